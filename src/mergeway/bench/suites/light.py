"""The suite `digits-light`: base, data and heads of `digits`, with experts as people have them: LoRA adapters, tuned lightly.

An expert of `digits` moves by some 12 % of the base's norm. A fine-tuned CLIP or language model moves by about 1 %. These move by 2
to 3 %. Rank, rate and steps were chosen by that and by the experts' own accuracies, before any rule was run on them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mergeway.bench.suite import Suite, load_suite
from mergeway.bench.suites.description import SuiteJson, TaskJson
from mergeway.bench.suites.embedded import embedded
from mergeway.checkpoint import open_checkpoint
from mergeway.checkpoint.lora import CONFIG, WEIGHTS
from mergeway.core.files import copy_file, make_directory, replace_text, replaced
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import OptionError
from mergeway.train import Training, finetune

NAME = "digits-light"
TRAINING: dict[str, Any] = {
    "steps": 300,
    "lr": 1.4e-4,
    "weight_decay": 0.01,
    "batch": 64,
    "freeze": "^visual_projection",
    "lora": 8,
    "lora_alpha": 16,
}


def build(out: Path, progress: Progress = SILENT) -> SuiteJson:
    """Train the experts into a directory and return its description; a build that was interrupted goes on where it stopped."""
    if (out / "suite.json").exists():
        raise OptionError(f"{out}: there is a suite already; remove it or give another --out")
    root = embedded("digits")
    hard = load_suite(root)
    whole: SuiteJson = json.loads((root / "suite.json").read_text(encoding="utf-8"))
    make_directory(out / "experts")
    rows: list[TaskJson] = []
    for row in whole["tasks"]:
        folder = out / "experts" / row["name"]
        accuracy = _train_expert(hard, row["name"], folder, progress)
        progress.note(f"{row['name']}: base {row.get('zero_shot', 0.0):.1f} %, expert {accuracy:.1f} %")
        light: TaskJson = {
            **row,
            "expert": f"experts/{row['name']}",
            "data": _reference(root / row["data"], out),
            "head": _reference(root / row["head"], out),
            "expert_accuracy": round(accuracy, 2),
        }
        rows.append(light)
    suite: SuiteJson = {
        **whole,
        "name": NAME,
        "base": _reference(root / "base", out),
        "training": TRAINING,
        "tasks": rows,
    }
    if not (out / "README.md").exists():
        with replaced(out / "README.md") as new:
            copy_file(embedded(NAME) / "README.md", new)
    replace_text(out / "suite.json", json.dumps(suite, indent=1) + "\n")
    return suite


def _train_expert(suite: Suite, task: str, folder: Path, progress: Progress) -> float:
    """Train an adapter, unless an earlier build did, and say how good base and adapter are together."""
    if not folder.exists():
        finetune(suite, task, folder, Training(**TRAINING), progress=progress)
        # What is shipped is the adapter; where it was trained is of no use to anyone else.
        for file in folder.iterdir():
            if file.name not in (CONFIG, WEIGHTS):
                file.unlink()
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        replace_text(folder / CONFIG, json.dumps({**config, "base_model_name_or_path": None}, indent=2) + "\n")
    base = open_checkpoint(suite.base)
    expert = open_checkpoint(folder, base)
    return suite.accuracy({name: expert.read(name) for name in expert.infos}, task)


def _reference(path: Path, out: Path) -> str:
    """A part of `digits` as this suite names it: by its place beside that suite, or from anywhere else."""
    root = embedded("digits").parent
    return f"../{path.relative_to(root).as_posix()}" if out.resolve().parent == root.resolve() else str(path.resolve())
