"""Prepare a model for training: put it into training mode, and log what may surprise the user."""

from __future__ import annotations

import logging

from torch import nn

from runner.core.state import State
from runner.distributed.ranks import get_data_parallel_size, get_global_rank
from runner.optim.freezing import listed

log = logging.getLogger("runner")

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def begin_training(state: State) -> None:
    """Put the model into training mode and log what may surprise the user. All ranks.

    If the model is already in training mode, nothing changes: modules that its own code has put into evaluation mode
    stay there, such as a frozen backbone with batch norm.
    """
    model = state.unwrapped_model
    if not model.training:
        model.train()
    if get_global_rank() != 0:
        return
    in_eval = [name for name, module in model.named_modules() if not module.training]
    if outermost := [name for name in in_eval if name.rpartition(".")[0] not in in_eval]:
        log.info("these modules stay in evaluation mode: %s; call train() on those that should not", listed(outermost))
    splits = state.grad_accum > 1 or isinstance(state.microbatch_size, int)  # 'auto' logs when it has to split
    if count := count_split_norms(state, splits):
        parts, remedies = ("microbatch", "") if splits else ("rank's share", "SyncBatchNorm, ")
        log.log(
            logging.WARNING if splits else logging.INFO,
            "batch norm (%d layers) sees each %s alone, so the gradient is not that of the whole batch; %sGroupNorm or "
            "GhostBatchNorm do not depend on the split",
            count,
            parts,
            remedies,
        )


def count_split_norms(state: State, splits: bool) -> int:
    """Return how many batch norms in training mode see only a part of a batch: a microbatch or a rank's share.

    Batch norms that see chunks of a batch anyway (`ghost_batch_size` of an enclosing module) do not count if each part
    consists of whole chunks.

    Args:
        state: the run.
        splits: whether batches are split into microbatches.
    """
    ranks = get_data_parallel_size()
    batch_size = getattr(getattr(state.train_dataloader, "order", None), "batch_size", 0)
    size = state.microbatch_size if isinstance(state.microbatch_size, int) else batch_size / ranks / state.grad_accum
    chunked: set[nn.Module] = set()
    for module in state.unwrapped_model.modules():
        chunk = getattr(module, "ghost_batch_size", 0)
        if chunk and size and size % chunk == 0:
            chunked |= {*module.modules()}
    modules = state.unwrapped_model.modules()
    norms = [module for module in modules if isinstance(module, BATCH_NORMS) and module.training]
    split_norms = [norm for norm in norms if splits or (ranks > 1 and not isinstance(norm, nn.SyncBatchNorm))]
    return sum(norm not in chunked for norm in split_norms)
