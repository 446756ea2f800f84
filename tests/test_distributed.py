"""Ranks against one process. What several ranks are to do is collected in `on_ranks`: starting them takes seconds."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, TensorDataset
from torchmetrics.classification import BinaryAveragePrecision, MulticlassAccuracy

from algorithms import EMA, MixUp
from callbacks import CheckpointSaver
from runner import Callback, ClassificationModel, LanguageModel, Model, Trainer
from runner.data import TensorLoader
from runner.distributed import (
    any_rank,
    broadcast_object,
    destroy_process_group,
    get_global_rank,
    get_world_size,
    init_process_group,
    pick_device,
)
from runner.schedulers import linear

VOCABULARY = 7
MOST_SAMPLES = 17


def seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def class_data(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_samples)
    inputs = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(2, (num_samples,), generator=generator)


def token_data(num_samples: int) -> tuple[Tensor, Tensor]:
    """Sequences of which 0 to 6 targets count; most of the second half of them has none."""
    generator = torch.Generator().manual_seed(num_samples)
    tokens = torch.randint(VOCABULARY, (num_samples, 7), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(num_samples):
        targets[row, row * 5 % 7 if row % 8 < 4 else row % 8 // 7 :] = -100
    return tokens[:, :-1].contiguous(), targets


class Classifier(ClassificationModel):
    def __init__(self, *between: nn.Module):
        super().__init__(seeded(lambda: nn.Sequential(nn.Linear(3, 5), *between, nn.Tanh(), nn.Linear(5, 2))), 2)


def language_model() -> Model:
    return LanguageModel(seeded(lambda: nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY))))


class SmallMemory(Classifier):
    """Has room for `most` samples."""

    def __init__(self, most: int, *between: nn.Module):
        super().__init__(*between)
        self.most = most

    def forward(self, batch):
        outputs = super().forward(batch)
        if self.training and len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        return outputs


CASES: dict[str, tuple[Any, Any, int, int, dict[str, Any]]] = {
    # name: model, data, samples, batch size, arguments of the Trainer
    "even": (Classifier, class_data, 24, 8, {}),
    "uneven last batch": (Classifier, class_data, 23, 9, {}),
    "fewer samples than ranks": (Classifier, class_data, 17, 8, {}),
    "always fewer samples than ranks": (Classifier, class_data, 5, 1, {}),
    "accumulated": (Classifier, class_data, 23, 9, {"grad_accum": 2}),
    "accumulated, fewer samples than ranks": (Classifier, class_data, 17, 8, {"grad_accum": 2}),
    "microbatches": (Classifier, class_data, 23, 9, {"microbatch_size": 2}),
    "out of memory": (lambda: SmallMemory(2), class_data, 23, 9, {"microbatch_size": "auto"}),
    "tokens": (language_model, token_data, 24, 8, {}),
    "tokens, uneven": (language_model, token_data, 19, 6, {}),
    "tokens, fewer samples than ranks": (language_model, token_data, 17, 8, {}),
    "tokens, accumulated": (language_model, token_data, 19, 6, {"grad_accum": 2}),
    "tokens, microbatches": (language_model, token_data, 17, 8, {"microbatch_size": 1}),
    "averaged": (Classifier, class_data, 23, 9, {"algorithms": "EMA"}),
}


def train(name: str) -> dict[str, Any]:
    """What two epochs left behind."""
    make_model, make_data, num_samples, batch_size, arguments = CASES[name]
    arguments = dict(arguments)
    if arguments.pop("algorithms", None):
        arguments["algorithms"] = [EMA("5ba")]
    data = make_data(num_samples)
    with Trainer(
        model=make_model(),
        train_dataloader=TensorLoader(*data, batch_size=batch_size, shuffle=True),
        eval_dataloader=TensorLoader(*data, batch_size=batch_size, shuffle=False),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=1e-3),
        schedulers=linear(t_warmup="2ba"),
        max_duration="2ep",
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    state = trainer.state
    now = state.timestamp
    return {
        "weights": {key: value.clone() for key, value in state.unwrapped_model.state_dict().items()},
        "metrics": {label: dict(values) for label, values in state.metric_values.items()},
        "counts": [now.epoch, now.batch, now.sample, now.token],
    }


class Everything(Classifier):
    """An accuracy, an error that averages, and a metric that keeps all that it saw."""

    def metrics(self, train):
        if train:
            return {}
        return {
            "accuracy": MulticlassAccuracy(2, average="micro", validate_args=False),
            "kept": torchmetrics.CatMetric(),
            "mean": torchmetrics.MeanMetric(),
            "average_precision": BinaryAveragePrecision(validate_args=False),
        }

    def update_metric(self, batch, outputs, metric):
        if isinstance(metric, MulticlassAccuracy):
            metric.update(outputs, batch[1])
        elif isinstance(metric, BinaryAveragePrecision):
            metric.update(outputs.softmax(1)[:, 1], batch[1])
        else:
            metric.update(batch[0][:, 0])


def evaluate_each_size() -> dict[int, dict[str, Any]]:
    """Metric values and counts for data of 1 to 17 samples in batches of 4."""
    found = {}
    sizes = range(1, MOST_SAMPLES + 1)
    loaders = {n: TensorLoader(*class_data(n), batch_size=4, shuffle=False) for n in sizes}
    with Trainer(model=Everything(), eval_dataloader=loaders[1], device="cpu") as trainer:
        for n, loader in loaders.items():
            values = dict(trainer.eval(loader)["eval"])
            values["kept"] = torch.atleast_1d(values["kept"]).sort().values
            found[n] = {"values": values, "samples": trainer.state.eval_timestamp.sample}
    return found


def collectives_of(model: Model, data: tuple[Tensor, ...], **arguments: Any) -> dict[str, int]:
    """How many collectives 40 batches in the middle of an epoch made, by kind and shape, as torch's profiler saw them.

    The ranks' agreement on time and signals, on three numbers, comes once in a while, and is left out.
    """
    seen: Counter[str] = Counter()

    class Profile(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.batch == 10:
                kinds = [torch.profiler.ProfilerActivity.CPU]
                self.profiler = torch.profiler.profile(activities=kinds, record_shapes=True, acc_events=True)
                self.profiler.start()
            elif state.timestamp.batch == 50:
                self.profiler.stop()
                names = [f"{one.name} {one.input_shapes}" for one in self.profiler.events() or []]
                seen.update(name for name in names if name.startswith("gloo:") and name != "gloo:all_reduce [[3]]")

    with Trainer(
        model=model,
        train_dataloader=TensorLoader(*data, batch_size=8, shuffle=True),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
        max_duration="60ba",
        callbacks=[Profile()],
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return dict(seen)


def refusals() -> dict[str, str | None]:
    """What is said about torch's own dataloaders on several ranks; None where they are taken."""
    data = TensorDataset(*class_data(12))
    odd = TensorDataset(*class_data(13))
    unsharded = BatchSampler(SequentialSampler(data), 2, drop_last=False)
    sharded = BatchSampler(DistributedSampler(data), 2, drop_last=False)
    loaders: dict[str, dict[str, Any]] = {
        "plain": {"train_dataloader": DataLoader(data, batch_size=2)},
        "shuffled": {"train_dataloader": DataLoader(data, batch_size=2, shuffle=True)},
        "batch sampler": {"train_dataloader": DataLoader(data, batch_sampler=unsharded)},
        "sharded": {"train_dataloader": DataLoader(data, batch_size=2, sampler=DistributedSampler(data))},
        "sharded batch sampler": {"train_dataloader": DataLoader(data, batch_sampler=sharded)},
        "evaluation": {"eval_dataloader": DataLoader(data, batch_size=2)},
        "evaluation, sharded": {"eval_dataloader": DataLoader(data, batch_size=2, sampler=DistributedSampler(data))},
        "evaluation, padded": {"eval_dataloader": DataLoader(odd, batch_size=2, sampler=DistributedSampler(odd))},
    }
    said: dict[str, str | None] = {}
    for name, given in loaders.items():
        try:
            Trainer(model=Classifier(), device="cpu", **given).close()
            said[name] = None
        except ValueError as error:
            said[name] = str(error)
    return said


