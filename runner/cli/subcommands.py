"""Modes typed as words: `runner init my_project` is `mode=init init=my_project`."""

from __future__ import annotations

from collections.abc import Sequence

from runner.cli.command_line import typed_value
from runner.cli.rows import MODES, Mode
from runner.terminal.commands import quoted

CONFIG_DIR = "--config-dir"


def spell_out(arguments: Sequence[str]) -> list[str]:
    """Return arguments with the words of a mode, or its own keys without `mode=`, as the keys of this mode."""
    mode = MODES.get(arguments[0]) if arguments else None
    if mode is not None and mode.words is not None:
        return [*_in_full(_spelled(mode, arguments[1:]), mode), f"mode={mode.name}"]
    if (typed := MODES.get(typed_value(arguments, "mode") or "")) is not None:
        return _in_full(arguments, typed)
    if typed_value(arguments, "mode") is None:
        for mode in MODES.values():
            if mode.words is not None and any(
                _is_own(one, mode) and one.partition("=")[2] != "null" for one in arguments
            ):
                return [*arguments, f"mode={mode.name}"]
    return list(arguments)


def _in_full(arguments: Sequence[str], mode: Mode) -> list[str]:
    """Return arguments with a mode's own keys in full, such as `replay.batch=5` for `batch=5`, and texts in quotes."""
    if not mode.trains_again:
        return list(arguments)
    spelled = []
    for one in arguments:
        key, _, value = one.partition("=")
        name = key.removeprefix(f"{mode.name}.")
        if name in mode.keys:
            is_bare = mode.keys[name] is str and value and value[0] not in "'\""
            one = f"{mode.name}.{name}={quoted(value) if is_bare else value}"  # such as HEAD~8, for Hydra's grammar
        spelled.append(one)
    return spelled


def _is_own(argument: str, mode: Mode) -> bool:
    key, equals, _ = argument.partition("=")
    return bool(equals) and (key == mode.name or key.startswith(f"{mode.name}."))


def _spelled(mode: Mode, arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a mode, with its words turned into values of its keys."""
    least, most = mode.words or (0, 0)
    arguments = _with_values(arguments)
    words = [one for one in arguments if not _is_key(one, mode)]
    if not least <= len(words) <= most:
        raise ValueError(f"{' '.join([mode.name, *arguments])}: write {mode.example}")
    others = [one for one in arguments if _is_key(one, mode)]
    if not words:
        return others
    if mode.word_keys:
        values = [words[0] if mode.word_keys[0] != "run" else quoted(words[0]), *words[1:]]
        return [*(f"{key}={value}" for key, value in zip(mode.word_keys, values, strict=False)), *others]
    if mode.first_key:  # its words are one text
        return [f"{mode.name}.{mode.first_key}={' '.join(words)}", *others]
    value = quoted(words[0]) if most == 1 else f"[{','.join(map(quoted, words))}]"
    return [f"{mode.name}={value}", *others]


def _with_values(arguments: Sequence[str]) -> list[str]:
    """Return arguments with `--config-dir FOLDER` joined to a single one."""
    joined = list(arguments)
    if CONFIG_DIR in joined[:-1]:
        place = joined.index(CONFIG_DIR)
        joined[place : place + 2] = [f"{CONFIG_DIR}={joined[place + 1]}"]
    return joined


def _is_key(argument: str, mode: Mode) -> bool:
    """Return whether an argument is a key or an option; where nothing is composed, a word may have a `=` too."""
    if argument.startswith(("-", "~")):
        return True
    return "=" in argument if mode.composes else _is_own(argument, mode)
