from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from algorithms import EMA
from callbacks import ExportForInference, InMemoryLogger
from callbacks._export import load_onnx
from runner import ClassificationModel, LanguageModel, Model, Trainer, evaluation_weights
from runner.models import GPT


class Network(nn.Module):
    """Has dropout and running statistics, which evaluation treats otherwise than training does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Branches(nn.Module):
    """Does one thing with one sample, another with more: no trace of it does both."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight * (1.0 if len(inputs) == 1 else 2.0)


class Regression(Model):
    """Takes and uses a dict of tensors."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["x"]) + batch["offset"]

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (outputs - batch["y"]).square().mean()


def make_trainer(run_dir: Path, export: ExportForInference, **arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 3, generator=generator), torch.tensor([0, 1, 1, 0])) for _ in range(3)]
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "model": ClassificationModel(Network(), 2),
        "train_dataloader": batches,
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.5),
        "max_duration": "2ep",
        "callbacks": [export],
        "device": "cpu",
        "run_dir": run_dir,
    }
    return Trainer(**(defaults | arguments))


def evaluated(trainer: Trainer, inputs: Any) -> Tensor:
    """What the module gives in evaluation mode, with the weights to evaluate."""
    model = trainer.state.unwrapped_model
    training = model.training
    with torch.no_grad(), evaluation_weights(trainer.state):
        outputs = model.eval()((inputs, None))
    model.train(training)
    return outputs


@pytest.mark.parametrize("algorithms", [(), ("average",)])
@pytest.mark.parametrize("save_format", ["torch_export", "torchscript", "safetensors"])
@pytest.mark.filterwarnings("ignore:.torch.jit.load:DeprecationWarning")
def test_a_file_gives_the_models_outputs(save_format: str, algorithms: tuple[str, ...], tmp_path: Path):
    memory = InMemoryLogger()
    averages = [EMA("4ba") for _ in algorithms]
    export = ExportForInference(save_format)
    with make_trainer(tmp_path, export, loggers=[memory], algorithms=averages) as trainer:
        trainer.fit()
        inputs = torch.randn(7, 3)
        expected = evaluated(trainer, inputs)
        assert trainer.state.unwrapped_model.training
    suffix = {"torch_export": "pt2", "torchscript": "pt", "safetensors": "safetensors"}[save_format]
    path = tmp_path / f"model.{suffix}"
    assert memory.artifacts == [(str(path), "export")]
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    if save_format == "safetensors":
        run = Network().eval()
        run.load_state_dict(load_file(path))
    else:
        run = torch.export.load(path).module() if save_format == "torch_export" else torch.jit.load(str(path))
    with torch.no_grad():
        torch.testing.assert_close(run(inputs), expected)
        if averages:  # the average is not what was trained
            live = trainer.state.unwrapped_model.eval()((inputs, None))
            assert (live - expected).abs().max() > 0.01


def test_onnx(tmp_path: Path, caplog):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"needs the package {package}")
    with make_trainer(tmp_path, ExportForInference("onnx"), algorithms=[EMA("4ba")]) as trainer:
        trainer.fit()
        inputs = torch.randn(7, 3)
        expected = evaluated(trainer, inputs)
    torch.testing.assert_close(load_onnx(tmp_path / "model.onnx", Network())(inputs), expected, rtol=1e-4, atol=1e-5)
    assert not [one for one in caplog.records if one.name.startswith("torch.onnx") and one.levelno >= logging.WARNING]
    assert logging.getLogger("torch.onnx").level == logging.NOTSET


def test_onnx_says_which_packages_it_needs(monkeypatch):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    message = "save_format='onnx' needs onnx, onnxscript, onnxruntime, not installed here: pip install -e '.[export]'"
    with pytest.raises(ImportError, match=re.escape(message)):
        ExportForInference("onnx")


@pytest.mark.parametrize("save_format", ["torch_export", "safetensors"])
def test_a_language_model(save_format: str, tmp_path: Path):
    tokens = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(0))
    batches = [(tokens[:, :-1], tokens[:, 1:])] * 2
    model = LanguageModel(GPT(vocab_size=32, context=8, d_model=16, n_layers=1, n_heads=2))
    path = tmp_path / "files" / ("gpt.pt2" if save_format == "torch_export" else "gpt.safetensors")
    export = ExportForInference(save_format, f"files/{path.name}")
    with make_trainer(tmp_path, export, model=model, train_dataloader=batches) as trainer:
        trainer.fit()
        expected = evaluated(trainer, tokens[:, :-1])
    if save_format == "torch_export":
        torch.testing.assert_close(torch.export.load(path).module()(tokens[:, :-1]), expected)
    else:
        assert "head.weight" not in load_file(path) or "token_embedding.weight" not in load_file(path)  # tied


def test_another_model_is_exported_itself_and_takes_a_batch(tmp_path: Path):
    batch = {"x": torch.randn(4, 2), "offset": torch.randn(4, 1), "y": torch.randn(4, 1)}
    model = Regression()
    with make_trainer(tmp_path, ExportForInference(), model=model, train_dataloader=[batch]) as trainer:
        trainer.fit()
        more = {key: torch.cat([value, value]) for key, value in batch.items()}
        expected = model(more)
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(more), expected.detach())


def test_the_batch_can_be_fixed_and_the_sample_ones_own(tmp_path: Path):
    export = ExportForInference(sample_input=torch.zeros(5, 3), dynamic_batch=False)
    with make_trainer(tmp_path, export) as trainer:
        trainer.fit()
    run = torch.export.load(tmp_path / "model.pt2").module()
    assert run(torch.ones(5, 3)).shape == (5, 2)
    with pytest.raises(Exception, match="5"):
        run(torch.ones(4, 3))


def test_transforms_apply_in_order_to_a_copy(tmp_path: Path):
    transforms = [lambda module: nn.Sequential(module, nn.Softmax(dim=1)), lambda module: module.double().float()]
    with make_trainer(tmp_path, ExportForInference(transforms=transforms)) as trainer:
        trainer.fit()
        inputs = torch.randn(3, 3)
        expected = evaluated(trainer, inputs).softmax(dim=1)
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(inputs), expected)


@pytest.mark.parametrize(
    ("save_format", "message"), [("torchscript", "the file's outputs are not the model's"), ("torch_export", "batch|0")]
)
def test_a_file_that_is_not_the_model_is_refused(save_format: str, message: str, tmp_path: Path):
    memory = InMemoryLogger()
    model = ClassificationModel(Branches(), 2)
    trainer = make_trainer(tmp_path, ExportForInference(save_format), model=model, loggers=[memory])
    with pytest.raises(Exception, match=message) as caught:
        trainer.fit()
    assert f"while exporting the model with save_format='{save_format}'" in caught.value.__notes__
    assert [*tmp_path.iterdir()] == []
    assert memory.artifacts == []


def test_a_second_fit_exports_again(tmp_path: Path):
    with make_trainer(tmp_path, ExportForInference()) as trainer:
        trainer.fit()
        trainer.fit("1ep")
        inputs = torch.randn(3, 3)
        expected = evaluated(trainer, inputs)
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(inputs), expected)


def program() -> None:
    from pathlib import Path

    import torch

    from callbacks import ExportForInference, InMemoryLogger
    from runner import ClassificationModel, Trainer, get_global_rank
    from runner.data import TensorLoader

    data = TensorLoader(torch.ones(8, 3), torch.zeros(8, dtype=torch.int64), batch_size=2, shuffle=False)
    with Trainer(
        model=ClassificationModel(torch.nn.Linear(3, 2), 2),
        train_dataloader=data,
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
        callbacks=[ExportForInference()],
        loggers=[memory := InMemoryLogger()],
        run_dir=Path("run"),
        device="cpu",
    ) as trainer:
        trainer.fit()
    assert len(memory.artifacts) == (get_global_rank() == 0)


def test_rank_0_exports(tmp_path: Path, run_ranks):
    run_ranks(program)
    assert torch.export.load(tmp_path / "run" / "model.pt2").module()(torch.ones(5, 3)).shape == (5, 2)


@pytest.mark.parametrize("arguments", [{"save_format": "pickle"}, {"save_path": "model.onnx"}, {"transforms": [3]}])
def test_arguments_are_checked(arguments: dict[str, Any]):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError) as caught:
        ExportForInference(**arguments)
    assert str(caught.value).startswith(f"{name}={value!r}")
