"""Keys, comments and descriptions of config files, read without composing them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.cli.catalogue import CONF, Choice, Key, choices, chosen_in, default_choices, keys_of

TEXT = """\
# @package _global_
# python -m runner experiment=mine
# Hardware: one GPU, 5 s. Expected: loss 0.1
# (mean, spread; n=3). Trains mine, e.g. two. And more.
defaults:
  - /callbacks: [lr_monitor]
  - override /model: mlp
optimizer:
  _target_: torch.optim.SGD
  # above
  lr: 0.1
  betas: [0.9, # first
    0.95] # both
  name: "a # b"  # beside
  # both of them, which are
  # large
  eps: 1  # first,
    # second,
          # third
  # single
  foreach: null  # flag
"""


def test_keys_have_the_comments_above_or_beside_them():
    assert keys_of(TEXT) == [
        Key("optimizer.lr", "0.1", "above"),
        Key("optimizer.betas", "[0.9, 0.95]", "both"),
        Key("optimizer.name", '"a # b"', "beside"),
        Key("optimizer.eps", "1", "both of them, which are large; first, second, third"),
        Key("optimizer.foreach", "null", "single; flag"),
    ]
    assert keys_of("a: [") == keys_of("") == keys_of("- 1") == []


@pytest.mark.parametrize("choice", choices(CONF), ids=lambda choice: choice.typed)
def test_no_comment_of_a_config_is_left_out(choice: Choice):
    if choice.group in ("experiment", "sweep"):  # the comments there are about several keys
        return
    shown = " ".join(key.comment for key in choice.keys)
    below = re.sub(r"\A(#.*\n)+", "", choice.text)
    comments = re.findall(r"^\s*# *(.+)", below, re.MULTILINE)
    assert [comment for comment in comments if comment not in shown] == []


def test_a_recipe_is_described_without_its_command(tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(TEXT)
    (recipe,) = (choice for choice in choices(tmp_path) if choice.is_own)
    assert recipe.summary == "Trains mine, e.g. two"
    assert recipe.command == "python -m runner experiment=mine"
    assert recipe.typed == "experiment=mine" and recipe.package == ""
    assert chosen_in(TEXT) == {"callbacks": ["lr_monitor"], "model": ["mlp"]}
    assert chosen_in("defaults: 3") == chosen_in("[") == {}


def test_the_default_choices_exist():
    names = {(choice.group, choice.name) for choice in choices(CONF)}
    defaults = {(group, name) for group, chosen in default_choices().items() for name in chosen}
    assert {pair for pair in defaults if not pair[0].startswith("hydra/")} <= names
    assert ("model", "resnet8") in defaults
