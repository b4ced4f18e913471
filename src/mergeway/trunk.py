"""A trunk: the deployed model of a stream, its rule's memory and its history in one durable directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergeway.alignment import Alignment, align
from mergeway.bringing import equip
from mergeway.calibrating import Ask, calibrate
from mergeway.calibration import DEFAULT_SIZE, Samples, draw
from mergeway.card import model_card
from mergeway.checkpoint import Checkpoint, open_checkpoint
from mergeway.checkpoint.adapter import Adapter, write_adapter
from mergeway.checkpoint.directory import check_apart
from mergeway.checkpoint.export import write_model
from mergeway.checkpoint.writer import DEFAULT_SHARD
from mergeway.commit import Commit
from mergeway.engine import Arrival, Base, Pass, prepare_arrival, prepare_base, worker_pool
from mergeway.errors import CheckpointError, MergewayError, OptionError, TrunkError
from mergeway.heads import head_of, head_pattern, label_config, read_heads, with_head, write_beside
from mergeway.memory import Bounds, CalibrationMemory
from mergeway.merging import check_weight
from mergeway.models import make_model
from mergeway.progress import SILENT, Progress
from mergeway.rules import RULES, Rule, make
from mergeway.store import Journal, Record, Store
from mergeway.store.journal import Folded, now
from mergeway.store.verify import problems_of
from mergeway.tangent import Tangent
from mergeway.taskdata import task_data


class Trunk:
    """Open one with `Trunk.open`, make one with `Trunk.create`; every change is committed whole or not at all."""

    def __init__(self, store: Store, *, threads: int | None = None, progress: Progress = SILENT) -> None:
        self._store = store
        self._threads = threads
        self._progress = progress
        settings = store.settings()
        try:
            self.base_ref: str = settings["base"]["source"]
            self.base_digest: str = settings["base"]["digest"]
            self.keep: int = settings["keep"]
            self.rule: Rule = make(settings["rule"], settings["options"])
            self.bounds = Bounds(**settings.get("memory", {}))
            self.heads: str | None = settings.get("heads")
        except (KeyError, TypeError, AttributeError) as problem:
            raise TrunkError(
                f"{store.settings_path}: the entry {problem} is missing or of another kind; restore it from a backup"
            ) from None
        except OptionError as problem:
            raise TrunkError(f"{store.settings_path}: {problem}; restore it from a backup") from None

    @property
    def path(self) -> Path:
        return self._store.path

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
    def open(cls, path: str | Path, *, threads: int | None = None, progress: Progress = SILENT) -> Trunk:
        """Open a trunk at its last commit."""
        return cls(Store(Path(path)), threads=threads, progress=progress)

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
            name = _task_name(task, checkpoint, journal.folded())
            arrival = prepare_arrival(base, checkpoint, float(weight), name, pool, self._progress)
            _refuse_twice(arrival, journal.folded(), again)
            commit = self._change(base, pool, journal)
            if base.heads is not None:
                commit = replace(commit, heads={**commit.heads, name: head_of(checkpoint, base.heads)})
            record = _record(journal, "add", arrival)
            if self.rule.whole:
                equip(self.rule, base, arrival, moments)
                asked = Ask(data, head, objective, remember)
                tasks = {f.task: f.weight for f in journal.folded()} | {name: arrival.weight}
                samples, objective = calibrate(
                    self.rule.name, base, tasks, commit.heads, self._remembered(journal.last), asked
                )
                return commit.whole(arrival, record, list(tasks.values()), samples, objective)
            if isinstance(data, Mapping) or isinstance(head, Mapping):
                raise OptionError(f"rule '{self.rule.name}' takes data of the arrival alone; give --data DATA")
            if objective is not None or (data is not None and self.rule.brings is None):
                raise OptionError(f"rule '{self.rule.name}' uses no data; leave out --data and the objective")
            source = partial(_read_data, data, head, name, base) if data is not None else None
            arrival = equip(self.rule, base, arrival, moments, source)
            at, memory = commit.standing()
            return commit.parts(
                lambda keep, model: commit.way.fold([arrival], at, memory, keep, model),
                record,
                deploy=self.rule.settles,
            )

    def memory(self) -> dict[str, Any]:
        """The calibration samples that the trunk remembers: tasks, samples, bytes."""
        directory = self._snapshot(self._store.journal().last)
        held = CalibrationMemory.read(directory)
        if held is None or directory is None:
            return {**asdict(self.bounds), "kind": None, "samples": 0, "bytes": 0, "tasks": []}
        return held.summary(directory)

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
            record = _record(journal, "remove", arrival)
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
            predictor, samples = _read_data(data, head, str(last.task), base)
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

    def params(self) -> dict[str, Tensor]:
        """The deployed tensors, mapped from disk."""
        deployed = self.deployed()
        return {name: deployed.read(name) for name in deployed.infos}

    def deployed(self, step: int | None = None) -> Checkpoint:
        """The deployed weights at the last step, or at one whose snapshot is kept."""
        while True:
            record = self._store.journal().last if step is None else self.record(step)
            if record.files is None:
                return self._open_base()
            try:
                return self._store.model(record.step)
            except CheckpointError:
                # A writer may drop a snapshot between our look at the journal and at its files; then there is a newer one.
                if self._store.has_snapshot(record.step):
                    raise
                if step is not None or record.hash == self._store.journal().last.hash:
                    raise TrunkError(f"{self.path}: the snapshot of step {record.step} is not kept") from None

    def log(self) -> list[Record]:
        """Every journal record, oldest first."""
        return self._store.journal().records

    def record(self, step: int, journal: Journal | None = None) -> Record:
        """The journal record of one step."""
        records = (journal or self._store.journal()).records
        if not 0 <= step < len(records):
            raise TrunkError(f"{self.path}: there is no step {step}; the last is {len(records) - 1}")
        return records[step]

    def folded(self, step: int | None = None) -> list[Folded]:
        """The arrivals that the deployed model holds."""
        return self._store.journal().folded(step)

    def kept_steps(self) -> list[int]:
        """The steps that `rollback` can go back to."""
        return [r.step for r in self.log() if r.files is None or self._store.has_snapshot(r.step)]

    def verify(self) -> list[str]:
        """Every byte that differs from what was committed, one line each; also a base that changed or is gone."""
        with worker_pool(self._threads) as pool:
            problems = problems_of(self._store, pool, self._progress)
            try:
                self._base(pool)
            except MergewayError as problem:
                problems.append(str(problem))
        return problems

    def export(
        self,
        out: str | Path,
        *,
        dtype: torch.dtype | None = None,
        task: str | None = None,
        shard_size: int = DEFAULT_SHARD,
        force: bool = False,
        command: str | None = None,
    ) -> Path:
        """Write the deployed model as a model directory that `transformers` loads.

        Heads that tasks keep for themselves are written beside it, as `heads/TASK.safetensors`; with `task` that task's head
        takes its place in the model itself.
        """
        check_apart(Path(out), [self.base_ref])
        rows = [(f.task, f.source, f.digest, f.weight) for f in self.folded()]
        card = model_card(self.base_ref, self.base_digest, rows, self.rule, command)
        heads = read_heads(self._snapshot(self._store.journal().last))
        if task is not None and task not in heads:
            raise TrunkError(
                f"{self.path}: task '{task}' has no head of its own; those that have one: {', '.join(heads) or 'none'}"
            )
        return write_model(
            Path(out),
            with_head(self.deployed(), heads[task]) if task else self.deployed(),
            self._open_base(),
            card,
            dtype,
            shard_size,
            force,
            self._progress,
            (lambda stage: label_config(stage, heads[task])) if task else (lambda stage: write_beside(stage, heads)),
        )

    def export_lora(
        self,
        out: str | Path,
        rank: int,
        *,
        dtype: torch.dtype = torch.float32,
        force: bool = False,
        command: str | None = None,
    ) -> Adapter:
        """Write the deployed model's distance from the base as a PEFT adapter, and say what each layer kept of it."""
        check_apart(Path(out), [self.base_ref])
        rows = [(f.task, f.source, f.digest, f.weight) for f in self.folded()]
        card = model_card(self.base_ref, self.base_digest, rows, self.rule, command, library="peft")
        with worker_pool(self._threads) as pool:
            return write_adapter(
                Path(out), self.deployed(), self._open_base(), rank, card, dtype, force, pool, self._progress
            )

    def _open_base(self) -> Checkpoint:
        allow = self._store.settings()["base"].get("allow_pickle", False)
        try:
            return open_checkpoint(self.base_ref, allow_pickle=allow)
        except CheckpointError as problem:
            raise TrunkError(f"the base of {self.path} cannot be opened: {problem}") from None

    def _change(self, base: Base, pool: Any, journal: Journal) -> Commit:
        heads = read_heads(self._snapshot(journal.last))
        return Commit(self._store, Pass(self.rule, base, pool, self._progress), journal, self.keep, heads)

    def _snapshot(self, record: Record) -> Path | None:
        return self._store.snapshot(record.step) if record.files else None

    def _remembered(self, last: Record) -> CalibrationMemory:
        return CalibrationMemory.read(self._snapshot(last)) or CalibrationMemory({}, bounds=self.bounds)

    def _base(self, pool: Any) -> Base:
        base = prepare_base(self._open_base(), pool, self._progress, self.heads)
        if base.seen.digest != self.base_digest:
            raise TrunkError(
                f"the base {self.base_ref} has changed since 'init' (digest {base.seen.digest[:12]}, was {self.base_digest[:12]}); put the old one back"
            )
        return base


