"""Sharded checkpoints: what each rank writes, what each reads again, and what is found when something is wrong."""

from __future__ import annotations

from pathlib import Path

from rank_runs import program_of
from sharded_runs import CASES, difference, on_ranks, train

from runner.checkpoints.digest import digest
from runner.checkpoints.files import read_file, verify


def cross() -> None:
    """Save gathered and in shards, and resume in either layout."""
    with on_ranks():
        for name in ("text: ema", "text: muon"):
            case, folder = CASES[name], Path(name.replace(": ", "-"))
            plain = train(case, folder, save=folder / "gathered", parallel="fsdp")
            sharded = train(case, folder, save=folder / "sharded", sharded=True, parallel="fsdp")
            assert difference(plain, sharded) == 0
            for parallel in ("fsdp", "ddp"):
                again = train(case, folder, parallel=parallel, resume_path=folder / "sharded")
                assert difference(plain, again) == 0, f"{name}: {parallel}"


def test_two_ranks_resume_in_either_layout_to_the_bit(run_ranks, tmp_path: Path):
    run_ranks(program_of("checkpoints/test_shards", "cross"), 2)
    for name in ("text-ema", "text-muon"):
        one, other = tmp_path / name / "gathered", tmp_path / name / "sharded"
        assert verify(other) is None
        assert {path.name for path in other.iterdir()} >= {f"shard-0000{rank}-of-00002.safetensors" for rank in (0, 1)}
        assert digest(read_file(one, "model.pt")) == digest(read_file(other, "model.pt")), name
        gathered, sharded = (read_file(path, "state.pt") for path in (one, other))
        for part in ("model", "optimizers", "algorithms"):
            assert digest(gathered[part]) == digest(sharded[part]), f"{name}: {part}"
