"""Analysis of a sweep: the Pareto front of several objectives, and the importance of each key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.pictures.figure import COLORS, GRAY, add_legend, is_logarithmic, scale, shorten
from runner.sweeps.names import short_names, show_value
from runner.sweeps.settings import REPEATED, Setting, is_number
from runner.sweeps.sweep import Sweep

FEWEST = 10  # settings below which importances are not estimated


def several_objectives(settings: Sequence[Setting], sweep: Sweep) -> dict[str, bool]:
    """Return for each of several objectives of a sweep whether lower is better; empty with a single objective."""
    results = [job.result for setting in settings for job in setting.measured if len(job.result.objectives) > 1]
    if not results:
        return {}
    names = [*results[0].objectives]
    if sweep.directions:
        return {name: direction == "minimize" for name, direction in zip(names, sweep.directions, strict=True)}
    return {name: name in results[0].lower for name in names}


def find_front(settings: Sequence[Setting], objectives: Mapping[str, bool]) -> list[Setting]:
    """Return the Pareto front: the settings that no other setting dominates.

    A setting dominates another if it is better in one objective and at least equal in all others. Settings without a
    value of each objective are left out.
    """
    scores = {}  # lower is better
    for setting in settings:
        means = {name: setting.average(name) for name in objectives}
        signed = [mean if objectives[name] else -mean for name, mean in means.items() if mean is not None]
        if len(signed) == len(objectives):
            scores[setting.name] = signed

    def is_dominated(score: list[float]) -> bool:
        return any(
            other != score and all(a <= b for a, b in zip(other, score, strict=True)) for other in scores.values()
        )

    return [setting for setting in settings if setting.name in scores and not is_dominated(scores[setting.name])]


def find_importances(settings: Sequence[Setting]) -> dict[str, float]:
    """Return the fraction of the objective's variance that each swept key explains on its own, largest first.

    The estimate is Optuna's fANOVA (Hutter et al., An Efficient Approach for Assessing Hyperparameter Importance,
    2014). It is empty with fewer than ten settings or fewer than two keys.
    """
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

    measured = [setting for setting in settings if setting.objectives]
    distributions: dict[str, BaseDistribution] = {}
    for key in sorted({key for setting in measured for key in setting.values if key not in REPEATED}):
        values = [setting.values.get(key) for setting in measured]
        numbers = [float(value) for value in values if value is not None and is_number(value)]
        if len(numbers) == len(values) and len({*numbers}) > 1:
            is_log = is_logarithmic(numbers, decades=1.0)
            distributions[key] = FloatDistribution(min(numbers), max(numbers), log=is_log)
        elif len(choices := sorted({*map(show_value, values)})) > 1:
            distributions[key] = CategoricalDistribution(choices)
    if len(measured) < FEWEST or len(distributions) < 2 or len({setting.mean for setting in measured}) == 1:
        return {}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler())
    for setting in measured:
        params = {key: setting.values.get(key) for key in distributions}
        for key, distribution in distributions.items():
            if isinstance(distribution, CategoricalDistribution):
                params[key] = show_value(params[key])
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=setting.mean))
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return optuna.importance.get_param_importances(study, evaluator=evaluator)


def draw_front(axes: Any, settings: Sequence[Setting], objectives: Mapping[str, bool], across: str) -> None:
    """Draw each setting by two objectives, and the Pareto front.

    The objective `across` is on the horizontal axis, the first objective on the vertical axis.
    """
    up = next(iter(objectives))
    known = [setting for setting in settings if None not in (setting.average(up), setting.average(across))]
    front = sorted(find_front(known, objectives), key=lambda setting: setting.average(across) or 0.0)
    names = {setting.name for setting in front}
    dominated = [setting for setting in known if setting.name not in names]

    def positions(group: Sequence[Setting]) -> tuple[list[float | None], list[float | None]]:
        return [setting.average(across) for setting in group], [setting.average(up) for setting in group]

    handles = {}
    if dominated:
        (handles["settings"],) = axes.plot(*positions(dominated), "o", color=GRAY, markersize=4)
    line = "-" if len(objectives) == 2 else ""
    (handles[f"Pareto front: {len(front)}"],) = axes.plot(
        *positions(front),
        f"o{line}",
        color=COLORS[0],
        drawstyle="steps-post" if objectives[across] else "steps-pre",
        markersize=6,
    )
    add_legend(axes, [*handles.values()], [*handles])
    for which, name in (("x", across), ("y", up)):
        better = "lower" if objectives[name] else "higher"
        getattr(axes, f"set_{which}label")(f"{shorten(name, 30)} ({better} is better)")
        scale(axes, which, [setting.average(name) or 0.0 for setting in known])


def draw_importances(axes: Any, shares: Mapping[str, float]) -> None:
    """Draw the importance of each key as a bar, the largest at the top."""
    shorts = short_names([*shares])
    names = [shorten(shorts[key], 24) for key in shares]
    axes.barh(names[::-1], [*shares.values()][::-1], color=COLORS[0], height=0.6)
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the objective's variance (fANOVA)")
    axes.set_title("importance of each key")
    axes.grid(visible=False, axis="y")
