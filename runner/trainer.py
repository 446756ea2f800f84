"""The Trainer: puts a run together, loads it, and hands it to the loops."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from runner import arguments, evaluation, loop
from runner.accumulation import choose_accumulation
from runner.checkpoints import snapshot
from runner.dataloader import BatchStream
from runner.destination import LoggerDestination
from runner.distributed import collectives, store
from runner.distributed.clock import Clock
from runner.distributed.signals import Interrupt
from runner.engine import Engine
from runner.evaluator import Evaluator, ensure_evaluators
from runner.event import Event
from runner.hooks import Algorithm, Callback
from runner.logger import Logger
from runner.metrics import TrainerLog, TrainMetrics, make_metrics
from runner.model import Model
from runner.optim.factories import Optimizers, existing_optimizers, make_optimizers, make_schedulers
from runner.ordering import name_hooks
from runner.precision import Precision
from runner.randomness import restore_determinism, set_determinism
from runner.run import Run
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
        arguments.check_microbatches(grad_accum, microbatch_size)
        self._iteration_length = arguments.check_iteration_length(iteration_length)
        self._scaling = (scale_schedule_ratio, scale_warmup)
        self._step_every_batch = step_schedulers_every_batch
        self.state = state = State(
            unwrapped_model=model,
            model=model,
            device=collectives.pick_device(device),
            precision=Precision(precision),
            rank_zero_seed=arguments.check_seed(seed),
            run_name=run_name or "",
            config=dict(config or {}),
            max_duration=arguments.check_duration(max_duration),
            grad_accum=grad_accum,
            microbatch_size=microbatch_size,
        )
        state.algorithms, state.callbacks, state.loggers = arguments.ordered_hooks(algorithms, callbacks, loggers)
        self._interval = Interval(eval_interval, name="eval_interval")
        self._join(run_dir, train_dataloader, ensure_evaluators(eval_dataloader, self._interval))
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
            loop.fit(self.run)

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
            evaluation.evaluate_standalone(self.run, evaluators)
            if given:
                self._open_evaluators(self.state.evaluators)  # those given here may have had their labels
        return {one.label: self.state.eval_metric_values[one.label] for one in evaluators}

    def predict(self, dataloader: Iterable[Any]) -> list[Any]:
        """Return this rank's outputs for each batch of a dataloader, on the CPU. All ranks."""
        stream = self._open(dataloader, "predict", "dataloader")
        with self._running():
            return evaluation.predict(self.run, stream)

    def close(self) -> None:
        """Let callbacks and destinations finish; the Trainer cannot be used afterwards. May be called again."""
        try:
            self.engine.close()
        finally:
            restore_determinism(self._before)
            if self._steps is not None:
                self._steps.close()
            if self._made_group:
                self._release_ddp()
                collectives.destroy_process_group(self.state.error)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.state.error = self.state.error or error
        self.close()

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

    def _join(self, run_dir: Any, train_dataloader: Iterable[Any] | None, evaluators: list[Evaluator]) -> None:
        """Join the other ranks, and make what needs them; leave them again where that fails."""
        self._made_group = collectives.init_process_group(self.state.device)
        with ExitStack() as on_error:
            if self._made_group:
                on_error.callback(collectives.destroy_process_group)
            self._name_run(run_dir)
            self._open_data(train_dataloader, evaluators)
            self.logger = Logger(self.state, self.state.loggers)
            self.engine = Engine(self.state, self.logger)
            on_error.pop_all()

    def _name_run(self, run_dir: str | Path | None) -> None:
        now = f"{datetime.datetime.now():%Y-%m-%d-%H-%M-%S-%f}"[:-3]
        self.state.run_name = collectives.broadcast_object(self.state.run_name or now)
        self.state.run_dir = Path("outputs", self.state.run_name) if run_dir is None else Path(run_dir)

    def _open_data(self, train_dataloader: Iterable[Any] | None, evaluators: list[Evaluator]) -> None:
        state, model = self.state, self.state.unwrapped_model
        state.train_dataloader, state.evaluators = train_dataloader, tuple(evaluators)
        self._train_stream = None
        if train_dataloader is not None:
            self._train_stream = self._open(train_dataloader, "train", "train_dataloader")
            state.train_dataloader_len = self._train_stream.length
            state.max_duration = state.max_duration.scaled(self._scaling[0], state.train_dataloader_len)
        state.train_metrics = make_metrics(model, train=True, device=state.device)
        self._eval_streams: dict[str, BatchStream] = {}
        self._open_evaluators(state.evaluators)
        own = [*([TrainMetrics()] if state.train_metrics else []), *([TrainerLog()] if state.loggers else [])]
        state.callbacks = (*name_hooks(own), *state.callbacks)

    def _open_evaluators(self, evaluators: Sequence[Evaluator]) -> None:
        for one in evaluators:
            if one.dataloader is self.state.train_dataloader and getattr(one.dataloader, "persistent_workers", False):
                remedy = "its persistent workers read one pass at a time; give a loader of its own"
                raise ValueError(f"evaluator {one.label!r}: dataloader is the train_dataloader: {remedy}")
            stream = self._open(one.dataloader, one.label, f"dataloader of evaluator {one.label!r}")
            self._eval_streams[one.label] = stream
            metrics = make_metrics(self.state.unwrapped_model, train=False, device=self.state.device)
            self.state.eval_metrics[one.label] = one.select(metrics)

    def _open(self, loader: Iterable[Any], label: str, name: str) -> BatchStream:
        state = self.state
        num_samples = state.unwrapped_model.num_samples
        return BatchStream(loader, state.device, state.precision, num_samples, label, name, state.rank_zero_seed)

    def _prepare(
        self, optimizers: Any, schedulers: Any, load_path: Any, strict: bool, resume_path: Any, compile: bool
    ) -> None:
        """Fire the events of construction, and make what stands between them."""
        state, fire = self.state, self.engine.run_event
        self._steps: Steps | None = None
        self._interrupt = Interrupt()
        self.noting: Callable[[], AbstractContextManager[Any]] = nullcontext  # adds to errors before others see them
        model = state.unwrapped_model
        # DDP sees neither what a training_step does past its forward(), nor whether other ranks ran out of memory; and
        # it sums its first batch in another order than the next, which of three ranks and more shows in the last bit.
        exact = collectives.get_world_size() > 2 and torch.are_deterministic_algorithms_enabled()
        unseen = model.training_step is not None or state.microbatch_size == "auto" or exact
        reduces_in_backward = collectives.get_world_size() == 1 or not unseen
        state.precision.check(state.device)
        arguments.refuse_unseen_hooks(state)
        model.to(state.device, state.precision.weight_dtype)
        state.optimizers = existing_optimizers(optimizers)
        fire(Event.INIT)
        model = state.model = state.unwrapped_model.to(state.device, state.precision.weight_dtype)  # with what is new
        state.optimizers = make_optimizers(optimizers, model)
        rates, stepped = make_schedulers(schedulers, state.optimizers, state.progress, *self._scaling)
        batch_schedulers, epoch_schedulers = (stepped, []) if self._step_every_batch else ([], stepped)
        state.schedulers = [*rates, *stepped]
        state.scaler = state.precision.scaler(state.device)
        fire(Event.BEFORE_LOAD)
        if load_path is not None:
            snapshot.load_weights(state, load_path, strict)
        if resume_path is not None:
            snapshot.restore(state, resume_path)
        fire(Event.AFTER_LOAD)
        if compile:
            model.compile()
        self._steps = make_steps(state, batch_schedulers, not reduces_in_backward)
        state.model = collectives.replicate(model, state.device)
        self.run = Run(
            state=state,
            engine=self.engine,
            clock=Clock(self._interrupt),
            train_stream=self._train_stream,
            eval_streams=self._eval_streams,
            iteration_length=self._iteration_length,
            steps=self._steps,
            rates=rates,
            epoch_schedulers=epoch_schedulers,
            accumulate=choose_accumulation(state, reduces_in_backward),
            reduces_in_backward=reduces_in_backward,
        )

    def _release_ddp(self) -> None:
        """Let go of DDP, which must not outlive the process group."""
        self.state.model = self.state.unwrapped_model
        if hasattr(self, "run"):
            self.run.bind(self.state.unwrapped_model)
