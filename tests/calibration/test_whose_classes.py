"""Under one head an arrival speaks of the classes that it has learned, and says of the others' that its samples are none of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mergeway as mw
from mergeway.calibration.loss import divergence, mean_loss
from mergeway.calibration.own_classes import with_own_classes

HEAD = torch.eye(6)


def task(name: str, said: list[int], head=HEAD, classes: int = 6) -> mw.Samples:
    """Samples whose arrival answers with these classes, one after another."""
    answers = torch.zeros(len(said), 1, classes)
    answers[range(len(said)), 0, said] = 5.0
    return mw.Samples(name, {"images": torch.zeros(len(said), 1)}, torch.tensor(said), head, answers=answers.half())


def own(*tasks: mw.Samples) -> list[list[int] | None]:
    return [None if t.own is None else t.own.nonzero().flatten().tolist() for t in with_own_classes(tasks)]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_at_temperature_one_it_is_the_divergence_from_the_answer_without_the_others():
    """Σ p (log p − log q) over all classes in float64, p zero outside the own ones and scaled to sum 1."""
    draw = np.random.default_rng(0)
    logits, answers = draw.normal(0, 3, (20, 6)), draw.normal(0, 3, (20, 6))
    mine = np.array([False, True, True, False, True, False])
    p, q = softmax(np.where(mine, answers, -np.inf)), softmax(logits)
    wanted = (p[:, mine] * np.log(p[:, mine] / q[:, mine])).sum(-1)
    found = divergence(torch.tensor(logits), torch.tensor(answers), own=torch.tensor(mine))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_a_temperature_is_for_the_own_classes_alone():
    draw = np.random.default_rng(1)
    logits, answers = draw.normal(0, 3, (20, 6)), draw.normal(0, 3, (20, 6))
    mine = np.array([True, True, False, False, True, False])
    p, q = softmax(answers[:, mine] / 3), softmax(logits[:, mine] / 3)
    wanted = 9 * (p * np.log(p / q)).sum(-1) - np.log(softmax(logits)[:, mine].sum(-1))
    found = divergence(torch.tensor(logits), torch.tensor(answers), 3.0, torch.tensor(mine))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-5)


@given(st.integers(0, 2**31), st.floats(1.0, 9.0))
def test_where_all_classes_are_own_nothing_changes(seed, temperature):
    logits, answers = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(seed))
    everything = torch.ones(6, dtype=torch.bool)
    found = divergence(logits, answers, temperature, everything)
    torch.testing.assert_close(found, divergence(logits, answers, temperature), rtol=1e-5, atol=1e-5)


def test_classes_that_only_others_answer_with_are_theirs():
    assert own(task("a", [0, 1] * 8), task("b", [2, 3] * 8)) == [[0, 1, 4, 5], [2, 3, 4, 5]]


def test_a_mistake_now_and_then_claims_no_class():
    """One answer in thirty-two; one in four does."""
    assert own(task("a", [0, 1] * 15 + [0, 2]), task("b", [2, 3] * 8))[0] == [0, 1, 4, 5]
    assert own(task("a", [0, 1, 2, 0] * 8), task("b", [2, 3] * 8))[0] == [0, 1, 2, 4, 5]


def test_domains_of_the_same_classes_have_all_of_them():
    assert own(task("a", [0, 1, 2] * 8), task("b", [2, 1, 0] * 8)) == [None, None]


def test_under_heads_of_their_own_tasks_have_all_of_them():
    assert own(task("a", [0, 1] * 8), task("b", [2, 3] * 8, HEAD.flip(0))) == [None, None]
    assert own(task("a", [0, 1] * 8), task("b", [2, 3] * 8, {"weight": HEAD})) == [None, None]
    assert own(task("a", [0, 1] * 8)) == [None]


def test_a_model_with_a_classifier_of_its_own_is_one_head():
    assert own(task("a", [0, 1] * 8, None), task("b", [2, 3] * 8, None)) == [[0, 1, 4, 5], [2, 3, 4, 5]]


def test_who_was_not_asked_has_no_say():
    silent = replace(task("b", [2, 3] * 8), answers=None)
    assert own(task("a", [0, 1] * 8), silent) == [None, None]


@pytest.mark.parametrize("batch", [3, 64])
def test_an_objective_on_a_stream_of_classes(batch):
    """Its loss by NumPy, before the second task has come and after it; a batch of it has the same classes."""
    tasks = [task("a", [0, 1] * 8), task("b", [2, 3] * 8)]
    logits = torch.randn(6, generator=torch.Generator().manual_seed(5))

    def predict(params, inputs, head):
        return params["w"].expand(len(inputs["images"]), 6)

    objective = mw.Objective(predict, tasks, size=16, copies=0, batch=batch)
    params = {"w": logits.clone().requires_grad_()}
    q = softmax(logits.double().numpy())

    def by_hand(said: list[int], mine: list[int]) -> float:
        p = softmax(np.where(np.isin(np.arange(6), mine), 5.0 * np.eye(6)[said], -np.inf))[:, mine]
        return float((p * np.log(p / q[mine])).sum(-1).mean())

    alone = by_hand([0, 1], list(range(6)))
    assert objective.seen(1)(params).item() == pytest.approx(alone, rel=1e-4)
    wanted = [by_hand([0, 1], [0, 1, 4, 5]), by_hand([2, 3], [2, 3, 4, 5])]
    assert list(objective.task_losses(params).values()) == pytest.approx(wanted, rel=1e-4)
    rows = next(iter(objective.batches(1, 16)))
    assert objective.accumulate_batch(params, rows) == pytest.approx(np.mean(wanted), rel=1e-4)
    assert mean_loss(logits.expand(8, 6), rows[0]).item() == pytest.approx(wanted[0], rel=1e-4)
