"""A trunk as a reader sees it: the deployed model, its history, its memory; nothing here takes the lock or changes a file of it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mergeway.calibration.memory import Bounds, CalibrationMemory
from mergeway.checkpoint import Checkpoint
from mergeway.checkpoint.adapter import Adapter, write_adapter
from mergeway.checkpoint.directory import check_apart
from mergeway.checkpoint.export import write_model
from mergeway.checkpoint.heads import Head, label_config, read_heads, with_head, write_beside
from mergeway.checkpoint.source import JsonObject
from mergeway.checkpoint.writer import DEFAULT_SHARD
from mergeway.core.pool import worker_pool
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import CheckpointError, OptionError, TrunkError
from mergeway.fold.card import adapter_notes, model_card
from mergeway.fold.prepare import Base
from mergeway.model.compute import Compute
from mergeway.rules import Description, Rule, make
from mergeway.trunk.base import KeptBase, Outline
from mergeway.trunk.journal import Folded, Journal, Record
from mergeway.trunk.record import Places
from mergeway.trunk.store import Store
from mergeway.trunk.verify import base_problems, problems_of


class TrunkView:
    """The committed state of a trunk; a writer beside it is never seen half-way."""

    def __init__(
        self,
        store: Store,
        *,
        threads: int | None = None,
        compute: Compute | None = None,
        progress: Progress = SILENT,
        base: str | Path | None = None,
    ) -> None:
        self._store = store
        self._threads = threads
        self._compute = compute
        self._progress = progress
        settings = store.settings()
        try:
            self._kept_base = KeptBase(store.path, settings["base"], str(base) if base is not None else None)
            self.base_digest: str = settings["base"]["digest"]
            self.keep: int = settings["keep"]
            self._rule_as: tuple[str, Mapping[str, object]] = settings["rule"], settings["options"]
            self._about: JsonObject | None = settings.get("about")
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

    @property
    def base_ref(self) -> str:
        """Where the base was when it was last named."""
        return self._kept_base.source

    @cached_property
    def rule(self) -> Rule:
        """The rule itself; a reader who does not have its class can do with `described_rule`."""
        try:
            return make(*self._rule_as)
        except OptionError as problem:
            raise TrunkError(
                f"{self._store.settings_path}: {problem}; install what the rule is from, or restore the file from a backup"
            ) from None

    @cached_property
    def rule_today(self) -> Description:
        """The rule as it is installed now, which may be another version than at `init`."""
        return Description.of(self.rule)

    @property
    def described_rule(self) -> Description:
        """What the trunk has written down about its rule."""
        return Description(**self._about, chosen=self._rule_as[1]) if self._about else self.rule_today

    def memory(self) -> JsonObject:
        """The calibration samples that the trunk remembers: tasks, samples, the arrivals' answers, bytes."""
        directory = self._store.of(self._store.journal().last).directory("calibration")
        held = CalibrationMemory.read(directory)
        if held is None or directory is None:
            nothing = dict.fromkeys(("samples", "bytes", "answer_bytes", "answer_bytes_at_most"), 0)
            return {**asdict(self.bounds), "kind": None, **nothing, "tasks": []}
        return held.summary(directory)

    def params(self) -> dict[str, Tensor]:
        """The deployed tensors, as copies that are the caller's to change."""
        deployed = self.deployed()
        return {name: deployed.read(name).clone() for name in deployed.infos}

    def deployed(self, step: int | None = None) -> Checkpoint:
        """The deployed weights at the last step, or at one whose snapshot is kept."""
        while True:
            record = self._store.journal().last if step is None else self.record(step)
            if record.files is None:
                return self._open_base()
            try:
                return self._store.of(record).model()
            except (CheckpointError, TrunkError):
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

    def places_of(self, step: int) -> list[str]:
        """Where the arrival of a step may lie today: where it was, and where it was as seen from the trunk."""
        return Places.recorded(self.record(step)).seen_from(self.path)

    def kept_steps(self) -> list[int]:
        """The steps that `rollback` can go back to."""
        return [r.step for r in self.log() if r.files is None or self._store.has_snapshot(r.step)]

    def verify(self, against: str | None = None) -> list[str]:
        """Every byte that differs from what was committed, one line each; also a base that changed.

        A base that is not here is a problem only if it is deployed. `against` is the `hash` of a record that the trunk must hold.
        """
        with worker_pool(self._threads) as pool:
            problems = problems_of(self._store, pool, self._progress, against)
            return problems + base_problems(self._kept_base, self._store, problems, pool, self._progress)

    def export(
        self,
        out: str | Path,
        *,
        dtype: torch.dtype | None = None,
        task: str | None = None,
        backbone: bool = False,
        shard_size: int = DEFAULT_SHARD,
        force: bool = False,
        command: str | None = None,
    ) -> Path:
        """Write the deployed model as a model directory that `transformers` loads.

        Where tasks keep heads for themselves, name the `task` whose head takes its place in the model, or ask for the `backbone`:
        the model with the base's own head, and all heads of tasks beside it, as `heads/TASK.safetensors`.
        """
        check_apart(Path(out), self._kept_base.named_places())
        heads = read_heads(self._store.of(self._store.journal().last).directory("heads"))
        own = self._head(heads, task, backbone)
        model = self.deployed()
        base = self._kept_base.outline(model) or self._open_base()
        return write_model(
            Path(out),
            with_head(model, own) if own else model,
            base.directory,
            self._card(base, command),
            dtype,
            shard_size,
            force,
            self._progress,
            (lambda stage: label_config(stage, own)) if own else (lambda stage: write_beside(stage, heads)),
        )

    def export_lora(
        self,
        out: str | Path,
        rank: int,
        *,
        dtype: torch.dtype = torch.float32,
        task: str | None = None,
        backbone: bool = False,
        force: bool = False,
        command: str | None = None,
    ) -> Adapter:
        """Write the deployed model's distance from the base as a PEFT adapter, and say what each layer kept of it.

        `task` and `backbone` are those of `export`; the head of a task is stored whole, among peft's `modules_to_save`.
        """
        check_apart(Path(out), self._kept_base.named_places())
        heads = read_heads(self._store.of(self._store.journal().last).directory("heads"))
        own = self._head(heads, task, backbone)
        base = self._open_base()
        with worker_pool(self._threads) as pool:
            return write_adapter(
                Path(out),
                self.deployed(),
                base,
                rank,
                lambda adapter: self._card(base, command, "peft", adapter_notes(adapter.kept, adapter.rank, task, own)),
                dtype,
                force,
                pool,
                self._progress,
                own.tensors if own else None,
                lambda stage: write_beside(stage, {} if own else heads),
            )

    def _card(
        self, base: Checkpoint | Outline, command: str | None, library: str = "transformers", notes: str = ""
    ) -> str:
        rows = [(f.task, f.source, f.digest, f.weight) for f in self.folded()]
        return model_card(base, self.base_digest, rows, self.described_rule, command, library, notes)

    def _head(self, heads: Mapping[str, Head], task: str | None, backbone: bool) -> Head | None:
        """The head that an export is to have; without one of a task it would have the base's, which no arrival has trained."""
        if task is not None and backbone:
            raise OptionError("--task and --backbone: give one of them")
        if task is not None and task not in heads:
            raise TrunkError(
                f"{self.path}: task '{task}' has no head of its own; those that have one: {', '.join(heads) or 'none'}"
            )
        if heads and task is None and not backbone:
            raise TrunkError(
                f"{self.path}: each task has a head of its own ({', '.join(heads)}), and the deployed model only the base's; export one task with --task NAME, or the backbone with all heads beside it with --backbone"
            )
        return heads[task] if task is not None else None

    def _open_base(self) -> Checkpoint:
        with worker_pool(self._threads) as pool:
            return self._base(pool).checkpoint

    def _base(self, pool: Executor) -> Base:
        return self._kept_base.find(pool, self._progress, self.heads)
