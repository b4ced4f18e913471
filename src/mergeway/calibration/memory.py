"""The calibration memory of a trunk: a bounded number of samples of the folded tasks, kept with the snapshot.

calibration.json                 how the model reads its inputs, how many samples, shared how, drawn by which seed
calibration.parquet              one row a sample: its task, and inputs and labels as bytes
calibration-heads.safetensors    the frozen heads of the tasks that have one

Samples that are kept back to judge by, and never folded with, are in files of the same kind called holdout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from mergeway.calibration.objective import Objective
from mergeway.calibration.sample_objective import SampleObjective
from mergeway.calibration.samples import DEFAULT_SIZE, Samples, draw, shares
from mergeway.calibration.table import read_rows, write_rows
from mergeway.calibration.teaching import TOP_K, answer_bytes, answers_of, copied_of
from mergeway.checkpoint import SafetensorsFiles
from mergeway.checkpoint.source import JsonObject, read_json
from mergeway.checkpoint.writer import FileWriter
from mergeway.core.files import contents, reading, write_text
from mergeway.core.ranks import team
from mergeway.core.tensors import TensorInfo
from mergeway.errors import OptionError, TrunkError, suggest
from mergeway.model.model import Model, Settings

CALIBRATION, HOLDOUT = "calibration", "holdout"
Sharing = Literal["even", "utility"]


@dataclass(frozen=True)
class Bounds:
    """How much a memory may hold: samples in all, shared evenly or by utility, drawn by a seed."""

    size: int = DEFAULT_SIZE
    share: Sharing = "even"
    seed: int = 0
    # How many copies of each sample an arrival is asked about; None for as many as a memory of this size is worth.
    copies: int | None = None
    # How many of its likeliest next tokens a language model is asked for at every place of a text.
    top_k: int = TOP_K

    def __post_init__(self) -> None:
        if type(self.top_k) is not int or self.top_k < 1:
            raise OptionError(f"--top-k is {self.top_k!r}; it must be at least 1 token")
        if type(self.size) is not int or self.size < 1:
            raise OptionError(f"--memory is {self.size!r}; it must be at least 1 sample")
        check_copies(self.copies)
        if self.share not in get_args(Sharing):
            raise OptionError(f"--memory-share '{self.share}': {suggest(str(self.share), get_args(Sharing))}")

    def counts(self, tasks: int, weights: Sequence[float] | None) -> list[int]:
        """How many samples each task may keep."""
        return shares(self.size, tasks, weights if self.share == "utility" else None)


@dataclass(frozen=True)
class CalibrationMemory:
    """Samples of folded tasks in the order of their arrival, and how the model reads them."""

    settings: Settings
    tasks: Sequence[Samples] = ()
    bounds: Bounds = field(default_factory=Bounds)

    def holding(self, settings: Settings, samples: Samples) -> CalibrationMemory:
        """The memory with one more task, or with other samples of one it has; drawn, and read into memory."""
        if self.tasks and dict(settings) != dict(self.settings):
            raise OptionError(
                f"the samples of '{samples.task}' are for {dict(settings)}, those in the trunk for {dict(self.settings)}; one trunk has one kind of model"
            )
        found = {t.task: t for t in self.tasks}
        found[samples.task] = draw(samples, self.bounds.size, self.bounds.seed).loaded()
        return replace(self, settings=dict(settings), tasks=list(found.values()))

    def shared_out(self, names: Sequence[str], weights: Sequence[float] | None = None) -> CalibrationMemory | None:
        """The samples in the order of all tasks, each cut to its share; None where there are none.

        Shares shrink with every task, and what is kept was always kept.
        """
        counts = dict(zip(names, self.bounds.counts(len(names), weights), strict=True))
        found = {t.task: t for t in self.tasks}
        tasks = [found[name].rows(slice(counts[name])) for name in names if name in found]
        return replace(self, tasks=tasks) if tasks else None

    def check_answers(self, digests: Mapping[str, str]) -> None:
        """Refuse answers of another arrival than the one that was folded in, of those with these digests."""
        for t in self.tasks:
            if t.asked is not None and t.asked != digests.get(t.task, t.asked):
                raise TrunkError(
                    f"the answers kept for '{t.task}' are those of another arrival (digest {t.asked[:12]}, folded {digests[t.task][:12]}); go back with 'rollback', and add it again"
                )

    def answered(self, objective: Objective | None, task: str, digest: str) -> CalibrationMemory:
        """The memory with what the arrivals answered; those who were asked before keep their digest."""
        if not isinstance(objective, SampleObjective):
            return self
        found = {t.task: t for t in objective.pool}
        asked = [found.get(t.task, t) for t in self.tasks]
        tasks = [replace(t, answers=a.answers, tops=a.tops) for t, a in zip(self.tasks, asked, strict=True)]
        return replace(
            self, tasks=[replace(t, asked=digest) if t.task == task and t.answers is not None else t for t in tasks]
        )

    def objective(self, model: Model, weights: Sequence[float], copies: int | None = None) -> SampleObjective:
        """The loss of all tasks in the memory, by the model that they were read for; `copies` in place of the bounds'."""
        if len(weights) != len(self.tasks):
            raise TrunkError(
                f"the trunk holds {len(weights)} arrivals but calibration samples of {len(self.tasks)}; give --data with every arrival"
            )
        by_utility = self.bounds.share == "utility"
        size, copies = self.bounds.size, self.bounds.copies if copies is None else copies
        top_k = self.bounds.top_k
        return SampleObjective(model, self.tasks, weights, size=size, by_utility=by_utility, copies=copies, top_k=top_k)

    def write(self, directory: Path, name: str = CALIBRATION) -> dict[str, dict[str, str]]:
        """The memory's files in a snapshot, and their digests; every rank calls it, the lead writes."""
        digests = team().from_lead(lambda: self._write_rows(directory, name))
        heads, file = self._heads(), _heads_file(name)
        if heads:
            writer = FileWriter(directory / file, {n: TensorInfo(tuple(t.shape), t.dtype) for n, t in heads.items()})
            for number, tensor in heads.items() if team().lead else ():
                writer.write(number, 0, tensor)
            digests[file] = writer.finish()
        return digests

    def _write_rows(self, directory: Path, name: str) -> dict[str, dict[str, str]]:
        table, description = f"{name}.parquet", f"{name}.json"
        columns = write_rows(directory / table, self.tasks)
        described = {
            "settings": dict(self.settings),
            "size": self.bounds.size,
            "share": self.bounds.share,
            "seed": self.bounds.seed,
            "copies": self.bounds.copies,
            "top_k": self.bounds.top_k,
            "tasks": [
                {
                    "name": t.task,
                    "samples": len(t),
                    "columns": c,
                    "written": t.written,
                    "asked": t.asked,
                    "copied": copied_of(t),
                }
                for t, c in zip(self.tasks, columns, strict=True)
            ],
        }
        text = json.dumps(described, indent=2) + "\n"
        write_text(directory / description, text)
        with reading(directory / table):
            rows = hashlib.sha256(contents(directory / table)).hexdigest()
        return {description: {"": hashlib.sha256(text.encode()).hexdigest()}, table: {"": rows}}

    def _heads(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for number, task in enumerate(self.tasks):
            if isinstance(task.head, Tensor):
                named[f"{number}"] = task.head
            elif task.head is not None:
                named |= {f"{number}/{name}": tensor for name, tensor in task.head.items()}
        return named

    @classmethod
    def read(cls, directory: Path | None, name: str = CALIBRATION) -> CalibrationMemory | None:
        """The memory of a snapshot, if it has one."""
        if directory is None or not (directory / f"{name}.json").exists():
            return None
        described = read_json(directory / f"{name}.json", "the calibration memory")
        try:
            size, share, seed = described["size"], described["share"], described["seed"]
            bounds = Bounds(size, share, seed, described.get("copies"), described.get("top_k", TOP_K))
            rows: list[JsonObject] = described["tasks"]
            found = read_rows(directory / f"{name}.parquet", {row["name"]: row["columns"] for row in rows})
        except (KeyError, TypeError):
            raise TrunkError(
                f"{directory / name}.json: is not a calibration memory of this version; go back with 'rollback', or give the data again in a new trunk"
            ) from None
        file = directory / _heads_file(name)
        heads = SafetensorsFiles(str(directory), [file]) if file.exists() else None
        tasks = [
            replace(found[row["name"]], head=_head(heads, number), written=row.get("written"), asked=row.get("asked"))
            for number, row in enumerate(rows)
        ]
        for task, row in zip(tasks, rows, strict=True):
            if row.get("copied") != copied_of(task):
                raise TrunkError(
                    f"{directory / name}.json: the copies of '{task.task}' that its arrival was asked about were made in another way than this version makes them; start a new trunk, or 'replay' this one"
                )
        return cls(described["settings"], tasks, bounds)

    def summary(self, directory: Path) -> JsonObject:
        """What a person asks of a memory: tasks, samples, the arrivals' answers, bytes on the disk."""
        files = [p for p in directory.glob(f"{CALIBRATION}*") if p.is_file()]
        return {
            "kind": self.settings.get("kind"),
            "size": self.bounds.size,
            "share": self.bounds.share,
            "seed": self.bounds.seed,
            "copies": self.bounds.copies,
            "top_k": self.bounds.top_k,
            "samples": sum(len(t) for t in self.tasks),
            "bytes": sum(p.stat().st_size for p in files),
            "answer_bytes": sum(len(t) * answer_bytes(t) for t in self.tasks),
            "answer_bytes_at_most": self.bounds.size * max((self._most_bytes(t) for t in self.tasks), default=0),
            "tasks": [{"task": t.task, "samples": len(t), **answers_of(t)} for t in self.tasks],
        }

    def _most_bytes(self, task: Samples) -> int:
        """What the answers to one sample can take: those to the longest document, (1 + copies)·tokens·(12k + 2) bytes."""
        bytes_ = answer_bytes(task)
        return bytes_ // task.labels.shape[1] * int(self.settings["max_length"]) if task.documents else bytes_


def _heads_file(name: str) -> str:
    return f"{name}-heads.safetensors"


def check_copies(copies: int | None) -> None:
    """Refuse anything but a number of copies, or None."""
    if copies is not None and (type(copies) is not int or copies < 0):
        raise OptionError(
            f"--copies is {copies!r}; it must be 0 or more, the copies of each sample that an arrival is asked about"
        )


def _head(stored: SafetensorsFiles | None, number: int) -> Tensor | dict[str, Tensor] | None:
    if stored is None:
        return None
    if f"{number}" in stored.infos:
        return stored.read(f"{number}")
    prefix = f"{number}/"
    named = {n.removeprefix(prefix): stored.read(n) for n in stored.infos if n.startswith(prefix)}
    return named or None
