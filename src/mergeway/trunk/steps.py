"""Steps as objects: going back to one, naming one, dropping the snapshots that nobody needs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from mergeway.core.pool import worker_pool
from mergeway.errors import OptionError, TrunkError, suggest
from mergeway.trunk.exports import Exports
from mergeway.trunk.journal import Record, now
from mergeway.trunk.tags import check_tag, read_tags, write_tags
from mergeway.trunk.view import Step


@dataclass(frozen=True)
class Pruned:
    """The snapshots that were dropped, and the bytes that their files took."""

    steps: list[int]
    bytes: int


class Steps(Exports):
    """What a writer does to the steps that there are."""

    def rollback(self, step: Step, *, wait: bool = True) -> Record:
        """Go back to an earlier step that still has its snapshot; that is a journal record too."""
        with self._store.writer(wait, self._progress):
            journal = self._store.journal()
            target = self.record(step, journal)
            step = target.step
            record = Record(
                len(journal.records), "rollback", target.result, now(), stream=target.stream, details={"to": step}
            )
            if target.files is None:
                return self._store.commit_record(journal.point(), record, self.keep)
            if not self._store.has_snapshot(step):
                kept = [str(r.step) for r in journal.records if r.files is None or self._store.has_snapshot(r.step)]
                raise TrunkError(
                    f"{self.path}: the snapshot of step {step} is no longer kept; there are those of {', '.join(kept)} (see --keep)"
                )
            with self._store.stage() as stage, worker_pool(self._threads) as pool:
                digests = self._store.of(target).link_into(stage, each=pool.map)
                return self._store.commit(stage, digests, journal.point(), record, self.keep)

    def tag(self, step: Step, name: str, *, wait: bool = True) -> int:
        """Give a step a name, which may stand for it wherever a step is asked for; its snapshot is kept from now on."""
        check_tag(name)
        with self._store.writer(wait, self._progress):
            record = self.record(step)
            if record.files is not None and not self._store.has_snapshot(record.step):
                raise TrunkError(
                    f"{self.path}: the snapshot of step {record.step} is no longer kept, so a tag could not bring it back; tag a step that 'log' marks as kept"
                )
            write_tags(self.path, {**read_tags(self.path), name: record.step})
        return record.step

    def untag(self, name: str, *, wait: bool = True) -> int:
        """Take a name away again; the step's snapshot goes when its time has come."""
        with self._store.writer(wait, self._progress):
            tags = read_tags(self.path)
            if name not in tags:
                raise OptionError(f"{self.path}: there is no tag '{name}'; {suggest(name, tags)}")
            step = tags.pop(name)
            write_tags(self.path, tags)
        return step

    def prune(self, keep: int | None = None, *, wait: bool = True) -> Pruned:
        """Drop all snapshots but the last `keep` (by default as many as `init` said), the deployed one, and those with a tag."""
        keep = self.keep if keep is None else keep
        if keep < 1:
            raise OptionError(f"--keep is {keep}; at least 1 snapshot must be kept")
        with self._store.writer(wait, self._progress):
            sizes = self.sizes()
            try:
                for left in self._store.drop(keep):
                    shutil.rmtree(left)
            except OSError as problem:
                raise TrunkError(
                    f"{self._store.steps}: a snapshot cannot be dropped ({problem.strerror or problem}); run again for the rest"
                ) from None
            dropped = sorted(set(sizes) - set(self._store.present()))
        return Pruned(dropped, sum(sizes[step] for step in dropped))
