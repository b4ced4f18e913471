"""A whole stream in one go: the same folds as a trunk, the same bits, without the history."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mergeway.checkpoint import Checkpoint, ModelWriter, SafetensorsFiles, open_checkpoint
from mergeway.checkpoint.directory import check_apart, check_free, copy_side_files, staged_directory, write_card
from mergeway.checkpoint.source import InMemory
from mergeway.checkpoint.writer import DEFAULT_SHARD, DictSink, FileWriter, Sink
from mergeway.core.progress import SILENT, Progress
from mergeway.core.ranks import team
from mergeway.core.tensors import TensorInfo
from mergeway.errors import OptionError
from mergeway.fold.card import model_card
from mergeway.fold.equip import equip
from mergeway.fold.prepare import Arrival, Base, prepare_arrival, prepare_base, worker_pool
from mergeway.fold.walk import Pass, memory_infos
from mergeway.rules import Fold, Rule, make


@dataclass(frozen=True)
class Merged:
    """What a merge into a directory did."""

    out: Path
    base: Base
    arrivals: list[Arrival]
    rule: Rule
    at: Fold


def merge(
    base: Any,
    arrivals: Sequence[Any],
    rule: str | Rule = "average",
    weights: Sequence[float] | None = None,
    objective: Any = None,
    *,
    moments: Sequence[Any] | None = None,
    threads: int | None = None,
    allow_pickle: bool = False,
    **options: Any,
) -> dict[str, Tensor]:
    """Fold arrivals (refs, modules or dictionaries) into a base and return the deployed tensors.

    `objective`, for the rules that need one, maps named tensors to a scalar tensor; an `Objective` with the tasks in the
    order of the arrivals is narrowed to those seen so far at each fold. `moments`, one for each arrival (a file, a dictionary
    of tensors or None), are for the rules that need them; those beside an arrival are found without it.
    """
    chosen = make(rule, options)
    with worker_pool(threads) as pool:
        prepared, stream = _prepare(base, arrivals, weights, None, allow_pickle, pool, SILENT)
        stream = _equipped(chosen, prepared, stream, moments, objective)
        model = DictSink(prepared.checkpoint.infos)
        _fold_stream(Pass(chosen, prepared, pool), stream, model, _MemoryScratch, objective)
    return model.tensors


@dataclass(frozen=True)
class FoldedModel:
    """The deployed model after one fold of a stream, and the rule's memory that the next one needs."""

    params: dict[str, Tensor]
    at: Fold
    memory: Checkpoint
    details: dict[str, Any]


def fold_steps(
    base: Any,
    arrivals: Sequence[Any],
    rule: str | Rule,
    weights: Sequence[float] | None = None,
    objective: Any = None,
    *,
    moments: Sequence[Any] | None = None,
    threads: int | None = 1,
    after: tuple[Fold, Checkpoint] | None = None,
) -> Iterator[FoldedModel]:
    """The deployed model after every fold, one at a time; the last is what `merge` returns.

    `after`, the fold and the memory of an earlier step of the same stream, goes on with the fold behind it.
    """
    chosen = make(rule)
    with worker_pool(threads) as pool:
        prepared, stream = _prepare(base, arrivals, weights, None, False, pool, SILENT)
        stream = _equipped(chosen, prepared, stream, moments, objective)
        way = Pass(chosen, prepared, pool)
        if chosen.whole:
            check_objective(chosen, objective)
        at, memory = after or (Fold(), None)
        for k, arrival in enumerate(stream[at.step :], at.step + 1):
            kept, model = _MemoryScratch(memory_infos(chosen, prepared)), DictSink(prepared.checkpoint.infos)
            details: dict[str, Any] = {}
            if chosen.whole:
                seen = seen_objective(objective, [a.weight for a in stream[:k]])
                at, whole = way.merge_whole(arrival, at, memory, seen)
                way.keep_whole(whole.memory, kept.sink)
                polished = way.polish_whole(whole.deployed, seen) if k == len(stream) else None
                way.deploy_whole(polished[0] if polished else whole.deployed, model)
                details, memory = whole.details, kept.read()
            else:
                at = way.fold([arrival], at, memory, kept.sink, model)
                memory = kept.read()
                if chosen.settles:
                    way.deploy(at, memory, model)
            way.copy_buffers(model)
            yield FoldedModel(model.tensors, at, memory, details)


