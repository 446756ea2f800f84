"""The command line: compose with Hydra, run one job or many, and exit with a code that says how it went.

Exit codes: 0, all is done; 1, training failed, with a trace; 2, the configuration is wrong, with one message; 3, the
run has diverged; 128 plus the number of a signal that ended the run after a checkpoint: 130 on Ctrl-C, 143 on SIGTERM.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from typing import NoReturn

import hydra

from runner.addresses import without_credentials
from runner.config.command_line import check_options, check_spaces, keys_first, merge_repeated, spell_out_init
from runner.config.errors import CONF, WrongConfig, config_errors
from runner.config.own_conf import find_own_conf
from runner.config.suggestions import about_replaced
from runner.distributed.environment import is_rank_zero
from runner.distributed.launch import Ranks
from runner.distributed.local_ranks import end_with_parent, ranks
from runner.distributed.threads import wait_briefly
from runner.job import Task, run
from runner.runs.folder import remove_unused
from runner.runs.rerun import with_saved_arguments
from runner.runs.result import Diverged
from runner.runs.saved_run import SavedRun, find_saved_run, with_latest
from runner.sweeps import sweep
from runner.sweeps.summary import end_sweep
from runner.sweeps.sweep import SweepRefused
from runner.terminal import labelled_lines, lasting_output, print_failure
from runner.tracebacks import are_whole, raised_by_hydra


def main() -> int:
    """Run the command line of this process, whatever its rank, and return the exit code."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    end_with_parent()
    with raised_by_hydra():
        return lead() if is_rank_zero() else follow(ranks())


def lead() -> int:
    """Run the command line, and return the exit code. Rank 0."""
    code = 1
    saved = None
    try:
        with config_errors():
            typed = spell_out_init(sys.argv[1:])
            check_options(typed)
            check_spaces(typed)
            sys.argv[1:] = with_latest(keys_first(merge_repeated(typed)))
            saved = find_saved_run(sys.argv[1:])
            if saved is not None:
                sys.argv[1:] = with_saved_arguments(saved, sys.argv[1:])
            found = find_own_conf(sys.argv[1:], CONF)  # unless the saved run had a folder of its own
            sys.argv[1:] = [*sys.argv[1:], *found]
            for sentence in about_replaced([*typed, *found], CONF):
                print(f"WARNING: {sentence}", file=sys.stderr)
        code = compose_and_run(saved)
    except WrongConfig as error:
        if are_whole():
            traceback.print_exception(error.__cause__)
        print(f"error: {without_credentials(str(error))}", file=sys.stderr)
        if saved is not None and not saved.is_own:
            print(f"the config.yaml of {saved.given!r} was changed, or was written by someone else", file=sys.stderr)
        code = 2
    except Diverged as error:
        print(f"error: {error}", file=sys.stderr)
        code = 3
    except Exception as error:
        print_failure(error)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):  # from a user's code; Python would print it too
            print(exit.code, file=sys.stderr)
    finally:
        ranks().dismiss(code)
    return code


def follow(ranks: Ranks) -> int:
    """Run the jobs that rank 0 sends, and return the exit code. All ranks but 0.

    Errors that all ranks raise alike are printed by rank 0 only.
    """
    for job in ranks.receive():
        try:
            with labelled_lines(job.label):
                run(job)
        except WrongConfig as error:
            if not ranks.has_next_message():
                print(f"error on rank {ranks.rank}: {error}", file=sys.stderr)
                return 2
        except Diverged:
            continue  # rank 0 found the same, and decides whether there is another job
        except KeyboardInterrupt:
            return 130
        except Exception as error:
            if ranks.report(error):
                print_failure(error)
            return 1
    return 0


def compose_and_run(saved: SavedRun | None) -> int:
    """Let Hydra compose one job or many, run each on all ranks, and return the exit code.

    Args:
        saved: the run to resume or to make again, None without one.
    """
    task = Task(saved)
    try:
        with config_errors():
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    except SweepRefused as refused:
        raise refused.error from refused.error.__cause__
    except Exception as error:
        if sweep.led is None:
            raise
        if not sweep.led.results():  # no job has begun, so the launcher or the sweeper has failed
            raise WrongConfig(f"the sweep cannot begin: {error}") from error
        if not sweep.led.is_broken:
            raise
    finally:
        code = end_sweep()
        remove_unused()
    if task.error is not None:
        raise task.error
    return code


def command() -> NoReturn:
    """Run the command line and end the process.

    Threads are joined, exit handlers run and output is flushed, as when Python exits. The teardown of the interpreter
    is skipped: with torch loaded it takes half a second, and threads of torch's process groups can abort the process.
    """
    wait_briefly()
    with lasting_output():
        code = main()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    command()
