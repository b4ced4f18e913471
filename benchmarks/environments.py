"""The peers, each in an environment of its own in the user's cache directory, made when first needed.

Their dependencies would not live together, nor with ours. torch comes first, in the version that is pinned here too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Environment:
    """What to install, and the program that is there afterwards."""

    name: str
    packages: tuple[str, ...]
    program: str

    def make(self) -> Path | None:
        """The directory of its programs; None, and a word on stderr, when it cannot be installed."""
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        home = cache / "mergeway-benchmarks" / self.name
        programs = home / "bin"
        if (programs / self.program).exists():
            return programs
        print(f"installing {self.name} into {home}", file=sys.stderr, flush=True)
        pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        try:
            subprocess.check_call([sys.executable, "-m", "venv", str(home)])
            for packages in ((TORCH,), self.packages):
                subprocess.check_call([*pip, *packages])
        except (subprocess.CalledProcessError, OSError) as problem:
            print(f"{self.name} could not be installed: {problem}", file=sys.stderr, flush=True)
            return None
        return programs


MERGEKIT = Environment("mergekit", (TORCH, "mergekit==0.1.5"), "mergekit-yaml")
# Newer transformers and datasets break its imports.
FUSIONBENCH = Environment(
    "fusionbench", (TORCH, "fusion-bench==0.2.33", "transformers==4.57.3", "datasets==4.4.1"), "fusion_bench"
)


def mergekit_yaml(chosen: str | None) -> str | None:
    """The mergekit-yaml to run."""
    programs = None if chosen else MERGEKIT.make()
    return str(programs / "mergekit-yaml") if programs else chosen


def fusionbench_python(chosen: str | None) -> str | None:
    """A Python that has FusionBench; the environment's directory may be given instead."""
    if chosen and Path(chosen).is_dir():
        return str(Path(chosen) / "bin" / "python")
    programs = None if chosen else FUSIONBENCH.make()
    return str(programs / "python") if programs else chosen
