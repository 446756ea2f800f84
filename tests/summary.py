"""What the tests cost: wall time, CPU time of all processes, and a loud word where the first tier takes too long."""

from __future__ import annotations

import resource
import time

import pytest
from python_process import end_server

FIRST_TIER = "not slow"  # what `make test` selects
MOST = 600.0  # seconds of wall time for the first tier; it is to take eight minutes on two cores


class Summary:
    """Adds the CPU time of this process, and of all that it has started, to those of xdist's workers."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.cpu = 0.0

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Ends the server of processes, so that its time counts, and tells the time of this process to xdist."""
        end_server()
        used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own = sum(one.ru_utime + one.ru_stime for one in used)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu"] = own  # type: ignore[attr-defined]
        elif not session.config.getoption("numprocesses", None):
            self.cpu = own

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        """Takes what a worker has told, if it has not crashed."""
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
    """Begins to count."""
    config.pluginmanager.register(Summary(), "summary of costs")
