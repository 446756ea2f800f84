"""`runner check`: its errors, warnings and predicted sizes; it leaves no files."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from composed_configs import composed
from kept_runs import tree
from tiers import fast
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from runner import Callback, ClassificationModel, Model
from runner.config import build
from runner.config.experiment import Experiment
from runner.data import faked_by
from runner.failures.errors import WrongConfig
from runner.timing.event import Event
from runner.trials import dry_run
from runner.verbs.check import report

OWN = "checked_here"
READ: list[str] = []
"""An entry for each batch that was read from `read_data`."""


class FailingModel(Model):
    """A model that fails in the method named by `fails`."""

    def __init__(self, fails: str = "nowhere") -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)
        self.unused = nn.Linear(2, 2)
        self.fails = fails

    def forward(self, batch: Any) -> Any:
        if self.fails == "forward":
            raise KeyError("no such key")
        return self.inner(batch[0].flatten(1))

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.nothing if self.fails == "loss" else nn.functional.cross_entropy(outputs, batch[1])

    def metrics(self, train: bool) -> Any:
        from runner.libraries.torchmetrics import import_torchmetrics

        return {"Wrong": import_torchmetrics().MeanSquaredError()} if self.fails == "metrics" else {}


class Softmax(nn.Linear):
    """A layer that returns probabilities."""

    def __init__(self) -> None:
        super().__init__(64, 10)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1)).softmax(dim=1)


class UnsavableLinear(nn.Linear):
    """A layer whose state cannot be loaded, and not even saved if `saves` is false."""

    def __init__(self, saves: bool = True) -> None:
        super().__init__(64, 10)
        self.saves = saves

    def forward(self, input: Any) -> Any:
        return super().forward(input.flatten(1))

    def get_extra_state(self) -> Any:
        return {"calls": 3} if self.saves else {len}

    def set_extra_state(self, state: Any) -> None:
        raise KeyError("number of calls")


class FailingCallback(Callback):
    """A callback that raises an error, or logs a value that is not a scalar."""

    def __init__(self, does: str = "raise") -> None:
        self.does = does

    def batch_end(self, state: Any, logger: Any) -> None:
        if self.does == "raise":
            state.nothing  # noqa: B018
        logger.log_metrics({"vector": torch.zeros(3)})


def read_for_one_rank(batch_size: int = 8) -> tuple[Any, Any]:
    """Return a training loader with a sampler for two ranks, and an evaluation loader without one."""
    data = TensorDataset(torch.zeros(16, 64), torch.zeros(16, dtype=torch.int64))
    return DataLoader(data, batch_size, sampler=DistributedSampler(data, 2, 0)), DataLoader(data, batch_size)


def read_data(batch_size: int = 8, **options: Any) -> tuple[Any, Any]:
    """Return five batches; reading one adds an entry to `READ`."""

    def batches() -> Iterator[Any]:
        for _ in range(5):
            READ.append("batch")
            yield torch.zeros(batch_size, 64), torch.zeros(batch_size, dtype=torch.int64)

    return batches(), None


def make_fake_data(batch_size: int, classes: int) -> tuple[Any, Any]:
    return [(torch.zeros(batch_size, 64), torch.full((batch_size,), classes - 1))], None


def read_single_loader() -> Any:
    return ([],)


def read_nothing() -> Any:
    return [], None


@faked_by(make_fake_data)
def read_large_data(batch_size: int, classes: int = 10) -> tuple[Any, Any]:
    """Fail, because `make_fake_data` should be called instead."""
    raise AssertionError("read")


@pytest.fixture(autouse=True)
def no_files_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs each test in `tmp_path`, and asserts that it leaves no temporary files, no `outputs` and no `mlruns`."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setitem(sys.modules, OWN, sys.modules[__name__])
    READ.clear()
    yield
    # torch makes an empty folder when it first computes on the meta device.
    assert [path for path in scratch.iterdir() if not path.name.startswith("torchinductor")] == []
    assert not (tmp_path / "outputs").exists() and not (tmp_path / "mlruns").exists()


def try_out(*overrides: str, resume: Path | None = None) -> dry_run.Findings:
    """Check a config and try it out, as `runner check` does."""
    config = composed(*overrides)
    build.check(Experiment(config))
    return dry_run.try_out(Experiment(config), resume=None if resume is None else str(resume))


TOKENS = ("model=gpt", "data=synthetic_tokens", "algorithms=none", "data.num_samples=64", "data.batch_size=32")
EVERYTHING = ("+algorithms=[mixup,ema,gradient_clipping]", "+callbacks=[speed_monitor,early_stopper,lr_monitor]")


def test_a_dry_run_fires_all_events_and_calls_no_destination(tmp_path: Path):
    findings = try_out(*EVERYTHING, "+callbacks.lines._target_=runner.callbacks.JSONLinesLogger")
    assert findings.events == len(Event)
    assert findings.device == "cpu"
    assert findings.destinations == ["mlflow_logger", "progress_bar", "learning_curves", "console_summary", "lines"]
    assert [warning for warning in findings.warnings if "half_life" not in warning] == []
    assert {path.name for path in tmp_path.iterdir()} == {"scratch"}
    assert findings.data.startswith(
        "train 1,200 samples in 19 batches of 64; eval 597 samples in 1 batch of 597; made up"
    )
    assert findings.batch == "float32 (4, 1, 8, 8), int64 (4,)"


@pytest.mark.parametrize(
    ("device", "overrides"),
    [
        ("cpu", ("model=mlp", "optimizer=adamw")),
        pytest.param("cpu", ("model=mlp", "+algorithms=ema"), marks=pytest.mark.slow),
        pytest.param("cpu", ("model=resnet8", "model.module.width=4"), marks=pytest.mark.slow),
        pytest.param("meta", ("model=mlp", "model.module.hidden=[512,512]", "+algorithms=ema"), marks=pytest.mark.slow),
        pytest.param("meta", (*TOKENS, "model.module.d_model=128", "optimizer=adamw"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_predicted_size_of_a_checkpoint_is_nearly_the_real_one(
    overrides: tuple[str, ...], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The state of destinations grows a little during the run, so 3% are allowed."""
    monkeypatch.setattr(dry_run, "MAX_WEIGHTS", 0 if device == "meta" else 2**30)
    overrides = (*overrides, "trainer.max_duration=2ep", "callbacks=[checkpoint_saver,learning_curves]")
    findings = try_out(*overrides)
    assert findings.device == device
    with build.build(Experiment(composed(*overrides)), tmp_path / "run", "run") as trainer:
        trainer.fit()
        state = trainer.state
        (last,) = (tmp_path / "run" / "checkpoints" / "latest").resolve().parent.glob(f"ep2-ba{state.timestamp.batch}")
        written = {path.name: path.stat().st_size for path in last.glob("*.pt")}
        parameters = [*state.unwrapped_model.parameters()]
    sizes = findings.sizes
    assert sizes.checkpoint == pytest.approx(sum(written.values()), rel=0.03)
    assert sizes.checkpoint_weights == pytest.approx(written["model.pt"], rel=0.01)
    assert sizes.parameters == sizes.trainable == sum(parameter.numel() for parameter in parameters)
    assert sizes.gradients == 4 * sizes.parameters <= sizes.weights
    moments = 2 if "optimizer=adamw" in overrides else 1
    assert sizes.optimizer == pytest.approx(moments * sizes.gradients, rel=0.01)
    assert bool(sizes.algorithms) == ("+algorithms=ema" in overrides)


