"""Lines of progress between epochs; tests/promises/test_programs.py covers the others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from runner import Timestamp
from runner.callbacks import ProgressLines, progress_lines


def test_an_alive_line_is_written_after_30_seconds_without_a_line(tmp_path: Path, monkeypatch: Any):
    state: Any = SimpleNamespace(timestamp=Timestamp(), metric_values={}, run_dir=tmp_path)
    logger: Any = None
    clock = [100.0]
    monkeypatch.setattr(progress_lines.time, "monotonic", lambda: clock[-1])
    file = tmp_path / "lines"
    callback = ProgressLines(str(file))
    callback.fit_start(state, logger)
    for seconds in (110.0, 129.0, 131.0, 140.0, 162.0):
        clock.append(seconds)
        callback.batch_end(state, logger)
    events = [json.loads(line)["event"] for line in file.read_text().splitlines()]
    assert events == ["fit_start", "alive", "alive"]
