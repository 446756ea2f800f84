"""Callbacks and algorithms written for Composer's documented interface; only the import differs from users' files."""

# Their hooks take a Composer state, which is a view of our own state, so the types of the parameters differ.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from runner.compat.composer import (
    Algorithm,
    Callback,
    Event,
    Logger,
    Precision,
    State,
    Time,
    Timestamp,
    TimeUnit,
    dist,
    ensure_time,
    get_precision_context,
    save_checkpoint,
)

# Callbacks


class EveryNBatches(Callback):
    def __init__(self, n: int = 3):
        self.n = n
        self.seen: list[int] = []

    def batch_end(self, state: State, logger: Logger):
        if state.timestamp.batch.value % self.n == 0:
            self.seen.append(int(state.timestamp.batch))


class EventCounter(Callback):
    """Counts all events by overriding `run_event`."""

    def __init__(self):
        self.counts: dict[Event, int] = {}

    def run_event(self, event: Event, state: State, logger: Logger):
        self.counts[event] = self.counts.get(event, 0) + 1
        super().run_event(event, state, logger)

    def epoch_end(self, state: State, logger: Logger):
        assert isinstance(state.timestamp, Timestamp)
        assert state.timestamp.batch_in_epoch == 0
        logger.log_metrics({"events": sum(self.counts.values())})


class LRMonitor(Callback):
    def batch_end(self, state: State, logger: Logger):
        assert state.optimizers is not None
        for scheduler in state.schedulers:
            logger.log_metrics({f"lr/group{n}": lr for n, lr in enumerate(scheduler.get_last_lr())})


class SpeedMonitor(Callback):
    def __init__(self, window_size: int = 2):
        self.window_size = window_size
        self.history: list[tuple[float, float]] = []

    def batch_end(self, state: State, logger: Logger):
        self.history.append((state.timestamp.sample.value, state.timestamp.total_wct.total_seconds()))
        if len(self.history) > self.window_size:
            samples = self.history[-1][0] - self.history[-1 - self.window_size][0]
            seconds = self.history[-1][1] - self.history[-1 - self.window_size][1]
            logger.log_metrics({"throughput/samples": samples, "throughput/samples_per_sec": samples / seconds})


class NaNMonitor(Callback):
    def after_loss(self, state: State, logger: Logger):
        losses = state.loss.values() if isinstance(state.loss, dict) else [state.loss]
        if any(torch.isnan(loss).any() for loss in losses):
            raise RuntimeError("Train loss contains a NaN.")


class EarlyStopper(Callback):
    def __init__(self, monitor: str, dataloader_label: str, patience: Any = "2ep"):
        self.monitor = monitor
        self.dataloader_label = dataloader_label
        self.patience = ensure_time(patience, TimeUnit.EPOCH)
        self.best: float | None = None
        self.best_occurred: Time | None = None

    def eval_end(self, state: State, logger: Logger):
        if state.dataloader_label != self.dataloader_label:
            return
        now = state.timestamp.get(self.patience.unit)
        value = float(state.eval_metrics[self.dataloader_label][self.monitor].compute())
        if self.best is None or value > self.best + 10:  # only at first: an accuracy never rises by 10
            self.best, self.best_occurred = value, now
        elif now - self.best_occurred >= self.patience:
            state.stop_training()

    def state_dict(self):
        return {"best": self.best, "best_occurred": self.best_occurred}

    def load_state_dict(self, state: dict[str, Any]):
        self.best, self.best_occurred = state["best"], state["best_occurred"]


class ThresholdStopper(Callback):
    def __init__(self, threshold: float = -1.0):
        self.threshold = threshold

    def eval_after_all(self, state: State, logger: Logger):
        if state.eval_metric_values["MulticlassAccuracy"] > self.threshold:
            state.max_duration = state.timestamp.batch  # as Composer's own stop_training does it


class CheckpointSaver(Callback):
    def __init__(self, save_interval: str = "3ba", folder: str = "."):
        self.save_interval = Time.from_timestring(save_interval)
        self.folder = folder
        self.saved: list[Any] = []

    def batch_checkpoint(self, state: State, logger: Logger):
        assert self.save_interval.unit == TimeUnit.BATCH
        if state.timestamp.batch % self.save_interval == 0:
            self.saved.append(save_checkpoint(state, self.folder + "/ep{epoch}-ba{batch}"))


