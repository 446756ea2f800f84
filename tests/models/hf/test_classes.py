"""Models of transformers take the number, names, and weights of classes from the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from tiny_bert import BERT, WORDS, make_bert

from runner.checkpoints.files import find_checkpoint, read_config, read_file
from runner.data.hf.dataset import load_hf_dataset
from runner.models.hf.model import HFModel
from runner.models.hf.network import HFNetwork
from runner.models.hf.saving import save_pretrained

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("extras")
CLASSES = ("bad", "fine", "good")
LABELS = [[number >> bit & 1 for bit in range(3)] for number in range(60)]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write files with 60 texts, each with one class or with any number of classes, in several forms."""
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    texts = [f"{WORDS[number % 13]} {WORDS[number * 7 % 13]}" for number in range(60)]
    classes = [CLASSES[0 if number % 2 else 1 if number % 3 else 2] for number in range(60)]
    names = [[name for name, label in zip(CLASSES, row, strict=True) if label] for row in LABELS]
    rows = [*zip(texts, classes, names, LABELS, strict=True)]
    single = "".join(f"{text},{name}\n" for text, name, _, _ in rows)
    (tmp_path / "single.csv").write_text(f"text,class\n{single}")
    many = "".join(f'{text},"{names}","{json.dumps(row)}",{",".join(map(str, row))}\n' for text, _, names, row in rows)
    (tmp_path / "many.csv").write_text(f"text,names,labels,{','.join(CLASSES)}\n{many}")
    lines = [json.dumps({"text": text, "names": names, "labels": row}) for text, _, names, row in rows]
    (tmp_path / "many.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def command(bert: Path, file: str, *arguments: str) -> list[str]:
    return [
        *("model=hf_model", f"model.module.name={bert}", "data=hf_dataset", "data.name=csv"),
        *(f"data.data_files={file}", "data.eval_split=null", "data.inputs=text", f"data.tokenizer={bert}"),
        *("data.num_workers=0", "algorithms=none", "optimizer=adamw", "optimizer.lr=0.01", "scheduler=none"),
        *("callbacks=[checkpoint_saver,console_summary]", "trainer.max_duration=2ep", *arguments),
    ]


def weights(run: Path | str) -> dict[str, torch.Tensor]:
    return read_file(find_checkpoint(run), "model.pt")


@pytest.mark.parametrize("task", ["sequence_classification", "token_classification"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_weighted_loss_equals_torchs_for_texts_and_tokens(task: str, smoothing: float):
    torch.manual_seed(0)
    network = HFNetwork("bert", task, pretrained=False, num_labels=3, overrides=BERT)
    model = HFModel(network, class_weights=[0.5, 2, 1], label_smoothing=smoothing).eval()
    tokens = torch.arange(12).view(3, 4) % 7 + 5
    labels = tokens % 3
    labels[0, 1:] = -100
    labels = labels if task == "token_classification" else labels[:, 0]
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    logits = network.base(tokens, torch.ones_like(tokens)).logits
    weight = torch.tensor([0.5, 2, 1])
    expected = F.cross_entropy(logits.reshape(-1, 3), labels.flatten(), weight, label_smoothing=smoothing)
    torch.testing.assert_close(model.loss(model(batch), batch), expected)
    parts = [{name: value[index : index + 1] for name, value in batch.items()} for index in range(3)]
    weights: list[Any] = [model.loss_weight(part) for part in parts]
    loss: Any = sum(weight * model.loss(model(part), part) for weight, part in zip(weights, parts, strict=True))
    torch.testing.assert_close(loss / sum(weights), expected)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("causal_lm", {"class_weights": [1, 2]}, "this is a model for causal_lm"),
        ("masked_lm", {"loss": "focal"}, "this is a model for masked_lm"),
        ("token_classification", {"multi_label": True}, "this is a model for token_classification"),
        ("sequence_classification", {"class_weights": [1, 2]}, "must be 3 numbers"),
    ],
)
def test_options_for_classifiers_are_refused_for_other_tasks(task: str, options: dict[str, Any], message: str):
    name = "gpt2" if task == "causal_lm" else "bert"
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50} if name == "gpt2" else BERT
    labels = 3 if "classification" in task else None
    network = HFNetwork(name, task, pretrained=False, num_labels=labels, overrides=sizes)
    with pytest.raises(ValueError, match=message):
        HFModel(network, **options)


def test_number_names_and_balanced_weights_come_from_the_training_data(run_here: Any, bert: Path, files: Path):
    options = ["data.targets=class", "model.class_weights=balanced"]
    ended = run_here(*command(bert, "single.csv", *options, "hydra.run.dir=run"), code=0)
    model = (read_config(find_checkpoint("run")) or {})["model"]
    assert model["classes"] == [*CLASSES] and model["module"]["num_labels"] == 3
    loader, _ = load_hf_dataset(
        name="csv", data_files="single.csv", eval_split=None, inputs="text", targets="class", tokenizer=str(bert)
    )
    labels = loader.dataset.targets.numpy()  # type: ignore[attr-defined]
    expected = compute_class_weight("balanced", classes=numpy.arange(3), y=labels)
    assert model["class_weights"] == pytest.approx(expected.tolist())
    assert json.loads(Path("run", "result.json").read_text())["class_weights"] == model["class_weights"]
    printed = ", ".join(f"{weight:.4g}" for weight in expected)
    assert f"class_weights=balanced: {printed}" in ended.out + ended.err
    run_here(*command(bert, "single.csv", *options, "trainer.max_duration=1ep", "hydra.run.dir=half"), code=0)
    run_here("resume", "half", "trainer.max_duration=2ep", code=0)
    torch.testing.assert_close(weights("half"), weights("run"), rtol=0, atol=0)
    exported = save_pretrained("run", files / "exported")
    config = transformers.AutoConfig.from_pretrained(exported)
    assert config.id2label == dict(enumerate(CLASSES)) and config.label2id["good"] == 2


