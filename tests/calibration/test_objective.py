"""The objective is the mean cross-entropy over tasks: against plain autograd, for every kind of model it knows."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch.nn import functional

import mergeway as mw
from mergeway.calibration.objective import Objective, as_objective
from mergeway.errors import OptionError
from mergeway.model.kinds import ClipVision, TextEncoder, make_model
from mergeway.model.model import Classifier


def linear(params, inputs, head):
    return torch.tanh(inputs["x"] @ params["w"]) @ head.mT


def task(name: str, count: int = 40, seed: int = 0) -> mw.Samples:
    generator = torch.Generator().manual_seed(seed)
    x, head = torch.randn(count, 6, generator=generator), torch.randn(3, 4, generator=generator)
    return mw.Samples(name, {"x": x}, torch.randint(0, 3, (count,), generator=generator), head)


TASKS = [task("a", 40, 1), task("b", 25, 2), task("c", 33, 3)]
PARAMS = {"w": torch.randn(6, 4, generator=torch.Generator().manual_seed(9))}


def plain_loss(params, samples: mw.Samples) -> torch.Tensor:
    """Mean cross-entropy, written out."""
    scores = linear(params, samples.inputs, samples.head)
    chosen = scores[torch.arange(len(samples.labels)), samples.labels]
    return (torch.logsumexp(scores, 1) - chosen).mean()


def gradient(objective, **options) -> tuple[float, torch.Tensor]:
    w = PARAMS["w"].clone().requires_grad_()
    return float(objective.accumulate({"w": w}, **options)), w.grad


# --- value and gradient -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, [1.0, 1.0, 1.0], [3.0, 1.0, 0.5]])
def test_mean_over_tasks(weights):
    objective = mw.Objective(linear, TASKS, weights, size=1000)
    shares = np.array(weights or [1.0] * 3) / sum(weights or [1.0] * 3)
    expected = sum(s * float(plain_loss(PARAMS, t)) for s, t in zip(shares, TASKS, strict=True))
    assert float(objective(PARAMS)) == pytest.approx(expected, rel=1e-5)
    w = PARAMS["w"].clone().requires_grad_()
    sum(s * plain_loss({"w": w}, t) for s, t in zip(shares, TASKS, strict=True)).backward()
    value, grad = gradient(objective)
    assert value == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(grad, w.grad, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 7, 25, 40, 1000])
def test_micro_batches_change_nothing(batch):
    whole, parts = (mw.Objective(linear, TASKS, [2.0, 1.0, 1.0], size=90, batch=b) for b in (10_000, batch))
    assert float(parts(PARAMS)) == pytest.approx(float(whole(PARAMS)), rel=1e-6)
    (value, grad), (expected, wanted) = gradient(parts), gradient(whole)
    assert value == pytest.approx(expected, rel=1e-6)
    assert torch.allclose(grad, wanted, atol=1e-6)
    assert parts.task_losses(PARAMS) == pytest.approx(whole.task_losses(PARAMS), rel=1e-6)


def test_micro_batches_bound_the_rows_in_flight():
    rows = []

    def watched(params, inputs, head):
        rows.append(len(inputs["x"]))
        return linear(params, inputs, head)

    mw.Objective(watched, TASKS, size=90, batch=8).accumulate({"w": PARAMS["w"].clone().requires_grad_()})
    assert max(rows) == 8
    assert sum(rows) == 30 + 25 + 30


def test_losses_and_gradients_of_single_tasks():
    objective = mw.Objective(linear, TASKS, size=1000)
    losses = objective.task_losses(PARAMS)
    assert list(losses) == ["a", "b", "c"]
    for samples in objective.tasks:
        assert losses[samples.task] == pytest.approx(float(plain_loss(PARAMS, samples)), rel=1e-5)
        w, mine = PARAMS["w"].clone().requires_grad_(), PARAMS["w"].clone().requires_grad_()
        plain_loss({"w": w}, samples).backward()
        assert objective.accumulate_task({"w": mine}, samples) == pytest.approx(losses[samples.task], rel=1e-6)
        assert torch.allclose(mine.grad, w.grad, atol=1e-6)


def test_same_bits_twice():
    first, second = (mw.Objective(linear, TASKS, size=60) for _ in range(2))
    assert float(first(PARAMS)) == float(second(PARAMS)) == float(first(PARAMS))
    assert torch.equal(gradient(first)[1], gradient(second)[1])


def test_nothing_that_moves_takes_part():
    objective = mw.Objective(linear, TASKS, size=60)
    value = objective.accumulate({"w": PARAMS["w"], "unused": torch.zeros(3, requires_grad=True)})
    assert value == pytest.approx(float(objective(PARAMS)), rel=1e-6)


# --- which samples ----------------------------------------------------------------------------------------------------


def test_seen_tasks_share_the_samples_anew():
    objective = mw.Objective(linear, TASKS, size=24)
    assert [len(t) for t in objective.tasks] == [8, 8, 8]
    two = objective.seen(2, [1.0, 3.0])
    assert [len(t) for t in two.tasks] == [12, 12]
    assert two.shares == [0.25, 0.75]
    one = objective.seen(1, [1.0])
    assert len(one.tasks[0]) == 24
    # Nested: what a task keeps is the beginning of what it had.
    for fewer, more in ((objective, two), (two, one)):
        kept = len(fewer.tasks[0])
        assert torch.equal(fewer.tasks[0].inputs["x"], more.tasks[0].inputs["x"][:kept])
    direct = mw.Objective(linear, TASKS[:2], [1.0, 3.0], size=24)
    assert float(two(PARAMS)) == float(direct(PARAMS))


def test_what_is_fitted_on_and_what_is_held_back_share_no_sample():
    objective = mw.Objective(linear, TASKS, size=60)
    fit, judge = objective.split()
    for left, right, whole in zip(fit.tasks, judge.tasks, objective.tasks, strict=True):
        assert len(right) == 2 == len([row for row in range(len(whole)) if row % 16 == 1])
        rows = torch.cat([left.inputs["x"], right.inputs["x"]])
        assert len(rows) == len(whole)
        assert {tuple(r.tolist()) for r in rows} == {tuple(r.tolist()) for r in whole.inputs["x"]}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: mw.Objective(linear, []), "at least one task"),
        (lambda: mw.Objective(linear, TASKS, [1.0]), "1 weights for 3 tasks"),
        (lambda: mw.Objective(linear, TASKS, size=2), "2 calibration samples for 3 tasks"),
        (lambda: mw.Objective(linear, TASKS).seen(4), "samples of 3 tasks, but 4 arrivals"),
        (lambda: mw.Objective(linear, [TASKS[0].rows(slice(0))]), "samples of 'a': there are no samples"),
    ],
)
def test_mistakes(make, said):
    with pytest.raises(OptionError, match=said):
        make()


# --- kinds of model ---------------------------------------------------------------------------------------------------


def test_clip_vision_is_the_model_with_its_head(vision):
    from transformers import CLIPVisionModelWithProjection

    expert = vision.task("bees").expert
    samples = vision.samples("bees", "test")
    assert isinstance(vision.model, ClipVision)
    ours = vision.model(load_file(expert / "model.safetensors"), samples.inputs, samples.head)
    with np.load(vision.path / "data" / "bees.npz") as file:
        pixels = torch.from_numpy((file["x_test"].transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5).float()
    with torch.no_grad():
        features = CLIPVisionModelWithProjection.from_pretrained(expert).eval()(pixel_values=pixels).image_embeds
    head = load_file(vision.path / "heads" / "bees.safetensors")["weight"]
    theirs = tiny.SCALE * functional.cosine_similarity(features[:, None], head[None], dim=-1)
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_text_encoder_is_the_mean_of_real_tokens(text):
    from transformers import AutoModel

    expert = text.task("animal").expert
    samples = text.samples("animal", "test")
    assert isinstance(text.model, TextEncoder)
    ours = text.model(load_file(expert / "model.safetensors"), samples.inputs, samples.head)
    model = AutoModel.from_pretrained(expert).eval()
    for row in range(3):
        ids = samples.inputs["input_ids"][row : row + 1, :4]  # every text has four words
        assert samples.inputs["attention_mask"][row].tolist() == [1] * 4 + [0] * 4
        with torch.no_grad():
            pooled = model(input_ids=ids).last_hidden_state.mean(1)
        theirs = tiny.SCALE * functional.normalize(pooled, dim=-1) @ samples.head.mT
        assert torch.allclose(ours[row], theirs[0], atol=1e-4)


def test_padding_changes_no_text_loss(text):
    """Trimmed batches of texts of like length against every text by itself."""
    objective = text.objective([t.name for t in text.tasks], size=16)
    checkpoint = load_file(text.base / "model.safetensors")
    params = {n: t.requires_grad_() for n, t in checkpoint.items() if t.is_floating_point()}
    value = objective.accumulate(params)
    alone = []
    for task in objective.tasks:
        losses = [
            functional.cross_entropy(text.model(params, row.inputs, row.head), row.labels)
            for row in (task.rows(slice(i, i + 1)) for i in range(len(task)))
        ]
        alone.append(torch.stack(losses).mean())
    wanted = torch.stack(alone).mean()
    grads = {n: p.grad.clone() for n, p in params.items() if p.grad is not None}
    for p in params.values():
        p.grad = None
    wanted.backward()
    assert value == pytest.approx(float(wanted.detach()), rel=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, params[name].grad, atol=1e-6, rtol=1e-4)


def test_a_classifier_brings_its_own_head():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=3,
        hidden_dropout_prob=0.5,
    )
    model = BertForSequenceClassification(config)
    ids, labels = torch.randint(0, 20, (10, 5)), torch.randint(0, 3, (10,))
    objective = mw.Objective(Classifier(model.train()), [mw.Samples("t", {"input_ids": ids}, labels)], size=10)
    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    expected = model.eval()(input_ids=ids, labels=labels).loss
    expected.backward()
    # Dropout is off, although the model was handed over in training mode.
    assert objective.accumulate(params) == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(params[name].grad, parameter.grad, atol=1e-6), name


def test_frozen_parameters_stay_out_of_the_model(vision):
    """The model's own parameters are replaced for the call only and never get a gradient."""
    params = {
        n: t.requires_grad_()
        for n, t in load_file(vision.task("ants").expert / "model.safetensors").items()
        if t.is_floating_point()
    }
    vision.objective(["ants"], size=8).accumulate(params)
    assert all(p.grad is None and not p.requires_grad for p in vision.model.module.parameters())
    assert any(p.grad is not None and p.grad.any() for p in params.values())


