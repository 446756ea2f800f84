"""Attributes of Composer's objects that are missing here, with their values or with remedies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SWITCHED_OFF: dict[str, Any] = {
    **dict.fromkeys(("fsdp_sharded_state_dict_enabled", "load_monolith_rank0_only"), False),
    **dict.fromkeys(("load_fsdp_monolith_rank0_only", "deepspeed_enabled", "is_model_deepspeed"), False),
    **dict.fromkeys(("fsdp_auto_wrap", "fsdp_elastic_sharded_enabled"), False),
    **dict.fromkeys(("fsdp_config", "fsdp_state_dict_type", "tp_config", "device_mesh", "deepspeed_config"), None),
    **dict.fromkeys(("fsdp_device_mesh", "tp_device_mesh", "parallelism_config", "fsdp_config_version"), None),
    **dict.fromkeys(("profiler", "precision_config", "dataset_state"), None),
    "auto_log_hparams": False,
    "automicrobatch_fsdp_hook_handles": [],
    "dataset_resumption": {},
    "fsdp_modules": {},
}
"""Attributes of features that do not exist here, with the values that they have in Composer when switched off."""

_TIME = "read state.timestamp"
_SAVE = "call runner.compat.composer.save_checkpoint(state, path) on all ranks"
_LOAD = "give trainer.load_path for weights, or runner resume for a whole run"
_SPLIT = "give data in runner.Evaluator, or call trainer.eval(loader)"

READ: dict[str, str] = {
    **dict.fromkeys(("timer", "epoch", "step", "batch_idx", "max_epochs"), f"{_TIME} and state.max_duration"),
    "batch_num_samples": "call state.unwrapped_model.num_samples(state.batch)",
    "batch_num_tokens": "call state.unwrapped_model.num_tokens(state.batch)",
    "current_metrics": "read state.metric_values[label][name]",
    "deepspeed_model": "read state.model",
    "get_model_state_dict": "call state.unwrapped_model.state_dict()",
    "get_optim_state_dict": "call state_dict() of each of state.optimizers",
    **dict.fromkeys(("iteration_length", "_iteration_length"), "it is trainer.iteration_length, and does not change"),
    "last_batch": "read state.batch",
    "last_loss": "read state.loss",
    "load_model_state": _LOAD,
    "load_optim_state": _LOAD,
    "load_state_dict": _LOAD,
    "metric_outputs": "read state.outputs at EVAL_AFTER_FORWARD",
    "microbatch_idx": "read state.microbatch_start, the index of the microbatch's first sample",
    "save_metrics": "metrics are always saved",
    "serialized_attributes": "everything that a resumed run needs is saved",
    "set_dataloader": _SPLIT,
    "state_dict": f"{_SAVE}, or state.unwrapped_model.state_dict() for the weights",
    "steps_per_epoch": "read state.dataloader_len",
    "using_torch_2": "torch is 2.11 or newer",
}
"""Attributes of the state that cannot be read, each with a replacement."""

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
    "timestamp": "the training loop advances it; trainer.fit(reset_time=True) starts at 0 again",
    "run_name": "give run_name in the config or the Trainer",
    "grad_accum": "give trainer.microbatch_size a size, and set state.device_train_microbatch_size",
}
"""Attributes of the state that cannot be set, each with a remedy; all others are the user's own."""

TIMESTAMP: dict[str, str] = {
    "copy": "a timestamp never changes: keep it, or call to_next_batch and the like",
    "get_state": "call state_dict()",
    "iteration_wct": "subtract total_wct at ITERATION_START from the current total_wct",
    "load_state_dict": "call Timestamp.from_state_dict(state)",
    "token_in_iteration": "subtract token at ITERATION_START from the current token",
}
"""Attributes of a timestamp that cannot be read, each with a replacement."""

_STEPPED = "the loop steps schedules"

SCHEDULERS: dict[str, str] = {
    **dict.fromkeys(("get_lr", "_last_lr", "print_lr"), "call get_last_lr()"),
    "last_epoch": _TIME,
    "lr_lambdas": "schedules are functions in runner.optim.schedulers",
    "step": f"{_STEPPED}; change param_group['lr'] at AFTER_TRAIN_BATCH",
    "_step_count": f"{_STEPPED}; {_TIME}",
}
"""Attributes of schedules of `runner.optim.schedulers` that cannot be read, each with a replacement."""

DEVICE: dict[str, str] = {
    "dist_backend": "call torch.distributed.get_backend()",
    "optimizer_to_device": "optimizers are made on the device",
    **dict.fromkeys(("state_dict", "load_state_dict"), "checkpoints hold random states"),
}
"""Attributes of a device that cannot be read, each with a replacement."""

_LOG = "call logger.log_metrics"
_UPLOAD = "call logger.upload_file"

LOGGER: dict[str, str] = {
    "log_traces": "log a table with log_table(columns, rows, name)",
    "log_analytics": "nothing is sent to anyone",
    "has_file_upload_destination": "upload_file does nothing if no destination takes files",
    **dict.fromkeys(("data_fit", "data_epoch", "data_batch", "metric_fit", "metric_epoch", "metric_batch"), _LOG),
    **dict.fromkeys(("log_fit", "log_epoch", "log_batch"), _LOG),
    **dict.fromkeys(("file_artifact", "file_symlink", "symlink_file"), _UPLOAD),
    "get_file_artifact": "read files from the run's folder",
}
"""Attributes of the logger that cannot be read, each with a replacement."""

_ON_RANK_ZERO = "do the work if get_local_rank() is 0, then call dist.barrier() on all ranks"
_TENSORS = "it would unpickle data from another rank: gather or broadcast tensors"

DIST: dict[str, str] = {
    **dict.fromkeys(("all_gather_object", "broadcast_object_list"), _TENSORS),
    **dict.fromkeys(("run_local_rank_zero_first", "local_rank_zero_download_and_wait"), _ON_RANK_ZERO),
    **dict.fromkeys(("busy_wait_for_local_rank_zero", "write_signal_file", "get_node_signal_file_name"), _ON_RANK_ZERO),
    "initialize_dist": "set launch.nproc_per_node, or start with torchrun or srun",
    "get_sampler": "use torch.utils.data.DistributedSampler, or loaders of runner.data, which need none",
}
"""Functions of `dist` that cannot be called, each with a remedy."""


def missing(owner: str, name: str, remedies: Mapping[str, str]) -> AttributeError:
    """Return the error for a missing attribute, with its remedy if it has one."""
    remedy = remedies.get(name)
    reason = f"has no counterpart here: {remedy}" if remedy else "is not part of runner.compat.composer"
    return AttributeError(f"{owner}.{name} {reason}")
