"""The cost of the tests: wall time, CPU time of all processes, and a warning if the first tier takes too long."""

from __future__ import annotations

import resource
import time

import pytest
from forked_writer import end_writers
from python_process import end_servers

FIRST_TIER = "not slow"  # what `make test` selects
MOST = 600.0  # seconds of wall time for the first tier; it is to take eight minutes on two cores


class Summary:
    """Adds up the CPU time of all test processes and of the processes that they start."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.cpu = 0.0

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Ends forked processes so that their time is counted, and reports the total of this process to xdist."""
        end_writers()
        end_servers()
        used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own = sum(one.ru_utime + one.ru_stime for one in used)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu"] = own  # type: ignore[attr-defined]
        elif not session.config.getoption("numprocesses", None):
            self.cpu = own

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        """Adds a worker's total, unless the worker crashed."""
        self.cpu += getattr(node, "workeroutput", {}).get("cpu", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """Prints both times."""
        wall = time.monotonic() - self.began
        terminalreporter.write_line(f"wall time {wall:.0f} s, CPU time {self.cpu:.0f} s")
        if config.getoption("markexpr") == FIRST_TIER and wall > MOST:
            terminalreporter.write_sep("!", "THE FIRST TIER TAKES TOO LONG", red=True, bold=True)
            terminalreporter.write_line(
                f"{wall / 60:.1f} minutes: it is to take at most eight on two cores that nobody else uses. What takes "
                "longest is above; what need not run with every change is marked `slow`."
            )


def pytest_configure(config: pytest.Config) -> None:
    """Starts the clock."""
    config.pluginmanager.register(Summary(), "summary of costs")
