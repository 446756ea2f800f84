from __future__ import annotations

import importlib.util
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from limited_files import limited_files
from safetensors.torch import load_file
from tiny_runs import tiny_trainer
from torch import Tensor, nn

from runner import ClassificationModel, Evaluator, LanguageModel, Model, Trainer, evaluation_weights
from runner.algorithms import EMA
from runner.callbacks import CheckpointSaver, ExportForInference, InMemoryLogger
from runner.data import TensorLoader
from runner.libraries.extras import how_to_install
from runner.models import GPT

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ONNX_PACKAGES), reason=f"needs {ONNX_PACKAGES}"
)
ONNX = pytest.param("onnx", marks=[pytest.mark.slow, needs_onnx])  # other formats test the code that all share


class Network(nn.Module):
    """A network with dropout and batch norm, which differ between training and evaluation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Branches(nn.Module):
    """A network that treats a single sample differently from several, so that a trace cannot be right for both."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight * (1.0 if len(inputs) == 1 else 2.0)


class Regression(Model):
    """A model whose batches are dicts of tensors and plain values."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.net(batch["x"]) + batch["offset"] * batch.get("scale", 1.0) * batch.get("times", 1)

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        return (outputs - batch["y"]).square().mean()


class DictOutputs(Regression):
    """A model that returns a dict, which may be nested."""

    def __init__(self, nested: bool):
        super().__init__()
        self.nested = nested

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        mean = super().forward(batch)
        outputs = {"zero": mean * 0, "mean": mean}
        return {"both": (outputs, mean + 1), "none": None} if self.nested else outputs

    def loss(self, outputs: dict[str, Any], batch: dict[str, Any]) -> Tensor:
        return super().loss(outputs["both"][0]["mean"] if self.nested else outputs["mean"], batch)


def make_trainer(run_dir: Path, export: ExportForInference, **arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 3, generator=generator), torch.tensor([0, 1, 1, 0])) for _ in range(3)]
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "model": ClassificationModel(Network(), 2),
        "train_dataloader": batches,
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.5),
        "max_duration": "2ep",
        "run_dir": run_dir,
    }
    return tiny_trainer(export, **(defaults | arguments))


def evaluated(trainer: Trainer, inputs: Any) -> Tensor:
    """Return the model's outputs in evaluation mode, with averaged weights if the run has them."""
    model = trainer.state.unwrapped_model
    training = model.training
    with torch.no_grad(), evaluation_weights(trainer.state):
        outputs = model.eval()((inputs, None))
    model.train(training)
    return outputs


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("save_format", ["torch_export", "torchscript", "safetensors"])
@pytest.mark.filterwarnings("ignore:.torch.jit.load:DeprecationWarning")
def test_a_file_reproduces_the_models_outputs(save_format: str, averaged: bool, tmp_path: Path):
    memory = InMemoryLogger()
    algorithms = [EMA("4ba")] if averaged else []
    export = ExportForInference(save_format)
    with make_trainer(tmp_path, export, loggers=[memory], algorithms=algorithms) as trainer:
        trainer.fit()
        inputs = torch.randn(7, 3)
        expected = evaluated(trainer, inputs)
        assert trainer.state.unwrapped_model.training
    suffix = {"torch_export": "pt2", "torchscript": "pt", "safetensors": "safetensors"}[save_format]
    path = tmp_path / f"model.{suffix}"
    assert memory.artifacts == [(str(path), "export")]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    if save_format == "safetensors":
        module = Network().eval()
        module.load_state_dict(load_file(path))
    else:
        module = torch.export.load(path).module() if save_format == "torch_export" else torch.jit.load(str(path))
    with torch.no_grad():
        torch.testing.assert_close(module(inputs), expected)
        if averaged:  # the average differs from the trained weights
            live = trainer.state.unwrapped_model.eval()((inputs, None))
            assert (live - expected).abs().max() > 0.01


def run_onnx(path: Path, *inputs: Tensor) -> list[Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    arguments = {argument.name: tensor.numpy() for argument, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, arguments)]


