"""Uses configs and saved runs from Python: makes the Trainer of a command, and loads the model of a run."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra import compose
from omegaconf import open_dict

from runner.cli.catalogue import CONF
from runner.cli.command import CONFIG_DIR, Command
from runner.cli.command_line import merge_repeated, search_path
from runner.cli.declared import with_quotes
from runner.cli.foreign import about_foreign
from runner.cli.nearest import nearest
from runner.cli.spelling import check_spelling
from runner.cli.verbs import VERBS
from runner.config import build
from runner.config.classes import without_data
from runner.config.composed import to_plain
from runner.config.errors import config_errors
from runner.config.experiment import Experiment
from runner.config.replaced import without_replaced
from runner.config.sources import check_encoding
from runner.distributed.environment import is_rank_zero
from runner.distributed.launch_secret import signed, verified
from runner.failures.checks import check_whole
from runner.failures.errors import WrongKey, wrong_argument
from runner.history.recompose import composing
from runner.history.saved_run import find_saved_run, with_latest
from runner.program.job import chosen_names, name_run
from runner.records.folder import make_run_folder, removed_when_refused
from runner.records.job import Job
from runner.records.listing import OUTPUTS
from runner.records.recording import recording, timing
from runner.verbs.train import record, settled

if TYPE_CHECKING:
    from runner.models.model import Model
    from runner.training.trainer import Trainer

_loading = threading.RLock()  # all threads share torch's generator, which is seeded to make a model
_folders = 0  # how many run folders this process has agreed on with other ranks


def trainer_of(overrides: Sequence[str], config_dir: str | Path | None) -> Trainer:
    """Return the Trainer for `Trainer.from_config`, which records the run and later its result in `result.json`.

    Raises:
        WrongConfig: the config is wrong; the message names the key.
    """
    options = [] if config_dir is None else [f"{CONFIG_DIR}={config_dir}"]
    arguments = with_quotes(merge_repeated(overrides))
    with config_errors():
        check_spelling(VERBS["train"], arguments)
        check_encoding([*arguments, *options], CONF)
        with composing():
            composed = compose("config", [*arguments, *search_path(options)], return_hydra_config=True)
        choices = dict(composed.hydra.runtime.choices)
        with open_dict(composed):
            del composed["hydra"]
        experiment = Experiment(to_plain(without_replaced(composed, arguments, options)[0]))
        build.check(experiment)
        if "RANK" not in os.environ and experiment.launch.processes() > 1:
            raise WrongKey("launch.nproc_per_node", "a program cannot start more ranks; use torchrun")
    command = Command.of("train", overrides=[*arguments, *options])
    run_dir = Path(_agree_on_folder())
    name = name_run(command, experiment, run_dir, None, choices)
    job = Job(
        experiment=experiment,
        run_dir=str(run_dir),
        run_name=name,
        command=command,
        overrides=arguments,
        arguments=[*options, *arguments],
        choices=chosen_names(choices, arguments),
    )
    with removed_when_refused(run_dir), config_errors():
        job = replace(job, experiment=settled(experiment, None))
        trainer = build.build(job.experiment, run_dir, name)
        record(trainer, job)
    trainer.error_context = partial(_recorded, trainer, job)
    trainer.warns_of_divergence = True  # no command will report it
    return trainer


def about_argument(name: str, value: Any, known: Collection[str]) -> str:
    """Return what to write instead of an argument that the Trainer does not have, perhaps one of another library."""
    foreign = about_foreign(name, value if isinstance(value, str | float | int) else None)
    if foreign is None:
        return nearest(name, known, most=0, otherwise="help(runner.Trainer) lists its arguments")
    match = re.match(r"write trainer\.(\w+)=([^\s;]+)(?! \+)", foreign)
    if match is None:
        return f"on the command line, {foreign}"
    ours = match[2] if match[2] == "..." else repr(yaml.safe_load(match[2]))
    return f"write {match[1]}={ours}{foreign[match.end() :]}"


@contextmanager
def _recorded(trainer: Trainer, job: Job) -> Iterator[None]:
    """Write the result of `fit`, `eval` or `predict` to `result.json`, and add notes to errors. All ranks."""
    from runner.trials.diagnosis import noting_faults

    with recording(job) as result, timing(result, partial(noting_faults, job.experiment, job.choices)):
        yield
        result.measure(trainer.state, job.experiment.objective)


def _agree_on_folder() -> str:
    """Return a new folder for a run, the same on all ranks of torchrun. All ranks."""
    if "RANK" not in os.environ:
        return make_run_folder(OUTPUTS)
    from runner.distributed.store import current_store

    global _folders
    _folders += 1
    key = f"from_config/{_folders}"
    store = current_store()
    if is_rank_zero():
        store.set(key, signed(key, make_run_folder(OUTPUTS)))
    return verified(key, store.get(key))


@dataclass(frozen=True)
class SavedModel:
    """The model of a saved run, from `load`."""

    model: Model
    """The model on the CPU, in evaluation mode, with the weights that evaluations measured."""
    config: dict[str, Any]
    """The run's resolved config."""
    checkpoint: Path
    """The source folder of the weights."""


