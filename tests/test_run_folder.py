"""Folders of runs: each made for one alone, removed again when nothing came of it."""

from __future__ import annotations

from pathlib import Path

from runner.run_folder import make_run_folder, remove_unused


def test_folders_made_in_one_second_differ(tmp_path: Path):
    remove_unused()
    folders = [make_run_folder(str(tmp_path / "outputs")) for _ in range(5)]
    assert len({*folders}) == 5
    (Path(folders[2]) / "kept").touch()
    remove_unused()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [Path(folders[2]) / "kept"]
    assert not any(Path(path).exists() for path in folders if path != folders[2])
