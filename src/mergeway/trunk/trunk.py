"""The changes of a trunk: each is made under the writer's lock and committed whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from mergeway.calibration.alignment import Alignment
from mergeway.calibration.calibrate import CalibrationRequest
from mergeway.calibration.given import ByTask, Data, HeadByTask
from mergeway.calibration.memory import HOLDOUT, Bounds, CalibrationMemory, check_copies
from mergeway.calibration.objective import Objective
from mergeway.calibration.sample_objective import asked_about
from mergeway.checkpoint import open_checkpoint
from mergeway.checkpoint.heads import read_heads
from mergeway.checkpoint.resolve import Reference
from mergeway.core.pool import worker_pool
from mergeway.core.progress import SILENT, Progress
from mergeway.core.ranks import team
from mergeway.errors import TrunkError
from mergeway.fold.prepare import Given, prepare_arrival, task_name, with_extras
from mergeway.fold.stream import fold_stream, folder_of
from mergeway.model.compute import Compute
from mergeway.rules import RULES, Rule, make, reference
from mergeway.trunk.align import AlignedStep
from mergeway.trunk.beginning import Beginning
from mergeway.trunk.commit import Change, Commit, notes_of, record_of
from mergeway.trunk.gate import Gate
from mergeway.trunk.journal import Record
from mergeway.trunk.remote import new_place, store_at
from mergeway.trunk.steps import Steps


class Trunk(Steps):
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
        embed_base: bool = False,
        threads: int | None = None,
        compute: Compute | None = None,
        allow_pickle: bool = False,
        progress: Progress = SILENT,
        **options: object,
    ) -> Trunk:
        """Start a trunk from a base; the base stays where it is and is checked by its digest at every fold.

        With `embed_base` the trunk keeps a copy of it and never needs the original again.

        `memory` bounds the calibration samples; `heads`, a regular expression, names the tensors that each task keeps for
        itself (by default those of a classifier, '' for none).
        """
        chosen = make(rule, options)
        name = rule if isinstance(rule, str) and rule in RULES else reference(chosen)
        beginning = Beginning(chosen, name, keep, memory or Bounds(), heads, embed_base, allow_pickle)
        store = beginning.create(new_place(path), base, threads, progress)
        try:
            return cls(store, threads=threads, compute=compute, progress=progress)
        except TrunkError as problem:
            raise TrunkError(f"{path}: is written, but cannot be opened: {problem}") from None

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        threads: int | None = None,
        compute: Compute | None = None,
        progress: Progress = SILENT,
        base: str | Path | None = None,
    ) -> Trunk:
        """Open a trunk at its last commit; `compute` says how a fold or an alignment with data runs the model.

        `base` says where the base is this time; `relocate` writes it down for good. A trunk by URL can only be read.
        """
        opened = cls(store_at(path), threads=threads, compute=compute, progress=progress, base=base)
        with contextlib.suppress(TrunkError):  # if you only read, you can do without the rule's class
            _ = opened.rule_today
        return opened

    def relocate(self, base: str | Path, *, wait: bool = True) -> str:
        """Write down where the base is now; it must be the one that the trunk started from."""
        with self._store.writer(wait, self._progress), worker_pool(self._threads) as pool:
            return self._kept_base.relocate(str(base), pool, self._progress)

    def add(
        self,
        ref: Reference,
        task: str | None = None,
        weight: float = 1.0,
        *,
        data: ByTask = None,
        head: HeadByTask = None,
        moments: Given = None,
        objective: Objective | Callable[[Mapping[str, Tensor]], Tensor] | None = None,
        remember: bool = True,
        copies: int | None = None,
        check: Mapping[str, Data] | None = None,
        max_drop: float | None = None,
        at_least: Mapping[str, float] | None = None,
        holdout: float | None = None,
        dry_run: bool = False,
        message: str | None = None,
        again: bool = False,
        wait: bool = True,
        allow_pickle: bool = False,
    ) -> Record:
        """Fold in one arrival and return its journal record.

        A rule that needs calibration takes `data` and `head` (whose samples join the trunk's memory) or an `objective` of
        the caller's own, which sees all tasks so far. A rule that needs moments takes a file of them, finds the one beside the
        arrival, or works out an empirical Fisher from `data` and `head`. Without `remember` no sample stays in the trunk: then
        `data` and `head` map task names to the data of every task that is not remembered, at this and every later arrival.

        Data may come without labels: the arrival is asked about its samples, and about `copies` of each (by default as many as
        the trunk's memory says), and its answers are kept in their place. A language model writes its own samples for
        `data="self:64"`, and without any data if the rule asks arrivals.

        The fold is judged before it is deployed, on the data of each task in `check` and on the samples that a `holdout`, a share
        of `data`, keeps in the trunk. It is refused with `GateRefused` if an earlier task falls by more than `max_drop` points,
        or a task stays below its percentage in `at_least`. A `dry_run` does all of it but the commit.
        """
        check_copies(copies)
        gate = Gate(dict(check or {}), max_drop, dict(at_least or {}))
        with self._change(wait) as change:
            base, point = change.base, change.point
            name = task_name(task, checkpoint := open_checkpoint(ref, base.checkpoint, allow_pickle), point)
            arrival = change.incoming(checkpoint, weight, name, again)
            heads = {**change.heads, **({name: arrival.head} if arrival.head is not None else {})}
            request = CalibrationRequest(data, head, objective, remember, self.compute, copies)
            held, request = change.held_back(arrival, heads, request, holdout, self.bounds)
            trials = gate.trials(change, arrival, heads, held, request)
            loss, memory, source = change.calibrated(arrival, heads, request, self.bounds)
            arrival = with_extras(self.rule, base, arrival, moments, source)
            with Commit.begin(self._store, change.point, base) as commit:
                [folded] = fold_stream(change.folder, [arrival], commit, loss, change.standing())
                change.refuse_twice(arrival, again)
                commit.keep_heads(heads)
                commit.keep_memory(memory and memory.answered(folded.objective, name, arrival.seen.digest))
                commit.keep_memory(held, HOLDOUT)
                judged = gate.judge(trials, change, commit.staged, arrival, self._progress)
                details = {**folded.details, **asked_about(folded.objective, name), **judged}
                details |= notes_of(message, self.compute)
                record, keep = record_of(self._store, point, "add", arrival), 0 if dry_run else self.keep
                return commit.finish(record, self.rule_today, folded.at, details, keep)

    def remove(self, task: str, ref: Reference, *, wait: bool = True, allow_pickle: bool = False) -> Record:
        """Take an arrival out again, given its checkpoint; for rules whose state is a sum."""
        with self._change(wait) as change:
            change.folder.check_removable()
            base, point = change.base, change.point
            held = {f.task: f for f in point.held}
            if task not in held:
                raise TrunkError(f"{self.path}: holds no task '{task}'; it holds {', '.join(held) or 'none'}")
            checkpoint = open_checkpoint(ref, base.checkpoint, allow_pickle)
            arrival = prepare_arrival(base, checkpoint, held[task].weight, task, change.pool, self._progress)
            if arrival.seen.digest != held[task].digest:
                raise TrunkError(
                    f"{checkpoint.source}: is not what was folded in as '{task}' (digest {arrival.seen.digest[:12]}, folded {held[task].digest[:12]})"
                )
            record = record_of(self._store, point, "remove", arrival)
            if len(held) == 1:
                # The deployed model is the base again, and there is nothing to keep.
                bare = replace(record, result=base.seen.digest)
                return self._store.commit_record(point, bare, self.keep)
            with Commit.begin(self._store, point, base) as commit:
                kept, model = commit.state(change.folder.state_infos()), commit.model(base.checkpoint.infos)
                at = change.folder.unfold(arrival, change.standing(), kept, model)
                commit.keep_heads({t: h for t, h in change.heads.items() if t != task})
                rest = [f.task for f in point.held if f.task != task]
                back = CalibrationMemory.read(self._store.of(point.last).directory(HOLDOUT), HOLDOUT)
                commit.keep_memory(back.shared_out(rest) if back else None, HOLDOUT)
                return commit.finish(record, self.rule_today, at, {}, self.keep)

    def align(
        self,
        data: str | Path,
        head: str | Path | None = None,
        how: Alignment | None = None,
        *,
        tangent: bool = False,
        wait: bool = True,
    ) -> Record:
        """Bring the features of the deployed model back to those before its last fold, on the last task's data.

        Only the last projection moves, or what `how` names. `tangent` is for models that are judged in the tangent space.
        """
        with self._change(wait) as change:
            last = change.point.last
            if last.kind != "add" or change.point.count < 2:
                raise TrunkError(
                    f"{self.path}: alignment follows the fold of a second or later arrival; the last record is '{last.kind}' of step {last.step}"
                )
            work = AlignedStep(data, head, how or Alignment(), tangent, self.compute, self._progress)
            return work.commit(change, self.deployed(last.step - 1), self.rule_today, self.keep)

    @contextlib.contextmanager
    def _change(self, wait: bool) -> Generator[Change]:
        """The writer's lock, workers, and the trunk as it stands."""
        with self._store.writer(wait, self._progress), worker_pool(self._threads) as pool:
            point = self._store.point()
            base = self._kept_base.find(pool, self._progress, self.heads)
            folder = folder_of(self.rule, base, pool, self._progress, team(), self.compute)
            yield Change(
                self._store, point, base, folder, pool, read_heads(self._store.of(point.last).directory("heads"))
            )
            if self._store.changed:
                self._kept_base.remember()
