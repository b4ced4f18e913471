"""What a language model answers: its k likeliest tokens at every place and k drawn from the rest, against plain NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import mergeway as mw
from mergeway.calibration.loss import divergence, mean_loss, targets, top_divergence
from mergeway.calibration.memory import Bounds, CalibrationMemory
from mergeway.calibration.samples import MASKED
from mergeway.calibration.teaching import ask, copies_of, with_copies
from mergeway.errors import OptionError

VOCABULARY, WIDTH = 11, 6


def documents(count: int = 9, longest: int = 7, seed: int = 0) -> mw.Samples:
    """Texts of three to seven tokens; every third has a prompt of two tokens that is not judged."""
    rng = np.random.default_rng(seed)
    ids, mask = np.zeros((count, longest), np.int64), np.zeros((count, longest), np.int64)
    labels = np.full((count, longest), MASKED)
    for row in range(count):
        length = int(rng.integers(3, longest + 1)) if row else longest
        ids[row, :length], mask[row, :length] = rng.integers(1, VOCABULARY, length), 1
        given = 2 if row % 3 == 2 else 0
        labels[row, given:length] = ids[row, given:length]
    inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    return mw.Samples("tales", inputs, torch.tensor(labels), shuffled=True)


def predict(params, inputs, head):
    """A language model without a past but the token before; its answer at a place depends on that place alone."""
    ids = inputs["input_ids"]
    before = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1)
    return (params["own"][ids] + params["before"][before]) @ params["out"]


def params_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"own": (VOCABULARY, WIDTH), "before": (VOCABULARY, WIDTH), "out": (WIDTH, VOCABULARY)}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def of_a_place(p_logits: np.ndarray, q_logits: np.ndarray, k: int, place: int) -> float:
    """Σ p log(p/q) over the k likeliest tokens, and the rest's mass over k tokens of it, one token at a time, in float64."""
    p, q = np.exp(log_softmax(p_logits)), np.exp(log_softmax(q_logits))
    likeliest = sorted(range(len(p)), key=lambda token: -p[token])
    total = sum(p[token] * np.log(p[token] / q[token]) for token in likeliest[:k])
    others = sorted(likeliest[k:])
    mass = sum(p[token] for token in others)
    for number in range(k if others else 0):
        # The token in whose share of the mass the mark lies: even steps, the first a golden part of a step from the start.
        mark = (number + (place + 1) * (np.sqrt(5) - 1) / 2 % 1) / k * mass
        token = next(token for token in others if sum(p[t] for t in others if t <= token) > mark)
        total += mass / k * np.log(p[token] / q[token])
    return total


def expected(samples: mw.Samples, ours, theirs, k: int) -> float:
    """The mean over all judged tokens of a task, place by place."""
    q, p = (predict(params, samples.inputs, None).numpy() for params in (ours, theirs))
    found = [
        of_a_place(p[row, place], q[row, place], k, place)
        for row in range(len(samples))
        for place in range(q.shape[1] - 1)
        if samples.labels[row, place + 1] != MASKED
    ]
    return float(np.mean(found))


@pytest.mark.parametrize("k", [1, 3, VOCABULARY - 1, VOCABULARY, 50])
def test_the_loss_is_that_of_numpy(k):
    samples, ours, theirs = documents(), params_of(0), params_of(1)
    objective = mw.Objective(predict, [samples], copies=0, top_k=k, batch=4)
    objective = objective.taught([1.0], lambda: theirs, always=True)
    wanted = expected(samples, ours, theirs, k)
    assert float(objective(ours)) == pytest.approx(wanted, rel=2e-3)
    assert float(objective(theirs)) == pytest.approx(0.0, abs=1e-4)
    [batch] = objective.batches(1, 4 * len(samples))
    assert objective.accumulate_batch(ours, batch) == pytest.approx(wanted, rel=2e-3)
    # Tokens have no temperature: which of them an arrival names is of its own.
    assert objective.softened(4.0).accumulate_batch(ours, batch) == objective.accumulate_batch(ours, batch)
    # With every token named, it is the divergence of the whole vocabularies.
    if k >= VOCABULARY:
        q, p = (predict(params, samples.inputs, None)[:, :-1] for params in (ours, theirs))
        judged = samples.labels[:, 1:] != MASKED
        assert float(objective(ours)) == pytest.approx(float(divergence(q[judged], p[judged]).mean()), rel=2e-3)


