"""Models of transformers with their own loss: each task, adapters, and BERT on a csv file without Python."""

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
from runner.models.hf.model import HFModel
from runner.models.hf.network import HFNetwork

transformers: Any = pytest.importorskip("transformers")

DOCS = Path(__file__).parents[3] / "docs" / "models.md"
GPT2 = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 50,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a BERT of random weights and its tokenizer of a few words."""
    return make_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A csv file in which the last of a few words decides, and a place of its own for what datasets prepares."""
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    generator = torch.Generator().manual_seed(0)
    lines = ["review,verdict"]
    for number in range(100):
        neutral = [WORDS[i] for i in torch.randint(7, (1 + number % 5,), generator=generator).tolist()]
        decides = WORDS[7 + int(torch.randint(3, (), generator=generator)) + 3 * (number % 2)]
        lines.append(f"{' '.join([*neutral, decides])},{('positive', 'negative')[number % 2]}")
    file = tmp_path / "reviews.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


def command(bert: Path, *arguments: str) -> list[str]:
    """The documented command, on a tiny model that is here, and with a few batches."""
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
    labels[0, 1:] = -100  # so that samples have unequal numbers of labels
    labels = {"sequence_classification": tokens[:, 0] % 3, "token_classification": labels}.get(task, labels)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def test_bert_is_fine_tuned_on_a_csv_file_by_the_documented_command(run_here, bert: Path, reviews: Path):
    short = ["optimizer.lr=0.01", "scheduler=none", "trainer.max_duration=6ep", "hydra.run.dir=run"]
    ended = run_here(*command(bert, *short), code=0)
    accuracy = re.search(r"eval/MulticlassAccuracy +([\d.]+)", ended.out)
    assert accuracy is not None and float(accuracy[1]) > 0.8, ended.out
    assert "classes: 0=negative, 1=positive" in ended.out + ended.err
    run_here("predict", "run", "--format=pt", "hydra.run.dir=predicted", code=0)
    predicted = torch.load("predicted/predictions.pt", weights_only=True)
    assert predicted["probabilities"].shape == (10, 2)
    assert (predicted["prediction"] == predicted["target"]).float().mean() > 0.8


def test_a_run_is_tried_out_without_reading(run_here, bert: Path, reviews: Path):
    ended = run_here("check", *command(bert), code=0)
    assert "input_ids int64 (4, 128), token_type_ids int64 (4, 128)" in " ".join(ended.out.split())
    wrong = run_here("check", *command(bert, "model.module.num_labels=1", "data.classes=[negative]"), code=2)
    assert "data.classes=['negative']: the column 'verdict' also has 'positive'" in wrong.err


TASKS = ["sequence_classification", "token_classification", "masked_lm", "causal_lm"]


def make(task: str, **options: Any) -> HFModel:
    torch.manual_seed(0)
    labels = 3 if "classification" in task else None
    name, overrides = ("gpt2", GPT2) if task == "causal_lm" else ("bert", BERT)
    return HFModel(HFNetwork(name, task, pretrained=False, num_labels=labels, overrides=overrides, **options)).eval()


@pytest.mark.parametrize("task", TASKS)
def test_weighted_parts_of_a_batch_have_the_loss_of_the_whole(task: str):
    model = make(task)
    batch = draw(task)
    outputs = model(batch)
    network: Any = model.module
    theirs = network.base(**batch)
    torch.testing.assert_close(model.loss(outputs, batch), theirs.loss)
    parts = [{name: one[span] for name, one in batch.items()} for span in (slice(1, 2), slice(2, 4), slice(0, 1))]
    if task == "causal_lm":
        parts = parts[:2]  # the first sample has no label of a next token
        batch = {name: one[1:] for name, one in batch.items()}
    weights = [float(model.loss_weight(part)) for part in parts]
    mean = sum(w * model.loss(model(part), part) for w, part in zip(weights, parts, strict=True)) / sum(weights)
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


