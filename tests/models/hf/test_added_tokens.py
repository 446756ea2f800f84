"""Added tokens have embeddings that train, and go along into checkpoints and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.checkpoints.base import bases_of
from runner.checkpoints.files import find_checkpoint, read_file
from runner.models.hf.causal_lm import HFCausalLM
from tests.support.tiny_tokenizer import make_tokenizer

transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("extras")
TOOLS = ["<tool>", "</tool>"]


def save_model(folder: Path, tied: bool, vocab_size: int = 300) -> str:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=vocab_size, tie_word_embeddings=tied, **sizes)
    config.max_position_embeddings = 64
    transformers.utils.logging.disable_progress_bar()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.utils.logging.enable_progress_bar()
    return make_tokenizer(folder)


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
def test_rows_of_new_tokens_train_with_adapters_and_are_exported(run_here, tmp_path: Path, tied: bool):
    save_model(tmp_path / "llama", tied)
    run_here(*command(LORA), code=0)
    weights = read_file(find_checkpoint("run"), "model.pt")
    assert all("lora_" in name or "trainable_tokens_delta" in name for name in weights)
    assert len({id(weight) for name, weight in weights.items() if "tokens_delta" in name}) == (1 if tied else 2)
    run_here("export", "run", "merged/", "--tokenizer", "./llama", code=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained("merged")
    numbers = tokenizer("<tool>dog</tool>")["input_ids"]
    assert (numbers[0], numbers[-1]) == (300, 301) and not {300, 301} & {*numbers[1:-1]}
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
@pytest.mark.parametrize("words", [[LORA], []], ids=["lora", "all"])
def test_two_ranks_resume_new_tokens_to_the_bit(run_app, monkeypatch, tmp_path: Path, words: list[str]):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "llama", tied=True)
    two = ["launch.nproc_per_node=2", *words]
    run_app(*command(*two))
    run_app(*command(*two, folder="cut", duration="2ba"))
    run_app("resume", "cut", "trainer.max_duration=4ba")
    first, second = (read_file(find_checkpoint(run), "model.pt") for run in ("run", "cut"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    run_app("eval", "run")


def test_new_rows_start_as_drawn_and_old_rows_stay_with_adapters(tmp_path: Path):
    folder = save_model(tmp_path / "llama", tied=False, vocab_size=310)  # with unused rows, as many models have
    model = HFCausalLM(folder, lora={"r": 2}, added_tokens=TOOLS)
    assert model.base.get_input_embeddings().weight.shape == (310, 32)
    assert bases_of(model)[""].digest == bases_of(HFCausalLM(folder, lora={"r": 2}))[""].digest
    model(torch.tensor([[5, 300, 7]])).square().sum().backward()
    trained = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert any("trainable_tokens_delta" in name for name in trained)
    assert not any(name.endswith(("embed_tokens.weight", "original_module.weight")) for name in trained)


@pytest.mark.parametrize("value", ["[a,a]", "['']", "text", "[3]"])
def test_added_tokens_are_checked(run_here, tmp_path: Path, value: str):
    save_model(tmp_path / "llama", tied=True)
    wrong = run_here("check", *command(f"data.added_tokens={value}"), code=2).err
    assert "added_tokens" in wrong and wrong.count("\n") == 1
