"""What a fine-tuning leaves behind: a model directory with moments, training log and the command that made it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mergeway.checkpoint import Checkpoint, ModelWriter
from mergeway.checkpoint.directory import copy_side_files, staged_directory, write_card
from mergeway.checkpoint.moments import FILE, write_moments
from mergeway.core.files import write_text
from mergeway.train.regularisers import FISHER, write_fisher
from mergeway.train.training import Training

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
    start: Any,
    command: str | None,
    force: bool,
) -> None:
    """Write it all, or nothing."""
    told = {
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
        write_text(stage / SETTINGS, json.dumps(told, indent=2) + "\n")
        write_card(stage, _card(base, told))


def _card(base: Checkpoint, told: Mapping[str, Any]) -> str:
    how = "in the tangent space of the base" if told["tangent"] else "by plain fine-tuning"
    made = f"\n```sh\n{told['command']}\n```\n" if told["command"] else ""
    return (
        f"# {', '.join(told['tasks'])}\n\nTuned from {base.source} on {', '.join(told['tasks'])} of suite {told['suite']}, "
        f"{how}, {told['steps']} steps. `moments.safetensors` holds Adam's second moments.\n{made}"
    )
