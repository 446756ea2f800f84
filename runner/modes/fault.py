"""What a fault that shows while a run is tried out is due to: a hook, the model with its data, and in which line."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig

from runner.batch import tensors
from runner.wrong_config import CONF, CONFIG_ERRORS, WrongConfig, explain, line_of_user

MAX_MESSAGE = 300  # letters of an error's own message
WITHOUT_ALGORITHMS = "without algorithms it works"

STEPS = {
    "forward": "its forward pass",
    "eval_forward": "its forward pass in evaluation",
    "validate": "its validate()",
    "loss": "its loss",
    "training_step": "its training_step()",
    "update_metric": "its metrics",
    "compute": "its metrics",
    "num_samples": "its num_samples()",
    "num_tokens": "its num_tokens()",
    "loss_weight": "its loss_weight()",
    "backward": "its backward pass",
}
"""What a model does in a run, by the function in which that begins."""


class HookAtFault(NamedTuple):
    """The callback or algorithm that raised an error, by its place in the config."""

    group: str
    key: str
    event: str


def hook_at_fault(error: BaseException, config: Mapping[str, Any]) -> HookAtFault | None:
    """Return the hook of the config that raised an error at an event, None where it was another's."""
    for note in getattr(error, "__notes__", []):
        if match := re.match(r"raised by '(\w+)' at (\w+),", note):
            for group in ("callbacks", "algorithms"):
                if match[1] in (config.get(group) or {}):
                    return HookAtFault(group, match[1], match[2])
    return None


@contextmanager
def naming_fault(config: Mapping[str, Any]) -> Iterator[None]:
    """Turn whatever is raised inside into a WrongConfig that names who is at fault, and the line in a user's code."""
    try:
        yield
    except WrongConfig:
        raise
    except Exception as error:
        raise WrongConfig(_describe(error, config)) from error


def _describe(error: Exception, config: Mapping[str, Any]) -> str:
    hook, step, place = hook_at_fault(error, config), _step(error), line_of_user(error)
    model, data = chosen(config, "model"), chosen(config, "data")
    if hook is not None:
        text = f"{_in_section(f'{hook.group}.{hook.key}', config[hook.group][hook.key], error)}"
        text += f"\n  at {hook.event}, with {model} and {data}"
    elif step is not None:
        text = f"{model} does not fit {data}. In {step}, with {_batch(error)}:\n  {_what(error)}"
    elif _name(error) in config["trainer"]:
        text = _in_section("trainer", config["trainer"], error)
    else:
        text = explain(error, sys.argv[1:], CONF) if isinstance(error, CONFIG_ERRORS) else _what(error)
    text += "".join(f"\n  {note}" for note in getattr(error, "__notes__", []) if note == WITHOUT_ALGORITHMS)
    text += f"\n  raised in {place}" if place is not None and place not in text else ""
    return text


def _in_section(path: str, section: Mapping[str, Any], error: Exception) -> str:
    return f"{path}.{error}" if _name(error) in section else f"{path}: {_what(error)}"


def _name(error: Exception) -> str:
    """Return the argument with which a message of this project begins: 'monitor' of "monitor='x' is no metric"."""
    return str(error).partition("=")[0]


def chosen(config: Mapping[str, Any], group: str) -> str:
    """Return what was chosen for a group, as it is typed: 'model=mlp'."""
    target = f"{group}._target_={config[group]['_target_']}"
    if not HydraConfig.initialized() or target in HydraConfig.get().overrides.task:
        return target
    return f"{group}={HydraConfig.get().runtime.choices.get(group)}"


def _step(error: Exception) -> str | None:
    """Return in which step of a model an error was raised."""
    names = (frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((STEPS[name] for name in names if name in STEPS), None)


def _batch(error: Exception) -> str:
    """Return what went through the model, as the loop that fired the step had it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        state: Any = frame.f_locals.get("state")
        if hasattr(state, "batch"):
            made = f" and outputs of {describe_batch(state.outputs)}" if hasattr(state, "outputs") else ""
            return f"a batch of {describe_batch(state.batch)}{made}"
    return "a batch"


def describe_batch(batch: Any) -> str:
    """Return types and shapes of a batch's tensors."""
    return ", ".join(f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for one in tensors(batch))


def _what(error: Exception) -> str:
    message = " ".join(str(error).split())
    shown = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
    return shown if type(error) in (ValueError, TypeError) else f"{type(error).__name__}: {shown}"