def test_a_head_is_needed(vision):
    samples = vision.samples("ants", "test")
    with pytest.raises(OptionError, match="needs a head"):
        vision.model({}, samples.inputs, None)


def test_a_checkpoint_of_another_class_is_refused(vision):
    samples = vision.samples("ants", "test")
    with pytest.raises(OptionError, match="other names than those of CLIPVisionModelWithProjection"):
        vision.model({"clip.vision.weight": torch.zeros(3)}, samples.inputs, samples.head)


def test_pooling_is_checked(text):
    with pytest.raises(OptionError, match="pooling is 'max'"):
        make_model(text.base, {**text.settings, "pooling": "max"})


# --- a suite's objective ----------------------------------------------------------------------------------------------


def test_calibration_comes_from_training_data_only(vision, text):
    for suite, key in ((vision, "images"), (text, "input_ids")):
        names = [t.name for t in suite.tasks]
        objective = suite.objective(names, size=12)
        for name, used in zip(names, objective.tasks, strict=True):
            train = {bytes(row.numpy().tobytes()) for row in suite.samples(name, "train").inputs[key]}
            assert {bytes(row.numpy().tobytes()) for row in used.inputs[key]} <= train
    images = {bytes(r.numpy().tobytes()) for r in vision.samples("ants", "test").inputs["images"]}
    assert not images & {bytes(r.numpy().tobytes()) for r in vision.objective(["ants"]).tasks[0].inputs["images"]}


