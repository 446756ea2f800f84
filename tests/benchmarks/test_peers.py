"""benchmarks/peers.py with the libraries that are installed for the tests."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_modules import FOLDER, load


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    module = load("benchmark_of_peers", "peers.py")
    monkeypatch.setattr(module, "ENVIRONMENTS", tmp_path / "environments")
    return module


def run(peers: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments, "--rounds", "1", "--tasks", "tiny"])
    return peers.main()


def test_the_error_for_a_library_that_cannot_be_installed_shows_pip_s_message(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(peers.REQUIRED, "ignite", ["--no-index", "no-such-package"])
    with pytest.raises(RuntimeError, match="pip could not install it: ERROR: No matching distribution"):
        peers.environment("ignite")


@pytest.mark.slow
def test_libraries_run_in_environments_that_include_the_packages_of_this_one(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(peers.REQUIRED, "ignite", ["--no-index", "no-such-package"])
    assert run(peers, monkeypatch, "accelerate", "transformers", "ignite") == 1
    printed = capsys.readouterr().out
    counts = [printed.count(f"{title}: ") for title in ("this runner", "HF Trainer", "Accelerate")]
    assert counts == [3, 3, 2]  # Accelerate has no callbacks
    assert "not measured: Ignite: pip could not install it" in printed and "torch 2." in printed
