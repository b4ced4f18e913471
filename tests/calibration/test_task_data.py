"""One route from `--data` to the model that is run: inputs are prepared without weights, and these are loaded once."""

from __future__ import annotations

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiny
import torch
from safetensors.torch import save_file

import mergeway as mw
from mergeway.calibration.hub import load_split
from mergeway.calibration.task_data import task_data
from mergeway.model import model as model_room


@pytest.fixture
def loads(monkeypatch):
    """The directory of every loading of weights."""
    calls = []
    load = model_room.load_weights

    def counted(family, directory, *more):
        calls.append(directory)
        return load(family, directory, *more)

    monkeypatch.setattr(model_room, "load_weights", counted)
    return calls


@pytest.fixture
def hub_suite(vision, tmp_path):
    """The tiny suite with its data as datasets of the hub, whose pictures are decoded when they are looked at."""
    from PIL import Image

    description = json.loads((vision.path / "suite.json").read_text())
    folder = tmp_path / "suite"
    folder.mkdir()
    load_split.cache_clear()
    for row in description["tasks"]:
        rows = tmp_path / row["name"]
        rows.mkdir()
        with np.load(vision.path / row["data"]) as file:
            for split in ("train", "test"):
                for k, image in enumerate(file[f"x_{split}"]):
                    Image.fromarray(image).save(rows / f"{split}{k}.png")
                pictures = [(rows / f"{split}{k}.png").read_bytes() for k in range(len(file[f"x_{split}"]))]
                table = {"image": [{"bytes": b, "path": None} for b in pictures], "label": file[f"y_{split}"].tolist()}
                pyarrow.parquet.write_table(pyarrow.table(table), rows / f"{split}-00000-of-00001.parquet")
        for picture in rows.glob("*.png"):
            picture.unlink()
        (folder / f"{row['name']}.json").write_text(json.dumps({"dataset": str(rows)}))
        row |= {"data": f"{row['name']}.json", "head": str(vision.path / row["head"])}
        row |= {"expert": str(vision.path / row["expert"])}
    description["base"] = str(vision.base)
    (folder / "suite.json").write_text(json.dumps(description))
    return folder


@pytest.mark.parametrize("rule", ["ode", "steer", "regmean"])
def test_data_of_a_suite_on_hub_data_is_the_same_data(vision, hub_suite, tmp_path, rule):
    folded = []
    for name, suite in (("arrays", vision.path), ("hub", hub_suite)):
        trunk = mw.Trunk.create(tmp_path / name, vision.base, rule)
        for task in ("ants", "bees"):
            trunk.add(vision.task(task).expert, task, data=f"{suite}#{task}")
        folded.append(trunk.params())
    assert all(torch.equal(folded[1][n], t) for n, t in folded[0].items())


def test_an_objective_of_hub_data_holds_tensors(vision, hub_suite):
    objective = mw.load_suite(hub_suite).objective(["ants", "bees"], size=10)
    assert all(isinstance(x, torch.Tensor) for t in objective.tasks for x in t.inputs.values())
    ours, theirs = objective.task_losses, vision.objective(["ants", "bees"], size=10).task_losses
    params = {n: t for n, t in tiny_params(vision).items() if t.is_floating_point()}
    assert ours(params) == theirs(params)


def tiny_params(suite):
    from safetensors.torch import load_file

    return load_file(suite.base / "model.safetensors")


@pytest.mark.parametrize("rule", ["ode", "steer", "regmean", "fisher"])
def test_an_add_with_data_loads_the_model_once(vision, tmp_path, loads, rule):
    mw.Trunk.create(tmp_path / "trunk", vision.base, rule)
    trunk = mw.Trunk.open(tmp_path / "trunk", compute=mw.Compute("cpu"))
    trunk.add(vision.task("ants").expert, "ants", data=f"{vision.path}#ants")
    assert len(loads) <= 1  # a rule may need no loss of a single task
    loads.clear()
    trunk.add(vision.task("bees").expert, "bees", data=f"{vision.path}#bees")
    assert loads == [vision.base]


def test_a_file_and_a_head_are_read_without_weights(vision, tmp_path, loads):
    images = np.zeros((6, tiny.SIDE, tiny.SIDE, 3), np.uint8)
    np.savez(tmp_path / "a.npz", x=images, y=np.arange(6) % 3)
    save_file({"weight": torch.eye(tiny.CLASSES, tiny.WIDTH)}, tmp_path / "head.safetensors")
    compute = mw.Compute("cpu", micro_batch=3)
    model, samples = task_data(
        str(tmp_path / "a.npz"), tmp_path / "head.safetensors", "t", vision.base, compute=compute
    )
    assert loads == [] and model.compute is compute
    again, _ = task_data(str(tmp_path / "a.npz"), tmp_path / "head.safetensors", "u", model)
    assert again is model
    model(tiny_params(vision), samples.inputs, samples.head)
    model(tiny_params(vision), samples.inputs, samples.head)
    assert loads == [vision.base]


def test_data_of_several_tasks_at_once_is_for_one_model(vision, tmp_path, loads):
    trunk = mw.Trunk.create(tmp_path / "trunk", vision.base, "ode")
    trunk.add(vision.task("ants").expert, "ants", data=f"{vision.path}#ants", remember=False)
    data = {task: f"{vision.path}#{task}" for task in ("ants", "bees")}
    trunk.add(vision.task("bees").expert, "bees", data=data, remember=False)
    assert loads == [vision.base]
    assert trunk.memory()["samples"] == 0
