"""How a change of a trunk becomes one commit: the rule's memory, the deployed weights and the record, staged together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from mergeway.calibration.memory import CalibrationMemory
from mergeway.checkpoint import Checkpoint, ModelWriter, SafetensorsFiles
from mergeway.checkpoint.heads import DESCRIPTION as HEADS
from mergeway.checkpoint.heads import Head, write_heads
from mergeway.checkpoint.inspect import combine_digests
from mergeway.checkpoint.writer import FileWriter
from mergeway.core.ranks import team
from mergeway.core.tensors import wide
from mergeway.fold.merge import seen_objective
from mergeway.fold.prepare import Arrival, Base
from mergeway.fold.walk import Pass, memory_infos, slot_name
from mergeway.rules import Fold
from mergeway.trunk.journal import Journal, Record, now
from mergeway.trunk.store import MEMORY, Digests, Store

# Works on the two writers of a stage, memory and model, and says where the stream stands then.
Change = Callable[[FileWriter, ModelWriter], Fold]


@dataclass(frozen=True)
class Commit:
    """A change under way: on which store, by which rule's pass, after which journal."""

    store: Store
    way: Pass
    journal: Journal
    keep: int
    heads: Mapping[str, Head] = field(default_factory=dict)

    def standing(self) -> tuple[Fold, Checkpoint | None]:
        """Where the rule stands after the last record, and its memory."""
        last = self.journal.last
        if last.files is None:
            return Fold(), None
        return Fold(**last.stream), self.store.memory(last.step)

    def parts(self, change: Change, record: Record, deploy: bool) -> Record:
        """A change that goes parameter by parameter; `deploy` when the model has to be worked out from the new memory."""
        with self.store.stage() as stage:
            keep = FileWriter(stage / MEMORY, memory_infos(self.way.rule, self.way.base))
            model = ModelWriter(stage, self.way.base.checkpoint.infos)
            at = change(keep, model)
            digests: Digests = {MEMORY: keep.finish()}
            if deploy:
                self.way.deploy(at, SafetensorsFiles("memory", [stage / MEMORY]), model)
            return self._finish(self.journal, stage, model, digests, record, at, {}).last

    def whole(
        self,
        arrival: Arrival,
        record: Record,
        weights: Sequence[float],
        samples: CalibrationMemory | None,
        objective: Any,
    ) -> Record:
        """An arrival folded by a rule that sees the whole model; a last stage of the rule is a commit of its own.

        `samples` are what the trunk remembers from now on.
        """
        objective = seen_objective(objective, weights)
        at, memory = self.standing()
        with self.store.stage() as stage:
            at, done = self.way.merge_whole(arrival, at, memory, objective)
            keep = FileWriter(stage / MEMORY, memory_infos(self.way.rule, self.way.base))
            self.way.keep_whole(done.memory, keep)
            digests: Digests = {MEMORY: keep.finish()} | (samples.write(stage) if samples else {})
            journal = self._model(self.journal, stage, done.deployed, digests, record, at, done.details)
        polished = self.way.polish_whole(done.deployed, objective)
        if polished is None:
            return journal.last
        # The stream does not continue from a last stage: the memory stays that of the fold.
        with self.store.stage() as stage:
            step = journal.last.step
            digests = team().from_lead(
                lambda: self.store.link_snapshot(step, stage, lambda name: not name.startswith("model"))
            )
            extra = Record(len(journal.records), "refine", "", now(), task=arrival.task)
            return self._model(journal, stage, polished[0], digests, extra, at, {"refine": polished[1]}).last

    def changed(self, tensors: Mapping[str, Tensor], record: Record, details: Mapping[str, Any]) -> Record:
        """Other values for some deployed tensors; the rule goes on from them if its memory holds the deployed update."""
        last, infos = self.journal.last, self.way.base.merged_infos
        at, memory = self.standing()
        assert memory is not None
        deployed = self.store.model(last.step)
        whole = {n: tensors.get(n, deployed.read(n)).to(wide(i.dtype)) for n, i in infos.items()}
        carries = self.way.rule.carries
        with self.store.stage() as stage:
            kept = self.store.link_snapshot(last.step, stage, lambda n: not n.startswith("model") and n != MEMORY)
            keep = FileWriter(stage / MEMORY, memory_infos(self.way.rule, self.way.base))
            moved = {slot_name(carries, n): n for n in tensors} if carries else {}
            for name in memory.infos:
                source = moved.get(name)
                base = self.way.base.checkpoint.read(source).to(whole[source].dtype) if source else None
                keep.write(name, 0, memory.read(name) if base is None else whole[moved[name]] - base)
            digests = kept | {MEMORY: keep.finish()}
            return self._model(self.journal, stage, whole, digests, record, at, details).last

    def base_again(self, record: Record) -> Record:
        """The last arrival was taken out: the deployed model is the base, and there is nothing to remember."""
        done = Record(**{**record.__dict__, "result": self.way.base.seen.digest})
        return self.store.commit_record(self.journal, done, self.keep).last

    def _model(
        self,
        journal: Journal,
        stage: Path,
        tensors: Mapping[str, Tensor],
        digests: Digests,
        record: Record,
        at: Fold,
        details: Mapping[str, Any],
    ) -> Journal:
        model = ModelWriter(stage, self.way.base.checkpoint.infos)
        self.way.deploy_whole(tensors, model)
        return self._finish(journal, stage, model, digests, record, at, details)

    def _finish(
        self,
        journal: Journal,
        stage: Path,
        model: ModelWriter,
        digests: Digests,
        record: Record,
        at: Fold,
        details: Mapping[str, Any],
    ) -> Journal:
        self.way.copy_buffers(model)
        written = model.finish()
        # Linked from the snapshot before, or not yet there. Another rank may be writing them already: ask no file.
        if HEADS not in digests:
            digests = digests | write_heads(stage, self.heads)
        done = {
            "result": _result(written, self.way.base),
            "stream": asdict(at),
            "details": {"rule": self.way.rule.name, "facts": dict(at.facts), **details},
        }
        return self.store.commit(stage, digests | written, journal, Record(**{**record.__dict__, **done}), self.keep)


def _result(written: Mapping[str, Mapping[str, str]], base: Base) -> str:
    tensors = {name: digest for file in written.values() for name, digest in file.items() if name}
    return combine_digests(tensors, base.checkpoint.infos)