@pytest.mark.slow
@needs_onnx
def test_an_onnx_file_reproduces_the_models_outputs_without_warnings(tmp_path: Path, caplog):
    with make_trainer(tmp_path, ExportForInference("onnx"), algorithms=[EMA("4ba")]) as trainer:
        trainer.fit()
        inputs = torch.randn(7, 3)
        expected = evaluated(trainer, inputs)
    (outputs,) = run_onnx(tmp_path / "model.onnx", inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [record for record in warnings if record.name.startswith("torch.onnx")]
    assert logging.getLogger("torch.onnx").level == logging.NOTSET


def test_the_error_for_onnx_without_its_packages_says_how_to_install_them(monkeypatch):
    for package in ONNX_PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    message = f"save_format='onnx' needs onnx, onnxscript, onnxruntime, not installed here: {how_to_install('export')}"
    with pytest.raises(ImportError, match=re.escape(message)):
        ExportForInference("onnx")


@pytest.mark.parametrize("save_format", ["torch_export", "safetensors"])
def test_a_language_model_with_tied_weights_is_exported(save_format: str, tmp_path: Path):
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


def named_batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x, offset, y = (torch.randn(4, size, generator=generator) for size in (2, 1, 1))
    return {"x": x, "offset": offset, "y": y}


def test_a_batch_may_hold_scalars_and_plain_values(tmp_path: Path):
    batch = {**named_batch(), "scale": torch.tensor(2.0), "times": 3, "name": None}
    with make_trainer(tmp_path, ExportForInference(), model=Regression(), train_dataloader=[batch]) as trainer:
        trainer.fit()
        more = {**batch, "x": torch.randn(7, 2), "offset": torch.randn(7, 1), "y": torch.randn(7, 1)}
        expected = trainer.state.unwrapped_model(more).detach()
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(more), expected)


@pytest.mark.parametrize("save_format", ["torch_export", "torchscript", "safetensors", ONNX])
@pytest.mark.filterwarnings("ignore:.torch.jit.load:DeprecationWarning")
def test_outputs_may_be_a_dict(save_format: str, tmp_path: Path):
    export = ExportForInference(save_format)
    batch = named_batch()
    with make_trainer(tmp_path, export, model=DictOutputs(nested=False), train_dataloader=[batch]) as trainer:
        trainer.fit()
        expected = {name: output.detach() for name, output in trainer.state.unwrapped_model(batch).items()}
    path = tmp_path / export.save_path
    if save_format == "onnx":
        torch.testing.assert_close(run_onnx(path, *batch.values()), [*expected.values()])
    elif save_format == "torch_export":
        torch.testing.assert_close(torch.export.load(path).module()(batch), expected)
    elif save_format == "torchscript":
        torch.testing.assert_close(torch.jit.load(str(path))(batch), expected)
    else:
        assert {*load_file(path)} == {"net.weight", "net.bias"}


def test_torchscript_refuses_nested_outputs(tmp_path: Path):
    arguments = {"model": DictOutputs(nested=True), "train_dataloader": [named_batch()]}
    trainer = make_trainer(tmp_path, ExportForInference("torchscript"), **arguments)
    with pytest.raises(RuntimeError, match="^save_format='torchscript' supports only tensors, tup"):
        trainer.fit()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("save_format", ["torch_export", ONNX])
def test_outputs_may_be_nested(save_format: str, tmp_path: Path):
    batch = {"y": torch.zeros(4, 1), "x": torch.randn(4, 2), "offset": torch.randn(4, 1)}
    export = ExportForInference(save_format)
    with make_trainer(tmp_path, export, model=DictOutputs(nested=True), train_dataloader=[batch]) as trainer:
        trainer.fit()
        (named, more), _ = trainer.state.unwrapped_model(batch).values()
    if save_format == "onnx":
        torch.testing.assert_close(
            run_onnx(tmp_path / "model.onnx", *batch.values()), [output.detach() for output in (*named.values(), more)]
        )
    else:
        outputs = torch.export.load(tmp_path / "model.pt2").module()(batch)
        torch.testing.assert_close(outputs["both"], (named, more))


