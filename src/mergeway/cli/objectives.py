"""Finding the objective that a command line names: a suite's calibration data, or a function of the user's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torch import Tensor

    from mergeway.bench.suite import Suite
    from mergeway.calibration.objective import Loss, Objective
    from mergeway.model.compute import Compute
    from mergeway.model.inputs import Params

ObjectiveOption = Annotated[
    str | None,
    typer.Option(
        "--objective",
        metavar="M:F",
        help="A Python function from named tensors to a loss, as module:function.",
        show_default=False,
    ),
]


def find_objective(suite: str | None, function: str | None, arrivals: Sequence[str], compute: Compute) -> Loss | None:
    """The objective for a stream of arrivals; None when neither is given."""
    from mergeway.errors import OptionError

    if suite and function:
        raise OptionError("--suite and --objective: give one of them")
    if function:
        return import_function(function, compute)
    if suite is None:
        return None
    return match_tasks(find_suite(suite, compute), arrivals)


def match_tasks(suite: Suite, arrivals: Sequence[str]) -> Objective:
    """The suite's objective with its tasks in the order of the arrivals, matched by path or by name."""
    from mergeway.errors import OptionError

    order = []
    for arrival in arrivals:
        found = [t.name for t in suite.tasks if t.is_of(arrival)]
        if not found:
            raise OptionError(
                f"{arrival}: is not an expert of suite '{suite.name}', and its name is none of its tasks; name the directory after the task"
            )
        order.append(found[0])
    return suite.objective(order)


def find_suite(name: str, compute: Compute | None = None) -> Suite:
    """A suite by its directory, or by its name."""
    from mergeway.bench.suite import load_suite
    from mergeway.bench.suites import suite_directory

    return load_suite(suite_directory(name), compute=compute)


def import_function(text: str, compute: Compute) -> Loss:
    """A function from `module:function`; modules in the working directory count."""
    from mergeway.calibration.objective import Objective
    from mergeway.errors import OptionError
    from mergeway.model.compute import Compute

    if compute != Compute():
        raise OptionError(
            "--objective: a function of your own runs where and how it says itself; leave out --device and what goes with it"
        )
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise OptionError(f"--objective {text!r}: expected module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Loss = getattr(importlib.import_module(module), name)
    except ImportError as problem:
        raise OptionError(f"--objective {text}: the module cannot be imported ({problem})") from None
    except AttributeError:
        raise OptionError(f"--objective {text}: module '{module}' has no '{name}'") from None
    except Exception as problem:  # whatever the user's own module does when it is imported
        raise OptionError(
            f"--objective {text}: importing the module failed ({type(problem).__name__}: {problem})"
        ) from None
    if not callable(found):
        raise OptionError(f"--objective {text}: is not a function")
    return found if isinstance(found, Objective) else _guarded(text, found)


def _guarded(text: str, function: Callable[[Params], Tensor]) -> Callable[[Params], Tensor]:
    """The user's function, whose own errors are the user's to mend."""
    from mergeway.errors import MergewayError, OptionError

    def loss(params: Params) -> Tensor:
        try:
            return function(params)
        except MergewayError:
            raise
        except Exception as problem:
            raise OptionError(f"--objective {text} failed ({type(problem).__name__}: {problem})") from problem

    return loss