def test_accuracy_is_the_share_of_hits(vision):
    params = load_file(vision.task("cats").expert / "model.safetensors")
    samples = vision.samples("cats", "test")
    hits = (vision.model(params, samples.inputs, samples.head).argmax(1) == samples.labels).float().mean()
    assert vision.accuracy(params, "cats") == pytest.approx(100 * float(hits))
    assert vision.accuracies(params, ["cats"], batch=3) == [vision.accuracy(params, "cats")]
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in params.items()}
    wide = {n: t.float() if t.is_floating_point() else t for n, t in half.items()}
    assert vision.accuracy(half, "cats") == vision.accuracy(wide, "cats")


def test_unknown_task(vision):
    with pytest.raises(OptionError, match="no task 'bee'; did you mean 'bees'"):
        vision.objective(["bee"])


# --- what a rule may ask ----------------------------------------------------------------------------------------------


def test_minibatches_are_seeded_and_share_the_rows_evenly():
    objective = mw.Objective(linear, TASKS, size=60)
    first, second, other = (list(objective.batches(3, 12, seed)) for seed in (5, 5, 6))
    assert [[len(rows) for rows in batch] for batch in first] == [[4, 4, 4]] * 3
    rows = [[task.inputs["x"] for batch in run for task in batch] for run in (first, second, other)]
    assert all(torch.equal(a, b) for a, b in zip(rows[0], rows[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(rows[0], rows[2], strict=True))
    assert objective.accumulate_task({"w": PARAMS["w"].clone().requires_grad_()}, first[0][1]) > 0


def test_a_function_is_an_objective_without_tasks():
    loss = as_objective(lambda params: params["w"].square().sum())
    assert isinstance(loss, Objective) and isinstance(mw.Objective(linear, TASKS), Objective)
    assert as_objective(loss) is loss and loss.seen(3) is loss and not loss.tasks
    value, grad = gradient(loss)
    assert value == pytest.approx(float(PARAMS["w"].square().sum())) and torch.allclose(grad, 2 * PARAMS["w"])
    for ask, what in (
        (lambda: loss.task_losses(PARAMS), "per-task losses"),
        (lambda: loss.accumulate_task(PARAMS, TASKS[0]), "per-task gradients"),
        (loss.newest, "give the task's data, not a function"),
    ):
        with pytest.raises(OptionError, match=what):
            ask()
    # It has no samples to draw from or to hold back: every batch is the whole of it.
    assert list(loss.batches(3)) == [[], [], []] and loss.split() == (loss, loss)
    assert loss.taught([1.0], lambda: pytest.fail("asked"), always=True) is loss
    assert loss.accumulate_batch({"w": PARAMS["w"].clone().requires_grad_()}, []) == pytest.approx(value)
    with pytest.raises(mw.MergewayError, match="must return one number as a tensor"):
        as_objective(lambda params: params["w"])(PARAMS)


def test_the_data_of_one_task():
    objective = mw.Objective(linear, TASKS, size=24)
    assert [len(objective.task_data(k)[1]) for k in range(3)] == [24, 24, 24]
    assert objective.newest()[1].task == "c"
