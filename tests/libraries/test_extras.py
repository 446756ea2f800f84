"""The command that installs the missing packages of a feature."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.libraries import extras


def test_the_command_installs_from_the_checkout_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkout = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(checkout)
    assert extras.how_to_install("hf") == "pip install -e '.[hf]'"
    assert extras.how_to_install(None) == "pip install -e ."
    monkeypatch.chdir(tmp_path)
    assert extras.how_to_install("hf") == f"pip install -e '{checkout}[hf]'"
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages" / "runner" / "libraries" / "extras.py"))
    assert extras.how_to_install("hf") == "pip install 'exactrun[hf]'"


def test_missing_packages_are_named():
    extras.require("X", None, "json")
    with pytest.raises(ImportError, match=r"X needs no_such_a, no_such_b, not installed here: pip install -e"):
        extras.require("X", "hf", "json", "no_such_a", "no_such_b")