def end_after_seconds(seconds: float) -> tuple[int, float]:
    """Batches and seconds of a run that ends by the clock, on ranks of which the last is slow."""

    class Slow(Callback):
        def batch_start(self, state, logger):
            time.sleep(0.03 if get_global_rank() else 0.02)

    with Trainer(
        model=Classifier(),
        train_dataloader=TensorLoader(*class_data(24), batch_size=8, shuffle=True),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
        max_duration=f"{seconds}s",
        callbacks=[Slow()],
        device="cpu",
    ) as trainer:
        trainer.fit()
    return trainer.state.timestamp.batch, trainer.state.timestamp.total_wct


def end_after_virtual_seconds(seconds: float) -> tuple[int, float]:
    """The same by clocks that go on by what is slept: each rank has its own."""
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: now[0])
        patch.setattr(time, "sleep", lambda slept: now.append(now.pop() + slept))
        return end_after_seconds(seconds)


def on_ranks() -> None:
    """Does everything on this rank and leaves it in a file."""
    init_process_group(torch.device("cpu"))  # once for all: the Trainers use it
    found = {
        "train": {name: train(name) for name in CASES},
        "eval": evaluate_each_size(),
        "mixup": train_with_mixup_and_dropout(0),
        "auto": train_out_of_memory(),
        "refusals": refusals(),
        "collectives": {
            "samples": collectives_of(Classifier(), class_data(480)),
            "accumulated": collectives_of(Classifier(), class_data(480), grad_accum=2),
            "tokens": collectives_of(language_model(), token_data(480)),
        },
        "clock": end_after_seconds(1.5),
        "virtual clock": end_after_virtual_seconds(1.5),
        "any": [any_rank(get_global_rank() == 1), any_rank(False)],
        "object": broadcast_object({"rank": get_global_rank()}),
    }
    torch.save(found, f"rank{get_global_rank()}.pt")
    gc.collect()  # DDP's threads end with it; at the exit of the interpreter, they may end the process with an error
    destroy_process_group()


