"""Tensors that belong to one task alone: kept beside the shared backbone, never merged.

heads.json           the tasks that have a head, with what their configs say of labels
heads.safetensors    their tensors, as number/name
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from mergeway.checkpoint import Checkpoint, SafetensorsFiles
from mergeway.checkpoint.source import read_json
from mergeway.checkpoint.writer import FileWriter, save_tensors
from mergeway.core.files import contents, make_directory, reading, replace_text, write_text
from mergeway.core.ranks import team
from mergeway.core.tensors import TensorInfo
from mergeway.errors import CheckpointError, OptionError

DESCRIPTION, TENSORS = "heads.json", "heads.safetensors"
# What transformers calls the layers that make a model a classifier.
CLASSIFIERS = r"^(classifier|score|pre_classifier|classification_head)\."
# The layers among them that give the answer; others, such as `pre_classifier` and `dense`, come before it.
_ANSWERS = re.compile(r"(^|\.)(classifier|score|out_proj)\.weight$")
_LABELS = ("num_labels", "id2label", "label2id", "problem_type")


def head_pattern(base: Checkpoint, wanted: str | None) -> str | None:
    """Which tensors are heads: as the user says, none for the empty pattern, else those of a classifier by its config."""
    if wanted is not None:
        try:
            re.compile(wanted)
        except re.error as problem:
            raise OptionError(f"--heads {wanted!r}: not a regular expression ({problem})") from None
        return wanted or None
    config = base.directory / "config.json" if base.directory else None
    if config is None or not config.exists():
        return None
    architecture = str((read_json(config, "the base's config").get("architectures") or [""])[0])
    return CLASSIFIERS if architecture.endswith(("ForSequenceClassification", "ForImageClassification")) else None


@dataclass(frozen=True)
class Head:
    """The head of one task: its tensors, and the entries of its config that speak of labels."""

    tensors: Mapping[str, Tensor]
    labels: Mapping[str, object] = field(default_factory=dict)


def head_of(arrival: Checkpoint, pattern: str) -> Head:
    """What an arrival brings for itself."""
    names = [n for n, i in arrival.infos.items() if i.merges and re.search(pattern, n)]
    config = arrival.directory / "config.json" if arrival.directory else None
    entries = read_json(config, "the arrival's config") if config is not None and config.exists() else {}
    return Head({n: arrival.read(n) for n in names}, {k: entries[k] for k in _LABELS if k in entries})


def write_heads(directory: Path, heads: Mapping[str, Head]) -> dict[str, dict[str, str]]:
    """The heads of a snapshot, and the digests of their files."""
    if not heads:
        return {}
    rows = [{"task": task, "labels": dict(head.labels)} for task, head in heads.items()]
    text = json.dumps(rows, indent=2) + "\n"
    team().from_lead(lambda: write_text(directory / DESCRIPTION, text))
    named = {f"{k}/{n}": t for k, head in enumerate(heads.values()) for n, t in head.tensors.items()}
    writer = FileWriter(directory / TENSORS, {n: TensorInfo(tuple(t.shape), t.dtype) for n, t in named.items()})
    for name, tensor in named.items() if team().lead else ():
        writer.write(name, 0, tensor)
    return {DESCRIPTION: {"": hashlib.sha256(text.encode()).hexdigest()}, TENSORS: writer.finish()}


def read_heads(directory: Path | None) -> dict[str, Head]:
    """The heads of a snapshot, by task."""
    if directory is None or not (directory / DESCRIPTION).exists():
        return {}
    tasks = _read_tasks(directory / DESCRIPTION)
    stored = SafetensorsFiles(str(directory), [directory / TENSORS])
    found = {}
    for number, (task, labels) in enumerate(tasks):
        prefix = f"{number}/"
        tensors = {n.removeprefix(prefix): stored.read(n) for n in stored.infos if n.startswith(prefix)}
        found[task] = Head(tensors, labels)
    return found


def _read_tasks(path: Path) -> list[tuple[str, dict[str, object]]]:
    """The tasks that have a head, with the labels of each."""
    try:
        with reading(path):
            rows = json.loads(contents(path))
        return [(str(row["task"]), dict(row["labels"])) for row in rows]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(
            f"{path}: is not the list of heads that was written; the snapshot is damaged, go back with 'rollback'"
        ) from None


def with_head(model: Checkpoint, head: Head) -> Checkpoint:
    """A model with a task's head in place of the base's."""
    return _Headed(model, head)


class _Headed:
    """A checkpoint some of whose tensors are a task's own."""

    def __init__(self, model: Checkpoint, head: Head) -> None:
        self.source, self.directory = model.source, model.directory
        self._model, self._head = model, head
        own = {n: TensorInfo(tuple(t.shape), t.dtype) for n, t in head.tensors.items()}
        self.infos: Mapping[str, TensorInfo] = {**model.infos, **own}

    def read(self, name: str) -> Tensor:
        return self._head.tensors[name] if name in self._head.tensors else self._model.read(name)

    def expect(self, name: str) -> None:
        if name not in self._head.tensors:
            self._model.expect(name)


def classes_of(head: Mapping[str, Tensor]) -> int | None:
    """How many classes a head of named tensors tells apart: the rows of its last matrix."""
    matrices = {n: t for n, t in head.items() if t.ndim == 2}
    last = {n: t for n, t in matrices.items() if _ANSWERS.search(n)} or matrices
    return min((len(t) for t in last.values()), default=None)


def label_config(directory: Path, head: Head) -> None:
    """Let an exported config speak of the labels of the head that is in the model, as many as the head has rows.

    A config that says nothing of labels means two without names, so nothing of the base's may stay.
    """
    config = directory / "config.json"
    if not config.exists():
        return
    rest = {k: v for k, v in read_json(config, "the config").items() if k not in _LABELS}
    labels = {k: v for k, v in head.labels.items() if k != "num_labels"}
    count, named = classes_of(head.tensors), labels.get("id2label")
    if count is not None and not (isinstance(named, dict) and len(named) == count):
        names = [f"LABEL_{k}" for k in range(count)]
        labels["id2label"] = {str(k): name for k, name in enumerate(names)}
        labels["label2id"] = {name: k for k, name in enumerate(names)}
    replace_text(config, json.dumps({**rest, **labels}, indent=2) + "\n")


def write_beside(directory: Path, heads: Mapping[str, Head]) -> None:
    """Every task's head as a file of its own beside a model."""
    if not heads:
        return
    make_directory(directory / "heads")
    for task, head in heads.items():
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", task)[:100]
        free = (stem if k == 1 else f"{stem}-{k}" for k in itertools.count(1))  # 'a b' and 'a/b' are two tasks
        path = next(p for p in (directory / "heads" / f"{name}.safetensors" for name in free) if not p.exists())
        save_tensors(path, head.tensors, {"task": task})
