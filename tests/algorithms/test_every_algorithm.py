"""Every algorithm alone: on two ranks, in microbatches, and on a model in which it finds nothing to change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks import CLASSES, FITTING, make_trainer, train_exactly
from tiers import fast

from runner import Algorithm
from runner.algorithms import NaNGuard
from runner.device.batch import tensors

# torch itself warns when it compiles for the first time.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

# Algorithms whose results on one rank and on two ranks differ, and why. The two ranks always have equal weights.
PER_RANK = {
    **dict.fromkeys(
        ["augmix", "batch_augment", "colout", "cutout", "rand_augment", "trivial_augment"], "draws for its samples"
    ),
    **dict.fromkeys(["cutmix", "mixup"], "draws for its samples, and takes partners among them"),
    "batch_size_warmup": "keeps the first of its samples",
    "ghost_batch_norm": "chunks its samples",
    "gyro_dropout": "assigns its samples to subnetworks",
    "sam": "climbs by the gradient of its samples",
    "selective_backprop": "chooses among its samples",
}

# Algorithms whose results with one microbatch and with two differ, and why.
PER_MICROBATCH = {"ghost_batch_norm": "chunks a microbatch"}

ALL = [(task, key) for task, keys in FITTING.items() for key in keys]

# For the first tier: algorithms whose hooks meet a microbatch, the gradient of a batch, or what is kept over batches.
IN_PARTS = (
    *(("images", key) for key in ("batch_augment", "cutmix", "ghost_batch_norm", "gradient_clipping", "info_batch")),
    *(("images", key) for key in ("label_smoothing", "mixup", "sam", "schedule_free", "selective_backprop")),
    *(("text", key) for key in ("compile", "ema", "gyro_dropout", "ngram_embedding", "seq_length_warmup")),
)
# For the first tier: algorithms that keep something of each batch.
KEEPING = (
    *(("images", key) for key in ("ema", "info_batch", "sam", "selective_backprop", "spike_guard")),
    *(("text", key) for key in ("gyro_dropout", "schedule_free", "seq_length_warmup")),
)


@pytest.fixture(autouse=True)
def without_compiling() -> Iterator[None]:
    """Run everything that `Compile` does, except that torch does not compile, which would take seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


def is_close(values: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether the results of two runs are equal up to rounding."""
    try:
        torch.testing.assert_close(values, expected)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(("task", "key"), fast(ALL, *IN_PARTS))
def test_two_microbatches_give_the_results_of_one_batch(task: str, key: str, tmp_path: Path):
    whole, split = (train_exactly(task, key, tmp_path, grad_accum=parts) for parts in (1, 2))
    assert is_close(split, whole) == (key not in PER_MICROBATCH)


def train_quarter() -> None:
    """Train with every fourth algorithm in turn, and save the results in a file; runs on each rank."""
    import sys
    import warnings
    from pathlib import Path

    import torch

    from runner import get_global_rank
    from runner.distributed.collectives import destroy_process_group, init_process_group

    sys.path.append(sys.argv[1])
    from tasks import FITTING, train_exactly

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
    torch.set_num_threads(1)
    init_process_group(torch.device("cpu"))
    with torch.compiler.set_stance("force_eager"):
        names = [(task, key) for task, keys in FITTING.items() for key in keys][int(sys.argv[2]) :: 4]
        left = {(task, key): train_exactly(task, key, Path("run")) for task, key in names}
    torch.save(left, f"{get_global_rank()}.pt")
    destroy_process_group()


@pytest.mark.parametrize("start", fast([3, 2, 1, 0], 3))
def test_two_ranks_train_like_one_except_for_draws_per_rank(run_ranks, tmp_path: Path, start: int):
    names = ALL[start::4]
    run_ranks(train_quarter, 2, str(Path(__file__).parent), str(start))
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    alone = {(task, key): train_exactly(task, key, tmp_path) for task, key in names}
    assert [*first] == names
    for name in names:
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=0, msg=f"{name} leaves ranks unequal")
    differing = {name for name in names if not is_close(first[name], alone[name])}
    assert differing == {(task, key) for task, key in names if key in PER_RANK}


class Spoiler(Algorithm):
    """Sets the third batch to NaN: inputs that are images, and outputs."""

    def before_forward(self, state, logger):
        inputs, targets = state.microbatch
        if state.timestamp.batch == 2 and inputs.is_floating_point():
            state.microbatch = (inputs * torch.nan, targets)

    def after_forward(self, state, logger):
        if state.timestamp.batch == 2:
            state.outputs = state.outputs * torch.nan


@pytest.mark.parametrize(("task", "key"), fast([pair for pair in ALL if pair[1] != "nan_guard"], *KEEPING))
def test_a_batch_skipped_by_nan_guard_leaves_no_trace(task: str, key: str, tmp_path: Path):
    guard = NaNGuard()
    with make_trainer(task, key, guard, Spoiler(), folder=tmp_path) as trainer:
        trainer.fit()
    assert guard.state_dict()["skipped"] == 1
    left = [trainer.state.unwrapped_model.state_dict(), trainer.state.eval_metric_values]
    assert trainer.state.eval_metric_values
    if key != "info_batch":  # unknown losses are stored as infinity
        left += [algorithm.state_dict() for algorithm in trainer.state.algorithms]
    assert all(tensor.isfinite().all() for tensor in tensors(left))


@pytest.mark.parametrize("task", FITTING)
def test_an_algorithm_with_nothing_to_do_is_refused_before_training(task: str, tmp_path: Path):
    for key in CLASSES.keys() - {*FITTING[task]}:
        with pytest.raises((ValueError, TypeError)) as caught, make_trainer(task, key, folder=tmp_path) as trainer:
            trainer.fit()
        (note,) = caught.value.__notes__
        assert note.startswith(f"raised by '{key}'"), note
        assert "in epoch 1, after 0 batches" in note