@pytest.mark.slow
def test_a_large_model_is_tried_on_the_meta_device():
    """300 million weights with AdamW and an EMA would take 6 GB; none of it is allocated."""
    findings = try_out(
        *("model=gpt", "data=stdlib_text", "algorithms=[gradient_clipping,ema]", "optimizer=adamw"),
        *("model.module.d_model=1024", "model.module.n_layers=24", "+callbacks=[early_stopper,speed_monitor]"),
        "trainer.precision=bf16",
    )
    assert (findings.device, findings.sizes.parameters) == ("meta", 302_704_640)
    assert findings.sizes.weights == findings.sizes.gradients == 2 * 302_704_640
    assert findings.refused == ["early_stopper"]  # it reads the value of a metric
    assert findings.events == len([event for event in Event if "predict" not in event])


NO_OPTIONS = ("~data.eval_batch_size", "~data.test_samples", "~data.seed")
OWN_DATA = f"~data.batch_size {' '.join(NO_OPTIONS)} data._target_=checked_here."
OWN_MODEL = "algorithms=none ~model.num_classes ~model.module model._target_=checked_here.FailingModel +model.fails="
OWN_LAYER = "model=mlp ~model.module +model.module._target_=checked_here.UnsavableLinear algorithms=none"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_mismatched_shapes_are_refused_on_both_devices(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dry_run, "MAX_WEIGHTS", 0 if device == "meta" else 2**30)
    with pytest.raises(WrongConfig, match="does not fit.* In its forward pass"):
        try_out("model=mlp", "data=synthetic_images", "algorithms=none")


