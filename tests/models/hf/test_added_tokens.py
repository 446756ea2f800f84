"""The embeddings of added tokens are trained, saved in checkpoints, and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import LLAMA, save_random_model
from tiny_tokenizer import make_tokenizer

from runner.checkpoints.base import bases_of
from runner.checkpoints.files import find_checkpoint, read_file
from runner.models.hf.causal_lm import HFCausalLM

transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("extras")
TOOLS = ["<tool>", "</tool>"]


def save_model(folder: Path, tied: bool, vocab_size: int = 300) -> str:
    options = {"vocab_size": vocab_size, "tie_word_embeddings": tied, "max_position_embeddings": 64}
    return make_tokenizer(save_random_model(transformers.LlamaConfig(**LLAMA, **options), folder))


def command(*arguments: str, folder: str = "run", duration: str = "4ba") -> list[str]:
    rows = [{"question": f"The fox {number}?", "answer": f"<tool>dog {number}</tool>"} for number in range(16)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [
        *("model=hf_causal_lm", "model.module.name=./llama", "data=chat", "data.data_files=rows.jsonl"),
        *("data.prompt=question", "data.response=answer", "data.context=48", "data.batch_size=2", "data.cache=null"),
        *('data.added_tokens=["<tool>","</tool>"]', "optimizer=adamw", "optimizer.lr=0.01", "scheduler=none"),
        *("algorithms=none", "callbacks=[checkpoint_saver]", f"trainer.max_duration={duration}"),
        *(f"hydra.run.dir={folder}", *arguments),
    ]


LORA = "model.module.lora={r: 2}"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:Could not find a config file")
def test_embeddings_of_added_tokens_train_with_adapters_and_are_exported(run_here, tmp_path: Path, tied: bool):
    save_model(tmp_path / "llama", tied)
    run_here(*command(LORA), code=0)
    weights = read_file(find_checkpoint("run"), "model.pt")
    assert all("lora_" in name or "trainable_tokens_delta" in name for name in weights)
    assert len({id(weight) for name, weight in weights.items() if "tokens_delta" in name}) == (1 if tied else 2)
    run_here("export", "run", "merged/", "--tokenizer", "./llama", code=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained("merged")
    tokens = tokenizer("<tool>dog</tool>")["input_ids"]
    assert (tokens[0], tokens[-1]) == (300, 301) and not {300, 301} & {*tokens[1:-1]}
    base = transformers.AutoModelForCausalLM.from_pretrained("llama")
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged").eval()
    before, after = base.get_input_embeddings().weight, merged.get_input_embeddings().weight
    assert torch.equal(before, after[:300]) and after.shape == (302, 32)
    head = merged.get_output_embeddings().weight
    assert head.shape == (302, 32) and torch.equal(head, after) == tied
    ours = HFCausalLM("llama", lora={"r": 2}, added_tokens=TOOLS).eval()
    ours.load_state_dict({name.removeprefix("module."): weight for name, weight in weights.items()}, strict=False)
    tokens = torch.tensor([[5, 300, 7, 301, 9]])
    torch.testing.assert_close(ours(tokens), merged(input_ids=tokens).logits)
    run_here("export", "run", "adapter/", "--form", "adapter", code=0)
    base.resize_token_embeddings(302)
    theirs = peft.PeftModel.from_pretrained(base, "adapter").eval()
    torch.testing.assert_close(theirs(input_ids=tokens).logits, ours(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[LORA], []], ids=["lora", "all"])
def test_added_tokens_on_two_ranks_resume_bit_for_bit(run_app, monkeypatch, tmp_path: Path, lora: list[str]):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "llama", tied=True)
    two = ["launch.nproc_per_node=2", *lora]
    run_app(*command(*two))
    run_app(*command(*two, folder="cut", duration="2ba"))
    run_app("resume", "cut", "trainer.max_duration=4ba")
    whole, resumed = (read_file(find_checkpoint(run), "model.pt") for run in ("run", "cut"))
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    run_app("eval", "run")


def test_adapters_train_only_the_added_rows_of_the_embedding(tmp_path: Path):
    folder = save_model(tmp_path / "llama", tied=False, vocab_size=310)  # many models have unused rows
    model = HFCausalLM(folder, lora={"r": 2}, added_tokens=TOOLS)
    assert model.base.get_input_embeddings().weight.shape == (310, 32)
    assert bases_of(model)[""].digest == bases_of(HFCausalLM(folder, lora={"r": 2}))[""].digest
    model(torch.tensor([[5, 300, 7]])).square().sum().backward()
    trained = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert any("trainable_tokens_delta" in name for name in trained)
    assert not any(name.endswith(("embed_tokens.weight", "original_module.weight")) for name in trained)


def test_wrong_added_tokens_are_refused(run_here, tmp_path: Path):
    save_model(tmp_path / "llama", tied=True)
    for value in ("[a,a]", "['']", "text", "[3]"):
        error = run_here("check", *command(f"data.added_tokens={value}"), code=2).err
        assert "added_tokens" in error and error.count("\n") == 1, value
