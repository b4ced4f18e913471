"""A suite's data: the base, experts, heads and samples of a benchmark, described by a directory's suite.json.

Its protocol says what is asked: `task`, each task among its own classes under its own head; `cil`, tasks of disjoint classes,
and `dil`, tasks of the same classes in other domains, both under one shared head, among all classes seen so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from torch import Tensor

from mergeway.calibration.description import SuiteTask, read_description
from mergeway.calibration.documents import read_documents
from mergeway.calibration.hub import read_hub
from mergeway.calibration.readers import read_head, read_jsonl, read_npz
from mergeway.calibration.sample_objective import SampleObjective
from mergeway.calibration.samples import DEFAULT_SIZE, Samples, require_labels
from mergeway.calibration.written import SELF, Writing, written_samples
from mergeway.checkpoint import open_checkpoint
from mergeway.errors import OptionError, suggest
from mergeway.model.compute import Compute
from mergeway.model.kinds import SUITE_KINDS, CausalLM
from mergeway.model.model import Encoder, ImageModel, TextModel


class SuiteData:
    """The tasks of a suite directory and their samples; everything is read when first needed and kept.

    `model` prepares the inputs, by default the suite's own base; `compute` says how that is run.
    """

    def __init__(self, path: str | Path, compute: Compute | None = None) -> None:
        self.path = Path(path)
        self.settings, self.tasks = read_description(self.path)
        self.name: str = self.settings["name"]
        self.kind: str = self.settings["kind"]
        self.base = self.path / self.settings["base"]
        self.protocol: str = self.settings.get("protocol", "task")
        self.classifier: str = self.settings.get("classifier", "head")
        self.compute = compute or Compute()
        self._samples: dict[tuple[str, str], Samples] = {}

    @cached_property
    def model(self) -> Encoder | CausalLM:
        """The suite's model; its weights are loaded at the first call."""
        return self.model_of(self.base, self.compute)

    def model_of(self, directory: Path, compute: Compute | None = None) -> Encoder | CausalLM:
        """A model directory read as the suite's description says."""
        return SUITE_KINDS[self.kind](directory, self.settings, compute)

    @property
    def encoder(self) -> Encoder:
        """The suite's model, for what can be done with encoders only."""
        if not isinstance(self.model, Encoder):
            raise OptionError(f"suite '{self.name}' is of kind {self.kind}; this is for encoders, which have heads")
        return self.model

    def head(self, name: str) -> Tensor:
        """A task's frozen head."""
        return _head_of(self.task(name), self.encoder)

    def task(self, name: str) -> SuiteTask:
        """The task of that name."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise OptionError(f"suite '{self.name}' has no task '{name}'; {suggest(name, [t.name for t in self.tasks])}")

    def samples(self, name: str, split: str) -> Samples:
        """The train or test examples of a task, prepared for the model."""
        key = (name, split)
        if key not in self._samples:
            self._samples[key] = self.read(name, split, self.model)
        return self._samples[key]

    def read(self, name: str, split: str, model: Encoder | CausalLM) -> Samples:
        """The train or test examples of a task, prepared for another model directory of the same kind."""
        task = self.task(name)
        if isinstance(model, CausalLM):
            return read_documents(lines_of(task, split), task.name, model)
        samples = _read(task, split, _head_of(task, model), model)
        if split == "test":
            require_labels(samples, "a model is judged by those of its test data")
        if task.labels is not None and samples.labelled:
            _check_labels(task, samples)
        return samples

    def objective(
        self,
        order: Sequence[str],
        weights: Sequence[float] | None = None,
        size: int = DEFAULT_SIZE,
        seed: int = 0,
        copies: int | None = None,
        written: bool = False,
    ) -> SampleObjective:
        """The loss on calibration samples of these tasks, from their training data only, or from texts their experts write."""
        if written:
            tasks = [self._written(n, size // len(order), seed) for n in order]
        else:
            tasks = [self.samples(n, "train") for n in order]
        return SampleObjective(self.model, tasks, weights, size=size, seed=seed, copies=copies)

    def _written(self, name: str, count: int, seed: int) -> Samples:
        """Texts that a task's expert writes itself, the same ones whenever they are asked for."""
        key = (name, f"written {count} {seed}")
        if key not in self._samples:
            base = open_checkpoint(self.base)

            def arrival() -> dict[str, Tensor]:
                expert = open_checkpoint(self.task(name).expert, base)
                return {n: expert.read(n) for n in expert.infos}

            self._samples[key] = written_samples(f"{SELF}{count}", name, self.model, Writing(arrival, seed))
        return self._samples[key]


def lines_of(task: SuiteTask, split: str) -> Path:
    """The file of JSON lines that holds a task's texts."""
    return task.data.with_name(f"{task.data.name}.{split}.jsonl")


def _head_of(task: SuiteTask, model: Encoder) -> Tensor:
    assert task.head is not None  # the description of a suite of encoders was refused without
    return read_head(task.head, model.width)


def _read(task: SuiteTask, split: str, head: Tensor, model: Encoder) -> Samples:
    if isinstance(model, TextModel):
        return read_jsonl(lines_of(task, split), task.name, head, model)
    if not isinstance(model, ImageModel):
        raise OptionError(f"{task.data}: a suite of kind {model.kind} has no data that can be read")
    if task.data.suffix == ".json":
        return read_hub(task.data, split, task.name, head, model.image_size)
    return read_npz(task.data, split, task.name, head, model)


def _check_labels(task: SuiteTask, samples: Samples) -> None:
    others = {int(label) for label in samples.labels} - set(task.labels or ())
    if others:
        raise OptionError(
            f"{task.data}: class {min(others)} is not among the labels of task '{task.name}' in suite.json"
        )


def is_suite(path: str | Path) -> bool:
    """Whether a directory describes a suite."""
    return (Path(path) / "suite.json").exists()


__all__ = ["SuiteData", "SuiteTask", "is_suite"]
