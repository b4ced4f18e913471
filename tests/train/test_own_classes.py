"""What a class-incremental training takes its losses over, by hand: own classes, old classes, and both forms of EWC's Fisher."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionModelWithProjection

from mergeway.bench.suite import load_suite
from mergeway.errors import OptionError
from mergeway.train import Training, finetune

CLASSES = {"first": [0, 3], "second": [2, 5], "third": [4, 1]}
STEPS, BATCH, RATE = 6, 7, 1e-2


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """Six classes in three tasks under one head; the tasks' classes stand in no order."""
    folder = tmp_path_factory.mktemp("own") / "suite"
    tiny.vision_suite(folder, ("one",), train=1, test=1)
    rng = np.random.default_rng(3)
    head = rng.normal(size=(6, tiny.WIDTH)).astype(np.float32)
    save_file(
        {"weight": torch.from_numpy(head / np.linalg.norm(head, axis=1, keepdims=True))}, folder / "head.safetensors"
    )
    rows = []
    for task, labels in CLASSES.items():
        arrays = {}
        for split, count in (("train", 20), ("test", 6)):
            arrays[f"x_{split}"] = rng.integers(0, 256, (count, tiny.SIDE, tiny.SIDE, 3), dtype=np.uint8)
            arrays[f"y_{split}"] = np.array(labels)[rng.integers(0, 2, count)]
        np.savez(folder / "data" / f"{task}.npz", **arrays)
        rows.append({"name": task, "data": f"data/{task}.npz", "head": "head.safetensors", "labels": labels})
    described = json.loads((folder / "suite.json").read_text()) | {"name": "own", "protocol": "cil", "tasks": rows}
    (folder / "suite.json").write_text(json.dumps(described))
    return load_suite(folder)


class ByHand:
    """A tower of transformers, the pictures as they lie on disk, and every loss written out; no code of ours but the draw of batches."""

    def __init__(self, suite, start=None):
        self.folder = suite.path
        self.model = CLIPVisionModelWithProjection.from_pretrained(start or suite.base).eval()
        self.head = load_file(suite.path / "head.safetensors")["weight"]

    def data(self, task):
        arrays = np.load(self.folder / "data" / f"{task}.npz")
        pixels = torch.from_numpy(arrays["x_train"]).permute(0, 3, 1, 2).float() / 127.5 - 1
        return pixels, arrays["y_train"].tolist()

    def scores(self, pixels):
        features = self.model(pixel_values=pixels).image_embeds
        return tiny.SCALE * (features / features.norm(dim=-1, keepdim=True)) @ self.head.mT

    @staticmethod
    def surprise(scores, labels, classes):
        """−log of the softmax over these classes alone, averaged."""
        among = scores[:, classes].exp().sum(-1).log()
        return torch.stack([total - row[y] for total, row, y in zip(among, scores, labels, strict=True)]).mean()

    def train(self, task, classes, training, teacher=None, old=()):
        pixels, labels = self.data(task)
        optimiser = torch.optim.AdamW(self.model.parameters(), lr=training.lr, weight_decay=training.weight_decay)
        for step, rows in enumerate(training.batches(len(labels), 0, STEPS)):
            for group in optimiser.param_groups:
                group["lr"] = training.rate(step, STEPS)
            scores = self.scores(pixels[rows])
            loss = self.surprise(scores, [labels[i] for i in rows], classes)
            if teacher is not None:
                with torch.no_grad():
                    wanted = (teacher.scores(pixels[rows])[:, old] / 2).softmax(-1)
                given = (scores[:, old] / 2).log_softmax(-1)
                loss = loss - training.lwf * (wanted * given).sum(-1).mean()
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimiser.step()
        return self

    def gradient(self, pixels, labels, classes):
        self.model.zero_grad()
        self.surprise(self.scores(pixels), labels, classes).backward()
        return {n: p.grad.clone() for n, p in self.model.named_parameters()}


def distance(found, model):
    """The largest difference but for a key's bias, whose gradient is rounding that Adam blows up to steps."""
    pairs = [(n, p.detach()) for n, p in model.named_parameters() if not n.endswith("k_proj.bias")]
    return max(float((found[n] - p).abs().max()) for n, p in pairs)


def how(**more):
    return Training(steps=STEPS, batch=BATCH, lr=RATE, **more)


