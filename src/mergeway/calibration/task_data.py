"""What `--data` and `--head` stand for: how the base reads its inputs, and the samples of one task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergeway.calibration.documents import read_documents
from mergeway.calibration.readers import base_settings, read_data, read_head
from mergeway.calibration.samples import Samples
from mergeway.calibration.suite import load_suite
from mergeway.errors import OptionError
from mergeway.model.encoders import KINDS, make_predictor
from mergeway.model.own_head import CausalLM, classes_of, make_model, own_settings


def task_data(
    data: str, head: Path | None, task: str, base: Path, own: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Any], Samples]:
    """Settings and training samples of a task; `own` is the head that came with the arrival's weights.

    Which objective it is follows from the base's `config.json`: a language model, a classifier with a head for each task, or
    an encoder under a frozen head (`--head`, or that of a suite).
    """
    suite = (Path(data.partition("#")[0]) / "suite.json").exists()
    settings = None if suite or head is not None or not (base / "config.json").exists() else own_settings(base)
    if settings is None:
        return arrival_data(data, head, task, base)
    model: Any = make_model(base, settings)
    if isinstance(model, CausalLM):
        if Path(data).suffix != ".jsonl":
            raise OptionError(f"{data}: a language model is calibrated on a .jsonl file of text or chats")
        return settings, read_documents(Path(data), task, model)
    classes = classes_of(own) if own else int(model.model.config.num_labels)
    # The readers want a head to count its classes; the tensors themselves take their place in the model.
    counted = torch.zeros(classes or 1, 1)
    return settings, replace(read_data(Path(data), task, counted, model), head=own or None)


def arrival_data(data: str, head: Path | None, task: str, base: Path) -> tuple[dict[str, Any], Samples]:
    """The settings and samples of an encoder under a frozen head.

    DATA is a file or folder together with a head, or SUITE#TASK for a task of a suite, which brings its own.
    """
    where, _, name = data.partition("#")
    if (Path(where) / "suite.json").exists():
        suite = load_suite(where)
        samples = suite.samples(name or task, "train")
        return {
            "kind": suite.kind,
            **{k: suite.settings[k] for k in (*KINDS[suite.kind], "pooling") if k in suite.settings},
        }, replace(samples, task=task)
    if head is None:
        raise OptionError(
            f"--data {data}: the task's head is needed too; give --head FILE with a tensor 'weight' [classes, width]"
        )
    settings = base_settings(base, head)
    predictor = make_predictor(base, settings)
    return settings, read_data(Path(data), task, read_head(head, predictor.width), predictor)
