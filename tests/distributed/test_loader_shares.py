"""Loaders that declare what each rank reads: two ranks give the results of one process with the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_models import Classifier, class_data
from rank_runs import Everything, program_of
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from runner import Trainer
from runner.data import Replicated, Sharded, TensorLoader
from runner.distributed.ranks import get_global_rank, get_world_size
from runner.distributed.shares import refuse_unsharded

# Batch sizes on each of two ranks.
SHARES = {"even": ([4, 4], [4, 4]), "uneven": ([4, 4, 3], [2]), "counts": ([1, 5], [3, 2])}


def batches_of(name: str, rank: int) -> list[tuple[Any, Any]]:
    """Return the batches of a rank; the ranks have different samples."""
    sizes = SHARES[name][rank]
    first = sum(sum(sizes_before) for sizes_before in SHARES[name][:rank])
    inputs, targets = (tensor[first : first + sum(sizes)].split(sizes) for tensor in class_data(40))
    return [*zip(inputs, targets, strict=True)]


def joined_batches(name: str) -> list[Any]:
    """Return the batches for one process, each of which joins the batches of all ranks at that step."""
    ranks = [batches_of(name, 0), batches_of(name, 1)]
    steps = [[batches[step] for batches in ranks if step < len(batches)] for step in range(max(map(len, ranks)))]
    return [[torch.cat(parts) for parts in zip(*step, strict=True)] for step in steps]


def evaluation(samples: int = 11) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*class_data(samples)), batch_size=3)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def train(name: str, loader: Any, evaluated: Any) -> dict[str, Any]:
    with Trainer(
        model=Everything(),
        train_dataloader=loader,
        eval_dataloader=evaluated,
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        max_duration="2ep",
        device="cpu",
    ) as trainer:
        trainer.fit()
        now = trainer.state.timestamp
        predicted = trainer.predict(evaluated)
    values = dict(trainer.state.eval_metric_values["eval"])
    values["kept"] = values["kept"].sort().values
    return {
        "weights": dict(trainer.state.unwrapped_model.state_dict()),
        "values": values,
        "counts": [now.epoch, now.batch, now.sample, trainer.state.eval_timestamp.sample],
        "predicted": sum(len(outputs) for outputs in predicted),
    }


def train_on_ranks() -> None:
    """Save the results of each case in a file. All ranks."""
    rank = get_global_rank()
    results: dict[str, Any] = {}
    for name in SHARES:
        results[name] = train(name, Sharded(batches_of(name, rank)), Replicated(evaluation()))
    with pytest.raises(ValueError, match="the share of rank 1 has no batch: each rank needs at least one"):
        train("empty", Sharded([] if rank else batches_of("even", 0)), None)
    torch.save(results, f"shares{rank}.pt")


def test_two_ranks_give_the_results_of_one_process(tmp_path: Path, run_ranks: Any):
    run_ranks(program_of("distributed/test_loader_shares", "train_on_ranks"), 2)
    ranks = [torch.load(tmp_path / f"shares{rank}.pt") for rank in (0, 1)]
    for name in SHARES:
        expected = train(name, joined_batches(name), evaluation())
        assert sum(results[name]["predicted"] for results in ranks) == expected["predicted"] == 11
        for results in ranks:
            assert results[name]["counts"] == expected["counts"]
            torch.testing.assert_close(results[name]["weights"], expected["weights"])
            torch.testing.assert_close(results[name]["values"], expected["values"])


def test_a_single_process_reads_all_samples_of_a_wrapped_loader():
    assert get_world_size() == 1
    for wrapped in (Sharded(evaluation()), Replicated(evaluation())):
        with Trainer(model=Classifier(), eval_dataloader=wrapped, device="cpu") as trainer:
            trainer.eval()
        assert trainer.state.eval_timestamp.sample == 11 and len(wrapped) == 4
        assert wrapped.batch_size == 3  # attributes are those of the loader


@pytest.mark.parametrize(
    ("loader", "label", "message"),
    [
        (evaluation(), "eval", r"same samples; use runner.data.DatasetLoader.*Sharded\(loader\).*Replicated\(loader\)"),
        (evaluation(), "train", r"same samples; use .*Sharded\(loader\) if each rank reads its own samples$"),
        ([], "train", "2 ranks divide this list, and each may read the same samples; use"),
        ((batch for batch in ()), "predict", "2 ranks divide this generator, and each may read the same samples"),
        (DataLoader(Numbers(), batch_size=2), "train", "2 ranks divide this DataLoader, and each may read the same"),
        (Numbers(), "eval", r"2 ranks divide this Numbers, .* or runner.data.Sharded\(loader\)"),
        (Replicated(evaluation()), "train", "Replicated is for evaluation, where each batch counts on one rank only"),
        (
            Sharded(DataLoader(evaluation().dataset, sampler=DistributedSampler(evaluation().dataset, 2, 0))),
            "eval",
            "DistributedSampler repeats samples, as 11 cannot be divided by 2 ranks",
        ),
    ],
)
def test_a_loader_that_would_count_samples_twice_is_refused(loader: Any, label: str, message: str):
    with pytest.raises(ValueError, match=message):
        refuse_unsharded(loader, label, 2)


def test_a_loader_that_declares_what_ranks_read_is_accepted():
    for loader in (Sharded(evaluation()), Replicated(evaluation())):
        refuse_unsharded(loader, "eval", 2)
    refuse_unsharded(Sharded(evaluation()), "train", 2)


def test_a_wrong_declaration_of_what_ranks_read_is_refused():
    with pytest.raises(ValueError, match="loader=TensorLoader: already declares what ranks read; leave out Sharded"):
        Sharded(TensorLoader(torch.zeros(4), batch_size=2, shuffle=False))
    with pytest.raises(TypeError, match="loader=3: must be iterable, yielding batches"):
        Replicated(3)  # type: ignore[arg-type]
    loader = evaluation()
    loader.ranks_read = "all"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="ranks_read='all': must be one of 'shares', 'everything'"):
        refuse_unsharded(loader, "eval", 2)
