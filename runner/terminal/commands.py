"""Writes commands for users to paste: values quoted for Hydra's grammar, arguments for the shell."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*", re.ASCII)  # text that needs no quotes
_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "nan", "inf")  # words that Hydra does not read as text


sweep_arguments: list[str] = []
"""The arguments of the sweep's command, if a launcher started this process for one of its jobs."""


def show_command(*arguments: str) -> str:
    """Return a runner command for the shell."""
    return f"python -m runner {shlex.join(arguments)}"


def typed_command() -> list[str]:
    """Return the command as the user typed it, interpreter first; in a launched job, the sweep's command."""
    return [sys.orig_argv[0], "-m", "runner", *sweep_arguments] if sweep_arguments else sys.orig_argv


def show_typed(command: Sequence[str]) -> str:
    """Return a command as typed, without the folders of the interpreter or of the `runner` script."""
    program = command[1:] if command[1:] and Path(command[1]).name == "runner" else command
    return shlex.join([*(Path(word).name for word in program[:1]), *program[1:]]) or "python"


def override(key: str, text: str) -> str:
    """Return the override that sets a key to a text, quoted if Hydra would otherwise read it as something else."""
    return f"{key}={text if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else quoted(text)}"


def quoted(text: str) -> str:
    """Return text quoted as the value of an override, so that Hydra and OmegaConf read exactly this text."""
    return in_quotes(re.sub(r"(\\*)\$\{", r"\1\1\\${", text))  # escape interpolations


def in_quotes(text: str) -> str:
    """Return text in quotes for Hydra's grammar. OmegaConf still resolves interpolations in it."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text) + "'"


def unquoted(text: str) -> str:
    """Return the text of a typed value, without the quotes and escapes of Hydra's grammar if it has any."""
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        inner = re.sub(rf"(\\+)(?={text[0]}|$)", lambda match: match[1][: len(match[1]) // 2], text[1:-1])
        return re.sub(r"(\\+)\$\{", lambda match: match[1][: len(match[1]) // 2] + "${", inner)
    return text
