"""Each algorithm by itself: on two ranks, with microbatches, and with a model in which it finds nothing to change."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import program_of
from tasks import CLASSES, FITTING, make_trainer, train_exactly
from tiers import fast

from runner import Algorithm, get_global_rank
from runner.algorithms import NaNGuard
from runner.device.batch import tensors
from runner.distributed.collectives import destroy_process_group, init_process_group

pytestmark = [
    pytest.mark.usefixtures("without_compiling"),
    # torch itself warns when it compiles for the first time.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]

# Algorithms whose results on two ranks differ from those on one, and what each rank does with its own samples.
# Both ranks always have equal weights.
PER_RANK = {
    **dict.fromkeys(["augmix", "batch_augment", "colout", "cutout"], "augments them at random"),
    **dict.fromkeys(["rand_augment", "trivial_augment"], "augments them at random"),
    **dict.fromkeys(["cutmix", "mixup"], "mixes them with each other at random"),
    "batch_size_warmup": "keeps the first of them",
    "ghost_batch_norm": "divides them into chunks",
    "gyro_dropout": "assigns them to subnetworks",
    "sam": "ascends along their gradient",
    "selective_backprop": "selects some of them",
}

# Algorithms whose results change with the number of microbatches, and why.
PER_MICROBATCH = {"ghost_batch_norm": "divides each microbatch into chunks"}

ALL = [(task, key) for task, keys in FITTING.items() for key in keys]

# In the first tier: algorithms that act on microbatches or on gradients, or that keep a state from batch to batch.
MICROBATCH_CASES = (
    *(("images", key) for key in ("batch_augment", "cutmix", "ghost_batch_norm", "gradient_clipping", "info_batch")),
    *(("images", key) for key in ("label_smoothing", "mixup", "sam", "schedule_free", "selective_backprop")),
    *(("text", key) for key in ("compile", "ema", "gyro_dropout", "ngram_embedding", "seq_length_warmup")),
)
# In the first tier: algorithms that keep a state from batch to batch.
STATEFUL_CASES = (
    *(("images", key) for key in ("ema", "info_batch", "sam", "selective_backprop", "spike_guard")),
    *(("text", key) for key in ("gyro_dropout", "schedule_free", "seq_length_warmup")),
)


def is_close(values: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether the results of two runs are equal up to rounding."""
    try:
        torch.testing.assert_close(values, expected)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(("task", "key"), fast(ALL, *MICROBATCH_CASES))
def test_two_microbatches_give_the_results_of_one_batch(task: str, key: str, tmp_path: Path):
    whole, split = (train_exactly(task, key, tmp_path, grad_accum=parts) for parts in (1, 2))
    assert is_close(split, whole) == (key not in PER_MICROBATCH)


def train_quarter() -> None:
    """Train with every fourth algorithm on this rank, and save the results."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
    init_process_group(torch.device("cpu"))
    with torch.compiler.set_stance("force_eager"):
        results = {(task, key): train_exactly(task, key, Path("run")) for task, key in ALL[int(sys.argv[1]) :: 4]}
    torch.save(results, f"{get_global_rank()}.pt")
    destroy_process_group()


@pytest.mark.parametrize("start", fast([3, 2, 1, 0], 3))
def test_two_ranks_train_like_one_unless_the_algorithm_acts_per_rank(run_ranks, tmp_path: Path, start: int):
    names = ALL[start::4]
    run_ranks(program_of("algorithms/test_every_algorithm", "train_quarter"), 2, str(start))
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    expected = {(task, key): train_exactly(task, key, tmp_path) for task, key in names}
    assert [*first] == names
    for name in names:
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=0, msg=f"{name} leaves ranks unequal")
    differing = {name for name in names if not is_close(first[name], expected[name])}
    assert differing == {(task, key) for task, key in names if key in PER_RANK}


class Spoiler(Algorithm):
    """Fills the images and the outputs of the third batch with NaN."""

    def before_forward(self, state, logger):
        inputs, targets = state.microbatch
        if state.timestamp.batch == 2 and inputs.is_floating_point():
            state.microbatch = (inputs * torch.nan, targets)

    def after_forward(self, state, logger):
        if state.timestamp.batch == 2:
            state.outputs = state.outputs * torch.nan


@pytest.mark.parametrize(("task", "key"), fast([pair for pair in ALL if pair[1] != "nan_guard"], *STATEFUL_CASES))
def test_a_batch_skipped_by_nan_guard_leaves_no_trace(task: str, key: str, tmp_path: Path):
    guard = NaNGuard()
    with make_trainer(task, key, guard, Spoiler(), folder=tmp_path) as trainer:
        trainer.fit()
    assert guard.state_dict()["skipped"] == 1
    states: list[Any] = [trainer.state.unwrapped_model.state_dict(), trainer.state.eval_metric_values]
    assert trainer.state.eval_metric_values
    if key != "info_batch":  # it stores unknown losses as infinity
        states += [algorithm.state_dict() for algorithm in trainer.state.algorithms]
    assert all(tensor.isfinite().all() for tensor in tensors(states))


@pytest.mark.parametrize("task", FITTING)
def test_an_algorithm_with_nothing_to_change_is_refused_before_training(task: str, tmp_path: Path):
    for key in CLASSES.keys() - {*FITTING[task]}:
        with pytest.raises((ValueError, TypeError)) as caught, make_trainer(task, key, folder=tmp_path) as trainer:
            trainer.fit()
        (note,) = caught.value.__notes__
        assert note.startswith(f"raised by '{key}'"), note
        assert "in epoch 1, after 0 batches" in note
