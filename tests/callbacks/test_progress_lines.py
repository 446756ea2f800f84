"""Lines of progress between epochs; tests/test_programs.py has the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.callbacks import ProgressLines, progress_lines


def test_a_line_comes_when_nothing_else_has_for_a_while(tmp_path: Path, monkeypatch: Any):
    from types import SimpleNamespace

    from runner import Timestamp

    state: Any = SimpleNamespace(timestamp=Timestamp(), metric_values={}, run_dir=tmp_path)
    logger: Any = None
    monkeypatch.setattr(progress_lines.time, "monotonic", lambda: now)
    file = tmp_path / "lines"
    one = ProgressLines(str(file))
    now = 100.0
    one.fit_start(state, logger)
    for now in (110.0, 129.0, 131.0, 140.0, 162.0):
        one.batch_end(state, logger)
    events = [json.loads(line)["event"] for line in file.read_text().splitlines()]
    assert events == ["fit_start", "alive", "alive"]
