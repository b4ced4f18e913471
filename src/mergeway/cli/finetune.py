"""The commands around a merge: `finetune` before it, `moments` for it, `align` after it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergeway.cli import completion
from mergeway.cli.app import TRAIN, app, command_line
from mergeway.cli.computing import computes
from mergeway.cli.options import BaseAt, Force, Json, NoWait, SuiteName, TrunkPath

if TYPE_CHECKING:
    from mergeway.model.compute import Compute
    from mergeway.train import Finetuned, Training


TaskNames = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        help="A task of it; several with commas, or 'all', are trained jointly.",
        autocompletion=completion.suite_tasks,
    ),
]
Out = Annotated[Path, typer.Option("--out", help="The arrival's directory.")]
Start = Annotated[
    str | None,
    typer.Option("--start", help="An expert or a trunk to start from; by default the base.", show_default=False),
]
Tangent = Annotated[bool, typer.Option("--tangent", help="Train in the tangent space of the base.")]
Lwf = Annotated[bool, typer.Option("--lwf", help="Distil from the model at the start.")]
LwfWeight = Annotated[float, typer.Option("--lwf-weight", help="What distillation counts in the loss.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="How soft the distilled answers are.", show_default=False)
]
Ewc = Annotated[bool, typer.Option("--ewc", help="Penalise moves by the Fisher information of earlier tasks.")]
EwcWeight = Annotated[float, typer.Option("--ewc-weight", help="What the penalty counts in the loss.")]
Epochs = Annotated[int | None, typer.Option("--epochs", help="Passes over the training data.", show_default=False)]
Steps = Annotated[int | None, typer.Option("--steps", help="Steps in all, instead of --epochs.", show_default=False)]
Rate = Annotated[float | None, typer.Option("--lr", help="The highest learning rate.", show_default=False)]
WeightDecay = Annotated[float | None, typer.Option("--weight-decay", help="AdamW's weight decay.", show_default=False)]
Batch = Annotated[int | None, typer.Option("--batch", help="Examples a step.", show_default=False)]
Warmup = Annotated[
    float | None, typer.Option("--warmup", help="The share of the steps in which the rate rises.", show_default=False)
]
Clip = Annotated[float | None, typer.Option("--clip", help="The longest gradient.", show_default=False)]
Seed = Annotated[int, typer.Option("--seed", help="The order of the examples.")]
Freeze = Annotated[
    str | None,
    typer.Option("--freeze", metavar="REGEX", help="Parameters that stay as they are.", show_default=False),
]
Classes = Annotated[
    str | None,
    typer.Option(
        "--classes", help="Of a class-incremental task, the classes its loss is over: own or all.", show_default=False
    ),
]
LwfClasses = Annotated[
    str | None,
    typer.Option(
        "--lwf-classes", help="What --lwf distils: old classes, from the second task on, or all.", show_default=False
    ),
]
EwcFisher = Annotated[
    str | None,
    typer.Option(
        "--ewc-fisher", help="How --ewc measures the Fisher information: per-batch or per-sample.", show_default=False
    ),
]
Learned = Annotated[
    str | None,
    typer.Option(
        "--learned",
        metavar="TASKS",
        help="The tasks that the start has learned, with commas, where it does not say so itself.",
        show_default=False,
    ),
]
Lora = Annotated[
    int | None,
    typer.Option(
        "--lora", metavar="RANK", help="Train a LoRA adapter of this rank, not whole weights.", show_default=False
    ),
]
LoraAlpha = Annotated[
    float | None,
    typer.Option("--lora-alpha", help="What scales the adapter; by default twice the rank.", show_default=False),
]
SaveEvery = Annotated[int, typer.Option("--save-every", help="Steps between two saves of the state.")]


@app.command(rich_help_panel=TRAIN)
@computes
def finetune(
    suite: SuiteName,
    task: TaskNames,
    out: Out,
    start: Start = None,
    tangent: Tangent = False,
    lwf: Lwf = False,
    lwf_weight: LwfWeight = 0.3,
    lwf_classes: LwfClasses = None,
    learned: Learned = None,
    temperature: Temperature = None,
    ewc: Ewc = False,
    ewc_weight: EwcWeight = 1e6,
    ewc_fisher: EwcFisher = None,
    classes: Classes = None,
    epochs: Epochs = None,
    steps: Steps = None,
    lr: Rate = None,
    weight_decay: WeightDecay = None,
    batch: Batch = None,
    warmup: Warmup = None,
    clip: Clip = None,
    seed: Seed = 0,
    freeze: Freeze = None,
    lora: Lora = None,
    lora_alpha: LoraAlpha = None,
    save_every: SaveEvery = 100,
    force: Force = False,
    as_json: Json = False,
    *,
    compute: Compute,
) -> None:
    """Tune a suite's model on a task, by default as the suite recommends, and write the arrival with its Adam moments."""
    from mergeway import train
    from mergeway.bench.recommended import recommended
    from mergeway.cli.display import progress
    from mergeway.cli.objectives import find_suite
    from mergeway.errors import OptionError

    if save_every < 1:
        raise OptionError(f"--save-every is {save_every}; it must be at least 1")
    loop = {"epochs": epochs, "steps": steps, "lr": lr, "weight_decay": weight_decay, "batch": batch, "warmup": warmup}
    more = {"clip": clip, "temperature": temperature, "freeze": freeze, "classes": classes, "lwf_classes": lwf_classes}
    more |= {"ewc_fisher": ewc_fisher, "lora": lora, "lora_alpha": lora_alpha}
    given: dict[str, object] = {name: value for name, value in (loop | more).items() if value is not None}
    given |= {"seed": seed, "tangent": tangent, "lwf": lwf_weight if lwf else 0.0, "ewc": ewc_weight if ewc else 0.0}
    found = find_suite(suite, compute)
    training = recommended(found, "training", train.Training, given)
    names = [t.name for t in found.tasks] if task == "all" else task.split(",")
    behind = learned.split(",") if learned is not None else None
    rest = {"start": start, "learned": behind, "save_every": save_every, "force": force, "command": command_line()}
    with progress() as bar:
        done = train.finetune(found, names, out, training, **rest, progress=bar)  # type: ignore[arg-type]
    _print_tuned(out, names, training, done, as_json)


