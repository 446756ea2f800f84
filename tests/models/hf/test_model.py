"""HFModel, compared with losses of transformers for each task, and trained on a CSV file by the documented command."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_bert import BERT, WORDS, make_bert
from torch import Tensor

from runner.checkpoints.files import find_checkpoint, read_file
from runner.libraries.extras import how_to_install
from runner.libraries.torchmetrics import import_torchmetrics
from runner.models.hf.model import HFModel
from runner.models.hf.network import HFNetwork
from runner.models.hf.saving import save_pretrained

transformers: Any = pytest.importorskip("transformers")

DOCS = Path(__file__).parents[3] / "docs" / "models.md"
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 32}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a BERT with random weights and a tokenizer of a few words."""
    return make_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a CSV file of reviews in which the last word determines the verdict; datasets caches in the same folder."""
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    generator = torch.Generator().manual_seed(0)
    lines = ["review,verdict"]
    for number in range(100):
        neutral = [WORDS[i] for i in torch.randint(7, (1 + number % 5,), generator=generator).tolist()]
        last = WORDS[7 + int(torch.randint(3, (), generator=generator)) + 3 * (number % 2)]
        lines.append(f"{' '.join([*neutral, last])},{('positive', 'negative')[number % 2]}")
    file = tmp_path / "reviews.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


def command(bert: Path, *arguments: str) -> list[str]:
    """Return the arguments of the documented command, with a tiny model from a folder."""
    lines = (line for line in DOCS.read_text().splitlines() if line.startswith("python -m runner model=hf_model"))
    line = next(line for line in lines if "data.data_files=reviews.csv" in line)
    words = shlex.split(line.replace("google-bert/bert-base-uncased", str(bert)))[3:]
    return [*words, "data.num_workers=0", "callbacks=[checkpoint_saver,console_summary]", *arguments]


def weights_of(run: Path) -> dict[str, Tensor]:
    return read_file(find_checkpoint(run), "model.pt")


def draw(task: str, samples: int = 4) -> dict[str, Tensor]:
    tokens = torch.randint(1, BERT["vocab_size"], (samples, 6), generator=torch.Generator().manual_seed(0))
    labels = tokens % 3
    labels[:, 4:] = -100
    labels[0, 1:] = -100  # the first sample has fewer labels
    labels = {"sequence_classification": tokens[:, 0] % 3, "token_classification": labels}.get(task, labels)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def test_the_documented_command_fine_tunes_bert_on_a_csv_file(run_here, bert: Path, reviews: Path):
    short = ["optimizer.lr=0.01", "scheduler=none", "trainer.max_duration=6ep", "hydra.run.dir=run"]
    ended = run_here(*command(bert, *short), code=0)
    accuracy = re.search(r"eval/MulticlassAccuracy +([\d.]+)", ended.out)
    assert accuracy is not None and float(accuracy[1]) > 0.8, ended.out
    assert "classes: 0=negative, 1=positive" in ended.out + ended.err
    run_here("predict", "run", "--format=pt", "hydra.run.dir=predicted", code=0)
    predicted = torch.load("predicted/predictions.pt", weights_only=True)
    assert predicted["probabilities"].shape == (10, 2)
    assert (predicted["prediction"] == predicted["target"]).float().mean() > 0.8


def test_check_shows_the_batch_and_refuses_missing_classes(run_here, bert: Path, reviews: Path):
    ended = run_here("check", *command(bert), code=0)
    assert "input_ids int64 (4, 128), token_type_ids int64 (4, 128)" in " ".join(ended.out.split())
    refused = run_here("check", *command(bert, "model.module.num_labels=1", "data.classes=[negative]"), code=2)
    assert "of split 'train' has 'positive' in column 'verdict'; add it" in refused.err


TASKS = ["sequence_classification", "token_classification", "masked_lm", "causal_lm"]


def make(task: str, **options: Any) -> HFModel:
    torch.manual_seed(0)
    labels = 3 if "classification" in task else None
    name, overrides = ("gpt2", GPT2) if task == "causal_lm" else ("bert", BERT)
    return HFModel(HFNetwork(name, task, pretrained=False, num_labels=labels, overrides=overrides, **options)).eval()


@pytest.mark.parametrize("task", TASKS)
def test_weighted_microbatches_have_the_loss_and_metrics_of_the_whole_batch(task: str):
    model = make(task)
    batch = draw(task)
    outputs = model(batch)
    network: Any = model.module
    theirs = network.base(**batch)
    torch.testing.assert_close(model.loss(outputs, batch), theirs.loss)
    if task == "causal_lm":  # the first sample has no next token with a label
        batch = {name: tensor[1:] for name, tensor in batch.items()}
    parts = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(0, 1), slice(1, None))]
    weights = [float(model.loss_weight(part)) for part in parts]
    losses = [weight * model.loss(model(part), part) for weight, part in zip(weights, parts, strict=True)]
    mean = torch.stack(losses).sum() / sum(weights)
    torch.testing.assert_close(mean, model.loss(model(batch), batch))
    for name, metric in model.metrics(train=False).items():
        for part in parts:
            model.update_metric(part, model(part), metric)
        if name.startswith("BitsPer"):
            torch.testing.assert_close(metric.compute() * torch.log(torch.tensor(2.0)), mean)
        else:
            counts = batch["labels"] != -100
            hits = model(batch)["logits"].argmax(-1) == batch["labels"]
            torch.testing.assert_close(metric.compute(), hits[counts].float().mean())


def test_a_seq2seq_model_trains_and_has_bits_per_token(tmp_path: Path):
    options = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    transformers.T5Config(**options, decoder_start_token_id=0, pad_token_id=0).save_pretrained(tmp_path)
    model = HFModel(HFNetwork(str(tmp_path), "seq2seq_lm", pretrained=False))
    batch = draw("seq2seq_lm")
    outputs = model(batch)
    model.loss(outputs, batch).backward()
    assert outputs["logits"].shape == (4, 6, 50) and {*model.metrics(False)} == {"BitsPerToken"}


@pytest.mark.parametrize(("labels", "problem"), [(1, None), (3, "multi_label_classification")])
def test_integer_targets_are_accepted_in_regression_and_multi_label_classification(labels: int, problem: str | None):
    network = HFNetwork("bert", pretrained=False, num_labels=labels, overrides={**BERT, "problem_type": problem})
    model = HFModel(network)
    shape = (4,) if labels == 1 else (4, labels)
    batch = {**draw("masked_lm"), "labels": torch.ones(shape, dtype=torch.int64)}
    outputs = model(batch)
    model.loss(outputs, batch).backward()
    ((name, metric),) = model.metrics(train=True).items()
    model.update_metric(batch, outputs, metric)
    assert name == ("MeanSquaredError" if labels == 1 else "MultilabelAccuracy")
    assert model.predictions(batch, outputs)["prediction"].shape == shape


def test_adapters_and_the_classifier_are_trained_resumed_and_merged(run_here, bert: Path, reviews: Path):
    pytest.importorskip("peft")
    lora = ["model.module.lora={r: 2, lora_dropout: 0.1}", "optimizer.lr=0.01", "scheduler=none"]
    lora.append("trainer.max_duration=4ba")
    run_here(*command(bert, *lora, "hydra.run.dir=whole"), code=0)
    run_here(*command(bert, *lora, "trainer.max_duration=2ba", "hydra.run.dir=cut"), code=0)
    before = weights_of(Path("cut"))
    run_here("resume", "cut", "trainer.max_duration=4ba", code=0)
    whole = weights_of(Path("whole"))
    torch.testing.assert_close(weights_of(Path("cut")), whole, rtol=0, atol=0)
    changed = {key for key in whole if not torch.equal(whole[key], before[key])}
    assert changed and all("lora_" in key or "modules_to_save" in key for key in changed)

    folder = save_pretrained("whole", "saved", tokenizer=str(bert))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    network = HFNetwork(str(bert), num_labels=2, lora={"r": 2, "lora_dropout": 0.1}).eval()
    network.load_state_dict({key.removeprefix("module."): weight for key, weight in whole.items()}, strict=False)
    batch = {name: tensor for name, tensor in draw("sequence_classification").items() if name != "labels"}
    torch.testing.assert_close(theirs(**batch).logits, network(**batch).logits)


@pytest.mark.slow
def test_a_model_with_adapters_is_exported(run_here, bert: Path, reviews: Path):
    pytest.importorskip("peft")
    export = ["callbacks=[export_for_inference]", "model.module.lora={r: 2}", "trainer.max_duration=1ba"]
    run_here(*command(bert, *export, "hydra.run.dir=run"), code=0)
    module = torch.export.load("run/model.pt2").module()
    batch = {name: torch.ones(3, 8, dtype=torch.int64) for name in ("input_ids", "token_type_ids", "attention_mask")}
    assert [*module(batch)] == ["logits"]


def test_hf_model_accepts_any_model_of_transformers_and_other_metrics():
    f1 = import_torchmetrics().F1Score(task="multiclass", num_classes=3, average="macro")
    config = transformers.BertConfig(**BERT, num_labels=3)
    model = HFModel(transformers.BertForSequenceClassification(config), {"f1": f1})
    batch = draw("sequence_classification")
    metric = model.metrics(train=True)["f1"]
    model.update_metric(batch, model(batch), metric)
    assert model.task == "sequence_classification" and metric is not f1 and 0 <= float(metric.compute()) <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "classification"}, "task='classification': must be one of 'causal_lm', "),
        ({"num_labels": 0}, "num_labels=0: must be a whole number, at least 1, or None"),
        ({"name": "t5", "task": "masked_lm"}, "name='t5': transformers has no 't5' model for task='masked_lm'"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        HFNetwork(**{"name": "bert", "pretrained": False, **options})


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 2}, "lora={'rank': 2}: peft's LoraConfig has no 'rank'; did you mean 'rank_pattern'"),
        ({"r": 2, "target_modules": ["qkv"]}, "lora={'r': 2, 'target_modules': ['qkv']}: peft refuses it: "),
    ],
)
def test_wrong_options_of_adapters_are_refused(lora: dict[str, Any], message: str):
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=re.escape(message)):
        HFNetwork("bert", pretrained=False, overrides=BERT, lora=lora)


def test_the_error_without_peft_contains_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(f"peft is not installed here: {how_to_install('hf')}")):
        HFNetwork("bert", pretrained=False, overrides=BERT, lora={"r": 2})


def test_batches_without_keys_or_labels_are_refused():
    model = make("sequence_classification")
    with pytest.raises(TypeError, match="a batch of type tuple: HFModel needs a mapping"):
        model((torch.ones(2, 3), torch.ones(2)))
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    with pytest.raises(ValueError, match="the batch has no 'labels', only 'input_ids'"):
        model.loss(model(batch), batch)
