"""One training run with one library, for `benchmarks/peers.py`, which starts this file in the library's environment.

The clock is read at the same point with every library: when the library requests the first batch of a window of steps.
The run then waits, so that the other libraries can take their turns.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from runner.libraries.torchvision import import_torchvision

NAMES: dict[str, tuple[str, str]] = {
    "torch": ("by hand", "torch"),
    "ours": ("this runner", "exactrun"),
    "ignite": ("Ignite", "pytorch-ignite"),
    "accelerate": ("Accelerate", "accelerate"),
    "mmengine": ("mmengine", "mmengine"),
    "lightning": ("Lightning", "lightning"),
    "transformers": ("HF Trainer", "transformers"),
    "composer": ("Composer", "mosaicml"),
}
"""For each function below: the title of its row, and the package whose version is printed."""
TASKS = {"tiny": 300, "resnet18": 8}
"""Steps in a window, by task."""
SETTINGS = ("bare", "callbacks", "logged")


class Ready(Dataset):
    """A data set of batches that are ready to use; the first batch of each window waits for the parent process.

    Args:
        task: a key of `TASKS`.
        windows: number of windows.
        turn: called at the start of each window; it waits for this library's turn.
    """

    def __init__(self, task: str, windows: int, turn: Callable[[], None]) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (32, 64) if task == "tiny" else (4, 3, 32, 32)
        self.batches = [
            (torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator))
            for _ in range(16)
        ]
        self.window, self.windows, self.turn = TASKS[task], windows, turn

    def __len__(self) -> int:
        return self.window * self.windows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index % self.window == 0:
            self.turn()
        return self.batches[index % len(self.batches)]


def make_network(task: str) -> nn.Module:
    """Return the network, with the same weights each time."""
    torch.manual_seed(0)
    if task == "tiny":
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    from runner.models import ResNet18

    return ResNet18(num_classes=10)


def make_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.SGD(network.parameters(), lr=0.01)


def ten_hooks(start: Callable[[int], Any], end: Callable[[int], Any]) -> list[Any]:
    """Return five callbacks for the start of a step and five for its end, made by two functions of their number."""
    return [*map(start, range(5)), *map(end, range(5))]


def do_nothing(*_: Any, **__: Any) -> None:
    """Serve as the hook of each callback."""


def run_torch(network: nn.Module, loader: DataLoader, setting: str) -> None:
    """Run a carefully hand-written loop."""
    optimizer = make_optimizer(network)
    writer: Any = None
    if setting == "logged":
        from torch.utils.tensorboard.writer import SummaryWriter

        writer = SummaryWriter("logs")
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(network(inputs), targets)
        loss.backward()
        optimizer.step()
        if writer:
            writer.add_scalar("loss", loss.item(), step)
    if writer:
        writer.close()


def run_ours(network: nn.Module, loader: DataLoader, setting: str) -> None:
    """Train with this project's Trainer, without training metrics, which other libraries do not compute either."""
    from runner import Callback, ClassificationModel, Trainer
    from runner.callbacks import TensorBoardLogger

    class Plain(ClassificationModel):
        def metrics(self, train: bool) -> dict:
            return {}

    def hook(name: str) -> Callable[[int], Callback]:
        return lambda number: type(f"Watch{number}{name}", (Callback,), {name: do_nothing})()

    with Trainer(
        model=Plain(network, 10),
        train_dataloader=loader,
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=ten_hooks(hook("batch_start"), hook("batch_end")) if setting == "callbacks" else [],
        loggers=[TensorBoardLogger()] if setting == "logged" else [],
        device="cpu",
        progress_bar=False,
        max_duration="1ep",
        run_dir="logs",
    ) as trainer:
        trainer.fit()