def merge_into(
    out: str | Path,
    base: Any,
    arrivals: Sequence[Any],
    rule: str | Rule = "average",
    weights: Sequence[float] | None = None,
    objective: Any = None,
    *,
    moments: Sequence[Any] | None = None,
    tasks: Sequence[str] | None = None,
    shard_size: int = DEFAULT_SHARD,
    threads: int | None = None,
    allow_pickle: bool = False,
    force: bool = False,
    command: str | None = None,
    progress: Progress = SILENT,
    **options: Any,
) -> Merged:
    """Fold arrivals into a base and write a model directory, in memory that does not grow with either."""
    chosen, out = make(rule, options), Path(out)
    team().from_lead(lambda: check_free(out, force))
    with worker_pool(threads) as pool:
        prepared, stream = _prepare(base, arrivals, weights, tasks, allow_pickle, pool, progress)
        check_apart(out, [prepared.checkpoint.source, *(a.checkpoint.source for a in stream)])
        stream = _equipped(chosen, prepared, stream, moments, objective)
        way = Pass(chosen, prepared, pool, progress)
        with staged_directory(out, force) as stage:
            model = ModelWriter(stage, prepared.checkpoint.infos, shard_size, digests=False)
            numbers = itertools.count()
            at = _fold_stream(
                way, stream, model, lambda infos: _DiskScratch(infos, stage / f"memory-{next(numbers)}"), objective
            )
            model.finish()
            copy_side_files(prepared.checkpoint.directory, stage)
            write_card(
                stage,
                model_card(
                    prepared.checkpoint.source,
                    prepared.seen.digest,
                    [(a.task, a.checkpoint.source, a.seen.digest, a.weight) for a in stream],
                    chosen,
                    command,
                ),
            )
    return Merged(out, prepared, stream, chosen, at)


class _MemoryScratch:
    """The rule's memory between two walks, in memory."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.sink = DictSink(infos)

    def read(self) -> Checkpoint:
        return InMemory(self.sink.tensors)

    def drop(self) -> None:
        self.sink.tensors.clear()


class _DiskScratch:
    """The rule's memory between two walks, in a file that is not kept."""

    def __init__(self, infos: Mapping[str, TensorInfo], path: Path) -> None:
        self.sink = FileWriter(path, infos, digests=False)

    def read(self) -> Checkpoint:
        self.sink.finish(sync=False)
        return SafetensorsFiles("scratch", [self.sink.path])

    def drop(self) -> None:
        team().from_lead(self.sink.path.unlink)


def _fold_stream(
    way: Pass,
    stream: list[Arrival],
    model: Sink,
    scratch: Callable[[Mapping[str, TensorInfo]], Any],
    objective: Any = None,
) -> Fold:
    """All folds of a stream; the rule's memory is kept only where it has to be seen again."""
    at = (
        _fold_whole(way, stream, model, scratch, objective)
        if way.rule.whole
        else _fold_parts(way, stream, model, scratch)
    )
    way.copy_buffers(model)
    return at


def _fold_parts(way: Pass, stream: list[Arrival], model: Sink, scratch: Callable[..., Any]) -> Fold:
    groups = [[arrival] for arrival in stream] if way.rule.surveys or way.rule.brings else [stream]
    at, memory, held = Fold(), None, None
    for group in groups:
        last = group is groups[-1]
        new = scratch(memory_infos(way.rule, way.base)) if not last or way.rule.settles else None
        at = way.fold(group, at, memory, new.sink if new else None, model if last else None)
        memory = new.read() if new else None
        if held:
            held.drop()
        held = new
    if memory is not None:
        way.deploy(at, memory, model)
    if held:
        held.drop()
    return at


