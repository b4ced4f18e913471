"""Data in memory gives the bits that the same data in a file gives."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import mergeway as mw
from mergeway.calibration.given import is_by_task
from mergeway.errors import OptionError


def folded(vision, where, data):
    trunk = mw.Trunk.create(where, vision.base, "ode", step=0.5)
    trunk.add(vision.task("ants").expert, "ants", data=data, head=vision.path / "heads" / "ants.safetensors")
    trunk.add(vision.task("bees").expert, "bees", data=data, head=vision.path / "heads" / "ants.safetensors")
    return trunk.params()


def test_arrays_tensors_and_files_are_the_same(vision, tmp_path):
    file = vision.path / "data" / "ants.npz"
    with np.load(file) as stored:
        x, y = stored["x_train"], stored["y_train"]
    expected = folded(vision, tmp_path / "file", file)
    for number, data in enumerate(
        (
            {"x": x, "y": y},
            {"x": torch.tensor(x), "y": torch.tensor(y)},
            [{"image": a, "label": int(b)} for a, b in zip(x, y, strict=True)],
        )
    ):
        found = folded(vision, tmp_path / str(number), data)
        assert all(torch.equal(found[n], t) for n, t in expected.items())
    with pytest.raises(OptionError, match="24 images and 3 labels"):
        folded(vision, tmp_path / "short", {"x": x, "y": y[:3]})


def test_texts_are_the_same(text, tmp_path):
    head = {"colour": text.path / "heads" / "colour.safetensors"}
    file = text.path / "data" / "colour.test.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    columns = {"text": [r["text"] for r in rows], "label": [r["label"] for r in rows]}
    expected = mw.evaluate(text.base, {"colour": file}, head=head)
    assert mw.evaluate(text.base, {"colour": rows}, head=head) == expected
    assert mw.evaluate(text.base, {"colour": columns}, head=head) == expected
    with pytest.raises(OptionError, match="of different lengths"):
        mw.evaluate(text.base, {"colour": {**columns, "label": [0]}}, head=head)


def test_what_is_by_task():
    assert is_by_task({"svhn": "x.npz"}) and is_by_task({"text": "x.jsonl"}) and is_by_task({"svhn": ["a", "b"]})
    assert not is_by_task({"x": np.zeros(1), "y": np.zeros(1)}) and not is_by_task({"text": ["a"]})
    assert not is_by_task("x.npz") and not is_by_task(["a"])
