"""Shows what a docstring has under `Logs:` as a list, with the names of metrics as code; for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe


class LogsSection(griffe.Extension):
    """Makes a list in Markdown of the section that no docstring style knows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Logs:\n((?:    .+\n?)+)", as_list, obj.docstring.value, flags=re.MULTILINE)


def as_list(section: re.Match[str]) -> str:
    """Return the entries `key: meaning` of a section as a list."""
    entries = re.sub(r"^    (\S.*?): ", r"- `\1`: ", section[1], flags=re.MULTILINE)
    return f"**Logs:**\n\n{entries}"