class WeightsSaver(Callback):
    def __init__(self, path: str):
        self.path = path

    def fit_end(self, state: State, logger: Logger):
        model = state.model.module if state.is_model_ddp else state.model
        if dist.get_global_rank() == 0:
            torch.save({"model": model.state_dict(), "batch": state.timestamp.batch.to_timestring()}, self.path)
            logger.upload_file("weights/last.pt", self.path, overwrite=True)
        dist.barrier()


class GradMonitor(Callback):
    def after_train_batch(self, state: State, logger: Logger):
        norm = sum(p.grad.norm(2) ** 2 for p in state.model.parameters() if p.grad is not None) ** 0.5
        logger.log_metrics({"l2_norm/grad/global": norm})


class DeviceMonitor(Callback):
    def fit_start(self, state: State, logger: Logger):
        batch = (state.device.tensor_to_device(torch.ones(2, 3)), torch.zeros(2))
        batch = state.device.batch_to_device(batch)
        state.device.module_to_device(state.model)
        assert not state.fsdp_enabled and not state.deepspeed_enabled and state.profiler is None
        with get_precision_context(state.precision):
            assert state.precision == Precision.FP32
        logger.log_hyperparameters({"device": state.device.name, "type": state.device.type})


class ImageLogger(Callback):
    def __init__(self):
        self.is_logged = False

    def batch_start(self, state: State, logger: Logger):
        if not self.is_logged:
            inputs = state.batch_get_item(0)
            logger.log_images(inputs.view(2, 1, 1, 3) / inputs.max(), name="inputs")
            self.is_logged = True


class TableLogger(Callback):
    def eval_end(self, state: State, logger: Logger):
        rows = [[name, float(value)] for name, value in state.eval_metric_values.items()]
        logger.log_table(columns=["metric", "value"], rows=rows, name="results")


class Progress(Callback):
    def __init__(self):
        self.lines: list[str] = []

    def batch_end(self, state: State, logger: Logger):
        elapsed = state.get_elapsed_duration()
        assert elapsed is not None and state.dataloader_len is not None
        share_of_epoch = float(state.timestamp.batch_in_epoch / state.dataloader_len)
        self.lines.append(f"{elapsed.value:.3f} {share_of_epoch:.2f} {state.dataloader_label}")


class OutputCollector(Callback):
    def __init__(self):
        self.outputs: list[torch.Tensor] = []
        self.batches: list[float] = []

    def eval_batch_end(self, state: State, logger: Logger):
        self.outputs.append(state.outputs.cpu())
        self.batches.append(state.eval_timestamp.batch.value)

    def predict_batch_end(self, state: State, logger: Logger):
        self.batches.append(-state.predict_timestamp.batch.value)


class DurationChanger(Callback):
    """Changes the length of training after two batches, in the middle of an epoch."""

    def __init__(self, length: Any = "5ba"):
        self.length = length

    def batch_end(self, state: State, logger: Logger):
        if state.timestamp.batch == 2:
            state.max_duration = self.length


class CloseRecorder(Callback):
    def __init__(self):
        self.closed: list[str] = []

    def fit_end(self, state: State, logger: Logger):
        self.closed.append(f"fit_end {state.timestamp.batch}")

    def close(self, state: State, logger: Logger):
        self.closed.append(f"close {state.timestamp.batch.to_timestring()}")

    def post_close(self):
        self.closed.append("post_close")


class LossLogger(Callback):
    def batch_end(self, state: State, logger: Logger):
        logger.log_metrics({"copy/loss": state.loss, "copy/total": state.total_loss_dict["loss/train/total"]})

    def epoch_end(self, state: State, logger: Logger):
        logger.log_metrics({f"copy/{name}": value for name, value in state.train_metric_values.items()})


# Algorithms


class GradientClipping(Algorithm):
    def __init__(self, clipping_threshold: float = 0.01):
        self.clipping_threshold = clipping_threshold

    def match(self, event: Event, state: State) -> bool:
        return event == Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: Logger):
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), self.clipping_threshold)


class LabelSmoothing(Algorithm):
    def __init__(self, smoothing: float = 0.2, target_key: Any = 1):
        self.smoothing = smoothing
        self.target_key = target_key
        self.original = None

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.BEFORE_LOSS, Event.AFTER_LOSS)

    def apply(self, event: Event, state: State, logger: Logger):
        if event == Event.BEFORE_LOSS:
            self.original = state.batch_get_item(self.target_key)
            one_hot = nn.functional.one_hot(self.original, state.outputs.shape[1]).float()
            smooth = one_hot * (1 - self.smoothing) + self.smoothing / one_hot.shape[1]
            state.batch_set_item(self.target_key, smooth)
        else:
            state.batch_set_item(self.target_key, self.original)


