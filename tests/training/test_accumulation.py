"""Gradient accumulation with `microbatch_size=auto`: retries after running out of memory, and how ranks wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from runner import Callback, ClassificationModel, Trainer
from runner.data import TensorLoader
from runner.device.attempts import shapes_of
from runner.training import accumulation

BATCH, BATCHES = 4, 5


class SampleCount(torchmetrics.SumMetric):
    """Counts samples, and also how often its own state is read, which happens when it is copied."""

    reads = 0

    @property
    def metric_state(self):
        SampleCount.reads += 1
        return super().metric_state


class LimitedMemory(ClassificationModel):
    """Has batch norm and a metric, and runs out of memory with more than `capacity` samples at a time."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double(), 2)
        self.capacity = BATCH

    def forward(self, batch):
        outputs = super().forward(batch)
        if self.training and len(batch[0]) > self.capacity:
            raise torch.OutOfMemoryError("out of memory")
        return outputs

    def metrics(self, train):
        return {"samples": SampleCount()} if train else {}

    def update_metric(self, batch, outputs, metric):
        metric.update(float(len(batch[0])))


class Capacities(Callback):
    """Changes the model's capacity at some batches, and records before which batches the metric was copied."""

    def __init__(self, capacities: dict[int, int]):
        self.capacities = capacities
        self.copies: list[int] = []

    def batch_start(self, state, logger):
        model: Any = state.unwrapped_model
        model.capacity = self.capacities.get(state.timestamp.batch, model.capacity)
        self.reads = SampleCount.reads

    def batch_end(self, state, logger):
        self.copies.append(int(SampleCount.reads > self.reads))


def make_trainer(
    folder: Path, capacities: dict[int, int], samples: int = BATCH * BATCHES, **arguments: Any
) -> tuple[Trainer, Capacities]:
    torch.manual_seed(0)
    inputs = torch.randn(samples, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    callback = Capacities(capacities)
    arguments = {"model": LimitedMemory(), "max_duration": "2ep", "microbatch_size": "auto"} | arguments
    return Trainer(
        train_dataloader=TensorLoader(inputs, (inputs[:, 0] > 0).long(), batch_size=BATCH, shuffle=True),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
        callbacks=[callback],
        device="cpu",
        run_dir=folder,
        **arguments,
    ), callback


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in trainer.state.unwrapped_model.state_dict().items()}


def test_metrics_are_copied_only_until_a_batch_of_these_shapes_has_fit(tmp_path: Path):
    trainer, callback = make_trainer(tmp_path, {}, samples=BATCH * BATCHES - 1)
    with trainer:
        trainer.fit()
    assert callback.copies == [1, 0, 0, 0, 1, *[0] * 5]  # the last batch of an epoch has one sample less


def test_a_batch_that_is_repeated_in_microbatches_equals_one_that_was_split_at_once(tmp_path: Path):
    trainer, callback = make_trainer(tmp_path / "auto", {0: 2})
    with trainer:
        trainer.fit()
    assert callback.copies == [1, *[0] * 9] and trainer.state.samples_per_microbatch == 2
    assert float(trainer.state.train_metric_values["samples"]) == BATCH * BATCHES
    plain, _ = make_trainer(tmp_path / "plain", {}, microbatch_size=2)
    with plain:
        plain.fit()
    torch.testing.assert_close(weights(trainer), weights(plain), rtol=0, atol=0)


def test_metrics_are_copied_again_if_more_memory_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    used = iter([10, 30, 20, 30, 31, *[31] * 5])
    monkeypatch.setattr(accumulation, "bytes_in_use", lambda device: next(used))
    trainer, callback = make_trainer(tmp_path, {4: 2})  # the fifth batch, with more bytes in use, runs out of memory
    with trainer:
        trainer.fit()
    assert callback.copies == [1, 1, 0, 0, 1, *[0] * 5] and trainer.state.samples_per_microbatch == 2
    assert float(trainer.state.train_metric_values["samples"]) == BATCH * BATCHES


def test_without_metrics_and_buffers_any_batch_can_be_repeated(tmp_path: Path):
    class Plain(LimitedMemory):
        def metrics(self, train):
            return {}

    model = Plain()
    model.module = nn.Linear(3, 2).double()
    trainer, _ = make_trainer(tmp_path, {3: 1}, model=model)
    with trainer:
        trainer.fit()
    assert trainer.state.samples_per_microbatch == 1 and trainer.state.timestamp.batch == 2 * BATCHES


