"""Which suites come with the package, where they lie, and how each is built again."""

from __future__ import annotations

from pathlib import Path

from mergeway.bench.suites.description import SuiteJson
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import OptionError, suggest

EMBEDDED = ("digits", "digits-light")


def embedded(name: str) -> Path:
    """The directory of an embedded suite."""
    if name not in EMBEDDED:
        raise OptionError(f"there is no embedded suite '{name}'; {suggest(name, EMBEDDED)}")
    return Path(__file__).parent / name


def build_suite(name: str, out: Path, progress: Progress = SILENT) -> SuiteJson:
    """Train an embedded suite anew into a directory and return its description."""
    embedded(name)
    if name == "digits":
        from mergeway.bench.suites.digits import build
    else:
        from mergeway.bench.suites.light import build
    return build(out, progress)
