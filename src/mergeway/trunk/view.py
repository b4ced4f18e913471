"""A trunk as a reader sees it: the deployed model, its history, its memory; nothing here takes the lock or changes a file of it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from torch import Tensor

from mergeway.calibration.given import Data, HeadByTask, heads_by_task
from mergeway.calibration.judge import Score
from mergeway.calibration.memory import CALIBRATION, HOLDOUT, Bounds, CalibrationMemory
from mergeway.calibration.trial import Heads, read_trials, scores, tensors_of
from mergeway.checkpoint import Checkpoint
from mergeway.checkpoint.heads import read_heads
from mergeway.checkpoint.source import JsonObject
from mergeway.core.pool import worker_pool
from mergeway.core.printed import html_table
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import CheckpointError, MergewayError, OptionError, TrunkError
from mergeway.fold.prepare import Base
from mergeway.model.compute import Compute
from mergeway.rules import Description, Rule, make
from mergeway.trunk.base import KeptBase
from mergeway.trunk.history import History
from mergeway.trunk.history import Step as Step
from mergeway.trunk.store import Store
from mergeway.trunk.verify import base_problems, problems_of


class TrunkView(History):
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
        super().__init__(store)
        self._threads = threads
        self.compute = compute
        self._progress = progress
        settings = store.settings()
        try:
            self._kept_base = KeptBase(store.path, settings["base"], str(base) if base is not None else None)
            self.base_digest: str = settings["base"]["digest"]
            self.keep: int = settings["keep"]
            self._rule_as: tuple[str, Mapping[str, object]] = settings["rule"], {**settings["options"]}
            self._about: JsonObject | None = settings.get("about")
            self.bounds = Bounds(**settings.get("memory", {}))
            self.heads: str | None = settings.get("heads")
        except (KeyError, TypeError, AttributeError) as problem:
            raise TrunkError(
                f"{store.settings_path}: the entry {problem} is missing or of another kind; restore it from a backup"
            ) from None
        except OptionError as problem:
            raise TrunkError(f"{store.settings_path}: {problem}; restore it from a backup") from None

    def __repr__(self) -> str:
        try:
            last, held = self.log()[-1].step, [f.task for f in self.folded()]
        except MergewayError as problem:  # to look at an object must not fail
            return f"{type(self).__name__}({str(self.path)!r}, {problem})"
        return f"{type(self).__name__}({str(self.path)!r}, rule={self._rule_as[0]!r}, step={last}, tasks={held})"

    def _repr_html_(self) -> str:
        try:
            records, held = self.log(), {f.step for f in self.folded()}
        except MergewayError as problem:
            return html_table(f"Trunk {self.path}", (), [(problem,)])
        rows = [
            (r.step, r.kind, r.task or "", "" if r.weight is None else f"{r.weight:g}", r.result[:12], r.step in held)
            for r in records
        ]
        shown = [(*row, "yes" if deployed else "") for *row, deployed in rows]
        title = f"Trunk {self.path}, rule {self._rule_as[0]}, base {self.base_ref}"
        return html_table(title, ("step", "kind", "task", "weight", "model", "in the model"), shown)

    @property
    def base_ref(self) -> str:
        """Where the base was when it was last named."""
        return self._kept_base.source

    @property
    def embeds_base(self) -> bool:
        """Whether the trunk keeps a copy of its base."""
        return self._kept_base.embedded

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

    def remembered(self) -> CalibrationMemory | None:
        """The calibration samples themselves, if there are any."""
        return CalibrationMemory.read(self._store.of(self._store.journal().last).directory(CALIBRATION))

    def held_out(self) -> CalibrationMemory | None:
        """The samples that are never folded with, to judge by, if there are any."""
        return CalibrationMemory.read(self._store.of(self._store.journal().last).directory(HOLDOUT), HOLDOUT)

    def params(self) -> dict[str, Tensor]:
        """The deployed tensors, as copies that are the caller's to change."""
        deployed = self.deployed()
        return {name: deployed.read(name).clone() for name in deployed.infos}

    def deployed(self, step: Step | None = None) -> Checkpoint:
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

    def evaluate(
        self,
        data: Mapping[str, Data],
        *,
        head: HeadByTask = None,
        step: Step | None = None,
        params: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Score]:
        """What the deployed model, that of a `step` that is kept, or one with these `params` is worth on test data of tasks.

        Tasks are judged with the heads that the trunk holds, or with those in the files of `head`.
        """
        record = self._store.journal().last if step is None else self.record(step)
        snapshot = self._store.of(record)
        heads = read_heads(snapshot.directory("heads"))
        known = Heads(heads_by_task(head, ""), heads, CalibrationMemory.read(snapshot.directory(CALIBRATION)))
        base = self._open_base()
        trials = read_trials(data, base.directory, known, self.compute)
        return scores(trials, params or tensors_of(self.deployed(record.step)))

    def verify(self, against: str | None = None) -> list[str]:
        """Every byte that differs from what was committed, one line each; also a base that changed.

        A base that is not here is a problem only if it is deployed. `against` is the `hash` of a record that the trunk must hold.
        """
        with worker_pool(self._threads) as pool:
            problems = problems_of(self._store, pool, self._progress, against)
            return problems + base_problems(self._kept_base, self._store, problems, pool, self._progress)

    def _open_base(self) -> Checkpoint:
        with worker_pool(self._threads) as pool:
            return self._base(pool).checkpoint

    def _base(self, pool: Executor) -> Base:
        return self._kept_base.find(pool, self._progress, self.heads)
