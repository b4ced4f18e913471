"""Experts of a suite whose base and data are there: each is trained once by `finetune`, and a build that was interrupted goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar, cast

from mergeway.bench.suite import load_suite
from mergeway.bench.suites.description import LanguageJson, SuiteJson
from mergeway.core.files import make_directory, replace_text
from mergeway.core.progress import Progress
from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.train import Training, finetune

Described = TypeVar("Described", LanguageJson, SuiteJson)


def begin_suite(out: Path) -> None:
    """A directory for a suite that is not built yet; one that an interrupted build left is gone on with."""
    if (out / "suite.json").exists():
        raise OptionError(f"{out}: there is a suite already; remove it or give another --out")
    make_directory(out)


def train_experts(out: Path, suite: Described, compute: Compute | None, progress: Progress) -> Described:
    """Train what a suite's tasks lack, one expert after the other, and name them in its description when all are there."""
    # The suite without experts has another name until it is whole, so that nothing takes it for finished.
    begun = out / "begun"
    make_directory(begun)
    rows = [_from_below(cast("dict[str, Any]", row)) for row in suite["tasks"]]
    replace_text(begun / "suite.json", json.dumps({**suite, "base": "../base", "tasks": rows}, indent=1) + "\n")
    whole, how = load_suite(begun, compute=compute), cast("dict[str, Any]", suite.get("training", {}))
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


def _from_below(row: dict[str, Any]) -> dict[str, Any]:
    """A task as it is described one directory further down."""
    return {**row, **{key: f"../{row[key]}" for key in ("data", "head") if key in row}}
