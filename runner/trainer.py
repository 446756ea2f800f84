"""The Trainer: puts a run together, loads it, and hands it to the loops."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner import arguments, evaluation, loop
from runner.checkpoints import snapshot
from runner.dataloader import BatchStream
from runner.destination import LoggerDestination
from runner.distributed import collectives, store
from runner.distributed.signals import Interrupt
from runner.engine import Engine, name_hooks
from runner.evaluator import Evaluator, ensure_evaluators
from runner.event import Event
from runner.hooks import Algorithm, Callback
from runner.logger import Logger
from runner.metrics import TrainerLog, TrainMetrics, make_metrics
from runner.model import Model
from runner.optim.factories import Optimizers, existing_optimizers, make_optimizers, make_schedulers
from runner.precision import Precision
from runner.randomness import ForwardStream, restore_determinism, set_determinism
from runner.state import State
from runner.steps import Steps, make_steps
from runner.time import Interval, Time


class Trainer:
    """Trains, evaluates and predicts with a model, through an event engine.

    The constructor trains nothing and opens no connection but the process group's; it validates all that can be
    validated. Use it as a context manager, or call `close()`, so that callbacks and destinations can finish.

    Args:
        model: what to train.
        train_dataloader: yields this rank's batches; needed by `fit`. Its `len()`, where it has one, is an epoch.
        eval_dataloader: a loader (evaluated under the label 'eval'), an `Evaluator`, or a list of those.
        optimizers: a factory from parameters to an optimizer, an optimizer, or a dict of factories by the name of the
            submodule whose parameters they get (for a model with its own `training_step`). Factories are called after
            INIT, when algorithms have changed the model, and get what is trainable then: what is frozen is not stepped
            later either. One whose first argument is called `model` gets the model.
        schedulers: schedules of `runner.schedulers`, whose product multiplies the rates, or factories of torch's own.
        max_duration: a time string, or epochs as an int.
        eval_interval: of evaluators that have none of their own: a time string, epochs as an int, or 0 for never.
        iteration_length: epochs in an iteration ('2ep'); None: the whole run.
        algorithms: what changes training; ordered by their declarations, otherwise as given.
        callbacks: what watches training, in the order in which it is called; destinations too.
        loggers: destinations.
        precision: 'fp32', 'amp_bf16', 'amp_fp16', 'bf16' (weights too), or 'amp_fp8'.
        grad_accum: microbatches per batch.
        microbatch_size: samples per microbatch in place of `grad_accum`; 'auto' halves them until memory suffices.
        device: 'auto', 'cpu', 'cuda', 'mps', ...; each rank takes the GPU of its local rank.
        seed: of all streams of randomness.
        deterministic: let torch refuse what may differ between equal runs; with 3 ranks or more, sum them in one order.
        compile: compile the model with `torch.compile`.
        scale_schedule_ratio: multiplies max_duration and the lengths in schedules; warm-ups only with `scale_warmup`.
        step_schedulers_every_batch: step torch's own schedulers per batch rather than per epoch.
        load_path: a checkpoint or a run's folder to take only the weights from, all by name unless not `load_strict`.
        resume_path: a checkpoint or a run's folder to go on from, to the bit.
        run_name: default: the date and time.
        run_dir: the run's folder, made when something is first written to it; default: `outputs/{run_name}`.
        config: the resolved config that made this run, for the record.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        *,
        model: Model,
        train_dataloader: Iterable[Any] | None = None,
        eval_dataloader: Any = None,
        optimizers: Optimizers = None,
        schedulers: Any = None,
        max_duration: str | int | Time = "1ep",
        eval_interval: str | int | Time = "1ep",
        iteration_length: str | int | Time | None = None,
        algorithms: Sequence[Algorithm] | Algorithm = (),
        callbacks: Sequence[Callback] | Callback = (),
        loggers: Sequence[LoggerDestination] | LoggerDestination = (),
        precision: str = "fp32",
        grad_accum: int = 1,
        microbatch_size: int | str | None = None,
        device: str | torch.device = "auto",
        seed: int = 0,
        deterministic: bool = False,
        compile: bool = False,
        scale_schedule_ratio: float = 1.0,
        scale_warmup: bool = False,
        step_schedulers_every_batch: bool = False,
        load_path: str | Path | None = None,
        load_strict: bool = True,
        resume_path: str | Path | None = None,
        run_name: str | None = None,
        run_dir: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        arguments.check_model(model)
        self._iteration_length = arguments.check_iteration_length(iteration_length)
        self._scaling, self._step_every_batch = (scale_schedule_ratio, scale_warmup), step_schedulers_every_batch
        self.state = State(
            unwrapped_model=model,
            model=model,
            device=collectives.pick_device(device),
            precision=Precision(precision),
            seed=arguments.check_seed(seed) + collectives.get_global_rank(),
            rank_zero_seed=seed,
            run_name=run_name or "",
            config=dict(config or {}),
            max_duration=arguments.check_duration(max_duration),
        )
        arguments.set_microbatches(self.state, grad_accum, microbatch_size)
        arguments.set_hooks(self.state, algorithms, callbacks, loggers)
        self._interval = Interval(eval_interval, name="eval_interval")
        self._made_group = collectives.init_process_group(self.state.device)
        with ExitStack() as on_error:
            if self._made_group:
                on_error.callback(collectives.destroy_process_group)
            self._name_run(run_dir)
            self._open_data(train_dataloader, ensure_evaluators(eval_dataloader, self._interval))
            self.logger = Logger(self.state, self.state.loggers)
            self.engine = Engine(self.state, self.logger)
            on_error.pop_all()
        self._before = set_determinism(deterministic)
        with self._closing_on_error():
            self._prepare(optimizers, schedulers, load_path, load_strict, resume_path, compile)

    def fit(self, duration: str | int | Time | None = None, may_be_over: bool = False) -> None:
        """Train until `max_duration`, or for `duration` more; again to go on. All ranks.

        With `may_be_over`, a resumed run whose training has ended does what is left of its end: FIT_START and FIT_END.
        SIGTERM and Ctrl-C let the batch in flight finish, then end training as the signal asks, after `close`.

        Raises:
            ValueError: see `check_trainable`.
        """
        state = self.state
        if duration is not None:
            more = arguments.check_duration(duration, "duration")
            state.max_duration = Time(state.timestamp.count(more.unit) + more.value, more.unit)
        arguments.check_trainable(state, may_be_over)
        state.stop_requested &= may_be_over
        for one in (*state.algorithms, *state.callbacks, *state.loggers):
            one.has_trained = True
        # Until everything is closed: a second signal must not cut off the checkpoint that the first one asked for.
        with self._interrupt.listening(), self._running():
            loop.fit(self)

    def eval(self, eval_dataloader: Any = None) -> dict[str, dict[str, torch.Tensor]]:
        """Evaluate now, and return metric values by evaluator label and name. All ranks.

        Args:
            eval_dataloader: a loader, an Evaluator or a list of Evaluators, in place of the Trainer's.
        """
        given = eval_dataloader is not None
        evaluators = ensure_evaluators(eval_dataloader, self._interval) if given else [*self.state.evaluators]
        if not evaluators:
            raise ValueError("eval_dataloader=None: eval() needs one; give it to the Trainer, or here")
        if given:
            self._open_evaluators(evaluators)
        with self._running():
            evaluation.evaluate_standalone(self, evaluators)
            if given:
                self._open_evaluators(self.state.evaluators)  # those given here may have had their labels
        return {one.label: self.state.eval_metric_values[one.label] for one in evaluators}

    def predict(self, dataloader: Iterable[Any]) -> list[Any]:
        """Return this rank's outputs for each batch of a dataloader, on the CPU. All ranks."""
        stream = self._open(dataloader, "dataloader")
        with self._running():
            return evaluation.predict(self, stream)

    def close(self) -> None:
        """Let callbacks and destinations finish; the Trainer cannot be used afterwards. May be called again."""
        try:
            self.engine.close()
        finally:
            restore_determinism(self._before)
            self.steps.close()
            if self._made_group:
                self._bind(self.state.unwrapped_model)  # lets go of DDP, which must not outlive the group
                collectives.destroy_process_group(self.state.error)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.state.error = self.state.error or error
        self.close()

    def iteration_is_complete(self) -> bool:
        """Whether the epoch that just ended completes an iteration."""
        state = self.state
        if self._iteration_length is None:
            return state.stop_requested or state.timestamp >= state.max_duration
        return state.timestamp.epoch_in_iteration >= self._iteration_length.value

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Inside, an error closes the Trainer; afterwards torch's generators, of CPU and CUDA, are as they were."""
        cuda = [self.state.device] if self.state.device.type == "cuda" else []
        with self._closing_on_error(), self.noting(), torch.random.fork_rng(cuda):
            yield

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            cause = self.state.error = store.first_failure(error)
            self.close()
            raise cause  # noqa: B904 (with the context that it has of itself)

    def _name_run(self, run_dir: str | Path | None) -> None:
        now = f"{datetime.datetime.now():%Y-%m-%d-%H-%M-%S-%f}"[:-3]
        self.state.run_name = collectives.broadcast_object(self.state.run_name or now)
        self.state.run_dir = Path("outputs", self.state.run_name) if run_dir is None else Path(run_dir)

    def _open_data(self, train_dataloader: Iterable[Any] | None, evaluators: list[Evaluator]) -> None:
        state, model = self.state, self.state.unwrapped_model
        state.train_dataloader, state.evaluators = train_dataloader, tuple(evaluators)
        if train_dataloader is not None:
            self.train_stream = self._open(train_dataloader, "train_dataloader")
            state.train_dataloader_len = self.train_stream.length
            state.max_duration = state.max_duration.scaled(self._scaling[0], state.train_dataloader_len)
        state.train_metrics = make_metrics(model, train=True, device=state.device)
        self.eval_streams: dict[str, BatchStream] = {}
        self._open_evaluators(state.evaluators)
        own = [*([TrainMetrics()] if state.train_metrics else []), *([TrainerLog()] if state.loggers else [])]
        state.callbacks = (*name_hooks(own), *state.callbacks)

    def _open_evaluators(self, evaluators: Sequence[Evaluator]) -> None:
        for one in evaluators:
            if one.dataloader is self.state.train_dataloader and getattr(one.dataloader, "persistent_workers", False):
                remedy = "its persistent workers read one pass at a time; give a loader of its own"
                raise ValueError(f"evaluator {one.label!r}: dataloader is the train_dataloader: {remedy}")
            self.eval_streams[one.label] = self._open(one.dataloader, f"dataloader of evaluator {one.label!r}")
            metrics = make_metrics(self.state.unwrapped_model, train=False, device=self.state.device)
            self.state.eval_metrics[one.label] = one.select(metrics)

    def _open(self, loader: Iterable[Any], name: str) -> BatchStream:
        state, num_samples = self.state, self.state.unwrapped_model.num_samples
        return BatchStream(loader, state.device, state.precision, num_samples, name, state.rank_zero_seed)

    def _prepare(
        self, optimizers: Any, schedulers: Any, load_path: Any, strict: bool, resume_path: Any, compile: bool
    ) -> None:
        """Fire the events of construction, and make what stands between them."""
        state, fire = self.state, self.engine.run_event
        self.steps = Steps(state, (), reduces=False)  # of no optimizer yet
        model, self._interrupt = state.unwrapped_model, Interrupt()
        self.noting: Callable[[], AbstractContextManager[Any]] = nullcontext  # adds to errors before others see them
        self.world_size = collectives.get_world_size()
        # DDP sees neither what a training_step does past its forward(), nor whether other ranks ran out of memory; and
        # it sums its first batch in another order than the next, which of three ranks and more shows in the last bit.
        exact = self.world_size > 2 and torch.are_deterministic_algorithms_enabled()
        unseen = model.training_step is not None or state.auto_microbatching or exact
        self.reduces_in_backward = self.world_size == 1 or not unseen
        self.sums_tokens = self.world_size > 1 and any(one.picks_samples for one in state.algorithms)
        self.pulse = collectives.Pulse(self._interrupt)
        self.forward_stream = ForwardStream(state.seed, state.device)
        self.has_loss = type(model).loss is not Model.loss
        state.precision.check(state.device)
        arguments.refuse_unseen_hooks(state)
        model.to(state.device, state.precision.weight_dtype)
        state.optimizers = existing_optimizers(optimizers)
        fire(Event.INIT)
        model = state.model = state.unwrapped_model.to(state.device, state.precision.weight_dtype)  # with what is new
        state.optimizers = make_optimizers(optimizers, model)
        self.rates, stepped = make_schedulers(schedulers, state.optimizers, state.progress, *self._scaling)
        batch_schedulers, self.epoch_schedulers = (stepped, []) if self._step_every_batch else ([], stepped)
        state.schedulers = [*self.rates, *stepped]
        state.scaler = state.precision.scaler(state.device)
        fire(Event.BEFORE_LOAD)
        if load_path is not None:
            snapshot.load_weights(state, load_path, strict)
        if resume_path is not None:
            snapshot.restore(state, resume_path)
        fire(Event.AFTER_LOAD)
        if compile:
            model.compile()
        self.steps = make_steps(state, batch_schedulers, not self.reduces_in_backward)
        self._bind(collectives.replicate(model, state.device))

    def _bind(self, wrapped: nn.Module) -> None:
        """Decide once what each step calls."""
        state, model = self.state, self.state.unwrapped_model
        state.model = wrapped

        def autocast(function: Callable[..., Any]) -> Callable[..., Any]:
            return state.precision.autocast(state.device)(function)  # one each: none is entered twice

        self.parameters = list(model.parameters())
        self.has_buffers = bool(model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys())
        self.forward, self.eval_forward = autocast(state.model), autocast(model.eval_forward)
        self.loss = loop.checked(self, "loss", autocast(model.loss))
        step = None if model.training_step is None else self.steps.watch(autocast(model.training_step))
        self.training_step = None if step is None else loop.checked(self, "training_step", step)
        self.unsynchronized = getattr(state.model, "no_sync", nullcontext)
        splits = state.grad_accum > 1 or state.microbatch_size is not None or not self.reduces_in_backward
        self.accumulate_gradients = loop.in_microbatches if splits else loop.whole_batch
        if state.auto_microbatching:
            self.accumulate_gradients = loop.in_fitting_microbatches