def train_with_mixup_and_dropout(seed: int) -> dict[str, Tensor]:
    with Trainer(
        model=Classifier(nn.Dropout(0.3)),
        train_dataloader=TensorLoader(*class_data(24), batch_size=8, shuffle=True),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.5),
        algorithms=[MixUp(alpha=1.0)],
        seed=seed,
        device="cpu",
    ) as trainer:
        trainer.fit()
    return dict(trainer.state.unwrapped_model.state_dict())


def train_out_of_memory() -> list[tuple[int, dict[str, Tensor]]]:
    """With batch norm and dropout: room for two samples on rank 0 only, and microbatches of two."""
    found = []
    for size in ("auto", 2):
        most = 2 if get_global_rank() == 0 else 100
        with Trainer(
            model=SmallMemory(most, nn.BatchNorm1d(5), nn.Dropout(0.3)),
            train_dataloader=TensorLoader(
                *class_data(16 * get_world_size()), batch_size=8 * get_world_size(), shuffle=True
            ),
            optimizers=lambda params: torch.optim.SGD(params, lr=0.5),
            max_duration="2ep",
            microbatch_size=size,
            device="cpu",
        ) as trainer:
            trainer.fit()
        found.append((trainer.state.microbatch_size, dict(trainer.state.unwrapped_model.state_dict())))
    return found


def run_file(function: str) -> str:
    return f"import runpy; runpy.run_path({__file__!r})[{function!r}]()"


@pytest.fixture
def strict() -> dict[str, str]:
    """In child processes, warnings are errors as they are here."""
    return {"PYTHONWARNINGS": "error"}


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_are_one_process(world_size: int, run_ranks, tmp_path: Path, strict):
    run_ranks(run_file("on_ranks"), world_size, env=strict)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]
    for name in CASES:
        alone = train(name)
        for found in ranks:
            own, metrics = dict(found["train"][name]), found["train"][name]["metrics"]
            # torchmetrics counts in float32.
            torch.testing.assert_close(metrics, alone["metrics"], rtol=1e-6, atol=0, msg=_named(name))
            own["metrics"] = alone["metrics"]
            torch.testing.assert_close(own, alone, rtol=1e-9, atol=1e-12, msg=_named(name))
            # Ranks are equal to the last bit, or they would drift apart.
            torch.testing.assert_close(
                found["train"][name], ranks[0]["train"][name], rtol=0, atol=0, msg=_named(f"{name}, on ranks")
            )
    expected = evaluate_each_size()
    for found in ranks:
        assert found["eval"].keys() == expected.keys()
        for n in expected:
            assert found["eval"][n]["samples"] == expected[n]["samples"] == n
            torch.testing.assert_close(
                found["eval"][n]["values"], expected[n]["values"], rtol=1e-6, atol=0, msg=_named(f"{n} samples")
            )
        torch.testing.assert_close(found["mixup"], ranks[0]["mixup"], rtol=0, atol=0)
        assert [size for size, _ in found["auto"]] == [2, 2]
        torch.testing.assert_close(found["auto"][0], found["auto"][1], rtol=1e-12, atol=1e-15, msg=_named("auto"))
        assert found["any"] == [True, False] and found["object"] == {"rank": 0}
    check_refusals(ranks[0]["refusals"])
    for found in ranks:
        # All gradients in one bucket; the tokens of all ranks are counted by one number more.
        gradients = {"gloo:all_reduce [[32]]": 40}
        tokens = {"gloo:all_reduce [[]]": 40, "gloo:all_reduce [[63]]": 40}
        assert found["collectives"] == {"samples": gradients, "accumulated": gradients, "tokens": tokens}
        assert found["clock"] == ranks[0]["clock"]
        # By rank 0's: after one batch ranks agree to meet again in a second, which is after 50 more, and so on.
        assert found["virtual clock"] == (101, pytest.approx(101 * 0.02))
    batches, seconds = ranks[0]["clock"]
    assert batches > 10 and seconds >= 1.5


