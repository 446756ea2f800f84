"""Commands to paste: values are quoted for Hydra's grammar, and arguments for the shell."""

from __future__ import annotations

import re
import shlex

_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*", re.ASCII)  # a text that Hydra reads as it is
_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "nan", "inf")  # which it reads as something else


typed: list[str] = []
"""The arguments of the command, in a process that a launcher started for a job of a sweep."""


def show_command(*arguments: str) -> str:
    """Return a command of the runner for a shell."""
    return f"python -m runner {shlex.join(arguments)}"


def override(key: str, text: str) -> str:
    """Return the override that gives a key a text, with the text in quotes where Hydra would read something else."""
    return f"{key}={text if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else quoted(text)}"


def quoted(text: str) -> str:
    """Return text as a quoted value of an override, which Hydra and OmegaConf turn into the same text again."""
    return in_quotes(re.sub(r"(\\*)\$\{", r"\1\1\\${", text))  # no interpolation


def in_quotes(text: str) -> str:
    """Return text in the quotes of Hydra's grammar; OmegaConf still resolves interpolations in it."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text) + "'"


def unquoted(text: str) -> str:
    """Return the text of a typed value, which may be in the quotes of Hydra's grammar."""
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        inner = re.sub(rf"(\\+)(?={text[0]}|$)", lambda match: match[1][: len(match[1]) // 2], text[1:-1])
        return re.sub(r"(\\+)\$\{", lambda match: match[1][: len(match[1]) // 2] + "${", inner)
    return text