def test_running_out_of_memory_with_shapes_that_have_fit_ends_the_run_which_can_be_resumed(tmp_path: Path):
    trainer, callback = make_trainer(tmp_path / "run", {3: 2})
    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught, trainer:
        trainer.fit(duration="3ba")
        trainer.save_checkpoint(tmp_path / "saved")
        trainer.fit(duration="7ba")
    notes = "\n".join(caught.value.__notes__)
    assert "microbatches of 4 samples had fit" in notes and "resume the run with trainer.microbatch_size=2" in notes
    assert callback.copies == [1, 0, 0] and not trainer.state.is_consistent

    resumed, callback = make_trainer(tmp_path / "run", {3: 2}, resume_path=tmp_path / "saved")
    with resumed:
        resumed.fit()
    assert callback.copies == [1, *[0] * 6] and resumed.state.samples_per_microbatch == 2
    assert float(resumed.state.train_metric_values["samples"]) == BATCH * BATCHES

    plain, _ = make_trainer(tmp_path / "plain", {})
    with plain:
        plain.fit(duration="3ba")
        plain.state.fitting_size = 2
        plain.fit(duration="7ba")
    torch.testing.assert_close(weights(resumed), weights(plain), rtol=0, atol=0)


class Graph:
    """A batch of unknown size."""

    def to(self, device):
        return self


def test_shapes_of_a_batch_are_none_if_they_do_not_determine_its_size():
    image, label = torch.zeros(2, 3), torch.zeros(2)
    assert shapes_of((image, label)) == ((image.shape,), (label.shape,))
    assert shapes_of({"a": [image], "b": None, "c": "text"}) == (((image.shape,),), (), ())
    nested = torch.nested.nested_tensor([image, image[:1]], layout=torch.jagged)
    assert shapes_of((label, Graph())) is None and shapes_of([label, nested]) is None


def test_a_rank_keeps_its_gradient_if_another_runs_out_of_memory_with_new_shapes(run_ranks, tmp_path: Path):
    def program():
        import torch
        import torchmetrics
        from torch import nn

        from runner import ClassificationModel, Trainer, get_global_rank
        from runner.data import Sharded

        class LimitedMemory(ClassificationModel):
            """Takes the mean over lengths, and runs out of memory with more than two samples of length 5."""

            capacity = 2 * 5 * 3
            passes = 0

            def forward(self, batch):
                self.passes += 1
                if len(batch[0]) > 2 and batch[0].numel() > self.capacity:
                    raise torch.OutOfMemoryError("out of memory")
                return self.module(batch[0].mean(1))

            def metrics(self, train):
                return {"samples": torchmetrics.SumMetric()}

            def update_metric(self, batch, outputs, metric):
                metric.update(float(len(batch[0])))

        def train(size):
            torch.manual_seed(0)
            generator = torch.Generator().manual_seed(get_global_rank())
            lengths = [2, 2, 2, 5 if get_global_rank() == 0 else 2, 2]  # only rank 0 meets a new length
            batches = [
                (torch.randn(4, length, 3, dtype=torch.float64, generator=generator), torch.arange(4) % 2)
                for length in lengths
            ]
            model = LimitedMemory(nn.Linear(3, 2).double(), 2)
            with Trainer(
                model=model,
                train_dataloader=Sharded(batches),
                optimizers=lambda params: torch.optim.SGD(params, lr=0.5),
                microbatch_size=size,
                device="cpu",
            ) as trainer:
                trainer.fit()
            state = trainer.state
            return {
                "size": state.samples_per_microbatch,
                "passes": model.passes,
                "samples": float(state.train_metric_values["samples"]),
                "weights": dict(state.unwrapped_model.state_dict()),
            }

        torch.save([train("auto"), train(2)], f"{get_global_rank()}.pt")

    run_ranks(program)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for auto, plain in ranks:
        assert auto["size"] == 2 and auto["samples"] == plain["samples"] == 40
        torch.testing.assert_close(auto["weights"], plain["weights"], rtol=1e-12, atol=0)
    assert [auto["passes"] for auto, _ in ranks] == [3 + 1 + 2 + 2, 3 + 1 + 2]


def test_a_rank_runs_its_forward_pass_before_the_other_ranks_send_their_loss_weights(run_ranks):
    def program():
        import time
        from pathlib import Path

        import torch
        from torch import nn

        from runner import ClassificationModel, Trainer, get_global_rank
        from runner.data import Sharded

        computed = Path("computed")

        class Weighted(ClassificationModel):
            def forward(self, batch):
                outputs = super().forward(batch)
                if get_global_rank() == 0:
                    computed.touch()
                return outputs

            def loss_weight(self, batch):
                end = time.monotonic() + 60
                while get_global_rank() == 1 and not computed.exists():
                    assert time.monotonic() < end, "rank 0 waits for this rank's weight before its forward pass"
                    time.sleep(0.01)
                return batch[1].sum()

        with Trainer(
            model=Weighted(nn.Linear(3, 2), 2),
            train_dataloader=Sharded([(torch.zeros(4, 3), torch.ones(4, dtype=torch.int64))]),
            optimizers=lambda params: torch.optim.SGD(params, lr=0.5),
            device="cpu",
        ) as trainer:
            trainer.fit()

    run_ranks(program)