@pytest.mark.parametrize("classes", ["own", "all"])
def test_the_loss_is_over_the_classes_named(suite, classes):
    training = how() if classes == "own" else how(classes="all")
    own, whole = (ByHand(suite).train("second", rows, training).model for rows in ([2, 5], list(range(6))))
    found = finetune(suite, "second", None, training).params
    expected, other = (own, whole) if classes == "own" else (whole, own)
    assert distance(found, expected) < 1e-4 < 1e-2 < distance(found, other)


def test_joint_training_is_over_the_classes_of_its_tasks(suite):
    done = finetune(suite, ["second", "first"], None, Training(steps=1, batch=40))
    hand = ByHand(suite)
    losses = [hand.surprise(hand.scores(hand.data(t)[0]), hand.data(t)[1], [0, 2, 3, 5]) for t in ("first", "second")]
    assert done.log[0]["loss"] == pytest.approx(float((sum(losses) / 2).detach()), rel=1e-5)


def test_lwf_distils_old_classes_from_the_second_task_on(suite, tmp_path):
    training = how(lwf=0.7)
    finetune(suite, "second", tmp_path / "one", training)
    assert (
        distance(load_file(tmp_path / "one" / "model.safetensors"), ByHand(suite).train("second", [2, 5], how()).model)
        < 1e-4
    )
    finetune(suite, "first", tmp_path / "two", training, start=tmp_path / "one")
    done = finetune(suite, "third", None, training, start=tmp_path / "two").params

    def by_hand(old):
        return (
            ByHand(suite, tmp_path / "two").train("third", [1, 4], training, ByHand(suite, tmp_path / "two"), old).model
        )

    assert distance(done, by_hand([0, 2, 3, 5])) < 1e-4 < 1e-3 < distance(done, by_hand(list(range(6))))
    whole = finetune(suite, "third", None, how(lwf=0.7, lwf_classes="all"), start=tmp_path / "two").params
    assert distance(whole, by_hand(list(range(6)))) < 1e-4
    named = finetune(
        suite,
        "third",
        None,
        training,
        start=load_file(tmp_path / "two" / "model.safetensors"),
        learned=["first", "second"],
    )
    assert all(torch.equal(named.params[n], done[n]) for n in done)


def test_lwf_asks_which_tasks_a_start_has_learned(suite, tmp_path):
    finetune(suite, "first", tmp_path / "one", how())
    (tmp_path / "one" / "training.json").unlink()
    with pytest.raises(OptionError, match="name them with learned"):
        finetune(suite, "second", None, how(lwf=0.3), start=tmp_path / "one")
    with pytest.raises(OptionError, match="has no task 'nope'"):
        finetune(suite, "second", None, how(lwf=0.3), start=tmp_path / "one", learned=["nope"])


def test_ewc_has_two_fishers(suite, tmp_path):
    """Released: squares of batch means on predicted labels, the first task's halved; the other: squares of each sample's own."""
    for name, more in (("batch", {}), ("sample", {"ewc_fisher": "per-sample"})):
        finetune(suite, "first", tmp_path / name, how(ewc=1.0, **more))
        finetune(suite, "second", tmp_path / f"{name}-two", how(ewc=1.0, **more), start=tmp_path / name)
    found = {p.name: load_file(p / "fisher.safetensors") for p in tmp_path.iterdir()}
    for form in ("batch", "sample"):
        for task, rows, folder in (("first", [0, 3], form), ("second", [2, 5], f"{form}-two")):
            hand = ByHand(suite, tmp_path / folder)
            pixels, labels = hand.data(task)
            order = drawn(suite, task)
            size = BATCH if form == "batch" else 1
            parts = [order[i : i + size] for i in range(0, len(order), size)]
            if form == "batch":
                labels = [rows[int(k)] for k in hand.scores(pixels)[:, rows].argmax(-1)]
            grads = [hand.gradient(pixels[part], [labels[i] for i in part], rows) for part in parts]
            own = {n: sum(g[n] ** 2 for g in grads) / len(grads) for n in grads[0]}
            before = found[form] if task == "second" else None
            for n, square in own.items():
                expected = square / 2 if form == "batch" else square
                if before is not None:
                    expected = before[n] / 2 + square / 2
                assert torch.allclose(found[folder][n], expected, rtol=2e-3, atol=1e-8), (folder, n)


def drawn(suite, task):
    """The rows of a task in the order in which calibration draws them, found by the pictures."""
    from mergeway.calibration.samples import draw

    pictures = suite.samples(task, "train").inputs["images"]
    shuffled = draw(suite.samples(task, "train"), len(pictures)).inputs["images"]
    return [next(i for i, p in enumerate(pictures) if torch.equal(p, q)) for q in shuffled]
