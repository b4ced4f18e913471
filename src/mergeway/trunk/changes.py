"""The changes of a trunk: each is made under the writer's lock and committed whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from mergeway.calibration.alignment import Alignment, align
from mergeway.calibration.calibrate import Ask, calibrate
from mergeway.calibration.memory import Bounds, CalibrationMemory
from mergeway.checkpoint import open_checkpoint
from mergeway.checkpoint.heads import head_of, head_pattern, read_heads
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import OptionError, TrunkError
from mergeway.fold.equip import equip
from mergeway.fold.merge import check_weight
from mergeway.fold.prepare import Base, prepare_arrival, prepare_base, worker_pool
from mergeway.fold.walk import Pass
from mergeway.model.compute import Compute
from mergeway.model.tangent import Tangent
from mergeway.rules import RULES, Rule, make
from mergeway.trunk.arrivals import read_data, record_of, refuse_twice, task_name
from mergeway.trunk.commit import Commit
from mergeway.trunk.journal import Journal, Record, now
from mergeway.trunk.store import Store
from mergeway.trunk.view import TrunkView


class Trunk(TrunkView):
    """Open one with `Trunk.open`, make one with `Trunk.create`."""

    @classmethod
    def create(
        cls,
        path: str | Path,
        base: str | Path,
        rule: str | Rule = "average",
        *,
        keep: int = 2,
        memory: Bounds | None = None,
        heads: str | None = None,
        threads: int | None = None,
        allow_pickle: bool = False,
        progress: Progress = SILENT,
        **options: Any,
    ) -> Trunk:
        """Start a trunk from a base; the base stays where it is and is checked by its digest at every fold.

        `memory` bounds the calibration samples; `heads`, a regular expression, names the tensors that each task keeps for
        itself (by default those of a classifier, '' for none).
        """
        chosen = make(rule, options)
        if RULES.get(chosen.name) is not type(chosen):
            raise OptionError(
                f"rule '{chosen.name}' is not registered, so the trunk could not be opened again; add it to mergeway.rules.RULES first"
            )
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise OptionError(f"keep is {keep!r}; at least 1 snapshot must be kept")
        if not isinstance(base, str | Path):
            raise TrunkError(
                f"the base of a trunk is a path or a hub id, not {type(base).__name__}; save the model first"
            )
        checkpoint = open_checkpoint(base, allow_pickle=allow_pickle)
        with worker_pool(threads) as pool:
            prepared = prepare_base(checkpoint, pool, progress)
        pattern = head_pattern(checkpoint, heads)
        source = str(Path(base).absolute()) if Path(base).exists() else str(base)
        settings = {
            "base": {"source": source, "digest": prepared.seen.digest, "allow_pickle": allow_pickle},
            "rule": chosen.name,
            "options": chosen.options(),
            "keep": keep,
            "memory": asdict(memory or Bounds()),
            "heads": pattern,
        }
        first = Record(
            0,
            "init",
            prepared.seen.digest,
            now(),
            source=source,
            digest=prepared.seen.digest,
            details={"rule": chosen.name, "options": chosen.options()},
        )
        return cls(Store.create(Path(path), settings, first), threads=threads, progress=progress)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        threads: int | None = None,
        compute: Compute | None = None,
        progress: Progress = SILENT,
    ) -> Trunk:
        """Open a trunk at its last commit; `compute` says how a fold or an alignment with data runs the model."""
        return cls(Store(Path(path)), threads=threads, compute=compute, progress=progress)

    def add(
        self,
        ref: Any,
        task: str | None = None,
        weight: float = 1.0,
        *,
        data: str | Mapping[str, str] | None = None,
        head: str | Path | Mapping[str, str | Path] | None = None,
        moments: Any = None,
        objective: Any = None,
        remember: bool = True,
        again: bool = False,
        wait: bool = True,
        allow_pickle: bool = False,
    ) -> Record:
        """Fold in one arrival and return its journal record.

        A rule that needs calibration takes `data` and `head` (whose samples join the trunk's memory) or an `objective` of
        the caller's own, which sees all tasks so far. A rule that needs moments takes a file of them, finds the one beside the
        arrival, or works out an empirical Fisher from `data` and `head`. Without `remember` no sample stays in the trunk: then
        `data` and `head` map task names to the data of every task that is not remembered, at this and every later arrival.
        """
        check_weight(weight)
        with self._store.writer(wait, self._progress), worker_pool(self._threads) as pool:
            journal = self._store.journal()
            base = self._base(pool)
            checkpoint = open_checkpoint(ref, base.checkpoint, allow_pickle)
            name = task_name(task, checkpoint, journal.folded())
            arrival = prepare_arrival(base, checkpoint, float(weight), name, pool, self._progress)
            refuse_twice(arrival, journal.folded(), again)
            commit = self._change(base, pool, journal)
            if base.heads is not None:
                commit = replace(commit, heads={**commit.heads, name: head_of(checkpoint, base.heads)})
            record = record_of(journal, "add", arrival)
            if self.rule.whole:
                equip(self.rule, base, arrival, moments)
                asked = Ask(data, head, objective, remember, self._compute)
                tasks = {f.task: f.weight for f in journal.folded()} | {name: arrival.weight}
                samples, objective = calibrate(
                    self.rule.name, base, tasks, commit.heads, self._remembered(journal.last), asked
                )
                return commit.whole(arrival, record, list(tasks.values()), samples, objective)
            if isinstance(data, Mapping) or isinstance(head, Mapping):
                raise OptionError(f"rule '{self.rule.name}' takes data of the arrival alone; give --data DATA")
            if objective is not None or (data is not None and self.rule.brings is None):
                raise OptionError(f"rule '{self.rule.name}' uses no data; leave out --data and the objective")
            source = None
            if data is not None:
                source = partial(read_data, data, head, name, base, self._compute, commit.heads.get(name))
            arrival = equip(self.rule, base, arrival, moments, source)
            at, memory = commit.standing()
            return commit.parts(
                lambda keep, model: commit.way.fold([arrival], at, memory, keep, model),
                record,
                deploy=self.rule.settles,
            )

    def remove(self, task: str, ref: Any, *, wait: bool = True, allow_pickle: bool = False) -> Record:
        """Take an arrival out again, given its checkpoint; for rules whose memory is a sum."""
        if not self.rule.additive:
            raise TrunkError(
                f"rule '{self.rule.name}' cannot take an arrival out again: its memory is not a sum; use 'rollback'"
            )
        with self._store.writer(wait, self._progress), worker_pool(self._threads) as pool:
            journal = self._store.journal()
            held = {f.task: f for f in journal.folded()}
            if task not in held:
                raise TrunkError(f"{self.path}: holds no task '{task}'; it holds {', '.join(held) or 'none'}")
            base = self._base(pool)
            checkpoint = open_checkpoint(ref, base.checkpoint, allow_pickle)
            arrival = prepare_arrival(base, checkpoint, held[task].weight, task, pool, self._progress)
            if arrival.seen.digest != held[task].digest:
                raise TrunkError(
                    f"{checkpoint.source}: is not what was folded in as '{task}' (digest {arrival.seen.digest[:12]}, folded {held[task].digest[:12]})"
                )
            record = record_of(journal, "remove", arrival)
            commit = self._change(base, pool, journal)
            commit = replace(commit, heads={t: h for t, h in commit.heads.items() if t != task})
            at, memory = commit.standing()
            if memory is None or len(held) == 1:
                return commit.base_again(record)
            return commit.parts(lambda keep, _: commit.way.unfold(arrival, at, memory, keep), record, deploy=True)

    def align(
        self,
        data: str,
        head: str | Path | None = None,
        how: Alignment | None = None,
        *,
        tangent: bool = False,
        wait: bool = True,
    ) -> Record:
        """Bring the features of the deployed model back to those before its last fold, on the last task's data.

        Only the last projection moves, or what `how` names. `tangent` is for models that are judged in the tangent space.
        """
        how = how or Alignment()
        with self._store.writer(wait, self._progress), worker_pool(self._threads) as pool:
            journal = self._store.journal()
            last = journal.last
            if last.kind != "add" or len(journal.folded()) < 2:
                raise TrunkError(
                    f"{self.path}: alignment follows the fold of a second or later arrival; the last record is '{last.kind}' of step {last.step}"
                )
            base = self._base(pool)
            predictor, samples = read_data(data, head, str(last.task), base, self._compute)
            if tangent:
                predictor = Tangent(predictor, {n: base.checkpoint.read(n).float() for n in base.merged_infos})
            previous = self.deployed(last.step - 1)
            before = {n: previous.read(n) for n in base.merged_infos}
            merged = {n: self._store.model(last.step).read(n) for n in base.merged_infos}
            done = align(predictor, merged, before, samples, how, self._progress)
            record = Record(len(journal.records), "align", "", now(), task=last.task)
            told = {"data": data, **asdict(how), "tangent": tangent, "before": done.before, "after": done.after}
            return self._change(base, pool, journal).changed(done.moved, record, {"align": told})

    def rollback(self, step: int, *, wait: bool = True) -> Record:
        """Go back to an earlier step that still has its snapshot; that is a journal record too."""
        with self._store.writer(wait, self._progress):
            journal = self._store.journal()
            target = self.record(step, journal)
            record = Record(
                len(journal.records), "rollback", target.result, now(), stream=target.stream, details={"to": step}
            )
            if target.files is None:
                return self._store.commit_record(journal, record, self.keep).last
            if not self._store.has_snapshot(step):
                kept = [str(r.step) for r in journal.records if r.files is None or self._store.has_snapshot(r.step)]
                raise TrunkError(
                    f"{self.path}: the snapshot of step {step} is no longer kept; there are those of {', '.join(kept)} (see --keep)"
                )
            with self._store.stage() as stage:
                digests = self._store.link_snapshot(step, stage)
                return self._store.commit(stage, digests, journal, record, self.keep).last

    def _change(self, base: Base, pool: Any, journal: Journal) -> Commit:
        heads = read_heads(self._snapshot(journal.last))
        return Commit(self._store, Pass(self.rule, base, pool, self._progress), journal, self.keep, heads)

    def _remembered(self, last: Record) -> CalibrationMemory:
        return CalibrationMemory.read(self._snapshot(last)) or CalibrationMemory({}, bounds=self.bounds)
