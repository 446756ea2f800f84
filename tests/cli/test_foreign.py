"""Keys and options of other libraries, and the commands to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from runner.cli.catalogue import CONF
from runner.cli.command import parse
from runner.cli.foreign import _table, about_foreign


def keys_of(content: Any, path: str) -> Iterator[str]:
    """Yield all keys in a config file, with their full paths."""
    for key, value in content.items() if isinstance(content, dict) else ():
        yield f"{path}.{key}".lstrip(".")
        yield from keys_of(value, f"{path}.{key}")


def texts(row: dict[str, Any]) -> Iterator[str]:
    """Yield all that a row of the table tells users to write."""
    yield from filter(None, [row.get("write"), *row.get("values", {}).values()])


def test_suggested_keys_choices_and_verbs_exist():
    known = set(keys_of(yaml.safe_load((CONF / "config.yaml").read_text()), ""))
    for file in CONF.glob("*/*.yaml"):
        known |= set(keys_of(yaml.safe_load(file.read_text()), file.parent.name))
    for row in _table().values():
        commands = [text.split()[1:] for text in texts(row) if text.startswith("runner ")]
        for command in commands:
            assert parse(command).verb == command[0], command
        overrides = " ".join(text for text in texts(row) if not text.startswith("runner ")).split()
        for word in [*overrides, *(override for command in commands for override in parse(command).overrides)]:
            key, _, value = word.lstrip("+~").partition("=")
            if not re.match(r"[+~\w]", word) or "<" in word or "torchrun" in word or key == "runner":
                continue
            group = CONF / key
            if group.is_dir():
                assert value == "{}" or (group / f"{value}.yaml").exists(), word
            elif word.startswith("~"):
                assert (CONF / f"{key.replace('.', '/')}.yaml").exists(), word
            else:
                assert key in known, word


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        ("model.module.epochs", 3, None),  # of a class of the user
        ("callbacks.mine.lr", 3, None),
        ("optimizer.momentum", 0.9, None),  # it exists here, but not in this optimizer
        ("epochs", None, "write trainer.max_duration=...ep"),
        ("epochs", "5ep", "write trainer.max_duration=5ep"),
        ("save_steps", "100ba", "write callbacks.checkpoint_saver.save_interval=100ba"),
        ("fp16", False, "write trainer.precision=fp32"),
        ("hparams.nested.lr", 0.1, "write optimizer.lr=0.1"),
        ("unknown", 3, None),
    ],
)
def test_only_keys_that_do_not_exist_here_are_foreign(key: str, value: Any, advice: str | None):
    assert about_foreign(key, value) == advice
