"""Measure how often verdicts are false positives, how often they find a difference, and the coverage of intervals.

    python benchmarks/verdict.py

Most figures come from simulated comparisons of normal values. For anytime evidence, equal settings are compared in
10,000 campaigns for each of several distributions, with a look after each of 40 pairs. The last figures come from
trained models: in 200 comparisons, sweeps of eight seeds with 16 hidden units are compared with sweeps that differ only
in the initial weights, and with sweeps that also have a lower learning rate; and 60 decisions of each kind end as
`runner decide` would end them.

The exit code is 1 if a figure is out of bounds: equal settings are told apart in more than 5 % of cases, with a look
after each pair or without; a power is more than three points from the promised one; an interval of six or more values
contains the true mean in less than 92 % of cases; or anytime evidence needs more than 1.5 times the pairs of a test
that is given the right number of pairs in advance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import numpy as np
import torch

from runner import ClassificationModel, Trainer
from runner.comparing.decision import (
    LEVEL,
    Samples,
    bootstrap,
    count_needed,
    decide,
    find_power,
    flip_signs,
    permute,
    smallest_p,
)
from runner.comparing.evidence import log_wealth
from runner.data.images.digits import load_digits
from runner.sweeps.decide.contenders import Contender
from runner.sweeps.decide.contest import Contest, Look

REPEATS = 4_000
CAMPAIGNS = 10_000
PAIRS = 40  # of a campaign, with a look after each
SIGMAS = 3  # allowed sampling error, in standard deviations
SWEEPS = 200  # comparisons of trained models
SEEDS = 8
DECISIONS = 60


def share(happens: Callable[[np.random.Generator], bool], repeats: int = REPEATS) -> float:
    """Return the share of repeats in which an event happens."""
    generator = np.random.default_rng(1)
    return sum(happens(generator) for _ in range(repeats)) / repeats


def errors() -> bool:
    """Print how often equal settings are told apart; return whether the shares are at most the level."""
    passed = True
    slack = SIGMAS * (LEVEL / REPEATS) ** 0.5
    for n in (5, 6, 8, 10, 12):
        rate = share(lambda rng, n=n: flip_signs(rng.standard_normal(n)) <= LEVEL)
        passed &= rate <= LEVEL + slack and (rate >= 0.03 - slack or smallest_p(n) > LEVEL / 2)
        print(f"equals told apart, {n:2} pairs          {rate:.1%}")
    for n, m in ((4, 4), (6, 5), (8, 8)):
        rate = share(lambda rng, n=n, m=m: permute(rng.standard_normal(n), rng.standard_normal(m)) <= LEVEL, 1000)
        passed &= rate <= LEVEL + SIGMAS * (LEVEL / 1000) ** 0.5
        print(f"equals told apart, {n:2} and {m} unpaired  {rate:.1%}")
    return passed


def power() -> bool:
    """Print how often planted differences are found; return whether this is within three points of the promise."""
    passed = True
    for effect in (2.0, 1.5, 1.2, 1.0, 0.85):
        n = count_needed(effect) or 0
        rate = share(lambda rng, n=n, effect=effect: flip_signs(rng.standard_normal(n) + effect) <= LEVEL, 2000)
        passed &= abs(rate - find_power(effect, n)) <= 0.03
        print(f"power at {effect:.2f} sd, {n:2} pairs          {rate:.1%}, promised {find_power(effect, n):.1%}")
    return passed


def coverage() -> bool:
    """Print how often intervals contain the true mean; return whether it is often enough from six values on."""

    def holds(rng: np.random.Generator, n: int) -> bool:
        low, high = bootstrap(rng.standard_normal(n)) or (0.0, 0.0)
        return low <= 0 <= high

    passed = True
    for n in (3, 4, 5, 6, 8, 12, 20):
        rate = share(lambda rng, n=n: holds(rng, n), 1000)
        passed &= n < 6 or rate >= 0.92
        print(f"interval of {n:2} holds the true mean     {rate:.1%}")
    return passed


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy-tailed": lambda rng, shape: rng.standard_cauchy(shape),
    "skewed": lambda rng, shape: rng.exponential(size=shape),
    "accuracies of 600": lambda rng, shape: rng.binomial(600, 0.97, shape) / 600,
    "mostly tied": lambda rng, shape: rng.binomial(1, 0.1, shape).astype(float),
}


def looks() -> bool:
    """Print how often looks after each pair tell equal settings apart; return whether it is at most the level."""
    passed = True
    for name, draw in DISTRIBUTIONS.items():
        for candidates in (1, 5):
            rng = np.random.default_rng(2)
            first = draw(rng, (CAMPAIGNS, PAIRS))
            # Holm's method rejects something if the smallest of several p-values is at most level / candidates.
            decided = np.zeros(CAMPAIGNS, bool)
            for _ in range(candidates):
                wealth = log_wealth(draw(rng, (CAMPAIGNS, PAIRS)) - first)
                decided |= wealth.max(axis=1) >= np.log(candidates / LEVEL)
            passed &= decided.mean() <= LEVEL + SIGMAS * (LEVEL / CAMPAIGNS) ** 0.5
            print(f"equals told apart, {PAIRS} looks, {candidates} {name:<17}  {decided.mean():.1%}")
    return passed


def anytime_power() -> bool:
    """Print the pairs that anytime evidence needs, and those of a fixed test with the right number of pairs."""
    passed = True
    rng = np.random.default_rng(3)
    for effect in (0.5, 1.0, 2.0):
        fixed = count_needed(effect) or 0
        wealth = log_wealth(rng.standard_normal((CAMPAIGNS, PAIRS)) + effect)
        decided = wealth >= -np.log(LEVEL)
        used = np.where(decided.any(axis=1), decided.argmax(axis=1) + 1, PAIRS)
        rate = decided.any(axis=1).mean()
        passed &= effect < 1 or (rate >= 0.95 and used.mean() <= 1.5 * max(fixed, 6))
        print(
            f"anytime at {effect:.2f} sd: {rate:.1%} within {PAIRS} pairs, {used.mean():.1f} used on average; "
            f"fixed test: {fixed} for 80%"
        )
    return passed


def train(seed: int, weights: int, lr: float) -> float:
    """Return the evaluation loss of a small network on digits; `seed` decides the order of the samples."""
    torch.manual_seed(weights)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    data, evaluation = load_digits(batch_size=128)
    with Trainer(
        model=ClassificationModel(network, num_classes=10),
        train_dataloader=data,
        eval_dataloader=evaluation,
        optimizers=lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9),
        max_duration="1ep",
        seed=seed,
        progress_bar=False,
    ) as trainer:
        return trainer.fit().metrics["eval/loss"]


def trained() -> bool:
    """Print how often verdicts tell trained models apart; return whether equal settings are within the level."""
    decided = [0, 0]
    for sweep in range(SWEEPS):
        seeds = range(sweep * SEEDS, (sweep + 1) * SEEDS)
        first = [train(seed, seed, 0.05) for seed in seeds]
        for index, lr in enumerate((0.05, 0.03)):
            second = [train(seed, 1_000_000 + seed, lr) for seed in seeds]
            decided[index] += decide([Samples(first, second, [str(seed) for seed in seeds])])[0].is_decided
    print(f"equals told apart, {SWEEPS} trained sweeps   {decided[0] / SWEEPS:.1%}")
    print(f"lr 0.03 told from 0.05, {SWEEPS} sweeps     {decided[1] / SWEEPS:.1%}")
    return decided[0] / SWEEPS <= LEVEL + SIGMAS * (LEVEL / SWEEPS) ** 0.5


def decisions() -> bool:
    """Print how often `decide` tells a setting from itself, and how many seeds a lower learning rate takes."""
    passed = True
    for lr, outcome in ((0.05, "equals told apart"), (0.02, "lr 0.02 told from 0.05")):
        contest = Contest([Contender(("A",)), Contender(("B",))])
        decided, seeds = 0, 0
        for number in range(DECISIONS):
            objectives: list[list[float]] = [[], []]
            while jobs := Look(contest, objectives, lower=True).next_jobs(places=1):
                for setting, seed in jobs:
                    order = number * contest.most_seeds + seed
                    weights = order + 1_000_000 * setting
                    objectives[setting].append(train(order, weights, lr if setting else 0.05))
            decided += not Look(contest, objectives, lower=True).open
            seeds += len(objectives[0])
        passed &= decided <= 3 if lr == 0.05 else decided >= 0.9 * DECISIONS
        print(f"{outcome}, {DECISIONS} decisions: {decided}, {seeds / DECISIONS:.1f} seeds on average")
    return passed


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.exit(0 if all([errors(), power(), coverage(), looks(), anytime_power(), trained(), decisions()]) else 1)
