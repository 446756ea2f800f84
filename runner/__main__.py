"""The command line: verbs that need no config are answered immediately, all others are composed with Hydra and run.

Exit codes: 0, all is done; 1, training failed, with a trace; 2, the configuration is wrong, with one message; 3, the
run has diverged; 75, the machine failed and a retry may succeed; 125, `git bisect run` should skip this commit; 128
plus the number of a signal that ended the run after a checkpoint: 130 on Ctrl-C, 143 on SIGTERM. See
`runner.failures.exit_codes`.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    # `python -m` puts the working directory first, where anybody's `yaml.py` would run in place of the library.
    del sys.path[0]
    if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == os.getcwd():  # a checkout that is not installed
        sys.path.append(os.getcwd())

from typing import NoReturn

from runner.device.memory import grow_segments
from runner.distributed import restarts
from runner.distributed.slurm import requeue_if_requested
from runner.distributed.threads import wait_briefly
from runner.failures.exit_codes import INTERRUPTED
from runner.libraries.ending import end_process
from runner.program.start import run_typed
from runner.terminal.answer import run_with_answer
from runner.terminal.output import lasting_output


def main() -> int:
    """Run the command line of this process, whatever its rank, and return the exit code."""
    return run_with_answer(run_typed)


def command() -> NoReturn:
    """Run the command line and end the process, or begin again if a restart was requested."""
    restarts.save_start()
    wait_briefly()
    grow_segments()
    with lasting_output():
        try:
            with restarts.allowed():
                code = main()
        except KeyboardInterrupt:  # while the runner was imported
            code = INTERRUPTED
        requeue_if_requested()
        end_process(code, restarts.restart_if_requested if restarts.is_requested() else None)


if __name__ == "__main__":
    command()
