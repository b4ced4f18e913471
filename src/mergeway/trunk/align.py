"""One alignment of a trunk: the deployed model moves back towards the features of the model before it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from mergeway.calibration.alignment import Alignment, align
from mergeway.calibration.calibrate import read_task
from mergeway.checkpoint import Checkpoint
from mergeway.core.progress import Progress
from mergeway.model.compute import Compute
from mergeway.model.tangent import Tangent
from mergeway.rules import Description
from mergeway.trunk.commit import Change, Commit, notes_of
from mergeway.trunk.journal import Record, now


@dataclass(frozen=True)
class AlignedStep:
    """What an alignment is asked to do."""

    data: str | Path
    head: str | Path | None
    how: Alignment
    tangent: bool
    compute: Compute | None
    progress: Progress

    def commit(self, change: Change, previous: Checkpoint, rule: Description, keep: int) -> Record:
        """Align the last record's model to the `previous` one, and make that the next step."""
        base, last = change.base, change.point.last
        model, samples = read_task(self.data, self.head, str(last.task), base.checkpoint, None, self.compute)
        start = {n: base.checkpoint.read(n).float() for n in base.merged_infos} if self.tangent else {}
        deployed = change.deployed()
        before = {n: previous.read(n) for n in base.merged_infos}
        merged = {n: deployed.read(n) for n in base.merged_infos}
        predict = Tangent(model, start) if self.tangent else model
        aligned = align(predict, merged, before, samples, self.how, self.progress)
        record = Record(last.step + 1, "align", "", now(), task=last.task)
        asked = {"data": self.data, **asdict(self.how), "tangent": self.tangent}
        facts = {**asked, "before": aligned.before, "after": aligned.after}
        with Commit.begin(change.store, change.point, base) as commit:
            standing = change.standing()
            kept, sink = commit.state(change.folder.state_infos()), commit.model(base.checkpoint.infos)
            change.folder.change(aligned.moved, standing, deployed, kept.sink, sink)
            commit.keep_rest_of(last)
            return commit.finish(record, rule, standing.at, {"align": facts, **notes_of(None, self.compute)}, keep)