def load(run: str | Path, allow_targets: Sequence[str] = ()) -> SavedModel:
    """Return the model and the config of a saved run.

        model = runner.load("latest").model

    Algorithms that change the model at INIT change this model too. Nothing is trained or written. A run may load
    another run at any time, such as the teacher of its model, in any thread and on any rank.

    Args:
        run: 'latest', a run's folder, one of its checkpoints (such as its `checkpoints/best`), or its MLflow id.
        allow_targets: classes outside this project that someone else's run may use, as on the command line.

    Raises:
        ValueError: there is no such run, it has no intact checkpoint, or it was made by someone else and uses classes
            that are not allowed.
    """
    import torch

    from runner.checkpoints.files import read_config, read_file
    from runner.checkpoints.weights import load_all_into
    from runner.core.engine import Engine
    from runner.core.logger import Logger
    from runner.distributed.sharding import Layout
    from runner.timing.event import Event
    from runner.training.arguments import make_state, ordered_hooks

    saved = find_saved_run(with_latest(Command.of("eval", str(run), allow_targets=tuple(allow_targets))))
    if saved is None or saved.path is None:
        raise wrong_argument("run", str(run), "has no record (config.yaml); give the folder of a run made by a command")
    checkpoint = build.checkpoint_of("run", saved.path)
    experiment = without_data(Experiment(saved.config), read_config(checkpoint))
    layout = Layout("ddp", None, None, 1)
    known = ("precision", "seed", "max_duration", "grad_accum", "microbatch_size")
    settings = {key: experiment.trainer.get(key) for key in known if key in experiment.trainer}
    cuda = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    # A Trainer would have to be made on other ranks too.
    with _loading, torch.random.fork_rng(cuda):
        algorithms = {key: algorithm.make() for key, algorithm in experiment.algorithms.items()}
        model = build.make_model(experiment)
        state = make_state(model=model, device="cpu", config=saved.config, run_name="", **settings)
        state.algorithms, *_ = ordered_hooks(algorithms, (), ())
        layout.move(state.unwrapped_model, state.device, state.precision.weight_dtype)
        engine = Engine(state, Logger(state, ()))
        engine.run_event(Event.INIT)
        layout.move(state.unwrapped_model, state.device, state.precision.weight_dtype)  # for new modules
        load_all_into(state.unwrapped_model, read_file(checkpoint, "model.pt"), checkpoint, strict=True)
        engine.close()
    return SavedModel(state.unwrapped_model.eval(), saved.config, checkpoint)


def replay(run: str | Path, batch: int, allow_targets: Sequence[str] = ()) -> Trainer:
    """Return a Trainer positioned right before a batch of a saved run, with the run's weights and randomness.

        with runner.replay("latest", 1234) as trainer:
            trainer.fit()  # trains that batch, bit for bit; another fit() trains the next one
            print(trainer.state.total_loss, trainer.state.outputs)

    It begins at the run's last checkpoint before the batch, and trains the batches in between again. The run's
    callbacks write into a temporary folder; its destinations do not run. With as many ranks as the run had, everything
    is equal bit for bit. From now on, torch uses as many CPU threads as the run did. The saved run is not changed.

    Args:
        run: 'latest', a run's folder, or its MLflow id.
        batch: number of the batch, from 1.
        allow_targets: classes outside this project that someone else's run may use, as on the command line.

    Raises:
        ValueError: there is no such run or no such batch, or the run was made by someone else and uses classes that are
            not allowed.
    """
    from runner.trials.standing import stand_before

    check_whole("batch", batch, 1, "the number of a batch")
    command = Command.of("replay", str(run), str(batch), allow_targets=tuple(allow_targets))
    saved = find_saved_run(with_latest(command))
    if saved is None or saved.run_dir is None:
        raise wrong_argument("run", str(run), "its folder is not here; give the folder of a run made by a command")
    return stand_before(Experiment(saved.config), Path(saved.run_dir), batch)
