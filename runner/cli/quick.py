"""Modes that compose nothing, such as `mode=runs`: answered from the typed keys alone, before Hydra is imported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from runner import __version__
from runner.cli.nearest import advice_in, nearest
from runner.cli.rows import MODES, Mode, find_mode
from runner.cli.subcommands import CONFIG_DIR, spell_out
from runner.distributed.environment import is_rank_zero
from runner.failures.exit_codes import DONE, WRONG_CONFIG
from runner.failures.facts import WrongKey, argument_of
from runner.terminal.answer import error_object, give
from runner.terminal.commands import unquoted
from runner.terminal.text import print_to_stderr


def answer(arguments: Sequence[str]) -> int | None:
    """Answer a command that composes nothing, and return its exit code; None for all other commands. Rank 0 prints."""
    mode = MODES.get(arguments[0]) if arguments else None
    try:
        if _asks_for("--version", arguments):
            return _print_version()
        if _asks_for("--help", arguments) or "-h" in arguments:
            return _run(MODES["help"], {})
        spelled = spell_out(arguments)
        names = [one.partition("=")[2] for one in spelled if one.startswith("mode=")]
        mode = MODES.get(unquoted(names[-1])) if names else None
        if mode is None or mode.composes:
            return None
        give(mode=mode.name)
        return _run(mode, own_keys(mode, spelled))
    except (ValueError, OSError) as error:
        if is_rank_zero():
            print_to_stderr(f"error: {error}")  # names in it may be from files of others
            give(mode=None if mode is None else mode.name, error=describe_error(error, mode))
        return WRONG_CONFIG if mode is None else mode.code_if_refused


def describe_error(error: Exception, mode: Mode | None) -> dict[str, Any]:
    """Return the JSON form of an error in a mode's arguments; one that names no key is about the mode's words."""
    advice = advice_in(error)
    key = error.key.partition("=")[0] if isinstance(error, WrongKey) else advice.key or argument_of(error)
    if not key and mode is not None and (mode.first_key or mode.has_value):
        key = f"{mode.name}.{mode.first_key}".rstrip(".")
    is_value = isinstance(error, WrongKey) and error.value is not None
    fix = advice.fix or fix_of(key, advice.meant, is_value)
    return error_object(WRONG_CONFIG, str(error), key, advice.allowed, fix)


def fix_of(key: str, meant: str, is_value: bool) -> str:
    """Return what to type instead of a wrong argument: the key with another value, or another key."""
    if not meant:
        return ""
    if is_value:
        return f"{key}={meant}"
    return meant if "." in meant else f"{key.rpartition('.')[0]}.{meant}".removeprefix(".")


def own_keys(mode: Mode, arguments: Sequence[str]) -> dict[str, str]:
    """Return the values that are typed for a mode, by key: its own, under its name, and that of `--config-dir`."""
    found: dict[str, str] = {}
    given = iter(arguments)
    for one in given:
        key, equals, value = one.partition("=")
        if key == CONFIG_DIR:
            found[CONFIG_DIR] = value if equals else next(given, "")
            continue
        if key == "mode" and equals:
            find_mode(unquoted(value))
            continue
        name = mode.name if key == mode.name and mode.has_value else key.removeprefix(f"{mode.name}.")
        is_known = (name in mode.keys and key != name) or (name == mode.name and mode.has_value)
        if not equals or not is_known:
            keys = [mode.name] * mode.has_value + [f"{mode.name}.{own}" for own in mode.keys]
            raise WrongKey(
                one, f"mode={mode.name} composes no config and takes no such key; " + nearest(key.lstrip("-"), keys)
            )
        if (text := unquoted(value)) not in ("", "null"):
            allowed = mode.keys.get(name)
            if isinstance(allowed, tuple) and text not in allowed:
                raise WrongKey(key, nearest(text, allowed), repr(text))
            found[name] = text
    return found


def split_names(text: str) -> list[str]:
    """Return the names in a typed list, `[A,'B c']`; none if it is no list."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else ""
    parts = re.findall(r"""\s*('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,]+)""", inner)
    return [name for one in parts if (name := unquoted(one.strip()))]


def _asks_for(option: str, arguments: Sequence[str]) -> bool:
    """Return whether an option is among the arguments, in full or cut short."""
    return any(option.startswith(one) and len(one) > 3 for one in arguments)


def _print_version() -> int:
    if is_rank_zero():
        print(f"runner {__version__}")
    return 0


def _run(mode: Mode, typed: Mapping[str, str]) -> int:
    if is_rank_zero():
        code = mode.resolve()(typed)
        return code if isinstance(code, int) else DONE
    return DONE