def _read_data(data: str, head: str | Path | None, task: str, base: Base) -> tuple[Any, Samples]:
    """The model as a function of parameters, and the labelled samples of one task."""
    directory = base.checkpoint.directory
    if directory is None:
        raise OptionError(f"data can be used with a base that is a model directory, not {base.checkpoint.source}")
    settings, samples = task_data(data, Path(head) if head else None, task, directory)
    return make_model(directory, settings), draw(samples, DEFAULT_SIZE)


def _record(journal: Journal, kind: str, arrival: Arrival) -> Record:
    return Record(
        step=len(journal.records),
        kind=kind,
        result="",
        time=now(),
        task=arrival.task,
        source=arrival.checkpoint.source,
        digest=arrival.seen.digest,
        weight=arrival.weight,
    )


def _task_name(task: str | None, checkpoint: Checkpoint, held: list[Folded]) -> str:
    taken = {f.task for f in held}
    if task is not None:
        if task in taken:
            raise TrunkError(f"task '{task}' is part of the deployed model already; give the arrival another --task")
        if not task or not task.isprintable():
            raise OptionError(f"task name {task!r}: it must be printable and not empty")
        return task
    stem = "".join(c if c.isprintable() else "_" for c in Path(checkpoint.source).stem) or "arrival"
    number, name = 1, stem
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    return name


def _refuse_twice(arrival: Arrival, held: list[Folded], again: bool) -> None:
    for folded in held:
        if folded.digest == arrival.seen.digest and not again:
            raise TrunkError(
                f"{arrival.checkpoint.source}: the same weights were folded in at step {folded.step} as '{folded.task}'; pass --again to count them once more"
            )
