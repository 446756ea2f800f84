"""Credentials in an address are used, but appear in nothing that a run writes or prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kept_runs import LONGER, SHORT
from python_process import find_free_port

KEY = "callbacks.mlflow_logger.tracking_uri"
QUICK = (*SHORT, "callbacks=[mlflow_logger,checkpoint_saver]", "callbacks.mlflow_logger.close_timeout=0")


def test_a_password_stands_nowhere(tmp_path: Path, run_here: Any):
    host = f"127.0.0.1:{find_free_port()}"
    address = f"{KEY}='http://bob:s3cr@t@{host}/?token=s3cr-t'"
    said = [run_here(*QUICK, address, "hydra.run.dir=run", code=0)]
    assert f"tracking_uri: http://***@{host}/?token=***" in (tmp_path / "run" / "config.yaml").read_text()
    for command in (("resume", "run", LONGER), ("sync", "run")):
        said.append(run_here(*command, code=2))
        assert f"error: {KEY}='http://***@{host}/?token=***': " in said[-1].err
        assert "type the full value again" in said[-1].err
    said.append(run_here("resume", "run", LONGER, address, code=0))
    assert "tracking_uri" not in said[-1].err  # not a change
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "FINISHED"
    said.append(run_here(*QUICK, address, "objective=none", code=2))
    assert not [one for one in said if "s3cr" in one.out + one.err]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [str(path) for path in files if b"s3cr" in path.read_bytes()] == []
