"""The recipes of conf/experiment/: each passes a dry run without warnings, and states the expected result."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from composed_configs import composed
from PIL import Image
from shapes_to_segment import draw_shapes
from tiers import fast
from tiny_bert import WORDS, make_bert
from tiny_tokenizer import MARKING, TEXT, make_tokenizer

from runner.config import build
from runner.config.experiment import Experiment
from runner.libraries.hugging_face import import_hf
from runner.trials import dry_run

CONF = Path(__file__).resolve().parents[2] / "conf"
RECIPES = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
IMAGES = [name for name in RECIPES if name.startswith("imagefolder")]
NOT_RUN = [*IMAGES, "text_finetune", "instruction_lora", "text_classification_csv", "image_transfer", "segmentation"]
MEASURED = [name for name in RECIPES if name not in NOT_RUN]


def header(name: str) -> str:
    lines = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


def try_out(*arguments: str) -> dry_run.Findings:
    """Check a config, and return the findings of a dry run, which must not warn."""
    experiment = Experiment(composed(*arguments))
    build.check(experiment)
    findings = dry_run.try_out(experiment)
    assert findings.warnings == []
    return findings


def make_llama(folder: Path, **tokenizer: Any) -> str:
    """Save a tiny Llama with a tokenizer, and return its folder."""
    model = make_tokenizer(folder, **tokenizer)
    options = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = import_hf("transformers").LlamaConfig(**options, intermediate_size=32, max_position_embeddings=64)
    import_hf("transformers").LlamaForCausalLM(config).save_pretrained(model)
    return model


@pytest.mark.parametrize("name", fast(MEASURED, "digits_fast", "stdlib_lm_fast"))
def test_a_recipe_passes_a_dry_run_without_warnings(name: str):
    try_out(f"experiment={name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_a_recipe_for_images_in_folders_passes_a_dry_run_without_warnings(name: str, tmp_path: Path):
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    for folder in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(40):
            Image.new("RGB", (8, 8)).save(tmp_path / folder / f"{number}.png")
    small = ("data.image_size=32", "data.batch_size=2", "trainer.precision=fp32", "model.module.name=resnet18")
    try_out(f"experiment={name}", f"data.path={tmp_path}", *small)


@pytest.mark.slow
def test_the_recipe_for_texts_trains_without_warnings(tmp_path: Path, run_here: Any):
    model = make_llama(tmp_path / "model")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(TEXT)
    arguments = ["experiment=text_finetune", f"data.path={tmp_path / 'texts'}", f"model.module.name={model}"]
    arguments += ["data.context=16", "data.batch_size=2", "data.eval_batch_size=2", "data.cache=null"]
    arguments += ["trainer.precision=fp32"]  # bf16 warns on CPUs
    try_out(*arguments)
    try_out(*arguments, "model.module.lora={r: 2, lora_alpha: 4}")  # frozen norms and biases give no warning
    ended = run_here(*arguments, "trainer.max_duration=3ba", "~callbacks.mlflow_logger", code=0)
    assert "BitsPerToken" in ended.out


def test_the_recipe_for_conversations_trains_adapters_without_warnings(tmp_path: Path, run_here: Any):
    pytest.importorskip("peft")
    model = make_llama(tmp_path / "model", template=MARKING)
    messages = [{"role": "user", "content": "Which animal?"}, {"role": "assistant", "content": "The quick brown fox"}]
    files = tmp_path / "chats.jsonl"
    files.write_text(40 * (json.dumps({"messages": messages}) + "\n"))
    arguments = ["experiment=instruction_lora", f"data.data_files={files}", f"model.module.name={model}"]
    arguments += ["data.context=64", "data.batch_size=2", "data.eval_batch_size=2", "data.cache=null"]
    arguments += ["trainer.precision=fp32"]  # bf16 warns on CPUs
    assert "[[The quick brown fox<|end|>" in try_out(*arguments).sample
    checked = run_here("check", *arguments, code=0)
    assert "trained     what is in double brackets: <|start|>user" in checked.out and "[[The quick" in checked.out
    ended = run_here(*arguments, "trainer.max_duration=3ba", "~callbacks.mlflow_logger", code=0)
    assert "BitsPerToken" in ended.out


def test_the_recipe_for_texts_in_a_csv_file_trains_without_warnings(tmp_path: Path, run_here: Any):
    (tmp_path / "bert").mkdir()
    rows = "".join(f"the {word} film,{'ab'[number % 3 == 0]}\n" for number, word in enumerate(WORDS * 4))
    (tmp_path / "texts.csv").write_text(f"text,label\n{rows}")
    arguments = ["experiment=text_classification_csv", f"data.data_files={tmp_path / 'texts.csv'}"]
    arguments += [f"model.module.name={make_bert(tmp_path / 'bert')}", "data.context=16", "trainer.precision=fp32"]
    try_out(*arguments)
    ended = run_here(*arguments, "trainer.max_duration=1ep", "data.num_workers=0", "~callbacks.mlflow_logger", code=0)
    assert "MulticlassAccuracy" in ended.out and "class_weights=balanced: " in ended.err


@pytest.mark.slow
def test_the_recipe_for_image_transfer_trains_without_warnings(tmp_path: Path, run_here: Any):
    for package in ("torchvision", "timm"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    for folder, count in {"train/cat": 6, "train/dog": 2, "val/cat": 2, "val/dog": 1}.items():
        (tmp_path / "pictures" / folder).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8)).save(tmp_path / "pictures" / folder / f"{number}.png")
    arguments = ["experiment=image_transfer", f"data.path={tmp_path / 'pictures'}", "data.image_size=32"]
    arguments += ["data.eval_image_size=32", "data.batch_size=4", "data.eval_batch_size=4", "data.num_workers=0"]
    arguments += ["model.module.name=test_resnet", "model.module.pretrained=false", "trainer.precision=fp32"]
    try_out(*arguments)
    ended = run_here(*arguments, "trainer.max_duration=1ep", "~callbacks.mlflow_logger", "hydra.run.dir=run", code=0)
    assert "class_weights=balanced: 0.6667, 2" in ended.err  # 8 / (2 * 6) and 8 / (2 * 2)
    run_here("export", "run", "model.safetensors", code=0)
    with import_hf("safetensors").safe_open("model.safetensors", "pt") as file:
        assert file.metadata()["classes"] == '["cat", "dog"]'
        assert file.get_slice("fc.weight").get_shape()[0] == 2


@pytest.mark.slow
def test_the_recipe_for_segmentation_trains_without_warnings(tmp_path: Path, run_here: Any):
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    arguments = ["experiment=segmentation", f"data.path={draw_shapes(tmp_path / 'shapes', (6, 2))}"]
    arguments += ["data.classes=[background,disk,box]", "data.image_size=32", "data.eval_image_size=32"]
    arguments += ["data.batch_size=3", "data.num_workers=0", "trainer.precision=fp32"]
    try_out(*arguments)
    ended = run_here(*arguments, "trainer.max_duration=1ep", "~callbacks.mlflow_logger", code=0)
    assert "MeanIoU" in ended.out and "PixelAccuracy" in ended.out


@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_recipe_states_hardware_time_and_metric_with_spread(name: str):
    assert re.search(r"Hardware: one CPU thread, \d+ s\. Expected: \w+ [\d.]+ (% )?\+- [\d.]+ ", header(name))
    assert re.search(r"\(mean, spread; n=\d+\)", header(name))


@pytest.mark.parametrize("name", NOT_RUN)
def test_a_recipe_that_was_not_measured_says_so(name: str):
    assert "Not run yet" in header(name)
