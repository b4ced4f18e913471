"""What `--data` and `--head` stand for: the model that reads a task's inputs, and the task's samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mergeway.calibration.documents import read_documents
from mergeway.calibration.given import Data, Prepared, is_place
from mergeway.calibration.readers import Split, read_data, read_head
from mergeway.calibration.samples import Samples
from mergeway.calibration.suite import SuiteData, is_suite
from mergeway.calibration.written import SELF, Writing, written_samples
from mergeway.checkpoint.heads import classes_of
from mergeway.checkpoint.source import JsonObject
from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.model.kinds import CausalLM, kind_of, make_model
from mergeway.model.model import Encoder, Model, Settings


def task_data(
    data: Data,
    head: Path | None,
    task: str,
    base: Model | Path,
    own: Mapping[str, Tensor] | None = None,
    compute: Compute | None = None,
    split: Split = "train",
    writing: Writing | None = None,
    settings: JsonObject | None = None,
    frozen: Tensor | None = None,
) -> tuple[Model, Samples]:
    """A task's samples, and the model that read them; its weights are not loaded before it is run.

    `base` is a model directory, to be run as `compute` says, or a model of it that read another task's data: the same one comes
    back if this data is for the same settings. DATA is a file or folder, or SUITE#TASK for a task of a suite, which has a head,
    or self:N for texts that the arrival writes itself, as `writing` says.
    The base's `config.json` decides what else is needed: nothing for a language model, for a classifier `own`, the head that
    came with the arrival's weights, and for an encoder `head`, the file of a frozen one. `split` says which samples, where the
    data has both. `settings` are those of the model if they are known, `frozen` a head that the caller has in memory.
    """
    if isinstance(data, Prepared):
        return _model_of(base, data.settings, compute), replace(data.samples, task=task, head=own or data.samples.head)
    where, _, name = str(data).partition("#") if is_place(data) else ("", "", "")
    if where and is_suite(where):
        return _suite_data(SuiteData(where), name or task, task, base, compute, split)
    model = _model_of(base, settings or kind_of(_directory(base), head), compute)
    if is_place(data) and str(data).startswith(SELF):
        return model, written_samples(str(data), task, model, writing)
    if isinstance(model, CausalLM):
        if is_place(data) and Path(str(data).partition("#")[0]).suffix not in (".jsonl", ".parquet"):
            raise OptionError(f"{data}: a language model reads a .jsonl or .parquet file of texts, questions or chats")
        return model, read_documents(data, task, model)
    if isinstance(model, Encoder):
        if head is None and frozen is not None:
            return model, read_data(data, task, frozen, model, split)
        if head is None:
            raise OptionError(
                f"--data {data if is_place(data) else task}: the task's head is needed too; give --head FILE with a tensor 'weight' [classes, width]"
            )
        return model, read_data(data, task, read_head(head, model.width), model, split)
    classes = classes_of(own) if own else model.classes
    # The readers want a head to count its classes; the tensors themselves take their place in the model.
    counted = torch.zeros(classes or 1, 1)
    return model, replace(read_data(data, task, counted, model, split), head=own or None)


def _suite_data(
    suite: SuiteData, name: str, task: str, base: Model | Path, compute: Compute | None, split: Split
) -> tuple[Model, Samples]:
    model = _model_of(base, suite.settings, compute)
    assert isinstance(model, Encoder | CausalLM)  # no suite is of another kind
    return model, replace(suite.read(name, split, model), task=task)


def _model_of(base: Model | Path, settings: Settings, compute: Compute | None) -> Model:
    """The model given, if it reads its inputs by these settings; else another of the same directory."""
    if isinstance(base, Path):
        return make_model(base, settings, compute)
    model = make_model(base.directory, settings, base.compute)
    return base if model.settings == base.settings else model


def _directory(base: Model | Path) -> Path:
    return base if isinstance(base, Path) else base.directory
