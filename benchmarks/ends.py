"""Ends of streams: the model after the last arrival, and numbers about it that are kept on disk as they come."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

Numbers = dict[str, float]


def find_suite(where: str, autocast: bool = False) -> Any:
    """A suite by its directory or its name; with `autocast` its model runs in bfloat16."""
    import mergeway as mw
    from mergeway.bench.suites import suite_directory
    from mergeway.model.compute import Compute

    return mw.load_suite(suite_directory(where), compute=Compute(autocast=autocast))


def end_of(
    suite: Any, rule: str, order: Sequence[str], weights: Sequence[float] | None, samples: int, seed: int
) -> dict[str, Tensor]:
    """The model after the last arrival; `rule` as `mergeway bench` takes it."""
    import mergeway as mw
    from mergeway.bench.protocol import parse_rule
    from mergeway.rules import make

    name, options, _ = parse_rule(rule)
    chosen = make(name, options)
    objective = suite.objective(list(order), size=samples, seed=seed) if chosen.needs else None
    return mw.merge(suite.base, [suite.task(task).expert for task in order], chosen, weights, objective, threads=1)


class Kept:
    """Numbers that take long, each worked out once; with a path, in a file that a second run goes on from."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._numbers: dict[str, Numbers] = json.loads(path.read_text()) if path and path.exists() else {}

    def get(self, key: str, make: Callable[[], Numbers]) -> Numbers:
        """The numbers of that key."""
        if key not in self._numbers:
            self._numbers[key] = make()
            print(key, self._numbers[key], file=sys.stderr, flush=True)
            if self._path:
                self._path.write_text(json.dumps(self._numbers, indent=1) + "\n")
        return self._numbers[key]
