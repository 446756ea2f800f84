"""Runs the typed command: directly if its verb composes no config, otherwise through Hydra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner import __version__
from runner.cli.command import Command, parse, typed_verb
from runner.cli.nearest import advice_in, fix_of
from runner.cli.verb import Verb
from runner.distributed.environment import is_rank_zero
from runner.distributed.slurm import use_tasks_as_ranks
from runner.failures.errors import WrongKey, cannot_use
from runner.failures.exit_codes import DONE, WRONG_CONFIG
from runner.failures.facts import argument_of
from runner.files.addresses import without_credentials
from runner.terminal.answer import error_object, set_fields
from runner.terminal.text import print_to_stderr
from runner.verbs import module_of


def run_typed(arguments: Sequence[str]) -> int:
    """Run the typed command, and return its exit code. Any rank; rank 0 prints."""
    use_tasks_as_ranks()
    if _asks_for("--version", arguments):
        return _print_version()
    verb = typed_verb(arguments)
    try:
        if _asks_for("--help", arguments) or "-h" in arguments:
            return _answer(Command.of("help", *([] if verb is None else [verb.name])))
        command = parse(arguments)
        verb = command.row
        set_fields(verb=verb.name)
        if not verb.composes:
            return _answer(command)
    except (ValueError, OSError, ImportError) as error:
        if is_rank_zero():
            print_to_stderr(f"error: {without_credentials(_text_of(error))}")
            set_fields(verb=None if verb is None else verb.name, error=describe_error(error, verb))
        return WRONG_CONFIG if verb is None else verb.code_if_refused
    from runner.program.command import run_command  # imports Hydra, which takes longer than printing the help

    return run_command(command)


def _text_of(error: Exception) -> str:
    return cannot_use(error) if isinstance(error, OSError) and error.filename is not None else str(error)


def describe_error(error: Exception, verb: Verb | None) -> dict[str, Any]:
    """Return an error in the command line as JSON; if it names no key, its key is the verb's first word."""
    advice = advice_in(error)
    key = error.key.partition("=")[0] if isinstance(error, WrongKey) else advice.key or argument_of(error)
    if not key and verb is not None:
        key = verb.first_word
    is_value = isinstance(error, WrongKey) and error.value is not None
    fix = advice.fix or fix_of(key, advice.meant, is_value)
    return error_object(WRONG_CONFIG, _text_of(error), key, advice.allowed, fix)


def _asks_for(option: str, arguments: Sequence[str]) -> bool:
    """Return whether the arguments contain an option, in full or abbreviated."""
    return any(option.startswith(argument) and len(argument) > 3 for argument in arguments)


def _print_version() -> int:
    if is_rank_zero():
        print(f"runner {__version__}")
    return DONE


def _answer(command: Command) -> int:
    if is_rank_zero():
        code = module_of(command.row).run(command)
        return code if isinstance(code, int) else DONE
    return DONE
