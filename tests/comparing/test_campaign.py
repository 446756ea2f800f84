"""Campaigns: levels of e-LOND by hand, the rate of wrong claims in simulations, and the file of a campaign."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from runner.comparing.campaign import Campaign, weight
from runner.comparing.decision import LEVEL
from runner.comparing.evidence import log_wealth
from runner.failures.errors import WrongKey


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    return Campaign.named("mine", tmp_path)


def test_the_weights_sum_to_at_most_1():
    first = sum(weight(number) for number in range(1, 100_001))
    rest = 1 / math.log(100_001) / 2.1098  # the integral of 1 / (t log(t)^2)
    assert 0.99 < first + rest <= 1.0001


def test_levels_grow_with_claims_and_stay_when_a_comparison_is_continued(campaign: Campaign):
    assert campaign.enter({"a": "x | y"})["a"] == LEVEL * weight(1)
    campaign.claim({"a": "better"})
    assert campaign.enter({"b": "x | z", "c": "x | v"}) == {"b": LEVEL * weight(2) * 2, "c": LEVEL * weight(3) * 2}
    assert campaign.enter({"a": "x | y"})["a"] == LEVEL * weight(1)
    campaign.claim({"b": ""})
    assert [*json.loads(campaign.path.read_text())["comparisons"]] == ["a", "b", "c"]


def test_of_200_comparisons_with_20_real_differences_at_most_5_percent_of_claims_are_wrong(tmp_path: Path):
    draw = np.random.default_rng(0)
    rates = []
    powers = []
    for repeat in range(4):
        campaign = Campaign.named(f"c{repeat}", tmp_path)
        real = {*draw.choice(200, 20, replace=False)}
        for number in range(200):
            level = campaign.enter({str(number): ""})[str(number)]
            wealth = log_wealth(draw.standard_normal(40) + 2.0 * (number in real))
            if wealth.max() >= -math.log(level):
                campaign.claim({str(number): "better"})
        comparisons = json.loads(campaign.path.read_text())["comparisons"]
        claims = {int(id) for id, comparison in comparisons.items() if comparison["claim"]}
        rates.append(len(claims - real) / max(len(claims), 1))
        powers.append(len(claims & real) / 20)
    assert np.mean(rates) <= LEVEL and np.mean(powers) > 0.95


def test_concurrent_decisions_lose_no_entry(campaign: Campaign):
    with ThreadPoolExecutor(4) as pool:
        levels = [*pool.map(lambda number: campaign.enter({str(number): ""})[str(number)], range(20))]
    assert sorted(levels, reverse=True) == [LEVEL * weight(number) for number in range(1, 21)]


def test_a_damaged_file_and_an_invalid_name_are_refused(campaign: Campaign, tmp_path: Path):
    campaign.enter({"a": ""})
    campaign.path.write_text("{")
    with pytest.raises(WrongKey, match="its file is damaged"):
        campaign.enter({"b": ""})
    with pytest.raises(WrongKey, match="--campaign='../x'"):
        Campaign.named("../x", tmp_path)
