"""The protocol: which rule folds which tasks in which order, with which utilities."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mergeway.bench.suite import Suite
from mergeway.errors import OptionError
from mergeway.rules import make


@dataclass(frozen=True)
class Cell:
    """One stream: a rule with its options, an order of tasks, their utilities, and the calibration seed."""

    rule: str
    options: tuple[tuple[str, object], ...]
    label: str
    order: tuple[str, ...]
    weights: tuple[float, ...]
    number: int
    samples: int
    # Of each sample, for rules that ask the arrivals; by default as many as the number of samples says.
    copies: int | None = None
    # The samples are texts that the experts write, not training data.
    written: bool = False

    @property
    def key(self) -> str:
        """A name for files: label, stream length, order number."""
        return f"{self.label}.{len(self.order)}.{self.number}"


def orders(tasks: Sequence[str], count: int, seed: int = 0) -> list[tuple[str, ...]]:
    """`count` seeded shufflings of the tasks, the same for every rule."""
    found = []
    for number in range(count):
        order = list(tasks)
        random.Random(1000 * seed + number).shuffle(order)  # noqa: S311 - an order, not a secret
        found.append(tuple(order))
    return found


def utilities(count: int, number: int, kind: str, seed: int = 0) -> tuple[float, ...]:
    """Uniform weights, or a random draw from (0, 1) normalised to sum 1 (Section 4.3, ODE-M)."""
    if kind == "uniform":
        return (1.0,) * count
    drawn = np.random.default_rng(10_000 + 1000 * seed + number).uniform(0.05, 1.0, count)
    return tuple(float(w) for w in drawn / drawn.sum())


def parse_rule(text: str) -> tuple[str, dict[str, object], str]:
    """A rule as written on the command line, `name` or `name:key=value:key=value`: its name, options and label."""
    name, *pairs = text.split(":")
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise OptionError(f"rule '{text}': expected name:key=value, such as iso:scaling=1.5")
        options[key] = value
    chosen = make(name, options)
    return name, chosen.options() if options else {}, text


def plan(
    suite: Suite,
    rules: Sequence[str],
    lengths: Sequence[int],
    count: int,
    kind: str,
    samples: int,
    seed: int = 0,
    copies: int | None = None,
    written: bool = False,
) -> list[Cell]:
    """Every stream of a benchmark."""
    tasks = [t.name for t in suite.tasks]
    cells = []
    for text in rules:
        name, options, label = parse_rule(text)
        for length in lengths:
            for number, order in enumerate(orders(tasks[:length], count, seed)):
                weights = utilities(length, number, kind, seed)
                cells.append(
                    Cell(name, tuple(options.items()), label, order, weights, number, samples, copies, written)
                )
    return cells


def check_plan(
    suite: Suite,
    lengths: Sequence[int],
    orders: int,
    utilities: str,
    jobs: int,
    engine: str,
    written: int | None = None,
) -> None:
    """Refuse streams that cannot be run."""
    for length in lengths:
        if not 1 <= length <= len(suite.tasks):
            raise OptionError(f"--tasks {length}: suite '{suite.name}' has {len(suite.tasks)} tasks")
    if utilities not in ("uniform", "random"):
        raise OptionError(f"--utilities '{utilities}': it takes uniform or random")
    if orders < 1 or jobs < 1:
        raise OptionError("--orders and --jobs must be at least 1")
    if engine not in ("local", "ray"):
        raise OptionError(f"--engine '{engine}': it takes local or ray")
    if written is not None:
        if suite.kind != "causal-lm":
            raise OptionError(
                f"--written: suite '{suite.name}' is of kind {suite.kind}; only language models write texts"
            )
        if written < max(lengths):
            raise OptionError(
                f"--samples {written}: with --written it takes at least one text for each of {max(lengths)} tasks"
            )
