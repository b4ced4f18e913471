"""`mergeway suites`: the list, and what `check` finds wrong with a suite."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mergeway.bench.suites import embedded


@pytest.fixture
def copy(tmp_path):
    """A copy of the embedded suite with its first two tasks."""
    root, made = embedded("digits"), tmp_path / "suite"
    said = json.loads((root / "suite.json").read_text())
    said["tasks"] = said["tasks"][:2]
    shutil.copytree(root / "base", made / "base")
    for task in said["tasks"]:
        for key in ("data", "head"):
            (made / task[key]).parent.mkdir(exist_ok=True)
            shutil.copyfile(root / task[key], made / task[key])
        shutil.copytree(root / task["expert"], made / task["expert"])
    (made / "suite.json").write_text(json.dumps(said))
    return made


def rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_list(call):
    rows = call("suites", "--json").json()
    names = [row["suite"] for row in rows]
    assert names[:5] == ["digits", "digits-light", "split-mnist", "rotated-digits", "stories"]
    assert {"clip-vit-b32-8", "clip-vit-l14-20", "cifar100-50", "imagenet-r-5", "office-31", "domainnet"} <= set(names)
    assert len(rows[0]["tasks"]) == 8
    text = call("suites").ok().out
    for task in rows[0]["tasks"]:
        assert task["task"] in text
    assert all(name in text for name in names)


def test_good_suite(call, copy):
    assert call("suites", "check", copy, "--json").json()["tasks"] == [
        {"task": "mnist", "classes": 10, "train": 1000, "test": 400},
        {"task": "optdigits", "classes": 10, "train": 1000, "test": 400},
    ]
    assert "2 tasks, all fit the base" in call("suites", "check", copy).ok().out


def test_suite_by_name(call):
    assert "digits: 8 tasks, all fit the base" in call("suites", "check", "digits").ok().out
    assert "did you mean 'digits'" in call("suites", "check", "digit").mistake()


def no_description(suite):
    (suite / "suite.json").unlink()


def missing_head(suite):
    (suite / "heads" / "mnist.safetensors").unlink()


def long_rows(suite):
    rewrite(suite / "heads" / "mnist.safetensors", lambda t: t.update(weight=2 * t["weight"]))


def broken_head(suite):
    rewrite(suite / "heads" / "mnist.safetensors", lambda t: t["weight"].fill_(float("nan")))


def narrow_head(suite):
    rewrite(suite / "heads" / "mnist.safetensors", lambda t: t.update(weight=t["weight"][:, :7].contiguous()))


def few_classes(suite):
    rewrite(suite / "heads" / "mnist.safetensors", lambda t: t.update(weight=t["weight"][:5].contiguous()))


def other_expert(suite):
    rewrite(suite / "experts" / "optdigits" / "model.safetensors", lambda t: t.pop("visual_projection.weight"))


def broken_expert(suite):
    rewrite(
        suite / "experts" / "optdigits" / "model.safetensors",
        lambda t: t["visual_projection.weight"].fill_(float("inf")),
    )


def broken_base(suite):
    rewrite(suite / "base" / "model.safetensors", lambda t: t["visual_projection.weight"].fill_(float("nan")))


def small_pictures(suite):
    x, y = np.zeros((3, 8, 8), np.uint8), np.zeros(3, np.int64)
    np.savez(suite / "data" / "mnist.npz", x_train=x, y_train=y, x_test=x, y_test=y)


def no_data(suite):
    (suite / "data" / "mnist.npz").unlink()


def unknown_kind(suite):
    said = json.loads((suite / "suite.json").read_text())
    (suite / "suite.json").write_text(json.dumps(said | {"kind": "clip-vison"}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_description, "no suite.json"),
        (missing_head, "does not exist"),
        (long_rows, "rows must have length 1"),
        (broken_head, "not finite"),
        (narrow_head, "width 64"),
        (few_classes, "out of range"),
        (other_expert, "does not fit the base"),
        (broken_expert, "NaN or infinite"),
        (broken_base, "NaN or infinite"),
        (small_pictures, "uint8 [n, 28, 28, 3]"),
        (no_data, "mnist.npz"),
        (unknown_kind, "did you mean 'clip-vision'"),
    ],
)
def test_bad_suite_is_one_line(call, copy, spoil, words):
    spoil(copy)
    assert words in call("suites", "check", copy).mistake()


def test_expert_may_be_a_single_file(call, copy):
    said = json.loads((copy / "suite.json").read_text())
    shutil.move(copy / "experts" / "mnist" / "model.safetensors", copy / "mnist.safetensors")
    said["tasks"][0]["expert"] = "mnist.safetensors"
    (copy / "suite.json").write_text(json.dumps(said))
    call("suites", "check", copy).ok()


def test_build_refuses_what_is_there_or_unknown(call, copy):
    assert "there is a suite already" in call("suites", "build", "digits", "--out", copy).mistake()
    assert "did you mean 'digits'" in call("suites", "build", "digit", "--out", copy).mistake()


def test_one_channel_pictures_are_grey_too(call, copy):
    with np.load(copy / "data" / "mnist.npz") as file:
        arrays = dict(file)
    arrays |= {key: arrays[key][..., None] for key in ("x_train", "x_test")}
    np.savez(copy / "data" / "mnist.npz", **arrays)
    call("suites", "check", copy).ok()


def test_heads_in_half_precision_are_close_enough(call, copy):
    rewrite(copy / "heads" / "mnist.safetensors", lambda t: t.update(weight=t["weight"].to(torch.float16)))
    call("suites", "check", copy).ok()
