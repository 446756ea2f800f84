"""Direct preference optimization, compared with the paper's formula on log-probabilities of transformers' models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizer import MARKING, make_tokenizer
from torch import Tensor

from runner.checkpoints.files import find_checkpoint
from runner.checkpoints.snapshot import read_file
from runner.data.hf.preferences import load_preferences
from runner.models.by_name import make_by_name
from runner.models.hf.causal_lm import HFCausalLM
from runner.models.hf.saving import save_pretrained
from runner.models.preference import PreferenceModel

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("extras")

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "the", "dog", "sleeps"]
LORA = {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.5}
CONTEXT = 64


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Write a model, a tokenizer, and pairs of answers, and return the arguments of `load_preferences`."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "prepared"))
    monkeypatch.setattr(pytest.importorskip("datasets").config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    monkeypatch.chdir(tmp_path)
    make_tokenizer(tmp_path / "model", vocab_size=320, template=MARKING)
    sizes = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=CONTEXT)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    lines = []
    for number in range(20):
        answers = (" ".join(WORDS[: 1 + number % 4]), " ".join(WORDS[number % 5 + 4 : 12]))
        lines.append({"question": WORDS[number % 13], "chosen": answers[0], "rejected": answers[1]})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options: dict[str, Any] = {"context": CONTEXT, "batch_size": 4, "eval_batch_size": 4, "cache": None}
    return {"data_files": "pairs.jsonl", "prompt": "question", "tokenizer": "model", **options}


def log_probability(network: Any, tokens: list[int], answer_length: int) -> Tensor:
    """Return the sum of the log-probabilities of the last tokens of a sequence."""
    rows = network(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    first = len(tokens) - answer_length
    return torch.stack([rows[position - 1, tokens[position]] for position in range(first, len(tokens))]).sum()


def sequences(files: dict[str, Any], rows: list[dict[str, str]]) -> list[list[tuple[list[int], int]]]:
    """Return for each row the tokens and the answer length of the chosen and of the rejected conversation."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(files["tokenizer"])
    pairs = []
    for row in rows:
        prompt = tokenizer(f"<|start|>user\n{row['question']}<|end|><|start|>assistant\n")["input_ids"]
        answers = [tokenizer(f"{row[key]}<|end|><|endoftext|>")["input_ids"] for key in ("chosen", "rejected")]
        pairs.append([(prompt + answer, len(answer)) for answer in answers])
    return pairs


@pytest.mark.parametrize("lora", [None, LORA], ids=["copy", "lora"])
def test_loss_and_gradients_equal_the_formula(files: dict[str, Any], lora: Any):
    files |= {"eval_split": "train"}
    batch = next(iter(load_preferences(**files)[1]))
    assert batch[0].shape == (4, 2, CONTEXT)
    torch.manual_seed(0)
    network = HFCausalLM("model", lora=lora)
    model = PreferenceModel(network, beta=0.3).eval()
    assert model.loss(model(batch), batch).item() == pytest.approx(math.log(2))
    with torch.no_grad():  # make the policy differ from the reference
        for weight in network.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn_like(weight)
    loss = model.loss(model(batch), batch)
    loss.backward()
    ours = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    assert ours and all("lora_" in name for name in ours) == (lora is not None)

    model.zero_grad()
    reference = transformers.AutoModelForCausalLM.from_pretrained("model")
    losses = []
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()[:4]]
    for chosen, rejected in sequences(files, rows):
        with torch.no_grad():
            reference_margin = log_probability(reference, *chosen) - log_probability(reference, *rejected)
        margin = log_probability(network.network, *chosen) - log_probability(network.network, *rejected)
        losses.append(-torch.log(1 / (1 + torch.exp(-0.3 * (margin - reference_margin)))))
    total = torch.stack(losses).mean()
    total.backward()
    torch.testing.assert_close(loss, total)
    theirs = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lora", [None, LORA], ids=["copy", "lora"])
def test_the_reference_has_no_dropout_and_training_modes_are_restored(files: dict[str, Any], lora: Any):
    inputs, targets = batch = next(iter(load_preferences(**files)[0]))
    network = HFCausalLM("model", overrides={"attention_dropout": 0.5}, lora=lora)
    model = PreferenceModel(network, beta=1.0).train()
    modes = [module.training for module in model.modules()]
    trained = [weight.requires_grad for weight in model.parameters()]
    torch.manual_seed(3)
    rewards = model(batch)
    assert [module.training for module in model.modules()] == modes
    assert [weight.requires_grad for weight in model.parameters()] == trained

    def log_probabilities() -> Tensor:
        rows = network(inputs.flatten(0, 1)).log_softmax(-1).view(*targets.shape, -1)
        return (rows.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)).sum(-1)

    torch.manual_seed(3)
    with_dropout = log_probabilities()
    network.eval()  # this is the reference, because new adapters do not change outputs
    torch.testing.assert_close(rewards, with_dropout - log_probabilities(), atol=1e-4, rtol=1e-4)