@pytest.mark.slow
def test_balanced_weights_train_equally_on_two_ranks_and_in_microbatches(run_app: Any, bert: Path, files: Path):
    exact = ["data.targets=class", "model.class_weights=balanced", "data.batch_size=6", "optimizer=sgd"]
    exact.append("model.module.overrides={hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}")
    splits = {"whole": [], "ranks": ["launch.nproc_per_node=2"], "microbatches": ["trainer.grad_accum=3"]}
    for folder, arguments in splits.items():
        run_app(*command(bert, "single.csv", *exact, *arguments, f"hydra.run.dir={folder}"))
    for folder in ("ranks", "microbatches"):
        torch.testing.assert_close(weights(files / folder), weights(files / "whole"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "targets"),
    [
        *(("many.csv", targets) for targets in ("names", "labels", [*CLASSES])),
        *(("many.jsonl", targets) for targets in ("names", "labels")),
    ],
)
def test_names_zeros_and_ones_and_columns_give_the_same_labels(bert: Path, files: Path, file: str, targets: Any):
    format_name = "json" if file.endswith("jsonl") else "csv"
    options: Any = {"inputs": "text", "targets": targets, "tokenizer": str(bert), "num_workers": 0}
    loader, held_out = load_hf_dataset(name=format_name, data_files=str(files / file), eval_split=None, **options)
    dataset: Any = held_out.dataset  # type: ignore[attr-defined]
    labels = torch.cat([batch["labels"] for batch in held_out])
    assert labels.shape == (6, 3) and torch.equal(labels, dataset.targets) and dataset.is_multi_label
    all_labels = torch.cat([loader.dataset.targets, dataset.targets])  # type: ignore[attr-defined]
    assert sorted(all_labels.tolist()) == sorted(LABELS)
    assert dataset.classes == (None if targets == "labels" else [*CLASSES])


@pytest.mark.slow
def test_a_multi_label_model_of_texts_is_trained_and_exported(run_here: Any, bert: Path, files: Path):
    options = ["data.targets=names", "model.multi_label=true", "model.class_weights=balanced", "hydra.run.dir=run"]
    run_here("check", *command(bert, "many.csv", *options), code=0)
    ended = run_here(*command(bert, "many.csv", *options), code=0)
    assert "eval/MultilabelAccuracy" in ended.out
    config = transformers.AutoConfig.from_pretrained(save_pretrained("run", files / "exported"))
    assert config.problem_type == "multi_label_classification" and config.id2label == dict(enumerate(CLASSES))
    for verb in ("train", "check"):
        ended = run_here(verb, *command(bert, "many.csv", "data.targets=names"), code=2)
        assert "model.multi_label=False: in this data, a sample can have any number of classes" in ended.err


@pytest.mark.parametrize(
    ("content", "targets", "message"),
    [
        ("text,y\na,\"['b']\"\nb,c\n", "y", "is not a list such as ['cat', 'dog'], unlike others"),
        ("text,y\na,b\nb,c\n", "y", "model.multi_label=True: in this data, a sample has one class"),
        ("text,y,z\na,1,0\nb,2,1\n", ["y", "z"], "targets=['y', 'z']: each column must hold 0 and 1"),
        ("text,y\na,1\nb,2\n", ["y", "gone"], "targets='gone': no such column; the columns are text, y"),
    ],
)
def test_wrong_targets_are_refused(run_here: Any, bert: Path, files: Path, content: str, targets: Any, message: str):
    (files / "wrong.csv").write_text(content)
    argument = f"data.targets={targets}".replace("'", "").replace(" ", "")
    ended = run_here(*command(bert, "wrong.csv", argument, "model.multi_label=true"), code=2)
    assert message in " ".join(ended.err.split())


def test_a_label_that_is_no_class_is_refused_at_the_start_but_a_number_is_not(run_here: Any, bert: Path, files: Path):
    (files / "train.csv").write_text("text,y\na,0\nb,2\n")
    options = ["data.eval_split=validation", "data.targets=y"]
    arguments = command(bert, "{train:train.csv,validation:eval.csv}", *options)
    for label, number in ((-100, 3), (3, "null")):
        (files / "eval.csv").write_text(f"text,y\na,0\nb,{label}\n")
        ended = run_here(*arguments, f"model.module.num_labels={number}", code=2)
        expected = f"data.targets='y': row 1 of split 'validation' has {label}, but class numbers must be from 0 to 2"
        assert f"error: {expected}" in ended.err
    run_here(*arguments, "model.module.num_labels=1", code=0)
