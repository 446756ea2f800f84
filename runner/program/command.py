"""Runs a command: composes configs with Hydra, runs one job or many, and returns an exit code."""

from __future__ import annotations

import sys
import traceback
from dataclasses import replace

import hydra

from runner.cli.catalogue import CONF
from runner.cli.command import Command
from runner.cli.command_line import check_options, merge_repeated, only_typed
from runner.cli.declared import with_quotes
from runner.config.composing import VERSION_BASE
from runner.config.errors import config_errors
from runner.config.one_job import is_one_job, run_one_job
from runner.config.own_conf import find_own_conf
from runner.config.sources import check_encoding
from runner.config.suggestions import about_replaced
from runner.distributed import restarts
from runner.distributed.endings import noting_interrupts, was_interrupted
from runner.distributed.environment import is_rank_zero
from runner.distributed.local_ranks import end_with_parent, ranks
from runner.distributed.slurm import request_requeue
from runner.failures.errors import Diverged, Requeued, SweepRefused, WrongConfig
from runner.failures.exit_codes import DIVERGED, ENVIRONMENT_FAILED, FAILED, INTERRUPTED, WRONG_CONFIG, code_of_failure
from runner.failures.facts import is_of_environment
from runner.failures.tracebacks import are_whole, raised_by_hydra
from runner.files.addresses import without_credentials
from runner.history.rerun import with_saved_arguments
from runner.history.saved_run import SavedRun, find_saved_run, with_latest
from runner.program.job import HydraTask, follow
from runner.records import folder as run_folder
from runner.records.result import error_of_failure
from runner.sweeps import sweep
from runner.sweeps.decide.contenders import VERB, as_sweep
from runner.sweeps.summary import end_sweep
from runner.terminal.answer import error_object, set_fields
from runner.terminal.console import print_failure, take_back_title
from runner.terminal.text import print_to_stderr


def run_command(command: Command) -> int:
    """Run the command of this process, whatever its rank, and return the exit code."""
    end_with_parent()
    with raised_by_hydra(), noting_interrupts():
        return lead(command) if is_rank_zero() else follow(ranks())


def lead(command: Command) -> int:
    """Run a command, and return the exit code. Rank 0."""
    code = FAILED
    saved = None
    try:
        with config_errors():
            sys.argv[1:] = command.overrides  # Hydra reads them here
            check_options(command.overrides)
            command = as_sweep(command)
            command = with_latest(replace(command, overrides=tuple(with_quotes(merge_repeated(command.overrides)))))
            saved = find_saved_run(command)
            sys.argv[1:] = command.overrides
            if saved is not None:
                sys.argv[1:] = with_quotes(with_saved_arguments(saved, command.overrides))
            added = find_own_conf(sys.argv[1:], CONF)  # none if the saved run has its own
            sys.argv[1:] = [*sys.argv[1:], *added]
            check_encoding(sys.argv[1:], CONF)
            for sentence in about_replaced([*command.overrides, *added], CONF):
                print_to_stderr(f"WARNING: {sentence}")
        code = compose_and_run(command, saved)
    except Exception as error:
        code = INTERRUPTED if was_interrupted() else report(error, command)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as exit:
        if isinstance(exit, Requeued):
            request_requeue()
        if isinstance(exit, restarts.Restarted):
            restarts.request()
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):  # raised by a user's code; Python would print it too
            print_to_stderr(exit.code)
    finally:
        ranks().dismiss(code)
    return code


def report(error: Exception, command: Command) -> int:
    """Print why a command has failed, and return the exit code."""
    if isinstance(error, Diverged):
        print_to_stderr(f"error: {error}")
        set_fields(error=error_object(DIVERGED, str(error)))
        return DIVERGED
    if not isinstance(error, WrongConfig):
        print_failure(error)
        set_fields(error=error_of_failure(error))
        return code_of_failure(error)
    if ranks().size == 1:  # other ranks may have printed below it
        take_back_title()
    if are_whole():
        traceback.print_exception(error.__cause__)
    print_to_stderr(f"error: {without_credentials(str(error))}")
    if is_of_environment(error) and not command.row.judges:  # such as a disk that was full before the first batch
        set_fields(error=error_object(ENVIRONMENT_FAILED, str(error)))
        return ENVIRONMENT_FAILED
    set_fields(error=error_object(WRONG_CONFIG, str(error), error.at, error.allowed, error.fix))
    return command.row.code_if_refused


def compose_and_run(command: Command, saved: SavedRun | None) -> int:
    """Let Hydra compose one job or many, run each on all ranks, and return the exit code."""
    task = HydraTask(command, saved)
    if command.verb == VERB:
        from runner.sweeps.decide.sweeper import register

        register()
    sweep.command = command
    run_folder.use(command.row)
    try:
        with config_errors():
            if is_one_job(sys.argv[1:]):
                run_one_job(task, sys.argv[1:])
            else:
                hydra.main(version_base=VERSION_BASE, config_path=str(CONF), config_name="config")(task)()
    except SweepRefused as refused:
        raise refused.error from refused.error.__cause__
    except Exception as error:
        if sweep.current is None:
            raise
        if not sweep.current.results():  # no job has begun, so the launcher or the sweeper has failed
            at = only_typed(sys.argv[1:], "hydra/launcher", "hydra/sweeper")
            raise WrongConfig(f"the sweep cannot start: {error}", at=at) from error
        if not sweep.current.is_broken:
            raise
    finally:
        code = end_sweep()
        run_folder.remove_unused()
    if task.error is not None:
        raise task.error
    return code
