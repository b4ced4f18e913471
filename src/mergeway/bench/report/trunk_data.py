"""What the page of a trunk shows: its journal, how far it has gone from the base, and how its arrivals lie to each other."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from typing import TypedDict

import torch
from torch import Tensor

from mergeway.bench.report.certificates import stream_certificate
from mergeway.checkpoint import Checkpoint, open_checkpoint
from mergeway.core.pool import worker_pool
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import MergewayError
from mergeway.fold.prepare import Arrival, Base, prepare_arrival, prepare_base
from mergeway.rules import RULES, Description, Rule
from mergeway.trunk import Trunk
from mergeway.trunk.diff import judged_steps
from mergeway.trunk.journal import Folded, Record


class Geometry(TypedDict):
    """How far the deployed models are from the base, how the arrivals' updates lie to each other, and what could not be read."""

    drift: list[dict[str, float]]
    arrivals: list[dict[str, str | float]]
    cosines: list[list[float]] | None
    problems: list[str]


def trunk_data(trunk: Trunk, progress: Progress = SILENT) -> dict[str, object]:
    """The numbers of a trunk for its page; what can no longer be read is reported, not guessed."""
    records, held, rule = trunk.log(), trunk.folded(), trunk.described_rule
    return {
        "kind": "trunk",
        "title": trunk.name,
        "path": str(trunk.path),
        "base": {"source": trunk.base_ref, "digest": trunk.base_digest},
        "rule": rule.name,
        "options": rule.options(),
        "chosen": _chosen(rule),
        "kept": trunk.kept_steps(),
        "journal": [_record(r) for r in records],
        "held": [asdict(f) for f in held],
        "judged": [
            {"step": r.step, "what": f"{r.kind} {r.task or ''}".strip(), "scores": scores, "alone": _alone(r)}
            for r, scores in judged_steps(records)
        ],
        "trajectories": [
            {"rule": rule.name, "fold": r.step, "task": r.task} | dict(r.details["trajectory"])
            for r in records
            if "trajectory" in r.details
        ],
        "stream": stream_certificate(records),
        **_geometry(trunk, held, progress),
    }


def _chosen(rule: Rule | Description) -> dict[str, object]:
    """The options that somebody set: those that differ from the rule's own, or all where its class is not at hand."""
    usual = RULES[rule.name]().options() if rule.name in RULES else {}
    return {key: value for key, value in rule.options().items() if key not in usual or usual[key] != value}


def _alone(record: Record) -> dict[str, float]:
    """What the arrival of a step was worth by itself, as far as it was judged."""
    return {row["task"]: row["arrival"] for row in record.details.get("checks", []) if "arrival" in row}


def _geometry(trunk: Trunk, held: Sequence[Folded], progress: Progress) -> Geometry:
    with worker_pool() as pool:
        try:
            base = prepare_base(trunk.deployed(0), pool, progress)
        except MergewayError as problem:
            problem_text = f"The base cannot be read, so there is no drift and no cosine: {problem}"
            return {"drift": [], "arrivals": [], "cosines": None, "problems": [problem_text]}
        drift = [{"step": step, "norm": _distance(base, trunk.deployed(step))} for step in trunk.kept_steps()]
        readable, problems = _arrivals(trunk, base, held, pool, progress)
    gram = _gram(base, readable)
    norms = gram.diagonal().sqrt()
    cosines = (gram / norms.outer(norms).clamp_min(1e-300)).tolist() if len(readable) > 1 else None
    arrivals: list[dict[str, str | float]] = [
        {"task": a.task, "norm": float(n)} for a, n in zip(readable, norms, strict=True)
    ]
    return {"drift": drift, "arrivals": arrivals, "cosines": cosines, "problems": problems}


def _record(record: Record) -> dict[str, object]:
    shown = ("step", "kind", "result", "time", "task", "source", "digest", "weight", "hash")
    whole = asdict(record)
    return {key: whole[key] for key in shown} | {
        "facts": dict(record.details.get("facts", {})),
        "to": record.details.get("to"),
        "message": record.details.get("message"),
        "rule": record.details.get("rule"),
        "total": record.stream.get("total"),
    }


def _distance(base: Base, model: Checkpoint) -> float:
    """‖Ψ − ψ0‖ over all merged parameters."""
    return sum(float(_difference(base, model.read(n), n).square().sum()) for n in _names(base)) ** 0.5


def _arrivals(
    trunk: Trunk, base: Base, held: Sequence[Folded], pool: Executor, progress: Progress
) -> tuple[list[Arrival], list[str]]:
    """The arrivals whose sources still hold what was folded, and a sentence for each of the others."""
    found, problems = [], []
    for folded in held:
        try:
            checkpoint = open_checkpoint(trunk.place_of(folded.step), base.checkpoint)
            arrival = prepare_arrival(base, checkpoint, folded.weight, folded.task, pool, progress)
        except MergewayError as problem:
            problems.append(f"Arrival '{folded.task}' cannot be read: {problem}")
            continue
        if arrival.seen.digest != folded.digest:
            problems.append(f"Arrival '{folded.task}': {folded.source} has changed since it was folded in.")
            continue
        found.append(arrival)
    return found, problems


def _gram(base: Base, arrivals: Sequence[Arrival]) -> Tensor:
    """⟨δi, δj⟩ of the updates, parameter by parameter."""
    gram = torch.zeros(len(arrivals), len(arrivals), dtype=torch.float64)
    for name in _names(base) if arrivals else ():
        updates = torch.stack([_difference(base, a.read(name), name).flatten() for a in arrivals])
        gram += updates @ updates.mT
    return gram


def _names(base: Base) -> list[str]:
    """Every merged parameter once: a tied one counts under its first name."""
    return [n for n in base.merged_infos if n not in base.tied]


def _difference(base: Base, tensor: Tensor, name: str) -> Tensor:
    return tensor.double() - base.checkpoint.read(name).double()
