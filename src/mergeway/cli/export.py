"""`mergeway export`: the deployed model as a directory of its own."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergeway.cli import completion
from mergeway.cli.app import DEPLOY, app, command_line
from mergeway.cli.options import BaseAt, Force, Json, ShardSize, StepOption, TrunkPath

if TYPE_CHECKING:
    from mergeway.checkpoint.adapter import Adapter
    from mergeway.checkpoint.source import JsonObject
    from mergeway.core.progress import Progress

ENOUGH = 0.9  # share of the update's energy below which an adapter is another model


TaskHead = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="Put this task's own head into the model or adapter.",
        show_default=False,
        autocompletion=completion.trunk_tasks,
    ),
]


@app.command(rich_help_panel=DEPLOY)
def export(
    trunk: TrunkPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model directory to write.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="float64, float32, float16 or bfloat16; by default that of the base.", show_default=False
        ),
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(
            "--lora", metavar="RANK", help="Write the update as a PEFT adapter of this rank.", show_default=False
        ),
    ] = None,
    task: TaskHead = None,
    step: StepOption = None,
    backbone: Annotated[
        bool,
        typer.Option("--backbone", help="Keep the base's head in the model, and write those of all tasks beside it."),
    ] = False,
    shard_size: ShardSize = "5GB",
    force: Force = False,
    base: BaseAt = None,
    as_json: Json = False,
) -> None:
    """Write the deployed model as a directory that transformers loads, or its update as an adapter that peft loads."""
    import torch

    from mergeway.checkpoint.writer import read_size
    from mergeway.cli.display import console, print_json, progress
    from mergeway.core.tensors import read_dtype
    from mergeway.trunk import Trunk

    wanted = read_dtype(dtype) if dtype else None
    adapter = None
    with progress() as bar:
        opened = Trunk.open(trunk, progress=bar, base=base)
        last = opened.log()[-1] if step is None else opened.record(step)
        asked: JsonObject = {"task": task, "backbone": backbone, "force": force, "step": step}
        asked["command"] = command_line()
        if lora is not None:
            adapter = opened.export_lora(out, lora, dtype=wanted or torch.float32, **asked)
            _warn(adapter, bar)
        else:
            opened.export(out, dtype=wanted, shard_size=read_size(shard_size), **asked)
    if as_json:
        written = {"out": str(out), "step": last.step, "result": last.result}
        print_json(written | (_adapter_json(adapter) if adapter else {}))
        return
    if adapter:
        _print_adapter(adapter)
    what = f" as a rank-{adapter.rank} adapter" if adapter else ""
    console().print(f"step {last.step} of {trunk} exported to {out}{what}", markup=False)


def _warn(adapter: Adapter, bar: Progress) -> None:
    if adapter.kept < ENOUGH:
        bar.note(
            f"the adapter keeps only {100 * adapter.kept:.1f} % of the update's energy; a larger --lora keeps more of the linear weights"
        )


def _adapter_json(adapter: Adapter) -> dict[str, object]:
    return {
        "rank": adapter.rank,
        "kept": adapter.kept,
        "layers": [asdict(layer) for layer in adapter.layers],
        "left_out": [asdict(layer) for layer in adapter.left_out],
    }


def _print_adapter(adapter: Adapter) -> None:
    """What each layer keeps of its update, and which tensors an adapter has no place for."""
    from mergeway.cli.display import console, table

    left = sum(layer.energy for layer in adapter.left_out)
    total = left + sum(layer.energy for layer in adapter.layers)
    cells = [
        (a.name, "×".join(map(str, a.shape)), f"{100 * a.energy / total:.2f} %", f"{100 * a.kept:.2f} %")
        for a in adapter.layers
    ]
    if adapter.left_out:
        cells.append((f"{len(adapter.left_out)} without a place", "", f"{100 * left / total:.2f} %", "0.00 %"))
    cells.append(("all", "", "100.00 %", f"{100 * adapter.kept:.2f} %"))
    columns = ("tensor", "shape", "energy", "kept")
    console().print(table(columns, cells, numbers=columns[1:]))
