"""Two small tasks for tests of all algorithms: images, and text for a GPT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner import Algorithm, ClassificationModel, LanguageModel, Model, Trainer, algorithms, replace_modules
from runner.core.ordering import snake_case
from runner.data import TensorLoader
from runner.models import GPT, ResNet8

NEED_A_GPU = {"CUDAGraph", "CudnnBenchmark", "Float8"}
CLASSES: dict[str, str] = {snake_case(name): name for name in algorithms.__all__ if name not in NEED_A_GPU}
"""All algorithms but those that need a GPU: class names by config name."""

# Arguments with which an algorithm acts within four batches and on small layers.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "alibi": {"max_sequence_length": 12, "train_sequence_length_scaling": 0.5},
    "batch_size_warmup": {"start": 0.5, "duration": 1.0},
    "blurpool": {"min_channels": 4},
    "ema": {"half_life": "1ba"},
    "factorize": {"min_channels": 4, "min_features": 8, "latent_features": 2},
    "ghost_batch_norm": {"ghost_batch_size": 4},
    "gradient_clipping": {"clipping_threshold": 0.1},
    "gyro_dropout": {"sigma": 4, "tau": 2},
    **{key: {"mean": 0.0, "std": 1.0} for key in ("augmix", "rand_augment", "trivial_augment")},
    "info_batch": {"delta": 1.0},
    "lawa": {"window": 2, "update_interval": "1ba"},
    "layer_freezing": {"freeze_start": 0.0},
    "logit_softcap": {"cap": 3.0},
    "ngram_embedding": {"table_size": 16},
    "progressive_resizing": {"finetune_fraction": 0.1, "delay_fraction": 0.3, "size_increment": 1},
    "schedule_free": {"warmup": "2ba"},
    "selective_backprop": {"start": 0.0, "end": 1.0, "interrupt": 0},
    "seq_length_warmup": {"duration": 1.0, "min_seq_length": 2, "step_size": 2},
    "squeeze_excite": {"latent_channels": 2, "min_channels": 8},
    "stochastic_depth": {"target_block": "BasicBlock", "drop_rate": 0.5},
    "swa": {"start": "0.2dur", "end": "1dur", "update_interval": "1ba", "swa_lr": 0.05, "anneal_steps": 2},
}
TEXT_ARGUMENTS: dict[str, dict[str, Any]] = {"stochastic_depth": {"target_block": "TransformerBlock"}}

# Algorithms that act on one of the two tasks only; all others act on both.
IMAGES_ONLY = {
    *("augmix", "batch_augment", "colout", "cutmix", "cutout", "mixup", "progressive_resizing", "rand_augment"),
    *("trivial_augment", "info_batch"),
    *("blurpool", "channels_last", "ghost_batch_norm", "low_precision_group_norm", "squeeze_excite"),
    "weight_standardization",
}
TEXT_ONLY = {
    *("alibi", "gated_linear_units", "low_precision_layer_norm", "ngram_embedding", "qk_norm", "rotary_embedding"),
    *("seq_length_warmup", "value_embedding"),
}
FITTING = {
    "images": [key for key in CLASSES if key not in TEXT_ONLY],
    "text": [key for key in CLASSES if key not in IMAGES_ONLY],
}
"""The algorithms that act on each task."""

NUM_SAMPLES, BATCH_SIZE = 15, 8  # two batches per epoch, the second with an odd number of samples


def make_algorithm(task: str, key: str) -> Algorithm:
    """Return an algorithm with arguments that suit a task."""
    arguments = ARGUMENTS.get(key, {}) | (TEXT_ARGUMENTS.get(key, {}) if task == "text" else {})
    return getattr(algorithms, CLASSES[key])(**arguments)


def make_model(task: str, exact: bool, batch_norm: bool) -> Model:
    """Return the task's model, with fixed weights.

    Args:
        task: 'images' or 'text'.
        exact: whether the model is in float64 and without dropout, so that results are equal up to rounding.
        batch_norm: whether the image model has batch norm; otherwise group norm, which treats samples independently.
    """
    dropout = 0.0 if exact else 0.1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if task == "text":
            net = GPT(vocab_size=11, context=12, d_model=16, n_layers=2, n_heads=4, dropout=dropout)
            for parameter in net.parameters():
                nn.init.normal_(parameter, std=0.3)
        else:
            net = nn.Sequential(ResNet8(in_channels=2, num_classes=3, width=8), nn.Dropout(dropout))
            net.insert(0, nn.Conv2d(2, 2, 1)).insert(1, nn.GroupNorm(1, 2))
    if not batch_norm:
        replace_modules(net, {nn.BatchNorm2d: lambda norm, index: nn.GroupNorm(1, norm.num_features)})  # type: ignore
    net = net.double() if exact else net
    return LanguageModel(net) if task == "text" else ClassificationModel(net, 3)


def make_data(task: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return images (15, 2, 6, 6) and their classes, or tokens (15, 12) and the tokens that follow them."""
    generator = torch.Generator().manual_seed(0)
    if task == "text":
        windows = torch.randint(11, (NUM_SAMPLES, 13), generator=generator)
        return windows[:, :-1], windows[:, 1:]
    images = torch.rand(NUM_SAMPLES, 2, 6, 6, generator=generator, dtype=dtype)
    return images, torch.randint(3, (NUM_SAMPLES,), generator=generator)


def make_trainer(task: str, *chosen: str | Algorithm, folder: Path, exact: bool = False, **arguments: Any) -> Trainer:
    """Return a Trainer for two epochs of two batches, with evaluations after each and algorithms in this order.

    Args:
        task: 'images' or 'text'.
        chosen: algorithms, or their names.
        folder: folder for the run's files.
        exact: see `make_model`; batch norm is used only for algorithms that act on it.
        **arguments: arguments of the Trainer.
    """
    data = make_data(task, torch.float64 if exact else torch.float32)
    in_low_precision = not exact and any(str(algorithm).startswith("low_precision") for algorithm in chosen)
    defaults: dict[str, Any] = {
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.1),
        "max_duration": "2ep",
        "precision": "amp_bf16" if in_low_precision else "fp32",
    }
    return Trainer(
        model=make_model(task, exact, batch_norm=not exact or "ghost_batch_norm" in chosen),
        train_dataloader=TensorLoader(*data, batch_size=BATCH_SIZE, shuffle=True),
        eval_dataloader=TensorLoader(*data, batch_size=NUM_SAMPLES, shuffle=False),
        algorithms=[
            make_algorithm(task, algorithm) if isinstance(algorithm, str) else algorithm for algorithm in chosen
        ],
        device="cpu",
        run_dir=folder,
        **{**defaults, **arguments},
    )


def train_exactly(task: str, key: str, folder: Path, **arguments: Any) -> dict[str, Any]:
    """Return the results of a run with one algorithm: its weights, and metrics of an evaluation."""
    with make_trainer(task, key, folder=folder, exact=True, **arguments) as trainer:
        trainer.fit()
    weights = {name: weight.detach().clone() for name, weight in trainer.state.unwrapped_model.named_parameters()}
    return {"weights": weights, "metrics": trainer.state.eval_metric_values["eval"]}
