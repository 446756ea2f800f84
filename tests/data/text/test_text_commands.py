"""A GPT trained on the user's texts, from the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from main_runs import run_folders
from tiers import fast
from tiny_tokenizer import TEXT, make_tokenizer

pytestmark = pytest.mark.usefixtures("extras")

DATA = {
    "text_files": ("data=text_files", "data.path=texts"),
    "hf_dataset": (
        *("data=hf_dataset", "data.name=json", "data.data_files={train:rows.jsonl,validation:rows.jsonl}"),
        "data.text=text",
    ),
}
SHORT = (
    *("model=gpt", "model.module.context=16", "data.context=16", "model.module.d_model=16", "model.module.n_heads=2"),
    *("data.eval_tokens=320", "data.eval_batch_size=4", "data.cache=kept", "scheduler=constant", "algorithms=none"),
    *("callbacks=[checkpoint_saver]", "trainer.eval_interval=0"),
)
TOKENS = ("data.tokenizer=tokenizer", "model.module.vocab_size=300", "model.metric_name=BitsPerToken")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write text files, JSON lines and a tokenizer into the working directory, and return it."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "prepared"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "prepared"))  # for other ranks
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        (tmp_path / "texts" / f"{name}.txt").write_text(TEXT)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines()))
    make_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def test_replay_shows_tokens_as_text(here: Path, run_here: Any):
    run_here(*DATA["text_files"], *SHORT, *TOKENS, "trainer.max_duration=3ba", "hydra.run.dir=run", code=0)
    result = json.loads(run_here("replay", "run", "2", "--json", code=0).out)["result"]
    words = result["worst"][0]["text"].split()
    assert len(words) > 3 and {*words[1:-1]} <= {*TEXT.split()}


def weights(folder: Path, number: int = -1) -> dict[str, torch.Tensor]:
    run = run_folders(folder)[number]
    return torch.load(run / "checkpoints" / "latest" / "model.pt", weights_only=True)


@pytest.mark.parametrize(
    ("data", "tokens"),
    [
        pytest.param("text_files", (), marks=pytest.mark.slow),
        ("text_files", TOKENS),
        ("hf_dataset", ()),
        pytest.param("hf_dataset", TOKENS, marks=pytest.mark.slow),
    ],
    ids=["files-bytes", "files-tokens", "data set-bytes", "data set-tokens"],
)
def test_a_resumed_run_is_bit_identical(data: str, tokens: tuple[str, ...], here: Path, run_here: Callable[..., Any]):
    command = (*DATA[data], *SHORT, *tokens)
    run_here(*command, "trainer.max_duration=7ba", code=0)
    run_here(*command, "trainer.max_duration=3ba", code=0)
    run_here("resume", str(run_folders(here)[1]), "trainer.max_duration=7ba", code=0)
    torch.testing.assert_close(weights(here, 0), weights(here, 1), atol=0, rtol=0)
    assert bool([*here.glob("kept/*.uint16")]) == bool(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["text_files", "hf_dataset"])
def test_two_ranks_train_like_one_rank(
    data: str, here: Path, run_app: Callable[..., Any], run_here: Callable[..., Any]
):
    command = (*DATA[data], *SHORT, *TOKENS, "trainer.max_duration=5ba", "trainer.device=cpu")
    result = run_app(*command, "launch.nproc_per_node=2")
    lines = result.stderr.splitlines()  # no progress bars; the second rank may log that it waits for the first
    assert len(lines) <= 1 and all(": waiting for it" in line for line in lines), lines
    cached = {file: file.stat().st_mtime_ns for file in here.glob("kept/*.uint16")}
    run_here(*command, code=0)
    torch.testing.assert_close(weights(here, 0), weights(here, 1), atol=1e-5, rtol=1e-4)
    assert cached and cached == {file: file.stat().st_mtime_ns for file in here.glob("kept/*.uint16")}


@pytest.mark.parametrize("data", fast(DATA, "text_files"))
def test_check_finds_tokens_outside_the_vocabulary(data: str, here: Path, run_here: Callable[..., Any]):
    command = ("check", *DATA[data], *SHORT, *TOKENS)
    assert "ok batch" in run_here(*command, code=0).out
    result = run_here(*command, "model.module.vocab_size=299", code=2)
    assert "In its forward pass" in result.err and "out of range" in result.err