@pytest.mark.parametrize(
    ("command", "parts"),
    fast(
        [
            (
                "model=gpt",
                ("runner.LanguageModel does not fit", "In its forward pass", "float32 (4, 1, 8, 8)", "indices"),
            ),
            ("model=mlp data=synthetic_images", ("In its forward pass", "4x3072 and 64x128")),
            ("model.num_classes=5", ("In its loss", "outputs of float32 (4, 5)", "Target 9 is out of bounds")),
            ("data=synthetic_images", ("In its forward pass", "to have 1 channels")),
            (
                "model=gpt data=stdlib_text model.module.vocab_size=255 algorithms=none",
                ("forward pass", "from 255 to 255", "of 255 rows", "out of range"),
            ),
            ("model=gpt data=stdlib_text data.context=129 algorithms=none", ("129 tokens is longer than context=128",)),
            (
                "model=gpt data=stdlib_text algorithms=mixup",
                ("algorithms.mixup: inputs of torch.int64", "BEFORE_TRAIN_BATCH", "it works without algorithms"),
            ),
            (
                "+callbacks.x._target_=checked_here.FailingCallback",
                ("callbacks.x: AttributeError", "at BATCH_END", "test_check.py:"),
            ),
            (
                "+callbacks.x._target_=checked_here.FailingCallback +callbacks.x.does=log",
                ("callbacks.x: metric 'vector'",),
            ),
            (f"{OWN_MODEL}forward", ("In its forward pass", "KeyError: 'no such key'", "test_check.py:")),
            (f"{OWN_MODEL}loss", ("In its loss", "AttributeError", "outputs of float32 (4, 10)", "test_check.py:")),
            (f"{OWN_MODEL}metrics", ("In its metrics", "same shape")),
            ("callbacks.checkpoint_saver.monitor=Acc", ("callbacks.checkpoint_saver.monitor='Acc'", "'eval/loss'")),
            ("trainer.max_duration=100tok", ("trainer.max_duration='100tok'", "num_tokens")),
            ("scheduler.t_warmup=25ep", ("scheduler.t_warmup='25ep'", "t_max")),
            ("scheduler.t_warmup=457ba", ("scheduler.t_warmup='457ba'", "t_max")),  # the run has 24 * 19 = 456
            ("optimizer.momentum=0", ("optimizer: Nesterov",)),
            ("data.batch_size=0", ("data.batch_size=0", "at least 1")),
            ("data=stdlib_text data.eval_bytes=3", ("data.eval_bytes=3", "one window")),
            ("data._target_=checked_here.missing", ("checked_here", "missing")),
            (
                f"{OWN_DATA}read_single_loader",
                (
                    "checked_here.read_single_loader must return (train_loader, eval_loader) or (train",
                    "not a tuple of 1",
                ),
            ),
            (f"{OWN_LAYER} +model.module.saves=false", ("'module._extra_state'", "cannot be saved: it holds a set")),
            (OWN_LAYER, ("KeyError: 'number of calls'", "test_check.py:")),
            (f"{OWN_DATA}read_nothing", ("train_dataloader has no batches: its data set is empty",)),
        ],
        *("model=gpt", "model=gpt data=stdlib_text model.module.vocab_size=255 algorithms=none"),
        *("+callbacks.x._target_=checked_here.FailingCallback +callbacks.x.does=log", "trainer.max_duration=100tok"),
        *("data.batch_size=0", f"{OWN_LAYER} +model.module.saves=false"),
    ),
)
def test_a_config_that_cannot_run_is_refused_in_a_short_message(command: str, parts: tuple[str, ...]):
    with pytest.raises((WrongConfig, ValueError)) as raised:
        try_out(*command.split())
    message = str(raised.value)
    for part in parts:
        assert part in message
    assert len(message.splitlines()) <= 5


