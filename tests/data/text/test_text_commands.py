"""A GPT trained on one's own texts, from the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from main_runs import run_folders
from tiers import one_in
from tiny_tokenizer import TEXT, make_tokenizer

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
    """A working directory with texts, rows of text, and a tokenizer."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "prepared"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "prepared"))  # of other ranks
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        (tmp_path / "texts" / f"{name}.txt").write_text(TEXT)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines()))
    make_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def test_a_replay_shows_the_text_of_tokens(here: Path, run_here: Any):
    run_here(*DATA["text_files"], *SHORT, *TOKENS, "trainer.max_duration=3ba", "hydra.run.dir=run", code=0)
    found = json.loads(run_here("replay", "run", "2", "--json", code=0).out)["result"]
    words = found["worst"][0]["text"].split()
    assert len(words) > 3 and {*words[1:-1]} <= {*TEXT.split()}


def weights(folder: Path, which: int = -1) -> dict[str, torch.Tensor]:
    run = run_folders(folder)[which]
    return torch.load(run / "checkpoints" / "latest" / "model.pt", weights_only=True)


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float, rtol: float) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(value, other[key], atol=atol, rtol=rtol)


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
def test_a_run_that_is_resumed_is_equal(data: str, tokens: tuple[str, ...], here: Path, run_here: Callable[..., Any]):
    command = (*DATA[data], *SHORT, *tokens)
    run_here(*command, "trainer.max_duration=7ba", code=0)
    run_here(*command, "trainer.max_duration=3ba", code=0)
    run_here("resume", str(run_folders(here)[1]), "trainer.max_duration=7ba", code=0)
    assert_close(weights(here, 0), weights(here, 1), atol=0, rtol=0)
    assert bool([*here.glob("kept/*.uint16")]) == bool(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["text_files", "hf_dataset"])
def test_two_ranks_train_as_one(data: str, here: Path, run_app: Callable[..., Any], run_here: Callable[..., Any]):
    command = (*DATA[data], *SHORT, *TOKENS, "trainer.max_duration=5ba", "trainer.device=cpu")
    done = run_app(*command, "launch.nproc_per_node=2")
    said = done.stderr.splitlines()  # no bars; whoever comes second may say that it waits for the first
    assert len(said) <= 1 and all(": waiting for it" in line for line in said), said
    made = {file: file.stat().st_mtime_ns for file in here.glob("kept/*.uint16")}
    run_here(*command, code=0)
    assert_close(weights(here, 0), weights(here, 1), atol=1e-5, rtol=1e-4)
    assert made and made == {file: file.stat().st_mtime_ns for file in here.glob("kept/*.uint16")}


@pytest.mark.parametrize("data", one_in(2, DATA))
def test_check_finds_tokens_outside_of_the_vocabulary(data: str, here: Path, run_here: Callable[..., Any]):
    command = ("check", *DATA[data], *SHORT, *TOKENS)
    assert "ok batch" in run_here(*command, code=0).out
    found = run_here(*command, "model.module.vocab_size=299", code=2)
    assert "In its forward pass" in found.err and "out of range" in found.err
