"""Values of a config are the same whether a single section or the whole config is parsed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.files.names import CONFIG
from runner.records.listing import SavedFolder
from runner.records.record import Record

PLAIN = {"seed": 3, "model": {"sizes": [1, 2], "text": "a: b\n\nc"}, "data": None, "odd": "x" * 200, "list": [{"a": 1}]}


@pytest.mark.parametrize(
    "text",
    [
        yaml.safe_dump(PLAIN, sort_keys=False),
        yaml.safe_dump(PLAIN, default_flow_style=True),  # a style that the runner does not write
        "seed: 1\nmodel: &shared {a: 1}\ndata: *shared\n",
        "seed: 1\nmodel: {a: 1}\nseed: 2\n",
        "# a comment\nseed: 1\nmodel:\n  a: 1",
        '"seed": 1\nmodel: {a: 1}\n',
    ],
)
def test_section_parsed_alone_equals_section_of_whole_config(text: str, tmp_path: Path):
    (tmp_path / CONFIG).write_text(text)
    folder = SavedFolder(tmp_path, None)
    whole = Record(tmp_path).config
    assert whole and {name: folder.section(name) for name in whole} == whole
    assert folder.section("absent") is None and folder.setting("model.absent") is None


def test_identical_sections_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from runner.records import listing

    parsed: list[str] = []
    load = listing.load_plain

    def load_and_record(text: str) -> Any:
        parsed.append(text)
        return load(text)

    monkeypatch.setattr(listing, "load_plain", load_and_record)
    for seed in range(50):
        run = tmp_path / f"{seed}"
        run.mkdir()
        (run / CONFIG).write_text(f"seed: {seed}\nmodel:\n  width: 48151\n")
        folder = SavedFolder(run, None)
        assert folder.setting("model.width") == 48151 and folder.setting("seed") == seed
    assert sum("48151" in text for text in parsed) == 1
