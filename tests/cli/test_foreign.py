"""Words of other libraries, and their counterparts here."""

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
    """All keys in a config file, in full."""
    for key, value in content.items() if isinstance(content, dict) else ():
        yield f"{path}.{key}".lstrip(".")
        yield from keys_of(value, f"{path}.{key}")


def texts(row: dict[str, Any]) -> Iterator[str]:
    yield from filter(None, [row.get("write"), *row.get("values", {}).values()])


def test_what_is_to_be_written_exists():
    known = set(keys_of(yaml.safe_load((CONF / "config.yaml").read_text()), ""))
    for file in CONF.glob("*/*.yaml"):
        known |= set(keys_of(yaml.safe_load(file.read_text()), file.parent.name))
    for row in _table().values():
        commands = [one.split()[1:] for one in texts(row) if one.startswith("runner ")]
        for command in commands:
            assert parse(command).verb == command[0], command
        others = " ".join(one for one in texts(row) if not one.startswith("runner ")).split()
        for word in [*others, *(one for command in commands for one in parse(command).overrides)]:
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
    ("key", "value", "said"),
    [
        ("model.module.epochs", 3, None),  # of a class of the user's own
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
def test_only_keys_that_must_be_foreign_are_taken_for_it(key: str, value: Any, said: str | None):
    assert about_foreign(key, value) == said