@pytest.mark.parametrize("k", [1, 3])
def test_over_many_places_it_is_the_divergence_of_the_whole_vocabularies(k):
    """The same two distributions at 3000 places: one place knows a part, all together know all of it, and of its gradient."""
    generator = torch.Generator().manual_seed(7)
    theirs, ours = torch.randn(2, VOCABULARY, generator=generator)
    text = torch.ones(1, 3000, dtype=torch.long)
    samples = mw.Samples("tales", {"input_ids": text, "attention_mask": text}, text, shuffled=True)
    answered = ask(lambda params, inputs, head: theirs.expand(1, 3000, -1), {}, samples, 0, top_k=k)
    logits = ours.clone().requires_grad_()
    partial = mean_loss(logits.expand(1, 3000, -1), replace(answered))
    wanted = divergence(whole := ours.clone().requires_grad_(), theirs)
    assert partial.item() == pytest.approx(wanted.item(), rel=5e-3)
    [ours_slope], [whole_slope] = torch.autograd.grad(partial, logits), torch.autograd.grad(wanted, whole)
    torch.testing.assert_close(ours_slope, whole_slope, atol=2e-3, rtol=0)


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_gradients_are_those_of_the_bins(scale):
    """Against autograd over bins that are summed up in float64, also where one token has all the mass."""
    generator = torch.Generator().manual_seed(2)
    logits = (scale * torch.randn(5, VOCABULARY, generator=generator)).requires_grad_()
    theirs = scale * torch.randn(5, VOCABULARY, generator=generator)
    tops = theirs.topk(4, -1).indices
    p = theirs.double().softmax(-1)

    def bins(x):
        named = x.gather(-1, tops)
        return torch.cat([named, (x.sum(-1, keepdim=True) - named.sum(-1, keepdim=True)).clamp(min=1e-6)], -1)

    top_divergence(logits, bins(p).log().float(), tops).sum().backward()
    wide = logits.detach().double().requires_grad_()
    q = bins(wide.softmax(-1))
    p = bins(p) / bins(p).sum(-1, keepdim=True)
    (p * (p.log() - q.log())).sum().backward()
    assert bool(torch.isfinite(logits.grad).all())
    torch.testing.assert_close(logits.grad.double(), wide.grad, atol=1e-4, rtol=1e-3)


def test_micro_batches_change_nothing_but_rounding():
    samples, ours, theirs = documents(), params_of(0), params_of(1)
    found = []
    for batch in (1, 2, 5, 9):
        objective = mw.Objective(predict, [samples], copies=1, top_k=3, batch=batch)
        objective = objective.taught([1.0], lambda: theirs, always=True)
        [drawn] = objective.batches(1, 7, seed=3)
        found.append((float(objective(ours)), objective.accumulate_batch(ours, drawn)))
    assert np.allclose(found, found[0], rtol=1e-5)


def test_answers_are_small_and_in_half_precision():
    samples = ask(predict, params_of(1), documents(), 2, top_k=3, at_once=4)
    assert samples.answers.shape == (9, 3, 7, 7) and samples.answers.dtype is torch.float16
    assert samples.tops.shape == (9, 3, 7, 6) and samples.tops.dtype is torch.int32
    for number in range(3):
        rows = with_copies(samples, range(9), [number] * 9)
        logits = predict(params_of(1), rows.inputs, None)
        p = logits.double().softmax(-1)
        here = rows.labels[:, 1:] != MASKED
        bins = rows.answers[:, 0, :-1].double().exp()
        likeliest, drawn = rows.tops[:, 0, :-1].long().split(3, -1)
        assert torch.equal(likeliest[here], logits[:, :-1][here].topk(3).indices)
        assert torch.allclose((bins[..., :3].sum(-1) + bins[..., -1])[here], torch.ones(()).double(), atol=2e-3)
        named = p[:, :-1].gather(-1, torch.cat([likeliest, -1 - drawn], -1) * here[..., None])
        assert torch.allclose(bins[here][:, :6], named[here], atol=2e-3)
        assert not bool((likeliest[here][:, :, None] == -1 - drawn[here][:, None]).any())
        # Where nothing is judged nothing is kept.
        assert not bool(rows.answers[:, 0, :-1][~here].any()) and not bool(rows.tops[:, 0, :-1][~here].any())


