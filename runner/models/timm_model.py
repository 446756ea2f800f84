"""Models of timm (PyTorch Image Models) by name, with new weights or with pretrained ones."""

from __future__ import annotations

import difflib
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from runner.failures.checks import check_counts
from runner.failures.errors import wrong_argument
from runner.libraries.extras import how_to_install
from runner.libraries.torchvision import import_torchvision


def timm_model(
    name: str = "resnet50", num_classes: int = 1000, pretrained: bool = False, in_channels: int = 3
) -> nn.Module:
    """Return a timm classification model: images `(N, in_channels, H, W)` -> logits `(N, num_classes)`.

    Many models take images of one size only, such as 224 x 224. Pretrained weights come from the Hugging Face Hub on
    first use and stay in its cache. The last layer gets new weights if `num_classes` differs from theirs; the weights
    of the first are summed or repeated over channels if `in_channels` differs. Source:
    https://github.com/huggingface/pytorch-image-models.

    Args:
        name: a name of `timm.list_models()`, such as resnet18 or vit_tiny_patch16_224; a tag, as in
            resnet18.a1_in1k, chooses the pretrained weights.
        num_classes: number of classes.
        pretrained: whether to load timm's weights; otherwise they are new.
        in_channels: channels of an image.

    Raises:
        ModuleNotFoundError: timm or torchvision is not installed.
        ValueError: a number is below 1, or timm has no such model, or no pretrained weights for it.
        OSError: the weights cannot be downloaded.
    """
    check_counts(num_classes=num_classes, in_channels=in_channels)
    timm = _import_timm()
    _check_name(timm, name, pretrained)
    # `runner check` makes models on the meta device, whose weights have no values.
    load = pretrained and torch.get_default_device().type != "meta"
    try:
        return timm.create_model(name, pretrained=load, num_classes=num_classes, in_chans=in_channels)
    except Exception as error:
        # The Hub's client lets errors of its HTTP library through, which are not OSErrors.
        if not load or not (isinstance(error, OSError) or type(error).__module__.partition(".")[0] == "httpx"):
            raise
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise OSError(
            f"pretrained=True: the weights of {name} cannot be downloaded ({reason}); try again with a "
            "network connection, after which they are cached, or use pretrained=false"
        ) from error


def _import_timm() -> Any:
    if find_spec("timm") is None:
        raise ModuleNotFoundError(f"timm is not installed here: {how_to_install('vision')}", name="timm")
    import_torchvision()  # timm imports torchvision itself, but not in a way that always works
    import timm  # type: ignore[import-not-found]

    return timm


def _check_name(timm: Any, name: str, pretrained: bool) -> None:
    architecture, _, tag = name.partition(".")
    known = timm.list_models()
    if architecture not in known:
        near = difflib.get_close_matches(architecture, known, n=5, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() has all names"
        raise wrong_argument("name", name, f"timm has no such model; {hint}")
    pretrained_names = timm.list_pretrained(f"{architecture}.*")
    tagged = [tagged_name for tagged_name in pretrained_names if tagged_name.partition(".")[0] == architecture]
    if tag and name not in tagged:
        remedy = f"choose among {', '.join(tagged)}" if tagged else f"it has none for {architecture}"
        raise wrong_argument("name", name, f"timm has no such weights; {remedy}")
    if pretrained and not timm.models.is_model_pretrained(name):
        raise ValueError(f"pretrained=True: timm has no weights for {name}; use pretrained=false")
