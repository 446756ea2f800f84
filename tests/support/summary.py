"""Prints what a test run cost: wall time, CPU time of all processes, and a warning if the first tier takes too long."""

from __future__ import annotations

import resource
import time

import pytest
from forked_writer import end_writers
from python_process import end_servers

FIRST_TIER = "not slow"  # what `make test` selects
MOST = 600.0  # seconds of wall time after which the first tier gets a warning; its target is 480 on two cores


class Summary:
    """Adds up the CPU time of all test processes and of the processes that they start."""

    def __init__(self) -> None:
        self.start_time = time.monotonic()
        self.cpu = 0.0

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Ends forked processes so that their time is counted, and reports the total of this process to xdist."""
        end_writers()
        end_servers()
        usages = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu"] = seconds  # type: ignore[attr-defined]
        elif not session.config.getoption("numprocesses", None):
            self.cpu = seconds

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        """Adds a worker's total, unless the worker crashed."""
        self.cpu += getattr(node, "workeroutput", {}).get("cpu", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """Prints both times."""
        wall = time.monotonic() - self.start_time
        terminalreporter.write_line(f"wall time {wall:.0f} s, CPU time {self.cpu:.0f} s")
        if config.getoption("markexpr") == FIRST_TIER and wall > MOST:
            terminalreporter.write_sep("!", "THE FIRST TIER TAKES TOO LONG", red=True, bold=True)
            terminalreporter.write_line(
                f"It took {wall / 60:.1f} minutes; the target is eight minutes on two idle cores. The slowest tests "
                "are listed above. Mark tests `slow` that need not run with every change."
            )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the summary, which starts its clock."""
    config.pluginmanager.register(Summary(), "summary of costs")
