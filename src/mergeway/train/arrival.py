"""What a fine-tuning leaves behind: a model directory with moments, training log and the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mergeway.checkpoint import Checkpoint, ModelWriter
from mergeway.checkpoint.directory import copy_side_files, staged_directory, write_card
from mergeway.checkpoint.moments import FILE, write_moments
from mergeway.core.files import write_text
from mergeway.train.regularisers import FISHER, write_fisher
from mergeway.train.training import Start, Training

if TYPE_CHECKING:
    from mergeway.calibration.suite import SuiteData
    from mergeway.train.loop import Finetuned

LOG, SETTINGS = "training.jsonl", "training.json"
BETA2 = 0.999


def write_arrival(
    out: Path,
    base: Checkpoint,
    done: Finetuned,
    fisher: Mapping[str, Tensor],
    steps: int,
    training: Training,
    tasks: list[str],
    suite: SuiteData,
    start: Start,
    command: str | None,
    force: bool,
) -> None:
    """Write it all, or nothing."""
    settings = {
        "suite": suite.name,
        "tasks": tasks,
        "start": str(start) if isinstance(start, str | Path) else "base" if start is None else "tensors",
        "steps": steps,
        "beta2": BETA2,
        **asdict(training),
        "command": command,
    }
    with staged_directory(out, force) as stage:
        model = ModelWriter(stage, base.infos)
        for name, info in base.infos.items():
            model.write(name, 0, done.params[name] if info.merges else base.read(name))
        model.finish()
        copy_side_files(base.directory, stage)
        write_moments(stage / FILE, done.moments, steps, BETA2)
        if fisher:
            write_fisher(stage / FISHER, fisher)
        write_text(stage / LOG, "".join(json.dumps(row) + "\n" for row in done.log))
        write_text(stage / SETTINGS, json.dumps(settings, indent=2) + "\n")
        write_card(stage, _card(base, suite.name, tasks, training.tangent, steps, command))


def _card(base: Checkpoint, suite: str, tasks: list[str], tangent: bool, steps: int, command: str | None) -> str:
    how = "in the tangent space of the base" if tangent else "by plain fine-tuning"
    names = ", ".join(tasks)
    return (
        f"# {names}\n\nTuned from {base.source} on {names} of suite {suite}, "
        f"{how}, {steps} steps. `moments.safetensors` holds Adam's second moments.\n"
        + (f"\n```sh\n{command}\n```\n" if command else "")
    )
