"""Attributes of Composer's state that are missing here: their equivalents, or what to do instead."""

from __future__ import annotations

from typing import Any

SWITCHED_OFF: dict[str, Any] = {
    **dict.fromkeys(("fsdp_sharded_state_dict_enabled", "load_monolith_rank0_only"), False),
    **dict.fromkeys(("load_fsdp_monolith_rank0_only", "deepspeed_enabled", "is_model_deepspeed"), False),
    **dict.fromkeys(("fsdp_config", "fsdp_state_dict_type", "tp_config", "device_mesh", "deepspeed_config"), None),
    **dict.fromkeys(("profiler", "precision_config", "dataset_state"), None),
    "dataset_resumption": {},
    "fsdp_modules": {},
}
"""Attributes of features that do not exist here, as they are in Composer where the feature is not used."""

_TIME = "read state.timestamp"
_SAVE = "call runner.compat.composer.save_checkpoint(state, path) on all ranks"
_LOAD = "give trainer.load_path for weights, or resume= for a whole run"
_SPLIT = "give data in runner.Evaluator, or call trainer.eval(loader)"

READ: dict[str, str] = {
    **dict.fromkeys(("timer", "epoch", "step", "batch_idx", "max_epochs"), f"{_TIME} and state.max_duration"),
    "batch_num_samples": "call state.unwrapped_model.num_samples(state.batch)",
    "batch_num_tokens": "call state.unwrapped_model.num_tokens(state.batch)",
    "current_metrics": "read state.metric_values[label][name]",
    "deepspeed_model": "read state.model",
    "get_model_state_dict": "call state.unwrapped_model.state_dict()",
    "last_batch": "read state.batch",
    "last_loss": "read state.loss",
    "load_model_state": _LOAD,
    "load_state_dict": _LOAD,
    "microbatch_idx": "read state.microbatch_start, the index of the microbatch's first sample",
    "save_metrics": "metrics are always saved",
    "serialized_attributes": "everything that a resumed run needs is saved",
    "set_dataloader": _SPLIT,
    "state_dict": f"{_SAVE}, or state.unwrapped_model.state_dict() for the weights",
    "steps_per_epoch": "read state.dataloader_len",
    "using_torch_2": "torch is 2.11 or newer",
}
"""Attributes that cannot be read, and what to use instead of each."""

WRITTEN: dict[str, str] = {
    "callbacks": "list callbacks in the config or the Trainer",
    "algorithms": "list algorithms in the config or the Trainer",
    "dataloader": _SPLIT,
    "dataloader_len": "give trainer.train_subset_num_batches, or Evaluator(subset_num_batches=...)",
    "train_dataloader": "give the Trainer another one",
    "evaluators": "give the Trainer all of them",
    "eval_metric_values": "log values of your own with logger.log_metrics",
    "train_metric_values": "log values of your own with logger.log_metrics",
    "model": "change modules inside the model at INIT, with runner.replace_modules, or give the Trainer another model",
    "optimizers": "give the Trainer a factory that makes the optimizer you want",
    "schedulers": "give the Trainer schedules, or change param_group['lr'] at AFTER_TRAIN_BATCH",
    "precision": "give trainer.precision",
    "scaler": "it follows trainer.precision",
    "timestamp": "time is stepped by the loop; trainer.fit(reset_time=True) starts it again",
    "run_name": "give run_name in the config or the Trainer",
    "grad_accum": "give trainer.microbatch_size a size, and set state.device_train_microbatch_size",
}
"""Attributes that cannot be set, and what to do instead; all others are the user's own."""
