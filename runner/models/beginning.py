"""How a model begins to train: in training mode, and with a line on what may surprise in that."""

from __future__ import annotations

import logging

from torch import nn

from runner.core.state import State
from runner.distributed.ranks import get_data_parallel_size, get_global_rank
from runner.optim.freezing import listed

log = logging.getLogger("runner")

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def begin_training(state: State) -> None:
    """Put the model into training mode, if it is not, and say what may surprise. All ranks.

    If the model is in training mode, modules that its own code has put into evaluation mode stay there, such as a
    frozen backbone with batch norm.
    """
    model = state.unwrapped_model
    if not model.training:
        model.train()
    if get_global_rank() != 0:
        return
    resting = [name for name, one in model.named_modules() if not one.training]
    if outermost := [name for name in resting if name.rpartition(".")[0] not in resting]:
        log.info("in evaluation mode, and left there: %s; call train() on what should not be", listed(outermost))
    splits = state.grad_accum > 1 or isinstance(state.microbatch_size, int)  # 'auto' says when it has to split
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
    """Return how many batch norms in training mode see only a part of a batch, whether a microbatch or a rank's share.

    Those that see chunks of a batch in any case (`ghost_batch_size` of the module around them) do not count if the
    parts consist of whole chunks.
    """
    ranks = get_data_parallel_size()
    batch_size = getattr(getattr(state.train_dataloader, "order", None), "batch_size", 0)
    size = state.microbatch_size if isinstance(state.microbatch_size, int) else batch_size / ranks / state.grad_accum
    chunked: set[nn.Module] = set()
    for module in state.unwrapped_model.modules():
        chunk = getattr(module, "ghost_batch_size", 0)
        if chunk and size and size % chunk == 0:
            chunked |= {*module.modules()}
    norms = [one for one in state.unwrapped_model.modules() if isinstance(one, BATCH_NORMS) and one.training]
    split = [one for one in norms if splits or (ranks > 1 and not isinstance(one, nn.SyncBatchNorm))]
    return len([one for one in split if one not in chunked])