def run_ignite(network: nn.Module, loader: DataLoader, setting: str) -> None:
    """Train with an Engine and an update function, as the first example of its documentation does."""
    from ignite.engine import Engine, Events
    from ignite.handlers import TensorboardLogger

    optimizer = make_optimizer(network)

    def update(engine: Any, batch: Any) -> Tensor:
        inputs, targets = batch
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(network(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Engine(update)
    if setting == "callbacks":
        for event in ten_hooks(lambda _: Events.ITERATION_STARTED, lambda _: Events.ITERATION_COMPLETED):
            trainer.add_event_handler(event, lambda engine: None)
    logger = TensorboardLogger(log_dir="logs") if setting == "logged" else None
    if logger is not None:
        logger.attach_output_handler(
            trainer, Events.ITERATION_COMPLETED, tag="train", output_transform=lambda loss: {"loss": loss.item()}
        )
    trainer.run(loader, max_epochs=1)
    if logger is not None:
        logger.close()


def run_accelerate(network: nn.Module, loader: DataLoader, setting: str) -> None:
    """Train with the loop of its documentation; it has no callbacks."""
    from accelerate import Accelerator

    logged = setting == "logged"
    accelerator = Accelerator(cpu=True, log_with="tensorboard" if logged else None, project_dir="logs")
    if logged:
        accelerator.init_trackers("loss")
    network, optimizer, loader = accelerator.prepare(network, make_optimizer(network), loader)
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(network(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        if logged:
            accelerator.log({"loss": loss.item()}, step=step)
    accelerator.end_training()


def run_mmengine(network: nn.Module, loader: DataLoader, setting: str) -> None:
    """Train with its Runner, without default hooks that are not needed."""
    import mmengine.hooks
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Wrapped(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, inputs: Tensor, targets: Tensor, mode: str) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.network(inputs), targets)}

    hooks: Any = dict.fromkeys(("runtime_info", "timer", "sampler_seed", "logger", "param_scheduler", "checkpoint"))
    if setting == "logged":
        kinds = {"runtime_info": "RuntimeInfoHook", "timer": "IterTimerHook", "logger": "LoggerHook"}
        hooks |= {key: {"type": kind} for key, kind in kinds.items()}
        hooks["logger"]["interval"] = 1

    def hook(name: str) -> Callable[[int], Any]:
        return lambda number: type(f"Watch{number}{name}", (mmengine.hooks.Hook,), {name: do_nothing})()

    Runner(
        model=Wrapped(),
        work_dir="logs",
        train_dataloader=loader,
        train_cfg={"by_epoch": True, "max_epochs": 1},
        optim_wrapper={"optimizer": make_optimizer(network)},
        default_hooks=hooks,
        custom_hooks=ten_hooks(hook("before_train_iter"), hook("after_train_iter")) if setting == "callbacks" else None,
        visualizer={"type": "Visualizer", "vis_backends": [{"type": "TensorboardVisBackend"}]}
        if setting == "logged"
        else None,
        log_level="ERROR",
    ).train()


def run_lightning(network: nn.Module, loader: DataLoader, setting: str) -> None:
    """Train with its Trainer, using its option for measuring overhead, `barebones`, unless the loss is logged."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = F.cross_entropy(self.network(batch[0]), batch[1])
            if setting == "logged":
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    def hook(name: str) -> Callable[[int], Callback]:
        return lambda number: type(f"Watch{number}{name}", (Callback,), {name: do_nothing})()

    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    logging = {"logger": TensorBoardLogger("logs"), "log_every_n_steps": 1, **quiet}
    watchers = ten_hooks(hook("on_train_batch_start"), hook("on_train_batch_end"))
    Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=watchers if setting == "callbacks" else None,
        **logging if setting == "logged" else {"barebones": True},
    ).fit(Module(), loader)


def run_transformers(network: nn.Module, loader: DataLoader, setting: str) -> None:
    """Train with Hugging Face's Trainer and the same loader, with everything optional switched off."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.network(inputs)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    class TrainerWithLoader(Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return loader

    def hook(name: str) -> Callable[[int], TrainerCallback]:
        return lambda number: type(f"Watch{number}{name}", (TrainerCallback,), {name: do_nothing})()

    logged = setting == "logged"
    os.environ["TENSORBOARD_LOGGING_DIR"] = "logs"
    loader.dataset.batches = [{"inputs": inputs, "labels": labels} for inputs, labels in loader.dataset.batches]  # type: ignore[attr-defined]
    model, steps = Wrapped(), len(loader)
    optimizer = make_optimizer(model)
    trainer = TrainerWithLoader(
        model=model,
        args=TrainingArguments(
            output_dir="logs",
            max_steps=steps,
            use_cpu=True,
            max_grad_norm=0.0,
            save_strategy="no",
            logging_strategy="steps" if logged else "no",
            logging_steps=1,
            report_to="tensorboard" if logged else "none",
            disable_tqdm=True,
        ),
        train_dataset=loader.dataset,
        callbacks=ten_hooks(hook("on_step_begin"), hook("on_step_end")) if setting == "callbacks" else None,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def run_composer(network: nn.Module, loader: DataLoader, setting: str) -> None:
    """Train with Composer's Trainer, without progress bar, console and checkpoints."""
    from composer import Callback, Trainer
    from composer.loggers import TensorboardLogger
    from composer.models import ComposerModel

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, batch: Any) -> Tensor:
            return self.network(batch[0])

        def loss(self, outputs: Any, batch: Any) -> Tensor:
            return F.cross_entropy(outputs, batch[1])

    def hook(name: str) -> Callable[[int], Callback]:
        return lambda number: type(f"Watch{number}{name}", (Callback,), {name: do_nothing})()

    Trainer(
        model=Model(),
        optimizers=make_optimizer(network),
        train_dataloader=loader,
        max_duration="1ep",
        device="cpu",
        device_train_microbatch_size=len(loader.dataset[1][1]),
        callbacks=ten_hooks(hook("batch_start"), hook("batch_end")) if setting == "callbacks" else None,
        loggers=TensorboardLogger(log_dir="logs") if setting == "logged" else None,
        progress_bar=False,
    ).fit()


def count_logged() -> int:
    """Return the number of losses that were logged: the most values of any tag that is named after a loss."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    most = 0
    for folder in {path for path, _, files in os.walk("logs") if any("tfevents" in name for name in files)}:
        events = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
        most = max([most, *(len(events.Scalars(tag)) for tag in events.Tags()["scalars"] if "loss" in tag)])
    return most


def main(name: str, task: str, setting: str, windows: str) -> None:
    """Train in the working directory; before each window, print a line with the CPU seconds, and wait for a line."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the libraries print to stderr, so that the parent reads only the reports
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def report(**fields: Any) -> None:
        print(json.dumps(fields), file=channel, flush=True)

    def turn() -> None:
        report(seconds=time.process_time())
        if not sys.stdin.readline():
            os._exit(1)  # the parent has ended

    with contextlib.suppress(ModuleNotFoundError):
        import_torchvision()  # so that libraries that need it can import it with a CPU version of torch
    report(version=importlib.metadata.version(NAMES[name][1]))
    ready = Ready(task, int(windows), turn)
    globals()[f"run_{name}"](make_network(task), DataLoader(ready, batch_size=None), setting)
    report(seconds=time.process_time(), logged=count_logged() if setting == "logged" else len(ready))


if __name__ == "__main__":
    main(*sys.argv[1:])
