"""A trunk's calibration memory: bounded, nested, written and read without loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mergeway as mw
from mergeway.calibration.memory import Bounds, CalibrationMemory
from mergeway.calibration.samples import draw
from mergeway.errors import OptionError, TrunkError

SETTINGS = {"kind": "clip-vision", "logit_scale": 20.0, "image_mean": [0.5], "image_std": [0.5]}


def samples(task: str, count: int = 100) -> mw.Samples:
    head = torch.randn(3, 8, generator=torch.Generator().manual_seed(count))
    return mw.Samples(task, {"images": torch.arange(count)}, torch.arange(count) % 3, head)


def grown(tasks: list[str], size: int) -> CalibrationMemory:
    memory = CalibrationMemory(SETTINGS, bounds=Bounds(size))
    for task in tasks:
        memory = with_task(memory, task)
    return memory


def with_task(memory: CalibrationMemory, task: str, settings: dict = SETTINGS) -> CalibrationMemory:
    """The memory after one more task."""
    grown = memory.holding(settings, samples(task)).shared_out([*(t.task for t in memory.tasks), task])
    assert grown is not None
    return grown


def test_bounded_by_its_size_and_nested():
    names = [f"task{k}" for k in range(7)]
    before: dict[str, list[int]] = {}
    for count in range(1, 8):
        memory = grown(names[:count], 30)
        kept = {t.task: t.inputs["images"].tolist() for t in memory.tasks}
        assert sum(map(len, kept.values())) == 30
        for task, rows in before.items():
            assert kept[task] == rows[: len(kept[task])]
        before = kept
    # The same samples as an objective that draws from all the data at once.
    for task in memory.tasks:
        drawn = draw(samples(task.task), len(task))
        assert torch.equal(task.inputs["images"], drawn.inputs["images"])


def test_written_and_read(tmp_path):
    memory = grown(["a", "b"], 12)
    digests = memory.write(tmp_path)
    assert (
        set(digests)
        == {p.name for p in tmp_path.iterdir()}
        == {"calibration.parquet", "calibration.json", "calibration-heads.safetensors"}
    )
    again = CalibrationMemory.read(tmp_path)
    assert again is not None
    assert again.settings == SETTINGS
    assert again.bounds.size == 12
    for ours, theirs in zip(again.tasks, memory.tasks, strict=True):
        assert ours.task == theirs.task
        assert torch.equal(ours.inputs["images"], theirs.inputs["images"])
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.head, theirs.head)
    # It goes on as if it had never left.
    third, expected = with_task(again, "c"), with_task(memory, "c")
    assert [t.inputs["images"].tolist() for t in third.tasks] == [t.inputs["images"].tolist() for t in expected.tasks]


def test_answers_to_copies_that_are_made_in_another_way_now(tmp_path):
    asked = replace(samples("a", 4), answers=torch.zeros(4, 3, 3, dtype=torch.half))
    CalibrationMemory(SETTINGS, [asked], Bounds(4, copies=2)).write(tmp_path)
    assert CalibrationMemory.read(tmp_path) is not None
    described = tmp_path / "calibration.json"
    described.write_text(described.read_text().replace("shifted, bent", "shifted"))
    with pytest.raises(TrunkError, match="the copies of 'a' that its arrival was asked about were made in another way"):
        CalibrationMemory.read(tmp_path)


def test_nothing_there(tmp_path):
    assert CalibrationMemory.read(tmp_path) is None
    assert CalibrationMemory.read(None) is None


def test_more_tasks_than_samples():
    with pytest.raises(OptionError, match="3 calibration samples for 4 tasks"):
        grown(["a", "b", "c", "d"], 3)


def test_one_kind_of_model():
    with pytest.raises(OptionError, match="one trunk has one kind of model"):
        with_task(grown(["a"], 10), "b", SETTINGS | {"logit_scale": 1.0})


def test_every_arrival_has_samples(tmp_path):
    with pytest.raises(TrunkError, match="holds 3 arrivals but calibration samples of 2; give data with every arrival"):
        grown(["a", "b"], 10).objective(tmp_path, [1.0, 1.0, 1.0])
