"""`make bench`, in a folder whose environment exists already."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_bench_runs_every_benchmark_and_fails_if_a_limit_is_missed(tmp_path: Path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for file in ("pyproject.toml", "constraints.txt", ".venv/bin/python", "benchmarks/a.py", ".venv/.installed-run"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / ".venv/bin/python").unlink()
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    (tmp_path / "benchmarks/_runs.py").write_text("raise SystemExit('no benchmark')\n")

    def bench(exit_code: int) -> subprocess.CompletedProcess[str]:
        (tmp_path / "benchmarks/a.py").write_text(f"raise SystemExit({exit_code})\n")
        (tmp_path / "benchmarks/b.py").write_text("print('measured')\n")
        command = ["make", "--no-print-directory", "bench", f"PYTHON={sys.executable}"]
        return subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)

    done = bench(0)
    assert (done.returncode, done.stdout) == (0, "== benchmarks/a.py\n== benchmarks/b.py\nmeasured\n"), done.stderr
    assert bench(2).returncode == 0  # a benchmark that this machine cannot run
    missed = bench(1)
    assert missed.returncode == 2 and "== benchmarks/b.py\nmeasured\nmissed: benchmarks/a.py\n" in missed.stdout
