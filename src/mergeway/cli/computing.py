"""The options of every command that runs a model, declared once: `@computes` hands them over as one `compute`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from mergeway.cli.options import AllowCode

_OPTIONS = {
    "device": (
        Annotated[str, typer.Option("--device", help="Where the model is run: auto, cpu, cuda or mps.")],
        "auto",
    ),
    "autocast": (
        Annotated[bool, typer.Option("--autocast", help="Run matrix products in bfloat16; weights stay float32.")],
        False,
    ),
    "micro_batch": (
        Annotated[
            int | None,
            typer.Option("--micro-batch", metavar="N", help="Examples run at once; less memory.", show_default=False),
        ],
        None,
    ),
    "checkpointing": (
        Annotated[
            bool, typer.Option("--checkpointing", help="Work activations out again in the backward pass; less memory.")
        ],
        False,
    ),
    "compile": (Annotated[bool, typer.Option("--compile", help="Run the model through torch.compile.")], False),
    "allow_code": (AllowCode, False),
}


def computes(command: Callable[..., None]) -> Callable[..., None]:
    """A command with these options in place of its last parameter, `compute`."""
    command.__annotations__.pop("compute")  # no option, and its type would bring in torch to print a help text
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "compute"]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in _OPTIONS.items()
    ]

    def run(**given: Any) -> None:
        from mergeway.model.compute import Compute

        compute = Compute(**{name: given.pop(name) for name in _OPTIONS})
        if given.get("engine") != "ray":  # there it is the cluster's machines that need the device
            _ = compute.where
        command(**given, compute=compute)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    return run