def check_refusals(said: dict[str, str | None]) -> None:
    for name in ("plain", "shuffled", "batch sampler"):
        assert (said[name] or "").startswith("train_dataloader: a DataLoader without a sharding sampler"), name
    assert said["sharded"] is None and said["sharded batch sampler"] is None and said["evaluation, sharded"] is None
    assert "the same samples" in (said["evaluation"] or "")
    assert "DistributedSampler repeats samples, as 13" in (said["evaluation, padded"] or "")


def _named(name: str) -> Any:
    return lambda message: f"{name}: {message}"


def test_evaluation_by_hand():
    model = Everything()
    for n, found in evaluate_each_size().items():
        inputs, targets = class_data(n)
        with torch.no_grad():
            logits = model.module(inputs)
        values = found["values"]
        assert float(values["accuracy"]) == pytest.approx(float((logits.argmax(1) == targets).double().mean()))
        assert float(values["loss"]) == pytest.approx(float(F.cross_entropy(logits, targets)), rel=1e-12)
        assert values["kept"].tolist() == pytest.approx(inputs[:, 0].sort().values.tolist(), rel=1e-6)
        assert found["samples"] == n


def test_ranks_draw_different_dropout_masks_and_lambdas():
    # The seed of a rank is the run's plus its number: two seeds must not give one stream.
    one, other = train_with_mixup_and_dropout(0), train_with_mixup_and_dropout(1)
    assert not torch.equal(one["module.0.weight"], other["module.0.weight"])


def train_until_signalled() -> None:
    """Trains until rank 1 is asked to end, and says at which batch."""

    class Terminate(Callback):
        def batch_end(self, state, logger):
            if get_global_rank() == 1 and state.timestamp.batch == 25:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.005)

        def close(self, state, logger):
            Path(f"stopped{get_global_rank()}.json").write_text(json.dumps(state.timestamp.batch))

    with Trainer(
        model=Classifier(),
        train_dataloader=TensorLoader(*class_data(24), batch_size=8, shuffle=True),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
        max_duration="100000ba",
        callbacks=[CheckpointSaver("50000ba"), Terminate()],
        run_dir="run",
        device="cpu",
    ) as trainer:
        trainer.fit()


def test_a_signal_to_one_rank_ends_all_at_one_batch(run_ranks, tmp_path: Path, strict):
    started = time.monotonic()
    finished = run_ranks(run_file("train_until_signalled"), 2, check=False, env=strict)
    assert [one.returncode for one in finished] == [143, 143], [one.stderr for one in finished]
    assert time.monotonic() - started < 30
    stopped = [json.loads((tmp_path / f"stopped{rank}.json").read_text()) for rank in range(2)]
    assert stopped[0] == stopped[1] >= 25
    checkpoints = [path for path in (tmp_path / "run" / "checkpoints").iterdir() if not path.is_symlink()]
    assert [path.name.partition("-")[2] for path in checkpoints] == [f"ba{stopped[0]}"]


def test_running_out_of_memory_alone():
    (found, weights), (size, expected) = train_out_of_memory()
    assert found == size == 2
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_one_process_makes_no_group():
    train("even")
    assert not dist.is_initialized()
    assert (get_world_size(), get_global_rank()) == (1, 0)
    assert any_rank(True) and not any_rank(False)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str):
    with pytest.raises(ValueError, match="device='"):
        pick_device(device)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_rank_without_a_gpu_of_its_own_is_refused(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device(device) == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="this rank would use GPU 2, but 2 are here"):
        pick_device(device)