def test_a_model_that_maps_sequences_to_sequences(tmp_path: Path):
    options = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    transformers.T5Config(**options, decoder_start_token_id=0, pad_token_id=0).save_pretrained(tmp_path)
    model = HFModel(HFNetwork(str(tmp_path), "seq2seq_lm", pretrained=False))
    batch = draw("seq2seq_lm")
    outputs = model(batch)
    model.loss(outputs, batch).backward()
    assert outputs["logits"].shape == (4, 6, 50) and {*model.metrics(False)} == {"BitsPerToken"}


@pytest.mark.parametrize(("labels", "problem"), [(1, None), (3, "multi_label_classification")])
def test_whole_numbers_are_targets_of_regression_and_of_several_labels(labels: int, problem: str | None):
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


def test_only_adapters_and_the_classifier_train_resume_and_are_merged(run_here, bert: Path, reviews: Path):
    from runner.models.hf.saving import save_pretrained

    pytest.importorskip("peft")
    lora = [
        "model.module.lora={r: 2, lora_dropout: 0.1}",
        "optimizer.lr=0.01",
        "scheduler=none",
        "trainer.max_duration=4ba",
    ]
    run_here(*command(bert, *lora, "hydra.run.dir=whole"), code=0)
    run_here(*command(bert, *lora, "trainer.max_duration=2ba", "hydra.run.dir=cut"), code=0)
    before = weights_of(Path("cut"))
    run_here("resume", "cut", "trainer.max_duration=4ba", code=0)
    whole, cut = weights_of(Path("whole")), weights_of(Path("cut"))
    assert all(torch.equal(whole[key], cut[key]) for key in whole) and whole.keys() == cut.keys()
    changed = {key for key in whole if not torch.equal(whole[key], before[key])}
    assert changed and all("lora_" in key or "modules_to_save" in key for key in changed)

    folder = save_pretrained("whole", "saved", tokenizer=str(bert))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    network = HFNetwork(str(bert), num_labels=2, lora={"r": 2, "lora_dropout": 0.1}).eval()
    network.load_state_dict({key.removeprefix("module."): one for key, one in whole.items()}, strict=False)
    batch = {name: one for name, one in draw("sequence_classification").items() if name != "labels"}
    torch.testing.assert_close(theirs(**batch).logits, network(**batch).logits)


@pytest.mark.slow
def test_a_model_with_adapters_is_exported(run_here, bert: Path, reviews: Path):
    pytest.importorskip("peft")
    export = ["callbacks=[export_for_inference]", "model.module.lora={r: 2}", "trainer.max_duration=1ba"]
    run_here(*command(bert, *export, "hydra.run.dir=run"), code=0)
    module = torch.export.load("run/model.pt2").module()
    batch = {name: torch.ones(3, 8, dtype=torch.int64) for name in ("input_ids", "token_type_ids", "attention_mask")}
    assert [*module(batch)] == ["logits"]


def test_metrics_of_ones_own_and_any_model_of_transformers():
    from runner.libraries.torchmetrics import import_torchmetrics

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
def test_wrong_arguments(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        HFNetwork(**{"name": "bert", "pretrained": False, **options})


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 2}, "lora={'rank': 2}: peft's LoraConfig has no 'rank'; did you mean 'rank_pattern'"),
        ({"r": 2, "target_modules": ["qkv"]}, "lora={'r': 2, 'target_modules': ['qkv']}: peft refuses it: "),
    ],
)
def test_wrong_adapters(lora: dict[str, Any], message: str):
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=re.escape(message)):
        HFNetwork("bert", pretrained=False, overrides=BERT, lora=lora)


def test_adapters_without_peft(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(f"peft is not installed here: {how_to_install('hf')}")):
        HFNetwork("bert", pretrained=False, overrides=BERT, lora={"r": 2})


def test_a_batch_that_does_not_fit():
    model = make("sequence_classification")
    with pytest.raises(TypeError, match="a batch of type tuple: HFModel needs a mapping"):
        model((torch.ones(2, 3), torch.ones(2)))
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    with pytest.raises(ValueError, match="the batch has no 'labels', only 'input_ids'"):
        model.loss(model(batch), batch)
