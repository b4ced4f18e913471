"""The application: its commands, what all of them share, and how a mistake becomes one line and exit code 2."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import threading
from contextlib import suppress
from typing import Annotated, ClassVar, NoReturn

import typer

from mergeway import __version__
from mergeway.core.printed import printable
from mergeway.core.ranks import RankLost, joined, started_by_torchrun
from mergeway.errors import GateRefused, MergewayError, speaking_to_a_shell

app = typer.Typer(
    name="mergeway",
    help="Continual model merging: fold fine-tuned checkpoints into one deployed model, one arrival at a time.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="--quiet and --debug may stand anywhere on the line. Exit codes: 0 done, 2 a mistake in the input, 3 refused by a gate, 1 a bug.",
)

# The panels of `mergeway --help`.
FOLD, DEPLOY, TRAIN, COMPARE = "Fold arrivals", "Look and deploy", "Train and prepare", "Compare rules"

# Importing a module registers its commands; --help shows them in this order.
_MODULES = (
    *("trunk", "undo", "merge", "history", "steps", "export", "push", "finetune", "bench", "path", "evaluate"),
    *("report", "suites", "rules", "demo"),
)

REFUSED = 3
INTERRUPTED = 130
_ANYWHERE = ("--quiet", "-q", "--debug")


class Settings:
    """Flags that hold for the whole command line."""

    quiet = False
    debug = False
    silent = False
    words: ClassVar[list[str]] = []


def _show_version(value: bool) -> None:
    if value:
        print(f"mergeway {__version__}")
        raise typer.Exit


@app.callback()
def _shared(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    Settings.quiet, Settings.debug = quiet or Settings.silent, debug


def run() -> int:
    """The `mergeway` program.

    Importing torch makes a million objects that live as long as the process. Looking through them for garbage over and over while
    they are made, and once more at the end, takes a good part of a merge of small checkpoints.
    """
    gc.set_threshold(100_000)
    code = _main_of_a_rank() if started_by_torchrun() else main()
    return code if "torch" not in sys.modules else _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process as Python does, but for taking every module apart, which frees memory that is given back anyway."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType] - waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe has nobody left to tell
            stream.flush()
    os._exit(code)


def _main_of_a_rank() -> int:
    """The same command on every process that torchrun started; only the lead speaks."""
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if command not in ("add", "merge"):
        return _failed(f"'{command}' runs on one process; only add and merge share their work under torchrun", 2)
    try:
        with joined() as team:
            if not team.lead:
                Settings.silent = True
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
            return main()
    except RankLost as problem:
        return _failed(str(problem), 2)


def register() -> None:
    """Bring in every command."""
    for module in _MODULES:
        importlib.import_module(f"mergeway.cli.{module}")


@speaking_to_a_shell()
def main(arguments: list[str] | None = None) -> int:
    """Run a command line; the exit code."""
    register()
    words = list(sys.argv[1:] if arguments is None else arguments)
    Settings.words = words
    _forget_steps()
    shared = [w for w in words if w in _ANYWHERE]
    Settings.debug = "--debug" in shared
    for word in words:
        if any("\ud800" <= c <= "\udfff" for c in word):
            return _failed(f"the argument {word!r} is not valid UTF-8; rename the file", 2)
    try:
        rest = [w for w in words if w not in _ANYWHERE]
        result = app([*shared, *rest], prog_name="mergeway", standalone_mode=False)
        sys.stdout.flush()
        if result == INTERRUPTED:  # some versions of typer return it, others raise
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except RankLost as problem:
        Settings.silent = False  # the lead may be the one that is gone
        return _failed(str(problem), 2)
    except GateRefused as problem:
        return _failed(str(problem), REFUSED)
    except MergewayError as problem:
        return _failed(str(problem), 2)
    except typer.TyperException as problem:
        return _failed(problem.format_message(), 2) if words else 0  # without words the help has been printed
    except (typer.Abort, KeyboardInterrupt):
        return _failed(f"interrupted; {_outcome()}", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone; what is left in the buffer has nowhere to go either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as problem:
        # Not foreseen where it happened, but the disk's or the system's fault all the same.
        return _failed(_system_error(problem), 2)
    except Exception as problem:
        if Settings.debug:
            raise
        if _is_memory(problem):
            return _failed(
                f"there was not enough memory; {_outcome()} (fewer --threads, a smaller --micro-batch or more ranks need less)",
                1,
            )
        return _failed(
            f"this is a bug in mergeway: {type(problem).__name__}: {problem} (run again with --debug and report it)", 1
        )


def _outcome() -> str:
    """What has become of the trunk by now; the module is there if a trunk was opened."""
    store = sys.modules.get("mergeway.trunk.store")
    steps = store.committed if store else []
    return f"step {steps[-1]} is committed" if steps else "nothing was changed"


def _forget_steps() -> None:
    store = sys.modules.get("mergeway.trunk.store")
    if store:
        store.committed.clear()


def _system_error(problem: OSError) -> str:
    where = f"{problem.filename}: " if problem.filename else ""
    return f"{where}the system refused ({problem.strerror or problem}); see that the file can be read and written, and run again"


def _is_memory(problem: Exception) -> bool:
    """Whether memory ran out; torch says so in words, on every device its own."""
    text = str(problem)
    return isinstance(problem, MemoryError) or (
        isinstance(problem, RuntimeError) and ("allocate memory" in text or "out of memory" in text)
    )


def _failed(message: str, code: int) -> int:
    if Settings.debug:
        import traceback

        traceback.print_exc()
    if not Settings.silent or code == 1:  # a bug may show on one rank alone
        print("error: " + printable(" ".join(message.split())), file=sys.stderr)
    return code


def read_options(pairs: list[str] | None) -> dict[str, str]:
    """KEY=VALUE pairs as a mapping."""
    from mergeway.errors import OptionError

    options: dict[str, str] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise OptionError(f"--set {pair!r}: expected KEY=VALUE, such as --set alpha=0.5")
        if key in options:
            raise OptionError(f"--set {key}: given twice")
        options[key] = value
    return options


def command_line() -> str:
    """The command as it was typed, for the model card."""
    import shlex

    return shlex.join(["mergeway", *Settings.words])
