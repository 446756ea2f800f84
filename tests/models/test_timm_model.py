"""Models of timm, and weights of timm and torchvision from files."""

import inspect
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import nn

from runner import ClassificationModel, Trainer
from runner.callbacks import LoadCheckpoint
from runner.models.timm_model import timm_model
from runner.models.torchvision_model import torchvision_model

TINY = "test_resnet"  # a model for timm's tests with 470,000 weights
TAG = "r160_in1k"
needs_timm = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")


@pytest.fixture
def make_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, torch.Tensor]]:
    """Disable downloads, and return a function that writes weights of the tiny model to the Hub's cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))  # for processes started by the test
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def cache() -> dict[str, torch.Tensor]:
        weights = timm_model(TINY).state_dict()
        revision, folder = "0" * 40, tmp_path / "hub" / f"models--timm--{TINY}.{TAG}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(revision)
        (folder / "snapshots" / revision).mkdir(parents=True)
        save_file(weights, folder / "snapshots" / revision / "model.safetensors")
        return weights

    return cache


def logits(model: nn.Module, *shape: int) -> torch.Tensor:
    return model.eval()(torch.randn(*shape))


@needs_timm
def test_a_model_has_the_requested_classes_and_channels():
    for name, in_channels, size in ((TINY, 3, 64), ("test_vit", 1, 160), (f"{TINY}.{TAG}", 2, 32)):
        model = timm_model(name, num_classes=7, in_channels=in_channels)
        assert logits(model, 2, in_channels, size, size).shape == (2, 7)
    with torch.device("meta"):
        assert sum(weight.numel() for weight in timm_model("resnet50").parameters()) == 25_557_032


@needs_timm
def test_initial_weights_depend_on_the_seed():
    def first_weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return next(timm_model(TINY).parameters())

    assert torch.equal(first_weights(0), first_weights(0)) and not torch.equal(first_weights(0), first_weights(1))


@needs_timm
def test_pretrained_weights_are_loaded(make_cached: Any):
    weights = make_cached()
    loaded = timm_model(TINY, pretrained=True).state_dict()
    assert loaded.keys() == weights.keys() and all(torch.equal(loaded[name], weights[name]) for name in weights)
    adapted = timm_model(f"{TINY}.{TAG}", num_classes=4, pretrained=True, in_channels=1).state_dict()
    assert adapted["fc.weight"].shape[0] == 4
    torch.testing.assert_close(adapted["conv1.0.weight"], weights["conv1.0.weight"].sum(dim=1, keepdim=True))
    assert torch.equal(adapted["layer4.0.conv1.weight"], weights["layer4.0.conv1.weight"])


@needs_timm
def test_pretrained_weights_that_cannot_be_downloaded_are_refused_in_one_line(make_cached: Any):
    message = rf"pretrained=True: the weights of {TINY} cannot be downloaded \(.+\); try"
    with pytest.raises(OSError, match=message) as caught:
        timm_model(TINY, pretrained=True)
    assert "\n" not in str(caught.value) and caught.value.filename is None
    with torch.device("meta"):  # runner check does this first
        assert next(timm_model(TINY, pretrained=True).parameters()).is_meta


@needs_timm
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet19"}, "name='resnet19': timm has no such model; did you mean resnet18, "),
        ({"name": "qqqqqqqqqq"}, r"name='qqqqqqqqqq': timm has no such model; timm\.list_models\(\) has all"),
        ({"name": "hf-hub:someone/else"}, "name='hf-hub:someone/else': timm has no such model"),
        ({"name": "resnet18.best"}, r"name='resnet18\.best': timm has no such weights; choose among resnet18\.a1_in1k"),
        ({"name": "botnet50ts_256", "pretrained": True}, "pretrained=True: timm has no weights for botnet50ts_256"),
        ({"num_classes": 0}, "num_classes=0: must be a whole number, at least 1"),
        ({"in_channels": -3}, "in_channels=-3: must be a whole number, at least 1"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        timm_model(**arguments)


@pytest.mark.parametrize("missing", ["timm", "torchvision"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch, missing: str):
    if missing == "torchvision" and find_spec("timm") is None:
        pytest.skip("timm is not installed")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{missing} is not installed here: pip install -e '\.\[vision\]'"):
        timm_model()


def test_the_config_has_every_argument_with_its_default():
    config = OmegaConf.load(Path(__file__).parents[2] / "conf" / "model" / "timm.yaml")
    model: Any = OmegaConf.to_container(OmegaConf.create({"model": config}), resolve=True)
    arguments = model["model"]["module"]
    assert arguments.pop("_target_") == "runner.models.timm_model"
    assert arguments == {key: value.default for key, value in inspect.signature(timm_model).parameters.items()}


IMAGES = ("data=synthetic_images", "data.num_samples=8", "data.batch_size=4", "data.eval_samples=4", "data.size=32")


@pytest.mark.slow
@needs_timm
def test_a_command_trains_and_resumes_a_timm_model(run_here: Any, make_cached: Any):
    command = ("model=timm", "model.num_classes=10", *IMAGES, "callbacks=[checkpoint_saver]")
    tiny = f"model.module.name={TINY}"
    run_here(*command, tiny, "trainer.max_duration=2ep", "scheduler=constant", "hydra.run.dir=whole", code=0)
    run_here(*command, tiny, "trainer.max_duration=3ba", "scheduler=constant", "hydra.run.dir=parts", code=0)
    run_here("resume", "parts", "trainer.max_duration=2ep", code=0)
    whole, parts = (torch.load(f"{run}/checkpoints/ep2-ba4/model.pt", weights_only=True) for run in ("whole", "parts"))
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)

    unknown = run_here(*command, "model.module.name=resnet19", code=2).err
    assert unknown.startswith("error: model.module.name='resnet19': timm has no such model; did you mean resnet18")
    offline = run_here(*command, tiny, "model.module.pretrained=true", code=2).err
    assert offline.startswith("error: model.module.pretrained=True: the weights of") and offline.count("\n") == 1
    make_cached()
    run_here(*command, tiny, "model.module.pretrained=true", "trainer.max_duration=1ba", code=0)
    assert "ok model" in run_here("check", *command, tiny, code=0).out


@pytest.mark.slow
@needs_timm
def test_two_ranks_train_pretrained_weights(run_app: Any, make_cached: Any, tmp_path: Path):
    make_cached()
    run_app(
        *("model=timm", "model.num_classes=10", f"model.module.name={TINY}", "model.module.pretrained=true", *IMAGES),
        *("callbacks=[checkpoint_saver]", "trainer.max_duration=1ep", "launch.nproc_per_node=2", "hydra.run.dir=run"),
        env={"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": os.environ["HF_HUB_CACHE"]},
    )
    assert (tmp_path / "run" / "checkpoints" / "ep1-ba2" / "model.pt").is_file()


@needs_timm
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(("library", "name"), [("timm", TINY), ("torchvision", "squeezenet1_1")])
def test_a_weight_file_is_loaded_except_for_ignored_keys(library: str, name: str, suffix: str, tmp_path: Path):
    make, head = (timm_model, "fc") if library == "timm" else (torchvision_model, "classifier.1")
    path = tmp_path / f"weights{suffix}"
    torch.manual_seed(1)
    weights = make(name, num_classes=5).state_dict()
    save_file(weights, path) if suffix == ".safetensors" else torch.save(weights, path)

    def load(network: nn.Module, **arguments: Any) -> dict[str, torch.Tensor]:
        model = ClassificationModel(network, 3)
        with Trainer(model=model, device="cpu", **arguments):
            return model.module.state_dict()

    torch.manual_seed(2)
    network = make(name, num_classes=3)
    initial = {key: value.clone() for key, value in network.state_dict().items()}
    expected = initial | {key: value for key, value in weights.items() if not key.startswith(f"{head}.")}
    loaded = load(network, callbacks=[LoadCheckpoint(path, ignore_keys=[f"module.{head}.*"])])
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
    whole = load(make(name, num_classes=5), load_path=path)
    torch.testing.assert_close(whole, weights, rtol=0, atol=0)
    with pytest.raises(ValueError, match=f"of another shape module.{head}.weight"):
        load(make(name, num_classes=3), callbacks=[LoadCheckpoint(path)])
