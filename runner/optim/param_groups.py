"""Rules for parameter groups, which give some parameters their own learning rate, weight decay or other settings."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from runner.failures.checks import check_whole
from runner.failures.errors import wrong_argument
from runner.libraries.optimizers import spare_compiler
from runner.optim.name_patterns import matches_name, near_names

OptimizerFactory = Callable[[Any], Optimizer]
"""Called with a list of parameters, or with the model itself if its first argument is named `model`."""

_NOT_SET = ("params", "name", "initial_lr", "lr_scale")  # keys of an optimizer's group that are not settings


def takes_model(factory: Any) -> bool:
    """Return whether a factory is called with the model, rather than with a list of its parameters."""
    return next(iter(inspect.signature(factory).parameters), None) == "model"


def call_factory(factory: Any, model: nn.Module) -> Any:
    """Call a factory with a model or its parameters, including frozen ones, and return the optimizer."""
    spare_compiler()
    if takes_model(factory):
        return factory(model)
    return factory([parameter for parameter in model.parameters() if is_steppable(parameter)])


def is_steppable(parameter: Tensor) -> bool:
    """Return whether an optimizer can step a parameter; it cannot step integers, such as quantized weights."""
    return parameter.is_floating_point() or parameter.is_complex()


class ParamGroups:
    """A factory for an optimizer in which rules give some parameters their own settings.

    Each rule selects parameters and lists the settings that differ for them:

        ParamGroups(
            lambda params: AdamW(params, lr=1e-3, weight_decay=0.1),
            {
                "no_decay": {"max_ndim": 1, "weight_decay": 0.0},
                "backbone": {"names": "*backbone.*", "lr_scale": 0.1},
            },
        )

    A rule selects the parameters that meet all of its conditions; without a condition, all parameters:

    - `names`: a shell pattern for full names, or a list; a later pattern wins, and `!` excludes: ['*', '!*head*'];
    - `modules`: the name of a class, or a list of names: parameters inside modules of such a class or a subclass;
    - `max_ndim`: the largest number of dimensions. Norms and biases have 1.

    All other keys are settings of the optimizer's groups, such as `lr` or `weight_decay`, or one of two factors:

    - `lr_scale`: the factor for the learning rate;
    - `layer_decay`: the factor by which the learning rate shrinks from each layer to the one below, above 0 and at most
      1: d layers below the highest, the rate is multiplied by `layer_decay ** d`. Layers are the numbered modules, such
      as `blocks.0`, in the order of the model. All parameters before them form the lowest layer, and those after them
      the highest.

    Rules also select frozen parameters, so that these have their settings if they are unfrozen later.

    If several rules select a parameter, all apply: the later rule wins if both have the same setting, and factors
    multiply. Parameters that the same rules select form a group, with the names of the rules under the key 'name'.
    Schedules multiply the rate of each group. If the optimizer already has several groups, each is split.

    Args:
        optimizer: a factory from parameters, or from the model if its first argument is named `model`.
        rules: the rules by name, at least one.

    Raises:
        ValueError, TypeError: a rule is malformed; or, when the optimizer is made, a rule or one of its patterns
            selects no parameter, the optimizer lacks a setting, or all parameters get a learning rate of 0.
    """

    def __init__(self, optimizer: OptimizerFactory, rules: Mapping[str, Mapping[str, Any]]) -> None:
        if not isinstance(rules, Mapping) or not rules:
            example = "{'no_decay': {'max_ndim': 1, 'weight_decay': 0.0}}"
            raise wrong_argument("param_groups", rules, f"must be rules by name, such as {example}", TypeError)
        self.optimizer = optimizer
        self.rules = [_Rule.parse(f"param_groups.{name}", rule) for name, rule in rules.items()]

    def __call__(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of a model, with its groups split by the rules."""
        optimizer = call_factory(self.optimizer, model)
        if isinstance(optimizer, Optimizer):
            self._split(optimizer, model)
        return optimizer

    def _split(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Split the groups of an optimizer that has not stepped yet."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        known = [parameter for parameter in _describe(model) if parameter.key in held]
        selections = [(rule, rule.select(known)) for rule in self.rules]
        for rule, depths in selections:
            changed = [group for group in optimizer.param_groups if any(id(p) in depths for p in group["params"])]
            rule.check(type(optimizer).__name__, changed)
        groups = []
        for group in optimizer.param_groups:
            # Parameters without a rule come first.
            parts: dict[tuple[tuple[_Rule, int], ...], list[nn.Parameter]] = {(): []}
            for parameter in group["params"]:
                key = id(parameter)
                applied = tuple((rule, depths[key]) for rule, depths in selections if key in depths)
                parts.setdefault(applied, []).append(parameter)
            groups += [_group(group, applied, part) for applied, part in parts.items() if part]
        trained = [group for group in groups if any(parameter.requires_grad for parameter in group["params"])]
        if not any(group.get("lr", 1) for group in trained) and any(
            group.get("lr") for group in optimizer.param_groups
        ):
            names = ", ".join(rule.key for rule in self.rules)
            raise ValueError(
                f"{names}: every parameter has a learning rate of 0, so that nothing trains; leave some out"
            )
        optimizer.__setstate__({"state": optimizer.state, "param_groups": groups})


def check_groups(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Check that a saved state of an optimizer has the same parameter groups, by name and number of parameters.

    Raises:
        ValueError: the groups differ, so that settings or momenta would go to other parameters.
    """

    def outline(groups: Sequence[Mapping[str, Any]]) -> str:
        sizes = [(group.get("name", index), len(group["params"])) for index, group in enumerate(groups)]
        return ", ".join(f"{name} ({size})" for name, size in sizes)

    before = outline(saved["param_groups"])
    now = outline(optimizer.param_groups)
    if before != now:
        raise ValueError(
            f"the parameter groups of {type(optimizer).__name__} have changed, from {before} tensors to {now}: a run "
            "cannot be resumed with other groups; start a new one from its weights, with load_path"
        )


class _Parameter(NamedTuple):
    """The properties by which rules select a parameter."""

    key: int
    names: list[str]
    classes: set[str]
    ndim: int


@dataclass(frozen=True, eq=False)
class _Rule:
    """A rule of `ParamGroups`; `key` is its name in messages."""

    key: str
    names: Sequence[str] | None
    modules: Sequence[str] | None
    max_ndim: int | None
    lr_scale: float
    layer_decay: float | None
    settings: dict[str, Any]

    @classmethod
    def parse(cls, key: str, rule: Any) -> _Rule:
        """Return the rule that a mapping describes, after all checks that need no model."""
        if not isinstance(rule, Mapping):
            raise wrong_argument(key, rule, "must be a rule, such as {'names': '*head*', 'lr_scale': 10}", TypeError)
        settings = {str(name): value for name, value in rule.items()}
        names = _parse_names(f"{key}.names", settings.pop("names", None))
        modules = _parse_names(f"{key}.modules", settings.pop("modules", None))
        max_ndim = settings.pop("max_ndim", None)
        if max_ndim is not None:
            check_whole(f"{key}.max_ndim", max_ndim, 0)
        if not settings:
            raise wrong_argument(key, dict(rule), "changes nothing; add a setting, such as weight_decay or lr_scale")
        lr_scale = settings.pop("lr_scale", 1.0)
        layer_decay = settings.pop("layer_decay", None)
        _check_number(f"{key}.lr_scale", lr_scale)
        if layer_decay is not None:
            _check_number(f"{key}.layer_decay", layer_decay)
            if not 0 < layer_decay <= 1:
                raise ValueError(f"{key}.layer_decay={layer_decay!r}: must be above 0 and at most 1")
        return cls(key, names, modules, max_ndim, lr_scale, layer_decay, settings)

    def select(self, known: Sequence[_Parameter]) -> dict[int, int]:
        """Return the keys of the selected parameters, each with its number of layers below the highest one."""
        for kind, entries in (("names", self.names), ("modules", self.modules)):
            for entry in entries or ():
                if not any(_matches(parameter, kind, entry) for parameter in known):
                    choices = _describe_choices(known, kind)
                    if kind == "names":
                        choices += f"; near: {near_names(entry, [name for item in known for name in item.names])}"
                    raise ValueError(f"{self.key}.{kind}={entry!r}: matches no parameter; {choices}")
        selected = [parameter for parameter in known if self._selects(parameter)]
        if not selected:
            values = {"names": self.names, "modules": self.modules, "max_ndim": self.max_ndim}
            conditions = [f"{self.key}.{name}={value!r}" for name, value in values.items() if value is not None]
            choices = _describe_choices(known, "names")
            raise ValueError(f"{', '.join(conditions)}: selects no parameter; {choices}")
        if self.layer_decay is None:
            return {parameter.key: 0 for parameter in selected}
        layers = _layers([parameter.names[0] for parameter in selected])
        if not any(layers):
            raise ValueError(f"{self.key}.layer_decay={self.layer_decay!r}: no module here is numbered, as in blocks.0")
        highest = max(layers)
        return {parameter.key: highest - layer for parameter, layer in zip(selected, layers, strict=True)}

    def check(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
        """Check that each setting exists in at least one of the groups that the rule changes."""
        allowed = sorted({name for group in groups for name in group if name not in _NOT_SET})
        for name, value in self.settings.items():
            if name not in allowed:
                near = get_close_matches(name, [*allowed, "names", "modules", "max_ndim", "lr_scale", "layer_decay"], 1)
                hint = f"did you mean {near[0]!r}? It" if near else "it"
                listed = ", ".join([*allowed, "lr_scale", "layer_decay"])
                raise ValueError(f"{self.key}.{name}={value!r}: {optimizer} has no such setting; {hint} has {listed}")
            _check_kind(f"{self.key}.{name}", value, next(group[name] for group in groups if name in group))

    def _selects(self, parameter: _Parameter) -> bool:
        last = next((entry for entry in reversed(self.names or ["*"]) if _matches(parameter, "names", entry)), "!")
        by_class = self.modules is None or any(_matches(parameter, "modules", entry) for entry in self.modules)
        return not last.startswith("!") and by_class and (self.max_ndim is None or parameter.ndim <= self.max_ndim)


def _describe_choices(known: Sequence[_Parameter], kind: str) -> str:
    """Return a phrase that lists the parameters or classes that a rule could select."""
    if kind == "modules":
        names = list(dict.fromkeys(name for parameter in known for name in sorted(parameter.classes)))
    else:
        names = [parameter.names[0] for parameter in known]
    subject = "classes" if kind == "modules" else "parameters"
    return f"{subject} are {', '.join(names[:6])}{f' and {len(names) - 6} more' * (len(names) > 6)}"


def _matches(parameter: _Parameter, kind: str, entry: str) -> bool:
    """Return whether an entry of a rule matches a name or a class of a parameter."""
    if kind == "modules":
        return entry in parameter.classes
    return any(matches_name(name, entry) for name in parameter.names)


def _group(group: dict[str, Any], applied: Sequence[tuple[_Rule, int]], part: list[nn.Parameter]) -> dict[str, Any]:
    """Return a group for some of a group's parameters, changed by the rules that apply to them.

    Each rule comes with the number of layers between these parameters' layer and the highest.
    """
    changed = {**group, "params": part}
    scale = 1.0
    for rule, depth in applied:
        changed |= {name: value for name, value in rule.settings.items() if name in group}
        scale *= rule.lr_scale * (rule.layer_decay or 1.0) ** depth
    labels = [rule.key.partition(".")[2] + f"-{depth}" * (rule.layer_decay is not None) for rule, depth in applied]
    changed |= {"name": "+".join(labels) or "default", "lr_scale": scale}
    if scale != 1:
        changed["lr"] = changed["lr"] * scale
    return changed


def _describe(model: nn.Module) -> list[_Parameter]:
    """Return each parameter of a model once, in the model's order, with all names of a shared parameter."""
    modules = model.named_modules(remove_duplicate=False)
    classes = {path: {cls.__name__ for cls in type(module).__mro__} for path, module in modules}
    descriptions: dict[int, _Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = id(parameter)
        description = descriptions.setdefault(key, _Parameter(key, [], set(), parameter.ndim))
        description.names.append(name)
        owners = name.split(".")[:-1]
        for depth in range(len(owners) + 1):
            description.classes.update(classes[".".join(owners[:depth])])
    return list(descriptions.values())


def _layers(names: Sequence[str]) -> list[int]:
    """Return the layer of each parameter: 0 before the first numbered module, then one more for each."""
    paths = [name.split(".")[:-1] for name in names]
    shared = 0  # length of the prefix that all paths share; a number in it does not distinguish layers
    for parts in zip(*paths, strict=False):
        if len({*parts}) > 1:
            break
        shared += 1
    numbered: dict[str, int] = {}
    layers: list[int | None] = []
    for name in names:
        inner = ".".join(name.split(".")[shared:])
        match = re.match(r"(?:[^.]+\.)*?\d+\.", inner)
        if match:
            layers.append(numbered.setdefault(match[0], len(numbered) + 1))
        else:
            layers.append(None if numbered else 0)
    return [len(numbered) + 1 if layer is None else layer for layer in layers]


def _parse_names(key: str, value: Any) -> Sequence[str] | None:
    if value is None:
        return None
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise wrong_argument(key, value, "must be a name or a list of names", TypeError)
    return names


def _check_kind(key: str, value: Any, current: Any) -> None:
    """Check that a setting has the type of the optimizer's own value for other parameters."""
    if isinstance(current, bool):
        fits = isinstance(value, bool)
    elif isinstance(current, list | tuple):
        fits = isinstance(value, list | tuple) and len(value) == len(current)
    elif isinstance(current, int | float):
        _check_number(key, value)
        fits = True
    else:
        fits = True
    if not fits:
        raise wrong_argument(
            key, value, f"must be of the same kind as {current!r}, the setting of other parameters", TypeError
        )


def _check_number(key: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong_argument(key, value, "must be a number of at least 0", TypeError)
    if not 0 <= value < math.inf:
        raise wrong_argument(key, value, "must be a finite number of at least 0")
