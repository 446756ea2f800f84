"""Writes commands for users to paste: values quoted for Hydra's grammar, arguments for the shell."""

from __future__ import annotations

import re
import shlex

_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*", re.ASCII)  # text that needs no quotes
_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "nan", "inf")  # words that Hydra does not read as text


sweep_arguments: list[str] = []
"""The arguments of the sweep's command, if a launcher started this process for one of its jobs."""


def show_command(*arguments: str) -> str:
    """Return a runner command for the shell."""
    return f"python -m runner {shlex.join(arguments)}"


def override(key: str, text: str) -> str:
    """Return the override that sets a key to a text, in quotes if Hydra would otherwise read something else."""
    return f"{key}={text if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else quoted(text)}"


def quoted(text: str) -> str:
    """Return text as a quoted value of an override, from which Hydra and OmegaConf read exactly that text."""
    return in_quotes(re.sub(r"(\\*)\$\{", r"\1\1\\${", text))  # escape interpolations


def in_quotes(text: str) -> str:
    """Return text in quotes for Hydra's grammar. OmegaConf still resolves its interpolations."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text) + "'"


def unquoted(text: str) -> str:
    """Return the text of a typed value, which may be quoted in Hydra's grammar."""
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        inner = re.sub(rf"(\\+)(?={text[0]}|$)", lambda match: match[1][: len(match[1]) // 2], text[1:-1])
        return re.sub(r"(\\+)\$\{", lambda match: match[1][: len(match[1]) // 2] + "${", inner)
    return text