def test_lists_of_messages_that_include_the_prompt_give_the_same_batch(files: dict[str, Any]):
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    lists = []
    for row in rows:
        prompt = {"role": "user", "content": row["question"]}
        lists.append({key: [prompt, {"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")})
    Path("lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lists))
    files |= {"eval_split": "train"}
    batches = [next(iter(load_preferences(**files)[1]))]
    files |= {"data_files": "lists.jsonl", "prompt": None}
    batches.append(next(iter(load_preferences(**files)[1])))
    torch.testing.assert_close(*batches, rtol=0, atol=0)


def test_a_pair_is_left_out_if_one_answer_is_cut_off(files: dict[str, Any], caplog: Any):
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    rows[1] |= {"question": "fox " * 99}
    rows[2] |= {"rejected": "dog " * 99}
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files |= {"eval_split": "train", "eval_batch_size": 32}
    _, evaluation = load_preferences(**files)
    (batch,) = evaluation
    assert len(batch[0]) == 19 and ((batch[1] != -100).sum(-1) > 0).all()
    assert caplog.messages == [
        "6 of 80 conversations were cut at data.context=64; 4 of them left out, as no answer remains"
    ]


def test_wrong_arguments_are_refused(files: dict[str, Any]):
    with pytest.raises(ValueError, match="beta=0: must be a finite number above 0"):
        PreferenceModel(HFCausalLM("model"), beta=0)
    message = "rejected='worse': no such column; the columns are question, chosen, rejected"
    with pytest.raises(ValueError, match=message):
        load_preferences(**files, rejected="worse")
    message = "init_weights='by_name': the reference is a copy of weights that have no values"
    with pytest.raises(ValueError, match=message):
        make_by_name(lambda: PreferenceModel(HFCausalLM("model")), seed=0)


def weights_of(run: Path) -> dict[str, Tensor]:
    return read_file(find_checkpoint(run), "model.pt")


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["null", "{r: 2, target_modules: all-linear}"], ids=["copy", "lora"])
def test_dpo_trains_equally_on_two_ranks_in_microbatches_and_after_a_resume(
    files: dict[str, Any], run_here: Any, run_app: Any, tmp_path: Path, lora: str
):
    command = [
        *("model=dpo", "model.module.name=model", f"model.module.lora={lora}", "data=preferences", "data.batch_size=6"),
        *("data.data_files=pairs.jsonl", "data.prompt=question", f"data.context={CONTEXT}", "data.cache=null"),
        *("optimizer=adamw", "optimizer.lr=0.01", "scheduler=none", "algorithms=none", "trainer.device=cpu"),
        *("callbacks=[checkpoint_saver,console_summary]", "trainer.max_duration=4ba"),
    ]
    ended = run_here(*command, "hydra.run.dir=run", code=0)
    assert "eval/PreferenceAccuracy" in ended.out
    whole = weights_of(tmp_path / "run")
    run_app(*command, "hydra.run.dir=parts", "launch.nproc_per_node=2", "trainer.grad_accum=2")
    torch.testing.assert_close(weights_of(tmp_path / "parts"), whole, atol=1e-5, rtol=1e-4)
    run_here(*command, "hydra.run.dir=cut", "trainer.max_duration=2ba", code=0)
    run_here("resume", "cut", "trainer.max_duration=4ba", code=0)
    resumed = weights_of(tmp_path / "cut")
    assert all(torch.equal(resumed[key], weight) for key, weight in whole.items())
    start = HFCausalLM("model").network.state_dict()
    for key, weight in start.items():
        assert lora != "null" or torch.equal(whole[f"reference.network.{key}"], weight)
    saved = transformers.AutoModelForCausalLM.from_pretrained(save_pretrained(tmp_path / "run", tmp_path / "saved"))
    assert any(not torch.equal(weight, start[key]) for key, weight in saved.state_dict().items())
    run_here("predict", "run", "--format=pt", "hydra.run.dir=predict", code=0)
    predicted = torch.load(tmp_path / "predict" / "predictions.pt", weights_only=True)
    assert predicted["chosen"].shape == predicted["rejected"].shape == (2,)
