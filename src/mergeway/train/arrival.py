"""What a fine-tuning leaves behind: a model directory with moments, training log and the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mergeway.checkpoint import Checkpoint, ModelWriter
from mergeway.checkpoint.directory import copy_side_files, staged_directory, write_card
from mergeway.checkpoint.moments import FILE, write_moments
from mergeway.core.files import write_text
from mergeway.train.regularisers import FISHER, write_fisher
from mergeway.train.start import SETTINGS
from mergeway.train.training import Training

if TYPE_CHECKING:
    from mergeway.train.loop import Finetuned
    from mergeway.train.lora import LoraFactors

LOG = "training.jsonl"
BETA2 = 0.999


@dataclass(frozen=True)
class Settings:
    """What training.json says: where the arrival comes from, the tasks it has learned, and how."""

    suite: str
    tasks: list[str]
    learned: list[str]
    start: str
    steps: int
    training: Training
    command: str | None

    def as_json(self) -> dict[str, object]:
        """Its entries."""
        entries: dict[str, object] = {
            "suite": self.suite,
            "tasks": self.tasks,
            "learned": self.learned,
            "start": self.start,
        }
        return entries | {"steps": self.steps, "beta2": BETA2, **asdict(self.training), "command": self.command}


def write_arrival(
    out: Path,
    base: Checkpoint,
    done: Finetuned,
    lora: LoraFactors | None,
    fisher: Mapping[str, Tensor],
    settings: Settings,
    force: bool,
) -> None:
    """Write it all, or nothing."""
    with staged_directory(out, force) as stage:
        if lora is not None:
            lora.write(stage)
        else:
            _write_whole(stage, base, done, settings.steps)
        if fisher:
            write_fisher(stage / FISHER, fisher)
        write_text(stage / LOG, "".join(json.dumps(row) + "\n" for row in done.log))
        write_text(stage / SETTINGS, json.dumps(settings.as_json(), indent=2) + "\n")
        write_card(stage, _card(base, settings))


def _write_whole(stage: Path, base: Checkpoint, done: Finetuned, steps: int) -> None:
    model = ModelWriter(stage, base.infos)
    for name, info in base.infos.items():
        model.write(name, 0, done.params[name] if info.merges else base.read(name))
    model.finish()
    copy_side_files(base.directory, stage)
    write_moments(stage / FILE, done.moments, steps, BETA2)


def _card(base: Checkpoint, settings: Settings) -> str:
    how, kept = "by plain fine-tuning", "`moments.safetensors` holds Adam's second moments."
    if settings.training.tangent:
        how = "in the tangent space of the base"
    if settings.training.lora:
        how, kept = f"as a LoRA adapter of rank {settings.training.lora}", "Load it with peft on that base."
    block = f"\n```sh\n{settings.command}\n```\n" if settings.command else ""
    return (
        f"# {', '.join(settings.tasks)}\n\nTuned from {base.source} on {', '.join(settings.tasks)} of suite {settings.suite}, "
        f"{how}, {settings.steps} steps. {kept}\n{block}"
    )