def _print_tuned(out: Path, names: list[str], training: Training, done: Finetuned, as_json: bool) -> None:
    from mergeway.cli.display import console, print_json

    last = done.log[-1]
    if as_json:
        print_json({"out": str(out), "tasks": names, "steps": int(last["step"]), "loss": last["loss"]})
        return
    adapter = f"an adapter of rank {training.lora}, " if training.lora else ""
    where = "in the tangent space, " if training.tangent else adapter
    console().print(f"{out}: {', '.join(names)}, {where}{last['step']} steps, loss {last['loss']:.3f}", markup=False)


@app.command(rich_help_panel=TRAIN)
def moments(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A Trainer's checkpoint, or a file of optimiser state.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The safetensors file to write.")],
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", help="The model's directory; by default where the optimiser's state lies.", show_default=False
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="REGEX", help="The parameters that were trained.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Take Adam's second moments, by parameter name, out of a saved optimiser."""
    from mergeway.checkpoint.moments import write_moments
    from mergeway.cli.display import console, print_json
    from mergeway.errors import OptionError
    from mergeway.train.optimiser import read_optimiser

    if out.exists():
        raise OptionError(f"{out}: exists already; choose another file")
    found = read_optimiser(checkpoint, model, only)
    write_moments(out, found.moments, found.step, found.beta2)
    if as_json:
        shown = {"out": str(out), "parameters": list(found.moments), "step": found.step, "beta2": found.beta2}
        print_json(shown)
        return
    console().print(f"{out}: moments of {len(found.moments)} parameters after step {found.step}", markup=False)


@app.command(rich_help_panel=TRAIN)
@computes
def align(
    trunk: TrunkPath,
    data: Annotated[
        str,
        typer.Option("--data", help="The last task's data: npz, parquet, jsonl, a folder of images, or SUITE#TASK."),
    ],
    head: Annotated[
        Path | None,
        typer.Option("--head", help="The task's frozen head, unless a suite brings it.", show_default=False),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            "--module", metavar="REGEX", help="What to train; by default the last projection.", show_default=False
        ),
    ] = None,
    distance: Annotated[str, typer.Option("--distance", help="What to bring down: mse or l1.")] = "mse",
    epochs: Annotated[int, typer.Option("--epochs", help="Passes over the data.")] = 1,
    lr: Annotated[float, typer.Option("--lr", help="The learning rate.")] = 1e-4,
    batch: Annotated[int, typer.Option("--batch", help="Examples a step.")] = 128,
    clip: Annotated[float, typer.Option("--clip", help="The longest gradient.")] = 1.0,
    tangent: Annotated[bool, typer.Option("--tangent", help="Align features in the tangent space.")] = False,
    no_wait: NoWait = False,
    base: BaseAt = None,
    as_json: Json = False,
    *,
    compute: Compute,
) -> None:
    """Bring the features of the deployed model back to those before its last fold."""
    from dataclasses import asdict

    from mergeway.calibration.alignment import Alignment
    from mergeway.cli.display import console, print_json, progress
    from mergeway.trunk import Trunk

    how = Alignment(module, distance, epochs, lr, batch, clip)  # type: ignore[arg-type]
    with progress() as bar:
        record = Trunk.open(trunk, compute=compute, progress=bar, base=base).align(
            data, head, how, tangent=tangent, wait=not no_wait
        )
    if as_json:
        print_json(asdict(record))
        return
    change = record.details["align"]
    console().print(
        f"step {record.step} align {record.task}: d {change['before']:.5f} before, {change['after']:.5f} after",
        markup=False,
    )