def _fold_whole(way: Pass, stream: list[Arrival], model: Sink, scratch: Callable[..., Any], objective: Any) -> Fold:
    check_objective(way.rule, objective)
    at, memory, held = Fold(), None, None
    for k, arrival in enumerate(stream, 1):
        seen = seen_objective(objective, [a.weight for a in stream[:k]])
        last = k == len(stream)
        at, whole = way.merge_whole(arrival, at, memory, seen, deploy=last)
        if held:
            held.drop()
        if last:
            polished = way.polish_whole(whole.deployed, seen)
            way.deploy_whole(polished[0] if polished else whole.deployed, model)
            break
        held = scratch(memory_infos(way.rule, way.base))
        way.keep_whole(whole.memory, held.sink)
        memory = held.read()
    return at


def _equipped(
    rule: Rule, base: Base, stream: list[Arrival], moments: Sequence[Any] | None, objective: Any
) -> list[Arrival]:
    """The stream with what its rule wants besides weights."""
    if moments is not None and len(moments) != len(stream):
        raise OptionError(f"moments: {len(moments)} given for {len(stream)} arrivals; give one each, or None")
    if rule.brings is None and moments is None:
        return stream
    if rule.brings == "grams":
        check_objective(rule, objective)
    narrow = getattr(objective, "seen", None)
    return [
        equip(
            rule,
            base,
            arrival,
            moments[k - 1] if moments else None,
            partial(_newest, narrow, k) if narrow else None,
        )
        for k, arrival in enumerate(stream, 1)
    ]


def _newest(narrow: Callable[[int], Any], count: int) -> Any:
    return narrow(count).newest()


def check_objective(rule: Rule, objective: Any) -> None:
    """Refuse to start a rule that needs data without any."""
    if "calibration" in rule.needs and objective is None:
        raise OptionError(
            f"rule '{rule.name}' needs calibration data; give --suite or --objective (objective=... in Python)"
        )


def seen_objective(objective: Any, weights: Sequence[float]) -> Any:
    """The objective of the arrivals so far; a plain function is the same at every fold."""
    narrow = getattr(objective, "seen", None)
    return narrow(len(weights), weights) if narrow else objective


def _prepare(
    base: Any,
    arrivals: Sequence[Any],
    weights: Sequence[float] | None,
    tasks: Sequence[str] | None,
    allow_pickle: bool,
    pool: Any,
    progress: Progress,
) -> tuple[Base, list[Arrival]]:
    if isinstance(arrivals, str | Path | Mapping) or not arrivals:
        raise OptionError("arrivals: expected a list with at least one checkpoint")
    shares = list(weights) if weights is not None else [1.0] * len(arrivals)
    if len(shares) != len(arrivals):
        raise OptionError(f"weights: {len(shares)} given for {len(arrivals)} arrivals; give one each")
    for share in shares:
        check_weight(share)
    opened = open_checkpoint(base, allow_pickle=allow_pickle)
    # Every file is opened, and every header read, before the first long pass over the data.
    checkpoints = [open_checkpoint(a, opened, allow_pickle) for a in arrivals]
    names = list(tasks) if tasks else [default_task(c) for c in checkpoints]
    prepared = prepare_base(opened, pool, progress)
    return prepared, [
        prepare_arrival(prepared, c, float(w), t, pool, progress)
        for c, w, t in zip(checkpoints, shares, names, strict=True)
    ]


def default_task(checkpoint: Checkpoint) -> str:
    """The name of an arrival that was given none: its file's, directory's or repository's."""
    name = Path(checkpoint.source).name.partition("@")[0]
    return name.removesuffix(".safetensors") or "arrival"


def check_weight(weight: float) -> None:
    """Utilities are positive and finite."""
    if not isinstance(weight, int | float) or not math.isfinite(weight) or weight <= 0:
        raise OptionError(f"weight {weight!r}: a utility weight is a positive, finite number")
