"""What models of transformers take from their data: the number, names and weights of classes, one or many per text."""

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
KINDS = ("bad", "fine", "good")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of the same 60 texts: with one class each, and with any number of classes in each form."""
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    texts = [f"{WORDS[number % 13]} {WORDS[number * 7 % 13]}" for number in range(60)]
    kinds = [KINDS[0 if number % 2 else 1 if number % 3 else 2] for number in range(60)]
    tags = [[name for place, name in enumerate(KINDS) if number >> place & 1] for number in range(60)]
    truth = [[number >> place & 1 for place in range(3)] for number in range(60)]
    rows = [*zip(texts, kinds, tags, truth, strict=True)]
    single = "".join(f"{text},{kind}\n" for text, kind, _, _ in rows)
    (tmp_path / "single.csv").write_text(f"text,kind\n{single}")
    many = "".join(f'{text},"{names}","{json.dumps(row)}",{",".join(map(str, row))}\n' for text, _, names, row in rows)
    (tmp_path / "many.csv").write_text(f"text,names,truth,{','.join(KINDS)}\n{many}")
    lines = [json.dumps({"text": text, "names": names, "truth": row}) for text, _, names, row in rows]
    (tmp_path / "many.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def command(bert: Path, file: str, *arguments: str) -> list[str]:
    kind = "json" if file.endswith("jsonl") else "csv"
    return [
        *("model=hf_model", f"model.module.name={bert}", "data=hf_dataset", f"data.name={kind}"),
        *(f"data.data_files={file}", "data.eval_split=null", "data.inputs=text", f"data.tokenizer={bert}"),
        *("data.num_workers=0", "algorithms=none", "optimizer=adamw", "optimizer.lr=0.01", "scheduler=none"),
        *("callbacks=[checkpoint_saver,console_summary]", "trainer.max_duration=2ep", *arguments),
    ]


def weights(run: Path | str) -> dict[str, torch.Tensor]:
    return read_file(find_checkpoint(run), "model.pt")


@pytest.mark.parametrize("task", ["sequence_classification", "token_classification"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_weighted_loss_is_that_of_torch_for_texts_and_tokens(task: str, smoothing: float):
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
    shares: list[Any] = [model.loss_weight(part) for part in parts]
    loss: Any = sum(share * model.loss(model(part), part) for share, part in zip(shares, parts, strict=True))
    torch.testing.assert_close(loss / sum(shares), expected)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("causal_lm", {"class_weights": [1, 2]}, "this is a model for causal_lm"),
        ("masked_lm", {"loss": "focal"}, "this is a model for masked_lm"),
        ("token_classification", {"multi_label": True}, "this is a model for token_classification"),
        ("sequence_classification", {"class_weights": [1, 2]}, "must be 3 numbers"),
    ],
)
def test_options_of_classifiers_are_refused_elsewhere(task: str, options: dict[str, Any], message: str):
    name = "gpt2" if task == "causal_lm" else "bert"
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50} if name == "gpt2" else BERT
    labels = 3 if "classification" in task else None
    network = HFNetwork(name, task, pretrained=False, num_labels=labels, overrides=sizes)
    with pytest.raises(ValueError, match=message):
        HFModel(network, **options)


def test_number_names_and_balanced_weights_come_from_the_training_data(run_here: Any, bert: Path, files: Path):
    options = ["data.targets=kind", "model.class_weights=balanced"]
    ended = run_here(*command(bert, "single.csv", *options, "hydra.run.dir=run"), code=0)
    model = (read_config(find_checkpoint("run")) or {})["model"]
    assert model["classes"] == [*KINDS] and model["module"]["num_labels"] == 3
    loader, _ = load_hf_dataset(
        name="csv", data_files="single.csv", eval_split=None, inputs="text", targets="kind", tokenizer=str(bert)
    )
    labels = loader.dataset.targets.numpy()  # type: ignore[attr-defined]
    expected = compute_class_weight("balanced", classes=numpy.arange(3), y=labels)
    assert model["class_weights"] == pytest.approx(expected.tolist())
    assert json.loads(Path("run", "result.json").read_text())["class_weights"] == model["class_weights"]
    printed = ", ".join(f"{weight:.4g}" for weight in expected)
    assert f"class_weights=balanced: {printed}" in ended.out + ended.err
    # The same run on two ranks, in microbatches, and interrupted.
    run_here(*command(bert, "single.csv", *options, "trainer.max_duration=1ep", "hydra.run.dir=half"), code=0)
    run_here("resume", "half", "trainer.max_duration=2ep", code=0)
    for name, weight in weights("run").items():
        assert torch.equal(weight, weights("half")[name]), name
    exported = save_pretrained("run", files / "exported")
    config = transformers.AutoConfig.from_pretrained(exported)
    assert config.id2label == dict(enumerate(KINDS)) and config.label2id["good"] == 2


@pytest.mark.slow
def test_two_ranks_and_microbatches_train_with_balanced_weights_as_one(run_app: Any, bert: Path, files: Path):
    exact = ["data.targets=kind", "model.class_weights=balanced", "data.batch_size=6", "optimizer=sgd"]
    exact.append("model.module.overrides={hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}")
    more = {"one": [], "two": ["launch.nproc_per_node=2"], "parts": ["trainer.grad_accum=3"]}
    for folder, arguments in more.items():
        run_app(*command(bert, "single.csv", *exact, *arguments, f"hydra.run.dir={folder}"))
    one, two, parts = (weights(files / folder) for folder in more)
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(parts[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "targets"),
    [
        *(("many.csv", targets) for targets in ("names", "truth", [*KINDS])),
        *(("many.jsonl", targets) for targets in ("names", "truth")),
    ],
)
def test_any_number_of_classes_has_the_same_labels_in_each_form(bert: Path, files: Path, file: str, targets: Any):
    kind = "json" if file.endswith("jsonl") else "csv"
    options: Any = {"inputs": "text", "targets": targets, "tokenizer": str(bert), "num_workers": 0}
    loader, held_out = load_hf_dataset(name=kind, data_files=str(files / file), eval_split=None, **options)
    dataset: Any = held_out.dataset  # type: ignore[attr-defined]
    labels = torch.cat([batch["labels"] for batch in held_out])
    assert labels.shape == (6, 3) and torch.equal(labels, dataset.targets) and dataset.is_multi_label
    texts = [*range(60)]
    everything = torch.cat([loader.dataset.targets, dataset.targets])  # type: ignore[attr-defined]
    expected = torch.tensor([[number >> place & 1 for place in range(3)] for number in texts])
    assert sorted(everything.tolist()) == sorted(expected.tolist())
    assert dataset.classes == (None if targets == "truth" else [*KINDS])


def test_texts_with_any_number_of_classes_train_and_are_exported(run_here: Any, bert: Path, files: Path):
    options = ["data.targets=names", "model.multi_label=true", "model.class_weights=balanced", "hydra.run.dir=run"]
    run_here("check", *command(bert, "many.csv", *options), code=0)
    ended = run_here(*command(bert, "many.csv", *options), code=0)
    assert "eval/MultilabelAccuracy" in ended.out
    config = transformers.AutoConfig.from_pretrained(save_pretrained("run", files / "exported"))
    assert config.problem_type == "multi_label_classification" and config.id2label == dict(enumerate(KINDS))
    for verb in ([], ["check"]):
        wrong = run_here(*verb, *command(bert, "many.csv", "data.targets=names"), code=2)
        assert "model.multi_label=False: in this data, a sample has any number of classes" in wrong.err


@pytest.mark.parametrize(
    ("content", "targets", "message"),
    [
        ("text,y\na,\"['b']\"\nb,c\n", "y", "is no list such as ['cat', 'dog'], unlike others"),
        ("text,y\na,b\nb,c\n", "y", "model.multi_label=True: in this data, a sample has one class"),
        ("text,y,z\na,1,0\nb,2,1\n", ["y", "z"], "targets=['y', 'z']: each column must hold 0 and 1"),
        ("text,y\na,1\nb,2\n", ["y", "gone"], "targets='gone': no such column; the columns are text, y"),
    ],
)
def test_wrong_targets_are_one_error(run_here: Any, bert: Path, files: Path, content: str, targets: Any, message: str):
    (files / "wrong.csv").write_text(content)
    typed = f"data.targets={targets}".replace("'", "").replace(" ", "")
    ended = run_here(*command(bert, "wrong.csv", typed, "model.multi_label=true"), code=2)
    assert message in " ".join(ended.err.split())
