"""benchmarks/gpu.py with --dry-run, which uses tiny sizes and no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmark_modules import load

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="takes minutes on a GPU")


@pytest.fixture(scope="module")
def gpu(runs: ModuleType) -> ModuleType:  # `runs` adds the folder to the path, because gpu.py imports operations.py
    return load("benchmark_of_gpus", "gpu.py")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_resumed_runs_are_bit_identical_and_other_rows_say_that_they_need_a_gpu(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str]
):
    assert gpu.main(["resumed", "syncs", "out_of_memory", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "dry run at tiny sizes, which measure nothing" in printed
    assert printed.count("0.000 tensors (limit 0)") == 2 and printed.count("needs a GPU") == 3
    rows = Path("build/gpu.md").read_text().splitlines()[4:]
    assert len(rows) == 5 and "| resumed | gpt, tensors that differ | 0.000 tensors (limit 0) |" in rows


def test_without_a_gpu_nothing_is_measured(gpu: ModuleType, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as error:
        gpu.main([])
    assert error.value.code == 2 and not Path("build").exists()
    assert "there is no GPU to measure; --dry-run runs it at tiny sizes" in capsys.readouterr().err


def test_a_section_is_cut_off_after_its_share_of_the_time(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def long() -> Iterator[object]:
        """Begins its last run too late."""
        yield gpu.Row("before", 1.0)
        gpu.CLOCK.deadline = 0.0
        yield gpu.Row("after", gpu.by_hand("resnet18"))

    def short() -> Iterator[object]:
        """Gets the remaining time."""
        yield gpu.Row("next", gpu.by_hand("resnet18"))

    monkeypatch.setattr(gpu, "SECTIONS", {long: 1, short: 1})
    assert gpu.main(["--dry-run"]) == 1
    titles = [line.split("|")[2].strip() for line in Path("build/gpu.md").read_text().splitlines()[4:]]
    assert titles == ["before", "CUT OFF", "next"]
    assert "its share of the time was used up" in capsys.readouterr().out


def test_a_word_that_is_in_no_section_s_name_is_an_error(gpu: ModuleType, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        gpu.main(["loops", "lops"])
    assert "'lops' is in no section's name: loops, syncs, " in capsys.readouterr().err


@pytest.mark.slow
def test_every_section_yields_rows(gpu: ModuleType, capsys: pytest.CaptureFixture[str]):
    assert gpu.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert [section.__name__ for section in gpu.SECTIONS if f"\n{section.__name__}: " not in printed] == []
    assert "FAILED" not in printed and "largest difference of a weight: 0.000" in printed


def test_a_failed_section_or_an_exceeded_limit_ends_with_code_1(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken() -> Iterator[object]:
        """Fails."""
        yield gpu.Row("before", 1.0, 1.01)
        raise RuntimeError("no kernel image")

    def slow() -> Iterator[object]:
        """Is too slow."""
        yield gpu.Row("a step", 1.02, 1.01)

    monkeypatch.setattr(gpu, "SECTIONS", {broken: 1, slow: 1})
    assert gpu.main(["broken", "--dry-run"]) == 1 and gpu.main(["slow", "--dry-run"]) == 0
    monkeypatch.setattr(gpu, "ON_GPU", True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert gpu.main(["slow"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: RuntimeError: no kernel image" in printed and "1.020 times (limit 1.01), OVER" in printed