class Shifted(Network):
    """A network with a buffer outside of its `state_dict`, such as the frequencies of rotary embeddings."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(2), persistent=False)

    def forward(self, inputs: Tensor) -> Any:
        return super().forward(inputs) + self.shift


def test_safetensors_leave_out_buffers_that_are_not_in_the_state_dict(tmp_path: Path):
    model = ClassificationModel(Shifted(), 2)
    with make_trainer(tmp_path, ExportForInference("safetensors"), model=model) as trainer:
        trainer.fit()
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == model.module.state_dict().keys() and "shift" not in weights


class Record:
    """An output of an unknown type."""


class ReturnsRecord(Network):
    def forward(self, inputs: Tensor) -> Any:
        return super().forward(inputs) if self.training else Record()


def test_outputs_of_an_unknown_type_are_refused(tmp_path: Path):
    trainer = make_trainer(tmp_path, ExportForInference("safetensors"), model=ClassificationModel(ReturnsRecord(), 2))
    with pytest.raises(TypeError, match="^the model returns a Record: it must return tensors, or a tuple, list or map"):
        trainer.fit()
    assert [*tmp_path.iterdir()] == []


class Diverged(Network):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * torch.tensor([float("nan"), 1.0])


@pytest.mark.parametrize("save_format", ["torch_export", "torchscript", "safetensors", ONNX])
@pytest.mark.filterwarnings("ignore:.torch.jit.load:DeprecationWarning")
def test_outputs_that_are_not_finite_are_exported_with_a_warning(save_format: str, tmp_path: Path, caplog):
    export = ExportForInference(save_format)
    with make_trainer(tmp_path, export, model=ClassificationModel(Diverged(), 2)) as trainer:
        trainer.fit()
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert messages[:-1] == ["export_for_inference: the model's outputs are not finite"]
    assert messages[-1].startswith("the loss of the last batch is nan: ")
    assert [path.name for path in tmp_path.iterdir()] == [str(export.save_path)]


def finished_run(folder: Path) -> Path:
    """Return the last checkpoint of a run that was trained to its end, but not exported."""
    saver = CheckpointSaver()
    with make_trainer(folder, ExportForInference(), callbacks=[saver]) as trainer:
        trainer.fit()
    assert saver.latest is not None
    return saver.latest


class Loader:
    """A loader that yields `batches` batches, and counts how often it is read."""

    def __init__(self, batches: int):
        self.batches = batches
        self.reads = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        self.reads += 1
        for _ in range(self.batches):
            yield torch.ones(4, 3), torch.tensor([0, 1, 1, 0])


@pytest.mark.parametrize("kind", ["TensorLoader", "iterable", "empty"])
def test_a_resumed_run_that_trains_no_batch_exports(kind: str, tmp_path: Path):
    checkpoint = finished_run(tmp_path)
    evaluator = Evaluator("eval", Loader(1), eval_interval=0)
    data = {
        "TensorLoader": TensorLoader(torch.randn(12, 3), torch.zeros(12).long(), batch_size=4, shuffle=True),
        "iterable": Loader(1),
        "empty": Loader(0),
    }[kind]
    arguments = {"train_dataloader": data, "eval_dataloader": evaluator, "resume_path": checkpoint}
    with make_trainer(tmp_path, ExportForInference(), **arguments) as trainer:
        trainer.fit(may_be_over=True)
        assert not hasattr(trainer.state, "batch")
        inputs = torch.randn(7, 3)
        expected = evaluated(trainer, inputs)
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(inputs), expected)


def test_with_a_sample_input_no_batch_is_read(tmp_path: Path):
    data = Loader(1)
    export = ExportForInference(sample_input=torch.zeros(5, 3))
    with make_trainer(tmp_path, export, train_dataloader=data, resume_path=finished_run(tmp_path)) as trainer:
        trainer.fit(may_be_over=True)
    assert (tmp_path / "model.pt2").exists()
    assert data.reads == 0


def test_the_error_without_any_batch_suggests_sample_input(tmp_path: Path):
    export, checkpoint = ExportForInference(), finished_run(tmp_path)
    with make_trainer(tmp_path, export, train_dataloader=Loader(0), resume_path=checkpoint) as trainer:
        message = "no batch to export with: nothing was trained, and the dataloaders are empty; set sample_input"
        with pytest.raises(RuntimeError, match=f"(?m)^{message}$"):
            trainer.fit(may_be_over=True)


@pytest.mark.parametrize("save_format", ["torch_export", "torchscript", "safetensors", ONNX])
def test_a_full_disk_does_not_fail_a_trained_run(save_format: str, tmp_path: Path, caplog):
    memory = InMemoryLogger()
    model = ClassificationModel(nn.Sequential(nn.Linear(3, 100_000), nn.Linear(100_000, 2)), 2)
    export = ExportForInference(save_format)
    with make_trainer(tmp_path, export, model=model, loggers=[memory]) as trainer, limited_files(1_000_000):
        trainer.fit()
    path = tmp_path / export.save_path
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert message == f"training is done; the export failed: {path} cannot be written (File too large)"
    assert [*tmp_path.iterdir()] == []
    assert memory.artifacts == []


@needs_onnx
def test_bf16_weights_are_refused_for_onnx(tmp_path: Path):
    with (
        pytest.raises(ValueError, match="save_format='onnx': a CPU cannot run its bf16 weights"),
        make_trainer(tmp_path, ExportForInference("onnx"), precision="bf16") as trainer,
    ):
        trainer.fit()
    assert trainer.state.timestamp.batch == 0


@pytest.mark.parametrize("place", ["file/model.pt2", "folder.pt2"])
def test_a_path_that_cannot_be_written_is_refused_before_training(place: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.pt2").mkdir()
    with make_trainer(tmp_path, ExportForInference(save_path=place)) as trainer:
        message = rf"(?m)^save_path='{place}': cannot be written \(.+\); give another path$"
        with pytest.raises(ValueError, match=message):
            trainer.fit()
        assert trainer.state.timestamp.batch == 0


@pytest.mark.parametrize("transforms", [(), [lambda module: nn.Sequential(nn.Flatten(), module)]])
def test_a_sample_that_the_model_cannot_take_is_refused_before_training(transforms: Any, tmp_path: Path):
    export = ExportForInference(sample_input=torch.zeros(5, 4), transforms=transforms)
    with make_trainer(tmp_path, export, algorithms=[EMA("4ba")]) as trainer:
        message = r"(?m)^sample_input: the model cannot take it \(mat1 and mat2 shapes.+\)$"
        with pytest.raises(ValueError, match=message):
            trainer.fit()
        assert trainer.state.timestamp.batch == 0


def test_a_fixed_batch_size_is_that_of_the_sample_input(tmp_path: Path):
    export = ExportForInference(sample_input=torch.zeros(5, 3), dynamic_batch=False)
    with make_trainer(tmp_path, export) as trainer:
        trainer.fit()
    module = torch.export.load(tmp_path / "model.pt2").module()
    assert module(torch.ones(5, 3)).shape == (5, 2)
    with pytest.raises(Exception, match="5"):
        module(torch.ones(4, 3))


def test_transforms_apply_in_order_to_a_copy(tmp_path: Path):
    transforms = [lambda module: nn.Sequential(module, nn.Softmax(dim=1)), lambda module: module.double().float()]
    with make_trainer(tmp_path, ExportForInference(transforms=transforms)) as trainer:
        trainer.fit()
        inputs = torch.randn(3, 3)
        expected = evaluated(trainer, inputs).softmax(dim=1)
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(inputs), expected)


@pytest.mark.parametrize(
    ("save_format", "message"),
    [("torchscript", "outputs differ from the model's"), ("torch_export", "batch|0")],
)
def test_a_file_that_does_not_reproduce_the_model_is_refused(save_format: str, message: str, tmp_path: Path):
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


def test_only_rank_0_exports(tmp_path: Path, run_ranks):
    def program() -> None:
        from pathlib import Path

        from tiny_runs import tiny_trainer

        from runner import get_global_rank
        from runner.callbacks import ExportForInference, InMemoryLogger

        loggers = [memory := InMemoryLogger()]
        with tiny_trainer(ExportForInference(), loggers=loggers, run_dir=Path("run")) as trainer:
            trainer.fit()
        assert len(memory.artifacts) == (get_global_rank() == 0)

    run_ranks(program)
    assert torch.export.load(tmp_path / "run" / "model.pt2").module()(torch.ones(5, 3)).shape == (5, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"save_format": "pickle"},
        {"save_path": "model.onnx"},
        {"transforms": [3]},
        {"sample_input": [1, 2]},
        {"sample_input": {"x": torch.zeros(0, 3)}},
        {"sample_input": torch.tensor(1.0)},
        {"sample_input": object()},
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError) as caught:
        ExportForInference(**arguments)
    assert str(caught.value).startswith(f"{name}={value!r}")