class LayerFreezing(Algorithm):
    def __init__(self, freeze_start: float = 0.5):
        self.freeze_start = freeze_start

    def match(self, event: Event, state: State) -> bool:
        return event == Event.EPOCH_END and float(state.get_elapsed_duration()) >= self.freeze_start

    def apply(self, event: Event, state: State, logger: Logger):
        parameters = list(state.model.parameters())
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not parameters[0]]
        logger.log_metrics({"layer_freezing/layers_frozen": 1})


class EMA(Algorithm):
    def __init__(self, smoothing: float = 0.5, update_interval: str = "1ba"):
        self.smoothing = smoothing
        self.update_interval = Time.from_timestring(update_interval)
        self.average: Any = None
        self.training: dict[str, torch.Tensor] | None = None
        self.updated = Time.from_batch(0)

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.BATCH_END, Event.EVAL_START, Event.EVAL_END)

    def apply(self, event: Event, state: State, logger: Logger):
        weights = state.unwrapped_model.state_dict()
        if event == Event.BATCH_END:
            if self.average is None:
                self.average = copy.deepcopy(weights)
            if state.timestamp.batch - self.updated >= self.update_interval:
                for name, value in weights.items():
                    self.average[name] = self.smoothing * self.average[name] + (1 - self.smoothing) * value
                self.updated = state.timestamp.batch
        elif event == Event.EVAL_START and self.average is not None:
            self.training = copy.deepcopy(weights)
            state.unwrapped_model.load_state_dict(self.average)
        elif event == Event.EVAL_END and self.training is not None:
            state.unwrapped_model.load_state_dict(self.training)
            self.training = None

    def state_dict(self):
        return {"average": self.average, "updated": self.updated}

    def load_state_dict(self, state, strict: bool = False):
        self.average, self.updated = state["average"], state["updated"]


class CutOut(Algorithm):
    """Replaces the whole batch after the loader has yielded it."""

    def match(self, event: Event, state: State) -> bool:
        return event == Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger):
        inputs, targets = state.batch
        inputs = inputs.clone()
        inputs[:, 0] = 0
        state.batch = (inputs, targets)


class InputScaling(Algorithm):
    """Changes the inputs of a microbatch before its forward pass."""

    def match(self, event: Event, state: State) -> bool:
        return event == Event.BEFORE_FORWARD

    def apply(self, event: Event, state: State, logger: Logger):
        state.batch_set_item((lambda batch: batch[0], lambda batch, new: (new, batch[1])), state.batch[0] * 0)


class ModelSurgery(Algorithm):
    def match(self, event: Event, state: State) -> bool:
        return event == Event.INIT

    def apply(self, event: Event, state: State, logger: Logger):
        state.model.module = nn.Sequential(state.model.module, nn.Tanh())


class LossWeight(Algorithm):
    def __init__(self, weight: float = 0.0):
        self.weight = weight

    def after_loss(self, state: State, logger: Logger):
        state.loss = state.loss * self.weight


class MicrobatchGrower(Algorithm):
    """Changes the size of microbatches during training, as a warm-up of the batch size does."""

    def __init__(self):
        self.sizes: list[int | None] = []

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.BATCH_START, Event.AFTER_FORWARD)

    def apply(self, event: Event, state: State, logger: Logger):
        if event == Event.BATCH_START:
            assert state.device_train_microbatch_size is not None and not state.auto_microbatching
            state.device_train_microbatch_size = 1 if state.timestamp.batch < "4ba" else 2
        else:
            self.sizes.append(len(state.batch[0]))


class WarmUp(Algorithm):
    def __init__(self, t_warmup: str = "4ba"):
        self.t_warmup = Time.from_timestring(t_warmup)
        self.rates: list[float] = []

    def match(self, event: Event, state: State) -> bool:
        return event == Event.BEFORE_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: Logger):
        factor = min(1.0, float(state.timestamp.batch / self.t_warmup))
        for group in state.optimizers[0].param_groups:
            group["lr"] = factor * 0.1
        self.rates.append(factor)


class OutputNoise(Algorithm):
    """Scales outputs in a hook that a subclass overrides and calls."""

    scale = 0.0

    def after_forward(self, state: State, logger: Logger):
        state.outputs = state.outputs * self.scale


class Louder(OutputNoise):
    scale = 1.0

    def after_forward(self, state: State, logger: Logger):
        super().after_forward(state, logger)
        state.outputs = state.outputs - state.outputs.detach()
