"""The calibration memory of a trunk: a bounded number of samples of each folded task, kept with the snapshot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mergeway.calibration import DEFAULT_SIZE, Samples, draw, shares
from mergeway.checkpoint import SafetensorsFiles
from mergeway.checkpoint.source import read_json
from mergeway.checkpoint.writer import FileWriter, write_text
from mergeway.errors import OptionError, TrunkError
from mergeway.objective import Objective
from mergeway.params import TensorInfo
from mergeway.predictors import make_predictor

TENSORS, DESCRIPTION = "calibration.safetensors", "calibration.json"


@dataclass(frozen=True)
class CalibrationMemory:
    """Samples of the folded tasks in the order of their arrival, at most `size` in all, and how the model reads them."""

    settings: Mapping[str, Any]
    tasks: Sequence[Samples] = ()
    size: int = DEFAULT_SIZE

    def with_task(self, settings: Mapping[str, Any], samples: Samples) -> CalibrationMemory:
        """The memory after one more task: everybody's share shrinks, and what is kept was always kept."""
        if self.tasks and dict(settings) != dict(self.settings):
            raise OptionError(
                f"the samples of '{samples.task}' are for {dict(settings)}, those in the trunk for {dict(self.settings)}; one trunk has one kind of model"
            )
        grown = [*self.tasks, draw(samples, self.size)]
        kept = [t.rows(slice(n)) for t, n in zip(grown, shares(self.size, len(grown)), strict=True)]
        return CalibrationMemory(dict(settings), kept, self.size)

    def objective(self, base: Path, weights: Sequence[float]) -> Objective:
        """The loss of all tasks in the memory."""
        if len(weights) != len(self.tasks):
            raise TrunkError(
                f"the trunk holds {len(weights)} arrivals but calibration samples of {len(self.tasks)}; give --data with every arrival"
            )
        return Objective(make_predictor(base, self.settings), self.tasks, weights, size=self.size)

    def write(self, directory: Path) -> dict[str, dict[str, str]]:
        """The memory's files in a snapshot, and their digests."""
        tensors: dict[str, Tensor] = {}
        for number, task in enumerate(self.tasks):
            tensors |= {f"{number}/inputs/{key}": value for key, value in task.inputs.items()}
            tensors[f"{number}/labels"] = task.labels
            if task.head is not None:
                tensors[f"{number}/head"] = task.head
        writer = FileWriter(directory / TENSORS, {n: TensorInfo(tuple(t.shape), t.dtype) for n, t in tensors.items()})
        for name, tensor in tensors.items():
            writer.write(name, 0, tensor)
        text = (
            json.dumps(
                {"settings": dict(self.settings), "size": self.size, "tasks": [t.task for t in self.tasks]}, indent=2
            )
            + "\n"
        )
        write_text(directory / DESCRIPTION, text)
        return {TENSORS: writer.finish(), DESCRIPTION: {"": hashlib.sha256(text.encode()).hexdigest()}}

    @classmethod
    def read(cls, directory: Path | None) -> CalibrationMemory | None:
        """The memory of a snapshot, if it has one."""
        if directory is None or not (directory / DESCRIPTION).exists():
            return None
        described = read_json(directory / DESCRIPTION, "the calibration memory")
        stored = SafetensorsFiles(str(directory), [directory / TENSORS])
        tasks = []
        for number, name in enumerate(described["tasks"]):
            prefix = f"{number}/inputs/"
            inputs = {n.removeprefix(prefix): stored.read(n) for n in stored.infos if n.startswith(prefix)}
            head = stored.read(f"{number}/head") if f"{number}/head" in stored.infos else None
            tasks.append(Samples(name, inputs, stored.read(f"{number}/labels"), head, shuffled=True))
        return cls(described["settings"], tasks, described["size"])
