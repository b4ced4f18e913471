"""A study: what the tables and figures of one suite are drawn from, run when asked for and never twice.

runs/*       one run of `bench` for every rule, stream length, kind of utilities and number of samples
kept/*.json  what is not a run: end accuracies, sweeps of trajectories, best operating times
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from mergeway import __version__
from mergeway.bench import Run, bench, end_accuracies
from mergeway.bench.ends import end_losses
from mergeway.bench.outcome import Description
from mergeway.bench.protocol import parse_rule
from mergeway.bench.suite import Suite
from mergeway.checkpoint.source import read_json
from mergeway.core.files import make_directory, replace_text
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import OptionError
from mergeway.rules import make

# The methods the papers compare, and the rule of this package that does best; a radar of ten rules shows none of them.
FEATURED = ("average", "task-arithmetic", "ties", "opcm", "ode", "steer")

Result = TypeVar("Result")


def default_lengths(tasks: int) -> list[int]:
    """The papers' stream lengths where a suite has twenty tasks; else half, three quarters and all of what it has."""
    if tasks >= 20:
        return [8, 14, 20]
    return sorted({math.ceil(tasks / 2), math.ceil(3 * tasks / 4), tasks})


@dataclass
class Study:
    """The suite, the protocol, and the directory that keeps what was run.

    `rules` are those of the tables, `featured` those of figures that compare rules. Unless it `tunes`, the row of continual
    fine-tuning stays empty.
    """

    suite: Suite
    out: Path
    rules: Sequence[str]
    featured: Sequence[str]
    lengths: Sequence[int]
    orders: int = 10
    samples: int = 1024
    jobs: int = 1
    progress: Progress = SILENT
    tunes: bool = True

    def check(self) -> None:
        """Refuse what cannot be run before anything is written."""
        if self.orders < 1 or self.jobs < 1:
            raise OptionError("--orders and --jobs must be at least 1")
        for length in self.lengths:
            if not 1 <= length <= len(self.suite.tasks):
                raise OptionError(f"--tasks {length}: suite '{self.suite.name}' has {len(self.suite.tasks)} tasks")
        for rule in self.rules:
            parse_rule(rule)
        if self.samples < self.longest:
            raise OptionError(f"--samples {self.samples}: each of {self.longest} tasks needs at least one")

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def shortest(self) -> int:
        """The shortest stream that has the three tasks a radar needs."""
        return min((n for n in self.lengths if n >= 3), default=self.longest)

    @property
    def orders_in_words(self) -> str:
        """How many orders, for the note below a table."""
        return f"{self.orders} {'order' if self.orders == 1 else 'orders'}"

    @property
    def ode(self) -> str:
        """The variant of `ode` that the tables about trajectories look at."""
        return next((r for r in self.rules if parse_rule(r)[0] == "ode"), "ode")

    @cached_property
    def ends(self) -> dict[str, dict[str, float]]:
        """What the base and the experts reach on each task."""
        return self.kept("ends", {}, lambda: end_accuracies(self.suite, self.progress))

    def run(
        self, rules: Sequence[str], length: int | None = None, utilities: str = "uniform", samples: int | None = None
    ) -> Run:
        """The streams of these rules, from disk where they are finished."""
        length, samples = length or self.longest, samples or self.samples
        parts = [self._run_one(rule, length, utilities, samples) for rule in rules]
        streams = {key: folds for part in parts for key, folds in part.streams.items()}
        cells = [cell for part in parts for cell in part.cells]
        described: Description = {
            "suite": self.suite.name,
            "rules": list(rules),
            "lengths": [length],
            "orders": self.orders,
            "utilities": utilities,
            "samples": samples,
            "version": __version__,
        }
        losses = end_losses(self.ends)
        return Run(self.suite.name, described, self.ends["base"], self.ends["experts"], streams, cells, losses)

    def _run_one(self, rule: str, length: int, utilities: str, samples: int) -> Run:
        # A rule that needs no data gives the same whatever the number of samples, so that is no part of its name.
        drawn = samples if make(*parse_rule(rule)[:2]).needs else self.samples
        name = f"{rule}-{length}-{utilities}" + (f"-{drawn}" if drawn != self.samples else "")
        return bench(
            self.suite,
            [rule],
            lengths=[length],
            orders=self.orders,
            utilities=utilities,
            samples=drawn,
            out=self.out / "runs" / _file_name(name),
            resume=True,
            jobs=self.jobs,
            ends=self.ends,
            progress=self.progress,
        )

    def kept(self, name: str, protocol: Mapping[str, object], work: Callable[[], Result]) -> Result:
        """The result of `work`, read from disk when it was done before under the same protocol."""
        path = self._kept_path(name)
        protocol = {"suite": self.suite.name, **protocol}
        if path.exists():
            found = read_json(path, "an earlier result")
            if found.get("protocol") != protocol:
                raise OptionError(f"{path}: was made under another protocol; choose another directory")
            return found["result"]
        result = work()
        make_directory(path.parent)
        replace_text(path, json.dumps({"protocol": protocol, "result": result}, indent=1) + "\n")
        return result

    def holds(self, name: str) -> bool:
        """Whether that was kept before."""
        return self._kept_path(name).exists()

    def _kept_path(self, name: str) -> Path:
        return self.out / "kept" / f"{_file_name(name)}.json"


def with_option(rule: str, key: str, value: object) -> str:
    """A rule as text with one option set; an option at its default is not written, so that equal rules share a run."""
    name, options, _ = parse_rule(rule)
    defaults = make(name).options()
    chosen = {**options, key: value}
    return ":".join([name, *(f"{k}={v}" for k, v in chosen.items() if v != defaults[k])])


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", text)
