"""Analysis of a sweep with several objectives: the Pareto front, and the importance of each key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.pictures.figure import COLORS, GRAY, add_legend, is_logarithmic, scale, shorten
from runner.sweeps.names import short_names, show_value
from runner.sweeps.settings import REPEATED, Setting, is_number
from runner.sweeps.sweep import Sweep

FEWEST = 10  # settings from which importances are worked out


def several_objectives(settings: Sequence[Setting], led: Sweep) -> dict[str, bool]:
    """Return the objectives of a sweep, and whether lower is better for each; empty if there are not several."""
    results = [job.result for setting in settings for job in setting.done if len(job.result.objectives) > 1]
    if not results:
        return {}
    names = [*results[0].objectives]
    if led.directions:
        return {name: one == "minimize" for name, one in zip(names, led.directions, strict=True)}
    return {name: name in results[0].lower for name in names}


def find_front(settings: Sequence[Setting], objectives: Mapping[str, bool]) -> list[Setting]:
    """Return the Pareto front: settings that no other beats in one objective and equals in all others.

    Settings without a value of each objective are left out.
    """
    losses = {}
    for setting in settings:
        means = {name: setting.average(name) for name in objectives}
        found = [mean if objectives[name] else -mean for name, mean in means.items() if mean is not None]
        if len(found) == len(objectives):
            losses[setting.name] = found

    def is_beaten(own: list[float]) -> bool:
        return any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in losses.values())

    return [one for one in settings if one.name in losses and not is_beaten(losses[one.name])]


def find_importances(settings: Sequence[Setting]) -> dict[str, float]:
    """Return the share of the objective's variance that each swept key explains on its own, largest first.

    The estimate is fANOVA, by Optuna (Hutter et al., An Efficient Approach for Assessing Hyperparameter Importance,
    2014). It is empty for fewer than ten settings, or for fewer than two keys.
    """
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

    done = [one for one in settings if one.objectives]
    kinds: dict[str, BaseDistribution] = {}
    for key in sorted({key for one in done for key in one.values if key not in REPEATED}):
        values = [one.values.get(key) for one in done]
        numbers = [float(one) for one in values if one is not None and is_number(one)]
        if len(numbers) == len(values) and len({*numbers}) > 1:
            kinds[key] = FloatDistribution(min(numbers), max(numbers), log=is_logarithmic(numbers, decades=1.0))
        elif len(choices := sorted({*map(show_value, values)})) > 1:
            kinds[key] = CategoricalDistribution(choices)
    if len(done) < FEWEST or len(kinds) < 2 or len({one.mean for one in done}) == 1:
        return {}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler())
    texts = [key for key, kind in kinds.items() if isinstance(kind, CategoricalDistribution)]
    for one in done:
        params = {key: one.values.get(key) for key in kinds} | {key: show_value(one.values.get(key)) for key in texts}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=one.mean))
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return optuna.importance.get_param_importances(study, evaluator=evaluator)


def draw_front(axes: Any, settings: Sequence[Setting], objectives: Mapping[str, bool], across: str) -> None:
    """Draw each setting by two objectives, and the Pareto front.

    The objective `across` is on the horizontal axis, the first on the vertical one.
    """
    up = next(iter(objectives))
    known = [one for one in settings if one.average(up) is not None and one.average(across) is not None]
    front = sorted(find_front(known, objectives), key=lambda one: one.average(across) or 0.0)
    names = {one.name for one in front}
    rest = [one for one in known if one.name not in names]
    handles = {}
    if rest:
        (handles["settings"],) = axes.plot(
            [one.average(across) for one in rest], [one.average(up) for one in rest], "o", color=GRAY, markersize=4
        )
    line = "-" if len(objectives) == 2 else ""
    (handles[f"Pareto front: {len(front)}"],) = axes.plot(
        [one.average(across) for one in front],
        [one.average(up) for one in front],
        f"o{line}",
        color=COLORS[0],
        drawstyle="steps-post" if objectives[across] else "steps-pre",
        markersize=6,
    )
    add_legend(axes, [*handles.values()], [*handles])
    for which, name in (("x", across), ("y", up)):
        better = "lower" if objectives[name] else "higher"
        getattr(axes, f"set_{which}label")(f"{shorten(name, 30)} ({better} is better)")
        scale(axes, which, [one.average(name) or 0.0 for one in known])


def draw_importances(axes: Any, shares: Mapping[str, float]) -> None:
    """Draw the importance of each key as a bar, the largest on top."""
    shorts = short_names([*shares])
    names = [shorten(shorts[key], 24) for key in shares]
    axes.barh(names[::-1], [*shares.values()][::-1], color=COLORS[0], height=0.6)
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the objective's variance (fANOVA)")
    axes.set_title("importance of each key")
    axes.grid(visible=False, axis="y")
