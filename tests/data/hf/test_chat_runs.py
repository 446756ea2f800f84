"""Runs on conversations from the command line: on ranks, in microbatches, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizer import MARKING, make_tokenizer

from runner.checkpoints.files import find_checkpoint
from runner.checkpoints.snapshot import read_file
from runner.data.hf.chat import load_chat

pytestmark = pytest.mark.usefixtures("extras")

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "the", "dog", "sleeps"]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write a model and conversations of very different lengths, and return the arguments of a run of four batches."""
    transformers: Any = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "prepared"))
    monkeypatch.setattr(pytest.importorskip("datasets").config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    lines = []
    for number in range(40):
        turns = [("user", WORDS[number % 13 :]), ("assistant", WORDS[: 1 + number % 12])] * (1 + number % 2)
        messages = [{"role": role, "content": " ".join(words)} for role, words in turns]
        lines.append(json.dumps({"messages": messages}) + "\n")
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    make_tokenizer(tmp_path / "model", vocab_size=320, template=MARKING)
    sizes = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=96)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return [
        *("model=hf_causal_lm", "model.module.name=model", "data=chat", "data.data_files=chats.jsonl"),
        *("data.context=96", "data.batch_size=4", "data.eval_batch_size=4", "data.cache=tokens", "optimizer=sgd"),
        *("optimizer.lr=0.5", "scheduler=none", "algorithms=none", "callbacks=[checkpoint_saver]"),
        *("trainer.max_duration=4ba", "trainer.device=cpu"),
    ]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return read_file(find_checkpoint(run), "model.pt")


@pytest.mark.slow
def test_ranks_and_microbatches_train_like_whole_batches_and_a_run_resumes(
    command: list[str], run_here: Any, run_app: Any, tmp_path: Path
):
    run_here(*command, "hydra.run.dir=run", code=0)
    run_here(*command, "hydra.run.dir=parts", "trainer.grad_accum=3", code=0)
    run_app(*command, "hydra.run.dir=ranks", "launch.nproc_per_node=2", "trainer.grad_accum=2")
    whole = weights_of(tmp_path / "run")
    start = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert any(not torch.equal(weight, start[key.removeprefix("module.network.")]) for key, weight in whole.items())
    for name in ("parts", "ranks"):
        torch.testing.assert_close(weights_of(tmp_path / name), whole, atol=1e-6, rtol=1e-5)
    run_here(*command, "hydra.run.dir=cut", "trainer.max_duration=2ba", code=0)
    run_here("resume", "cut", "trainer.max_duration=4ba", code=0)
    resumed = weights_of(tmp_path / "cut")
    assert all(torch.equal(resumed[key], weight) for key, weight in whole.items())


def test_windows_of_a_batch_have_different_numbers_of_targets(command: list[str], tmp_path: Path):
    arguments = {"data_files": str(tmp_path / "chats.jsonl"), "tokenizer": str(tmp_path / "model"), "context": 96}
    train = load_chat(**arguments, batch_size=4, cache=None)[0]  # type: ignore[arg-type]
    counts = {int((targets != -100).sum()) for _, batch, _ in train for targets in batch}
    assert len(counts) > 2


def test_a_wrong_row_ends_the_command_with_one_line(command: list[str], run_here: Any, tmp_path: Path):
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user"}]}\n' * 3)
    result = run_here(*command, "hydra.run.dir=run", code=2)
    assert "data.messages='messages': row 0: message 0 must have a role and a content" in result.err
    assert not (tmp_path / "run").exists()