def test_a_copy_goes_on_as_an_earlier_document_does():
    samples = documents()
    ids, mask = samples.inputs["input_ids"], samples.inputs["attention_mask"]
    joined = 0
    for row in range(len(samples)):
        made = with_copies(samples, [row] * 20, list(range(1, 21)))
        for place in range(20):
            own = made.inputs["input_ids"][place]
            fits = [
                (other, cut)
                for other in range(max(1, row))
                for cut in range(2, 8)
                if torch.equal(own, torch.cat([ids[row, :cut], ids[other, cut:]]))
                and torch.equal(made.inputs["attention_mask"][place], torch.cat([mask[row, :cut], mask[other, cut:]]))
                and torch.equal(made.labels[place], torch.cat([samples.labels[row, :cut], samples.labels[other, cut:]]))
            ]
            assert fits
            joined += not torch.equal(own, ids[row])
    assert joined > 60
    assert torch.equal(ids, documents().inputs["input_ids"])
    assert copies_of(128, documents=True) == 0


def test_memory_keeps_them_to_the_bit_and_shrinks_to_the_first(tmp_path):
    samples = ask(predict, params_of(1), documents(), 1, top_k=3)
    memory = CalibrationMemory({"kind": "causal-lm", "max_length": 50}, [samples], Bounds(20, copies=1, top_k=3))
    memory.write(tmp_path)
    shown = memory.summary(tmp_path)
    assert shown["answer_bytes"] == 9 * (1 + 1) * 7 * (6 * 6 + 2)
    assert shown["answer_bytes_at_most"] == 20 * (1 + 1) * 50 * (6 * 6 + 2)
    [again] = CalibrationMemory.read(tmp_path).tasks
    assert again.tops.dtype is torch.int32 and torch.equal(again.tops, samples.tops)
    assert torch.equal(again.answers.view(torch.int16), samples.answers.view(torch.int16))
    cut = CalibrationMemory.read(tmp_path).shared_out(["tales", "songs"]).tasks[0]
    assert len(cut) == 9 and CalibrationMemory.read(tmp_path).bounds == memory.bounds
    cut = replace(memory, bounds=Bounds(9)).shared_out(["tales", "songs"]).tasks[0]
    assert len(cut) == 5 and torch.equal(cut.tops, samples.tops[:5])


def test_answers_that_do_not_fit_are_refused():
    samples = ask(predict, params_of(1), documents(), 0, top_k=3)
    with pytest.raises(OptionError, match=r"answered with token 5., but the model has 11; .* another vocabulary"):
        mean_loss(torch.zeros(9, 7, VOCABULARY), replace(samples, tops=samples.tops - 41 * (samples.tops < 0)))
    with pytest.raises(OptionError, match=r"answers \[9, 1, 7, 7\] for tokens \[9, 1, 7, 2\]"):
        mw.Objective(predict, [replace(samples, tops=samples.tops[..., :2])])
    with pytest.raises(OptionError, match="answers at 5 places for texts of 7 tokens"):
        mw.Objective(predict, [replace(samples, answers=samples.answers[:, :, :5], tops=samples.tops[:, :, :5])])
    assert targets(samples) == int((samples.labels[:, 1:] != MASKED).sum())


@pytest.mark.parametrize("top_k", [0, -3, 2.5, True])
def test_top_k_is_a_number_of_tokens(top_k):
    with pytest.raises(OptionError, match=f"top_k is {top_k}; it must be at least 1 token"):
        Bounds(top_k=top_k)