@pytest.mark.parametrize(
    ("command", "warning"),
    fast(
        [
            ("trainer.eval_interval=25ep", "trainer.eval_interval='25ep' is longer than the run of '24ep'"),
            (
                "callbacks.checkpoint_saver.save_interval=457ba",
                "callbacks.checkpoint_saver.save_interval='457ba' is longer",
            ),
            ("algorithms=ema", "ema.half_life='1000ba' is longer than the run of '24ep': the average hardly"),
            (
                "+callbacks=early_stopper callbacks.early_stopper.patience=30ep",
                "patience='30ep' is longer than the run",
            ),
            (
                "trainer.eval_interval=0 callbacks.checkpoint_saver.monitor=eval/loss",
                "callbacks.checkpoint_saver.monitor='eval/loss' is never computed: trainer.eval_interval is 0",
            ),
            ("data.batch_size=1201", "data.batch_size=1201 is more than the 1,200 training samples"),
            ("data.batch_size=3 launch.nproc_per_node=4", "data.batch_size=3 is less than launch.nproc_per_node=4"),
            (
                "trainer.grad_accum=33 launch.nproc_per_node=2",
                "trainer.grad_accum=33 is more than the 32 samples of a batch on",
            ),
            ("trainer.microbatch_size=65", "trainer.microbatch_size=65 is more than the 64 samples"),
            ("trainer.precision=amp_fp16 trainer.device=cpu", "trainer.precision='amp_fp16' on a CPU"),
            (
                "~model.module +model.module._target_=checked_here.Softmax",
                "the outputs are probabilities, but the loss takes logits: leave out the model's softmax",
            ),
            (f"{OWN_MODEL}nowhere", "no gradient reaches unused.weight, unused.bias: not trained, and refused by DDP"),
        ],
        *("trainer.eval_interval=25ep", "data.batch_size=3 launch.nproc_per_node=4", f"{OWN_MODEL}nowhere"),
    ),
)
def test_a_probable_mistake_gives_a_warning(command: str, warning: str):
    findings = try_out("model=mlp", *command.split())
    assert any(warning in text for text in findings.warnings), findings.warnings


@pytest.mark.parametrize(
    "command",
    fast(
        [
            "trainer.eval_interval=24ep callbacks.checkpoint_saver.save_interval=456ba",
            "trainer.grad_accum=32 launch.nproc_per_node=2 trainer.eval_interval=0.5dur",
            "data.batch_size=1200 trainer.microbatch_size=64 scheduler.t_warmup=24ba",
            "trainer.iteration_length=2ep trainer.compile=true scheduler=none",
            "trainer.max_duration=1ba optimizer=adam",
            "trainer.max_duration=1h",
            "trainer.precision=bf16 trainer.device=cpu",
        ],
        "trainer.grad_accum=32 launch.nproc_per_node=2 trainer.eval_interval=0.5dur",
    ),
)
def test_a_correct_config_gives_no_warning(command: str):
    findings = try_out("model=mlp", "algorithms=none", *command.split())
    assert [warning for warning in findings.warnings if "bfloat16" not in warning] == []


def test_data_with_a_fake_function_are_not_read():
    overrides = ("model=mlp", "algorithms=none", "callbacks=none", *NO_OPTIONS, f"data._target_={OWN}.read_large_data")
    findings = try_out(*overrides)
    assert findings.data == "train 1 batch; made up, not read"
    with pytest.raises(WrongConfig, match="Target 10 is out of bounds"):
        try_out(*overrides, "+data.classes=11")


def test_only_one_batch_is_read_from_data_without_a_fake_function():
    findings = try_out(
        *("model=mlp", "callbacks=none", "algorithms=none", "scheduler=none"),
        *(*NO_OPTIONS, f"data._target_={OWN}.read_data", "+data.option=1"),
    )
    assert READ == ["batch"]
    assert findings.data == f"train an unknown number of batches; one batch read: {OWN}.read_data has no `fake`"
    assert findings.batch == "float32 (4, 64), int64 (4,)"
    assert findings.warnings == [f"data.option goes into the **options of {OWN}.read_data, which may ignore it"]


def test_an_eval_loader_that_ranks_cannot_divide_is_refused():
    overrides = (
        *("model=mlp", "callbacks=none", "algorithms=none"),
        *(*NO_OPTIONS, f"data._target_={OWN}.read_for_one_rank"),
    )
    assert try_out(*overrides).data.startswith("train 1 batch; eval 1 batch")
    with pytest.raises(WrongConfig, match="dataloader of evaluator 'eval': nothing says how 2 ranks divide"):
        try_out(*overrides, "launch.nproc_per_node=2")


