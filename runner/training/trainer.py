"""The Trainer: builds a run from its parts, loads its checkpoint, and passes it to the loops."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from runner.checkpoints import base, snapshot
from runner.core.destination import LoggerDestination
from runner.core.engine import Engine
from runner.core.hooks import Algorithm, Callback
from runner.core.logger import Logger
from runner.core.ordering import name_hooks
from runner.core.randomness import restored_generators
from runner.data.generator_seeding import warn_of_unseeded
from runner.data.worker_context import use_fork_server
from runner.device.numerics import set_numerics
from runner.distributed import collectives, store
from runner.distributed.clock import Clock
from runner.distributed.sharding import Layout
from runner.distributed.signals import Interrupt
from runner.failures.checks import check_session, check_subset, name_of_loader, refusing_unknown
from runner.files.values import LocalPath
from runner.models.model import Model, own_forward_methods
from runner.optim.factories import Optimizers, existing_optimizers, make_optimizers, make_schedulers
from runner.optim.steps import Steps, make_steps
from runner.terminal.console import in_notebook
from runner.timing.event import Event
from runner.timing.time import Time
from runner.training import arguments, evaluation, loop
from runner.training.accumulation import choose_accumulation
from runner.training.dataloader import BatchStream
from runner.training.evaluator import Evaluator, Rule, ensure_evaluators, interval_or_rule
from runner.training.fit_result import FitResult
from runner.training.metrics import TrainerLog, TrainMetrics, make_metrics
from runner.training.run import Run


class Trainer:
    """Trains a model, evaluates it and predicts with it, through an event engine.

    The constructor checks everything that can be checked before training, and opens no connections except those of the
    process group. Use the Trainer as a context manager, or call `close()`, so that callbacks and destinations finish.

    Args:
        model: the model to train.
        train_dataloader: an iterable of this rank's batches, which `fit` needs. Its `len()`, if it has one, is the
            number of batches per epoch.
        eval_dataloader: a loader (evaluated under the label 'eval'), an `Evaluator`, or a list of Evaluators.
        optimizers: a factory from parameters to an optimizer; an optimizer; or, for a model with its own
            `training_step`, a dict of these by the name of the submodule whose parameters they get. Factories are
            called after INIT, when algorithms have changed the model, and get all parameters. Frozen ones are included,
            and are stepped once they are unfrozen. A factory whose first argument is called `model` gets the model.
        schedulers: schedules of `runner.optim.schedulers` and functions of a `Timestamp`, whose first argument is named
            `timestamp`: each returns a multiplier of the learning rates. Also torch schedulers, or their factories. An
            algorithm that sets rates, such as `ReduceOnPlateau`, may be given here or among the algorithms.
        max_duration: the length of training: a time string, or a number of epochs as an int.
        eval_interval: the interval of evaluators without their own: a time string, a number of epochs as an
            int, 0 for never, or a function of the State; see `Evaluator`.
        train_subset_num_batches: the number of batches after which an epoch ends; None: all of the train_dataloader.
        iteration_length: the length of an iteration in epochs ('2ep'); None: the whole run is one iteration.
        algorithms: objects that change training; they run in the order given, unless they declare another order.
        callbacks: objects that observe training, called in the order given; destinations may be among them.
        loggers: logger destinations.
        precision: 'fp32', 'tf32', 'amp_bf16', 'amp_fp16', or 'bf16' (weights too).
        grad_accum: the number of microbatches per batch.
        microbatch_size: samples per microbatch, instead of `grad_accum`; 'auto' starts from the whole batch and
            halves until a microbatch fits in memory.
        device: 'auto', 'cpu', 'cuda', 'mps', ...; each rank uses the GPU of its local rank.
        seed: the seed of all random streams.
        deterministic: whether torch refuses operations that may differ between identical runs. With 3 or more ranks,
            gradients are also summed in a fixed order.
        parallel: 'ddp': each rank has all weights; 'fsdp': each has a part of weights, gradients and optimizer states.
        shard_size: with 'fsdp', the number of ranks that share one copy of the weights; None: all.
        gather_dtype: with 'fsdp', the dtype in which weights are gathered and used: 'bfloat16', which rounds them;
            None: their own dtype.
        tensor_parallel: the number of ranks that split each layer between them and see the same samples; 1: layers are
            not split.
        compile: whether to compile the model with `torch.compile`; with 'fsdp', each of its repeated blocks.
        scale_schedule_ratio: the factor for max_duration and for the lengths in schedules.
        scale_warmup: whether `scale_schedule_ratio` applies to warm-ups as well.
        step_schedulers_every_batch: whether to step torch schedulers after each batch rather than each epoch.
        session: wall-clock time after which `fit` saves a checkpoint and ends the process with code 0; None: no limit.
        load_path: a checkpoint, a run's folder, or a file of `runner export` from which to load only the weights.
        load_strict: whether the names of the weights in `load_path` must all match the model's.
        resume_path: a checkpoint or a run's folder from which to resume, bit for bit.
        run_name: the run's name, by default the date and time.
        run_dir: the run's folder, created when something is first written to it; by default `outputs/{run_name}`.
        progress_bar: whether to add a `ProgressBar` if the callbacks have none; None: on a terminal and in a notebook.
        config: the resolved config of this run, which is recorded.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
    """

    @refusing_unknown("runner.program.in_python:about_argument")  # by name: a room above
    def __init__(
        self,
        *,
        model: Model,
        train_dataloader: Iterable[Any] | None = None,
        eval_dataloader: Any = None,
        optimizers: Optimizers = None,
        schedulers: Any = None,
        max_duration: str | int | Time = "1ep",
        eval_interval: str | int | Time | Rule = "1ep",
        train_subset_num_batches: int | None = None,
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
        parallel: str = "ddp",
        shard_size: int | None = None,
        gather_dtype: str | None = None,
        tensor_parallel: int = 1,
        compile: bool = False,
        scale_schedule_ratio: float = 1.0,
        scale_warmup: bool = False,
        step_schedulers_every_batch: bool = False,
        session: str | Time | None = None,
        load_path: LocalPath | Path | None = None,
        load_strict: bool = True,
        resume_path: LocalPath | Path | None = None,
        run_name: str | None = None,
        run_dir: LocalPath | Path | None = None,
        progress_bar: bool | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.state = state = arguments.make_state(
            model, device, precision, seed, run_name, config, max_duration, grad_accum, microbatch_size
        )
        self._layout = Layout(parallel, shard_size, gather_dtype, tensor_parallel)
        self._layout.check(model, microbatch_size)
        self._iteration_length = arguments.check_iteration_length(iteration_length)
        self._scaling = (scale_schedule_ratio, scale_warmup)
        self._step_every_batch = step_schedulers_every_batch
        schedulers, acting = arguments.split_schedulers(schedulers)
        hooks = arguments.ordered_hooks(algorithms, callbacks, loggers, acting, progress_bar)
        state.algorithms, state.callbacks, state.loggers = hooks
        self._interval = interval_or_rule(eval_interval)
        self._train_subset = check_subset("train_subset_num_batches", train_subset_num_batches)
        self._join(run_dir, train_dataloader, ensure_evaluators(eval_dataloader, self._interval))
        self._restore_numerics = set_numerics(deterministic, tf32=state.precision == "tf32")
        with self._closing_on_error():
            self._prepare(optimizers, schedulers, load_path, load_strict, resume_path, compile, session)

    @classmethod
    def from_config(cls, *overrides: str, config_dir: str | Path | None = None) -> Trainer:
        """Return the Trainer that `python -m runner OVERRIDES` would train, with a new folder in outputs/.

            with Trainer.from_config("experiment=digits_fast", "optimizer.lr=0.05") as trainer:
                print(trainer.fit())

        Args:
            overrides: keys and values as on the command line, each a string.
            config_dir: a folder with your own configs, as in `--config-dir`.

        Raises:
            WrongConfig: the config is wrong; the message names the key.
        """
        return resolve_name("runner.program.in_python:trainer_of")(overrides, config_dir)  # in a higher room

    def fit(
        self, duration: str | int | Time | None = None, may_be_over: bool = False, reset_time: bool = False
    ) -> FitResult:
        """Train until `max_duration`, or for `duration` more, and return the metrics. Call it on all ranks.

        Calling it again continues training. On SIGTERM and Ctrl-C, the current batch finishes, the Trainer is closed,
        and the signal's exception is raised: SystemExit or KeyboardInterrupt. In a notebook, interrupting the cell ends
        training after the current batch, and the Trainer stays open.

        Args:
            duration: how much longer to train; None: until `max_duration`.
            may_be_over: whether a resumed run may have nothing left to train. It then only fires what remains, from
                FIT_START to FIT_END.
            reset_time: whether time starts again at 0, for another phase of training with the same weights and
                optimizers. Schedules, intervals and the order of data then start again too. Torch schedulers and the
                states of callbacks and algorithms are kept.

        Raises:
            ValueError: training cannot start, see `check_trainable`.
        """
        self.engine.check_open()
        state = self.state
        if reset_time:
            state.restart_time()
        if duration is not None:
            more = arguments.check_duration(duration, "duration")
            state.max_duration = Time(state.timestamp.count(more.unit) + more.value, more.unit)
        arguments.check_trainable(state, may_be_over)
        state.stop_requested &= may_be_over
        for hook in (*state.algorithms, *state.callbacks, *state.loggers):
            hook.has_trained = True
        # Signals stay caught until all is closed: a second must not cut off the checkpoint that the first requested.
        with self._interrupt.listening(), self._running():
            loop.fit(self.run)
        return FitResult(state, self.warns_of_divergence)

    def eval(
        self, eval_dataloader: Any = None, checkpoint: str | Path | None = None
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Evaluate now, and return metric values by evaluator label and metric name. Call it on all ranks.

        Args:
            eval_dataloader: a loader, an Evaluator or a list of Evaluators, instead of the Trainer's.
            checkpoint: a checkpoint or a run's folder whose weights to evaluate; metrics are logged at its time.

        Raises:
            ValueError: there is no evaluation data, neither here nor in the Trainer.
        """
        self.engine.check_open()
        is_new = eval_dataloader is not None
        evaluators = ensure_evaluators(eval_dataloader, self._interval) if is_new else [*self.state.evaluators]
        if not evaluators:
            raise ValueError("eval_dataloader=None: eval() needs one; pass it to the Trainer or to eval()")
        if is_new:
            self._open_evaluators(evaluators)
        weights = None if checkpoint is None else snapshot.weights_of(self.state, checkpoint)
        with self._running():
            evaluation.evaluate_standalone(self.run, evaluators, weights)
            if is_new:
                self._open_evaluators(self.state.evaluators)  # the new ones may have used the same labels
        return {evaluator.label: self.state.eval_metric_values[evaluator.label] for evaluator in evaluators}

    def predict(self, dataloader: Iterable[Any], subset_num_batches: int | None = None) -> list[Any]:
        """Return this rank's outputs for each batch of a dataloader, on the CPU. Call it on all ranks.

        Args:
            dataloader: the batches to predict.
            subset_num_batches: the number of batches after which to stop; None: all.
        """
        self.engine.check_open()
        check_subset("subset_num_batches", subset_num_batches)
        stream = self._open(dataloader, "predict", subset_num_batches)
        with self._running():
            return evaluation.predict(self.run, stream)

    def save_checkpoint(self, path: str | Path, weights_only: bool = False, sharded: bool | None = None) -> None:
        """Write a checkpoint folder, complete or not at all, from which `resume_path` continues. Call it on all ranks.

        Args:
            path: the folder to write; an existing checkpoint there is replaced.
            weights_only: whether to leave out everything that only a resumed run needs.
            sharded: whether each rank writes its part of a sharded model; None: only if rank 0 cannot hold all of it.

        Raises:
            FileExistsError: `path` exists and is not a checkpoint.
            OSError: the disk is full or the folder is read-only.
        """
        self.engine.check_open()
        snapshot.save_checkpoint(self.state, path, weights_only, sharded)

    def close(self) -> None:
        """Let callbacks and destinations finish. The Trainer cannot be used afterwards, but can be closed again."""
        try:
            self.engine.close()
        finally:
            self._restore_numerics()
            if self._steps is not None:
                self._steps.close()
            if self._made_group:
                self.state.model = self.state.unwrapped_model  # the DDP wrapper must not outlive the process group
                if hasattr(self, "run"):
                    self.run.bind(self.state.unwrapped_model)
                collectives.destroy_process_group(self.state.error)

    def __repr__(self) -> str:
        return f"Trainer({self.state.describe()})"

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.state.error = self.state.error or error
        self.close()

    @contextmanager
    def _running(self) -> Generator[None]:
        """Close the Trainer if the body fails, and restore the global generators after the body."""
        with self._closing_on_error(), self.error_context(), restored_generators(self.state.device):
            yield

    @contextmanager
    def _closing_on_error(self) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            cause = self.state.error = store.first_failure(error)
            self.close()
            raise cause  # noqa: B904 (the exception keeps its own context)

    def _join(self, run_dir: Any, train_dataloader: Iterable[Any] | None, evaluators: list[Evaluator]) -> None:
        """Join the process group, and build everything that needs the group; on failure, leave it."""
        self._made_group = collectives.init_process_group(self.state.device)
        with ExitStack() as on_error:
            if self._made_group:
                on_error.callback(collectives.destroy_process_group)
            self._layout.join()
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
        state = self.state
        state.train_dataloader = train_dataloader
        state.evaluators = tuple(evaluators)
        self._train_stream = None
        if train_dataloader is not None:
            self._train_stream = self._open(train_dataloader, "train", self._train_subset)
            state.train_dataloader_len = self._train_stream.length
            state.max_duration = state.max_duration.scaled(self._scaling[0], state.train_dataloader_len)
        state.train_metrics = make_metrics(state.unwrapped_model, train=True, device=state.device)
        self._eval_streams: dict[str, BatchStream] = {}
        self._open_evaluators(state.evaluators)
        built_in = [*([TrainMetrics()] if state.train_metrics else []), *([TrainerLog()] if state.loggers else [])]
        state.callbacks = (*name_hooks(built_in), *state.callbacks)

    def _open_evaluators(self, evaluators: Sequence[Evaluator]) -> None:
        for evaluator in evaluators:
            label = evaluator.label
            arguments.check_evaluator(evaluator, self.state.train_dataloader)
            self._eval_streams[label] = self._open(evaluator.dataloader, label, evaluator.subset_num_batches)
            metrics = make_metrics(self.state.unwrapped_model, train=False, device=self.state.device)
            self.state.eval_metrics[label] = evaluator.select(metrics)

    def _open(self, loader: Iterable[Any], label: str, subset: int | None = None) -> BatchStream:
        state = self.state
        num_samples = state.unwrapped_model.num_samples
        use_fork_server(loader)
        warn_of_unseeded(loader, name_of_loader(label))
        return BatchStream(loader, state.device, state.precision, num_samples, label, state.rank_zero_seed, subset)

    def _prepare(
        self, optimizers: Any, schedulers: Any, load_path: Any, strict: bool, resume: Any, compile: bool, session: Any
    ) -> None:
        """Fire the events of the constructor, and build the parts of the run between them."""
        state = self.state
        fire = self.engine.run_event
        self._steps: Steps | None = None
        self._interrupt = Interrupt(state.stop_training if in_notebook() else None)
        self.error_context: Callable[[], AbstractContextManager[Any]] = nullcontext  # adds notes to errors
        self.warns_of_divergence = True  # a command ends with an error instead
        model = state.unwrapped_model
        state.precision.check(state.device)
        arguments.refuse_unseen_hooks(state)
        self._layout.move(model, state.device, state.precision.weight_dtype)
        base.forget_changed(model)
        state.optimizers = existing_optimizers(optimizers)
        fire(Event.INIT)
        model = state.model = state.unwrapped_model
        self._layout.move(model, state.device, state.precision.weight_dtype)  # for new modules
        self._layout.place(model, state.device, own_forward_methods(model))
        state.optimizers = make_optimizers(optimizers, model)
        rates, stepped = make_schedulers(schedulers, state.optimizers, state.progress, *self._scaling)
        state.schedulers = [*rates, *stepped]
        state.scaler = state.precision.scaler(state.device)
        state.resumed_from = None if resume is None else Path(resume)  # hooks that load weights themselves read this
        fire(Event.BEFORE_LOAD)
        if load_path is not None:
            snapshot.load_weights(state, load_path, strict)
        if resume is not None:
            snapshot.restore(state, resume)
        fire(Event.AFTER_LOAD)
        if compile:
            self._layout.compile(model)
        reduces_in_backward = self._layout.reduces_in_backward(model, state.microbatch_size)
        self._steps = make_steps(state, stepped if self._step_every_batch else [], not reduces_in_backward)
        self.run = Run(
            state=state,
            wrap=lambda: self._layout.wrap(model, state.device, state.ddp_options),
            engine=self.engine,
            clock=Clock(self._interrupt, check_session(session, state.callbacks, self._train_stream is not None)),
            train_stream=self._train_stream,
            eval_streams=self._eval_streams,
            iteration_length=self._iteration_length,
            steps=self._steps,
            rates=rates,
            epoch_schedulers=[] if self._step_every_batch else stepped,
            accumulate=choose_accumulation(state, reduces_in_backward),
            reduces_in_backward=reduces_in_backward,
        )
