"""A whole stream in one go: the same folds as a trunk, the same bits, without the history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mergeway.calibration.objective import Loss, Objective, as_objective
from mergeway.checkpoint import Checkpoint, open_checkpoint
from mergeway.checkpoint.directory import check_apart, check_free, copy_side_files, staged_directory, write_card
from mergeway.checkpoint.heads import head_pattern, write_beside
from mergeway.checkpoint.resolve import Reference
from mergeway.checkpoint.writer import DEFAULT_SHARD
from mergeway.core.pool import worker_pool
from mergeway.core.progress import SILENT, Progress
from mergeway.core.ranks import team
from mergeway.errors import OptionError
from mergeway.fold.card import model_card
from mergeway.fold.folder import Standing
from mergeway.fold.outlets import InMemory, OnDisk
from mergeway.fold.prepare import (
    Arrival,
    Base,
    Given,
    check_weight,
    looks_first,
    prepare_arrival,
    prepare_base,
    task_name,
    with_extras,
)
from mergeway.fold.stream import Folded, fold_stream, folder_of
from mergeway.model.compute import Compute
from mergeway.rules import Fold, Rule, make

After = tuple[Fold, Checkpoint] | None


@dataclass(frozen=True)
class MergedDirectory:
    """What a merge into a directory did."""

    out: Path
    base: Base
    arrivals: list[Arrival]
    rule: Rule
    at: Fold


@dataclass(frozen=True)
class FoldedModel:
    """The deployed model after one fold of a stream, and the rule's state that the next one needs."""

    params: dict[str, Tensor]
    at: Fold
    state: Checkpoint
    details: Mapping[str, object]


def merge(
    base: Reference,
    arrivals: Sequence[Reference],
    rule: str | Rule = "average",
    weights: Sequence[float] | None = None,
    objective: Loss | None = None,
    *,
    moments: Sequence[Given] | None = None,
    tasks: Sequence[str] | None = None,
    heads: str | None = None,
    threads: int | None = None,
    compute: Compute | None = None,
    allow_pickle: bool = False,
    **options: object,
) -> dict[str, Tensor]:
    """Fold arrivals (refs, modules or dictionaries) into a base and return the deployed tensors.

    `objective`, for the rules that need one, maps named tensors to a scalar tensor; an `Objective` with the tasks in the
    order of the arrivals is narrowed to those seen so far at each fold. `moments`, one for each arrival (a file, a dictionary
    of tensors or None), are for the rules that need them; those beside an arrival are found without it. `heads`, a regular
    expression, names the tensors that each task keeps for itself (by default those of a classifier, '' for none); the base's
    stay in the result. `compute` names a device for rules without data; `auto` is the CPU.
    """
    given = _Given(base, arrivals, weights, tasks, heads, allow_pickle, compute)
    outlet = InMemory()
    with worker_pool(threads) as pool:
        stream = _prepare(make(rule, options), given, moments, objective, pool)
        for _ in stream.folds(pool, outlet):
            pass
    return outlet.last.tensors


def fold_steps(
    base: Reference,
    arrivals: Sequence[Reference],
    rule: str | Rule,
    weights: Sequence[float] | None = None,
    objective: Loss | None = None,
    *,
    moments: Sequence[Given] | None = None,
    heads: str | None = None,
    threads: int | None = 1,
    compute: Compute | None = None,
    after: After = None,
) -> Iterator[FoldedModel]:
    """The deployed model after every fold, one at a time; the last is what `merge` returns.

    `after`, the fold and the state of an earlier step of the same stream, goes on with the fold behind it.
    """
    given = _Given(base, arrivals, weights, None, heads, False, compute)
    outlet = InMemory(every=True, keeps=True)
    with worker_pool(threads) as pool:
        stream = _prepare(make(rule), given, moments, objective, pool)
        for folded in stream.folds(pool, outlet, after):
            assert folded.state is not None
            yield FoldedModel(outlet.last.tensors, folded.at, folded.state, folded.details)


def merge_into(
    out: str | Path,
    base: Reference,
    arrivals: Sequence[Reference],
    rule: str | Rule = "average",
    weights: Sequence[float] | None = None,
    objective: Loss | None = None,
    *,
    shard_size: int = DEFAULT_SHARD,
    force: bool = False,
    moments: Sequence[Given] | None = None,
    tasks: Sequence[str] | None = None,
    heads: str | None = None,
    command: str | None = None,
    progress: Progress = SILENT,
    threads: int | None = None,
    compute: Compute | None = None,
    allow_pickle: bool = False,
    **options: object,
) -> MergedDirectory:
    """Fold arrivals into a base and write a model directory, in memory that does not grow with either.

    Heads of single tasks are written beside the model.
    """
    chosen, out = make(rule, options), Path(out)
    given = _Given(base, arrivals, weights, tasks, heads, allow_pickle, compute)
    team().from_lead(lambda: check_free(out, force))
    with worker_pool(threads) as pool:
        stream = _prepare(chosen, given, moments, objective, pool, progress)
        check_apart(out, [stream.base.checkpoint.source, *(a.checkpoint.source for a in stream.arrivals)])
        with staged_directory(out, force) as stage:
            outlet = OnDisk(stage, shard_size)
            *_, folded = stream.folds(pool, outlet)
            outlet.writer.finish()
            for read in (stream.base, *stream.arrivals):
                read.seen.complete(pool)
            team().from_lead(lambda: _write_beside(stage, stream, command))
    return MergedDirectory(out, stream.base, stream.arrivals, chosen, folded.at)


