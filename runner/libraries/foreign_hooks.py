"""Maps the hook names of other libraries to those of the runner."""

from __future__ import annotations

_FOREIGN_NAMES = {
    "fit_start": "on_train_start on_train_begin before_fit before_run before_train",
    "fit_end": "on_train_end after_fit after_run after_train",
    "epoch_start": "on_train_epoch_start on_epoch_begin before_epoch before_train_epoch",
    "epoch_end": "on_train_epoch_end after_epoch after_train_epoch",
    "batch_start": "on_train_batch_start on_train_batch_begin on_batch_begin on_step_begin on_train_step_start "
    "before_batch before_iter before_train_iter",
    "before_train_batch": "on_before_zero_grad",
    "after_forward": "after_pred",
    "after_backward": "on_substep_end",
    "after_train_batch": "on_before_optimizer_step on_pre_optimizer_step before_step",
    "batch_end": "on_train_batch_end on_step_end on_train_step_end on_optimizer_step after_step after_batch after_iter "
    "after_train_iter",
    "eval_start": "on_validation_start on_validation_epoch_start on_test_start on_test_begin on_test_epoch_start "
    "on_eval_epoch_start before_validate before_val before_val_epoch before_test before_test_epoch",
    "eval_batch_start": "on_validation_batch_start on_test_batch_start on_test_batch_begin on_eval_step_start "
    "before_val_iter before_test_iter",
    "eval_batch_end": "on_validation_batch_end on_test_batch_end on_eval_step_end after_val_iter after_test_iter",
    "eval_end": "on_validation_end on_validation_epoch_end on_test_end on_test_epoch_end on_eval_epoch_end on_evaluate "
    "after_validate after_val after_val_epoch after_test after_test_epoch",
    "predict_start": "on_predict_begin on_predict_epoch_start",
    "predict_batch_start": "on_predict_batch_begin on_predict_step_start",
    "predict_batch_end": "on_predict_step_end",
    "predict_end": "on_predict on_predict_epoch_end",
    "state_dict": "on_save_checkpoint",
    "load_state_dict": "on_load_checkpoint",
    "close": "on_exception",
}

HOOKS_HERE = {foreign: name for name, names in _FOREIGN_NAMES.items() for foreign in names.split()}
"""The runner's closest hook for each hook of Lightning, Keras, transformers, fastai, MMEngine and torchtnt.

Names that consist of `on_` and an event of the runner, such as `on_fit_start`, are left out.
"""
