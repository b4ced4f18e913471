"""The same arrivals by another rule: a new trunk from the journal of an old one, where the arrivals still exist."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mergeway.calibration.given import Data, Prepared
from mergeway.checkpoint import open_checkpoint
from mergeway.checkpoint.directory import staged_directory
from mergeway.core.pool import worker_pool
from mergeway.errors import CheckpointError, MergewayError, TrunkError, UnsureError
from mergeway.fold.prepare import prepare_arrival, prepare_base
from mergeway.rules import Rule, make
from mergeway.trunk.store import committed
from mergeway.trunk.trunk import Trunk


def replay(
    trunk: Trunk,
    out: str | Path,
    rule: str | Rule,
    *,
    data: Mapping[str, Data] | None = None,
    head: Mapping[str, str | Path] | None = None,
    keep: int | None = None,
    **options: object,
) -> Trunk:
    """Fold the arrivals that a trunk holds into a new trunk by another rule, in their order, with their names and weights.

    Every arrival is found and compared with its digest before the first is folded. A rule that needs data gets the samples that
    the old trunk remembers, or what `data` has of a task. The new trunk appears whole or not at all, and keeps as many snapshots as the
    old one, or `keep`.
    """
    chosen, target = make(rule, options), Path(out)
    held = trunk.folded()
    if not held:
        raise TrunkError(f"{trunk.path}: holds no arrival, so there is nothing to replay")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise TrunkError(f"{target}: exists and is not empty; choose another directory")
    base, places = _check_sources(trunk)
    memory = trunk.remembered()
    known = {t.task: Prepared(memory.settings, t) for t in memory.tasks} if memory is not None else {}
    given: dict[str, Data] = {**known, **(data or {})}
    try:
        with staged_directory(target) as stage, _in_a_stage(target):
            replayed = Trunk.create(
                stage,
                base,
                chosen,
                keep=trunk.keep if keep is None else keep,
                memory=trunk.bounds,
                heads=trunk.heads or "",
                embed_base=trunk.embeds_base,
                compute=trunk.compute,
            )
            for arrival, place in zip(held, places, strict=True):
                needed = given.get(arrival.task) if chosen.needs else None
                file = (head or {}).get(arrival.task)
                replayed.add(place, arrival.task, arrival.weight, data=needed, head=file, again=True)
    except CheckpointError as problem:
        raise TrunkError(str(problem)) from None
    try:
        return Trunk.open(target, compute=trunk.compute)
    except MergewayError as problem:
        raise TrunkError(f"{target}: is written, but cannot be opened: {problem}") from None


@contextmanager
def _in_a_stage(target: Path) -> Generator[None]:
    """What is committed in a stage is gone with it, so nobody is told of it."""
    try:
        yield
    except UnsureError as problem:
        raise TrunkError(f"{target}: cannot be written ({problem.cause})") from None
    finally:
        committed.clear()


def _check_sources(trunk: Trunk) -> tuple[str, list[str]]:
    """Where the base and the arrivals are now; refuses, before any work, if one is gone or is no longer what was folded."""
    lost: list[str] = []
    places = [trunk.place_of(arrival.step) for arrival in trunk.folded()]
    with worker_pool() as pool:
        base = prepare_base(trunk.deployed(0), pool, heads=trunk.heads)
        for arrival, place in zip(trunk.folded(), places, strict=True):
            try:
                checkpoint = open_checkpoint(place, base.checkpoint)
                found = prepare_arrival(base, checkpoint, arrival.weight, arrival.task, pool).seen.digest
            except MergewayError as problem:
                lost.append(f"'{arrival.task}' cannot be read ({problem})")
                continue
            if found != arrival.digest:
                lost.append(f"'{arrival.task}' at {place} has changed since step {arrival.step}")
    if lost:
        raise TrunkError(f"{trunk.path}: cannot be replayed: {'; '.join(lost)}")
    return base.checkpoint.source, places