def test_checking_the_resumption_of_a_run_leaves_the_run_unchanged(tmp_path: Path):
    small = ("model=mlp", "data.batch_size=400", "callbacks=checkpoint_saver")
    with build.build(Experiment(composed(*small, "trainer.max_duration=4ba")), tmp_path / "run", "run") as trainer:
        trainer.fit()

    run = tmp_path / "run"
    before = tree(run)
    assert try_out(*small, resume=run).events == len(Event) - 2  # the iteration and the epoch have already started
    with pytest.raises(WrongConfig, match="trainer.max_duration='4ba' is reached"):
        try_out(*small, "trainer.max_duration=4ba", resume=run)
    with pytest.raises(WrongConfig, match="do not fit the model"):
        try_out(*small, f"trainer.load_path={tmp_path}/run", "model.module.hidden=[3]")
    assert tree(run) == before


MISSING = ("model=mlp", "callbacks=[load_checkpoint]", "callbacks.load_checkpoint.checkpoint=missing")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_a_new_run_needs_the_checkpoint_of_load_checkpoint(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dry_run, "MAX_WEIGHTS", 0 if device == "meta" else 2**30)
    experiment = Experiment(composed("model=mlp", "callbacks=checkpoint_saver", "trainer.max_duration=1ba"))
    with build.build(experiment, tmp_path / "run", "run") as trainer:
        trainer.fit()
    assert try_out(*MISSING, resume=tmp_path / "run").device == device
    existing = (*MISSING[:2], f"callbacks.load_checkpoint.checkpoint={tmp_path}/run")
    assert try_out(*existing).device == device
    with pytest.raises(WrongConfig, match="callbacks.load_checkpoint.checkpoint=.*: its weights do not fit"):
        try_out(*existing, "model.module.hidden=[3]")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_missing_checkpoint_for_load_checkpoint_is_refused(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dry_run, "MAX_WEIGHTS", 0 if device == "meta" else 2**30)
    with pytest.raises(WrongConfig, match="callbacks.load_checkpoint.checkpoint='missing': no complete checkpoint"):
        try_out(*MISSING)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheduler": {"foo": 1}}, "scheduler.foo: has no effect"),
        ({"scheduler": 3}, "scheduler=3"),
        ({"predict": {"format": "pt"}}, "predict: no such key"),
        ({"optimzer": {}}, "optimzer: no such key; did you mean 'optimizer'"),
    ],
    ids=str,
)
def test_an_unused_key_is_refused(change: Any, message: str):
    with pytest.raises(ValueError, match=message):
        build.check(Experiment(composed("model=mlp", "scheduler=none") | change))


def test_the_report_shows_model_batch_memory_and_checkpoint():
    config = composed(*EVERYTHING, "model=mlp")
    rows = dict(report(Experiment(config), dry_run.try_out(Experiment(config))))
    assert rows["ok model"] == "ClassificationModel(MLP), 26,122 parameters, all trainable"
    assert rows["ok batch"].endswith("through 40 events, on the CPU")
    assert rows["memory"].startswith("585 kB per process at the peak of a step: weights 104 kB, gradients 104 kB")
    assert rows["checkpoint"].endswith("including weights of 107 kB")
    assert len(rows) <= 9


@pytest.mark.slow
def test_check_leaves_no_files_and_names_the_failing_job_of_a_sweep(tmp_path: Path, run_app: Any):
    finished = run_app("check", "model=mlp", "launch.nproc_per_node=2", "hydra.run.dir=mine")
    assert finished.stdout.splitlines()[0].strip() == "model=mlp launch.nproc_per_node=2" and finished.stderr == ""
    finished = run_app("-m", "check", "model.num_classes=5,10", exit_code=2)
    assert "in the job model.num_classes=5" in finished.stderr and "Target 9" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert "model.num_classes=10" in finished.stdout and "ok batch" in finished.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"scratch"}


def test_a_model_that_cannot_be_built_on_meta_is_built_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    class Reading(ClassificationModel):
        """Reads the value of a weight in its constructor; on the meta device there is none."""

        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 10)
            self.scale = float(next(self.parameters()).sum())

    monkeypatch.setattr(sys.modules[__name__], "Reading", Reading, raising=False)
    findings = try_out("~model.num_classes", "~model.module", f"model._target_={OWN}.Reading", "algorithms=none")
    assert (findings.device, findings.sizes.parameters) == ("cpu", 650)