@dataclass(frozen=True)
class _Given:
    """A stream as a caller names it."""

    base: Reference
    arrivals: Sequence[Reference]
    weights: Sequence[float] | None
    tasks: Sequence[str] | None
    heads: str | None
    allow_pickle: bool
    compute: Compute | None

    def shares(self) -> list[float]:
        """A weight for each arrival, after a look at both lists."""
        if isinstance(self.arrivals, str | Path | Mapping) or not self.arrivals:
            raise OptionError("arrivals: expected a list with at least one checkpoint")
        shares = list(self.weights) if self.weights is not None else [1.0] * len(self.arrivals)
        if len(shares) != len(self.arrivals):
            raise OptionError(f"weights: {len(shares)} given for {len(self.arrivals)} arrivals; give one each")
        for share in shares:
            check_weight(share)
        if self.tasks is not None and len(self.tasks) != len(self.arrivals):
            raise OptionError(f"tasks: {len(self.tasks)} names given for {len(self.arrivals)} arrivals; give one each")
        return shares


@dataclass(frozen=True)
class _Prepared:
    """A stream that is ready to be folded."""

    rule: Rule
    base: Base
    arrivals: list[Arrival]
    objective: Objective | None
    progress: Progress
    compute: Compute | None

    def folds(self, pool: Executor, outlet: InMemory | OnDisk, after: After = None) -> Iterator[Folded]:
        """Every fold, or those behind the step `after`."""
        folder = folder_of(self.rule, self.base, pool, self.progress, team(), self.compute)
        if after is None:
            return fold_stream(folder, self.arrivals, outlet, self.objective)
        done, left = self.arrivals[: after[0].step], self.arrivals[after[0].step :]
        weights = tuple(a.weight for a in done)
        objective = self.objective
        for k, arrival in enumerate(done, 1):  # a state holds no answers, but the arrivals are there to be asked again
            objective = folder.ask(objective, weights[:k], arrival)
        return fold_stream(folder, left, outlet, objective, Standing(*after, weights))


def _prepare(
    rule: Rule,
    given: _Given,
    moments: Sequence[Given] | None,
    objective: Loss | None,
    pool: Executor,
    progress: Progress = SILENT,
) -> _Prepared:
    shares = given.shares()
    if moments is not None and len(moments) != len(shares):
        raise OptionError(f"moments: {len(moments)} given for {len(shares)} arrivals; give one each, or None")
    opened = open_checkpoint(given.base, allow_pickle=given.allow_pickle)
    # Every file is opened, and every header read, before the first long pass over the data.
    checkpoints = [open_checkpoint(a, opened, given.allow_pickle) for a in given.arrivals]
    names: list[str] = []
    for number, checkpoint in enumerate(checkpoints):
        names.append(task_name(given.tasks[number] if given.tasks else None, checkpoint, names))
    first = looks_first(rule)
    base = prepare_base(opened, pool, progress, head_pattern(opened, given.heads), first)
    loss = as_objective(objective) if objective is not None else None
    arrivals: list[Arrival] = []
    for k, (checkpoint, weight, name) in enumerate(zip(checkpoints, shares, names, strict=True), 1):
        arrival = prepare_arrival(base, checkpoint, weight, name, pool, progress, first)
        data = (lambda k=k: loss.seen(k).newest()) if loss is not None else None
        arrivals.append(with_extras(rule, base, arrival, moments[k - 1] if moments else None, data))
    return _Prepared(rule, base, arrivals, loss, progress, given.compute)


def _write_beside(stage: Path, stream: _Prepared, command: str | None) -> None:
    copy_side_files(stream.base.checkpoint.directory, stage)
    write_beside(stage, {a.task: a.head for a in stream.arrivals if a.head is not None})
    rows = [(a.task, a.checkpoint.source, a.seen.digest, a.weight) for a in stream.arrivals]
    card = model_card(stream.base.checkpoint, stream.base.seen.digest, rows, stream.rule, command)
    write_card(stage, card)
