"""Suites on real pre-trained models: base and data come from packages, experts are trained here once and kept in the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mergeway.bench.suites.description import LanguageJson, SuiteJson
from mergeway.bench.suites.smol import build_smol
from mergeway.bench.suites.stories import build_stories
from mergeway.bench.suites.vit import build_vit
from mergeway.core.cache import cache_root
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import OptionError
from mergeway.model.compute import Compute


@dataclass(frozen=True)
class Trained:
    """A suite that is trained on your machine, and what it is made of."""

    kind: str
    tasks: int
    base: str
    data: str
    build: Callable[[Path, Path, Compute, Progress], LanguageJson | SuiteJson]


TRAINED = {
    "stories": Trained("causal-lm", 5, "stories15M", "texts of five kinds", build_stories),
    "smol": Trained("causal-lm", 4, "SmolLM2-135M-Instruct", "questions of four kinds", build_smol),
    "vit": Trained("image-encoder", 6, "a DINOv2 ViT-S/14", "pictures of six kinds", build_vit),
}


def trained_directory(name: str) -> Path:
    """Where such a suite lies once it is built."""
    folder = cache_root() / "suites" / name
    if not (folder / "suite.json").exists():
        raise OptionError(
            f"{name}: is trained on your machine; build it first with 'mergeway suites build {name} --packages DIR'"
        )
    return folder


def build_trained(
    name: str, out: Path | None, packages: Path | None, compute: Compute, progress: Progress = SILENT
) -> LanguageJson | SuiteJson:
    """Build such a suite, by default into the cache; a build that was interrupted goes on where it stopped."""
    if packages is None or not packages.is_dir():
        raise OptionError(f"{name}: give --packages DIR, a directory with the packages; docs/suites.md lists them")
    return TRAINED[name].build(out or cache_root() / "suites" / name, packages, compute, progress)
