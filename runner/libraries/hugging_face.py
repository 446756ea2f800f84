"""Import Hugging Face's libraries, which are optional, and limit their progress bars. No other module imports them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

from runner.distributed.ranks import get_global_rank
from runner.libraries.extras import how_to_install


def import_hf(name: str) -> ModuleType:
    """Return `transformers`, `datasets`, or a library that comes with them, or one of their modules, by its full name.

    Raises:
        ModuleNotFoundError: the library is not installed.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # a library that this one needs is missing
        raise ModuleNotFoundError(f"{package} is not installed here: {how_to_install('hf')}", name=package) from error


@contextmanager
def bars_on_terminals(*packages: str) -> Iterator[None]:
    """Within the context, let these libraries draw progress bars only on a terminal, and only on rank 0.

    Args:
        packages: libraries whose `utils` can switch off the bars: `datasets`, `huggingface_hub`.
    """
    with ExitStack() as stack:
        for utils in (import_hf(f"{package}.utils") for package in packages if not draws_bars()):
            # If this variable turns the bars on, switching them off only warns.
            if not utils.are_progress_bars_disabled() and "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
                utils.disable_progress_bars()
                stack.callback(utils.enable_progress_bars)
        yield


def draws_bars() -> bool:
    """Return whether this process may draw progress bars: it is rank 0 and has a terminal."""
    return get_global_rank() == 0 and sys.stderr.isatty()
