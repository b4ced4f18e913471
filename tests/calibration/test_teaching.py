"""Answers in place of labels: what the arrival says, the loss against it, minibatches, what is held back, what is kept."""

from __future__ import annotations

import logging
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import mergeway as mw
from mergeway.bench.suites import suite_directory
from mergeway.calibration.loss import divergence
from mergeway.calibration.memory import Bounds, CalibrationMemory
from mergeway.calibration.samples import UNKNOWN
from mergeway.calibration.teaching import MOST_COPIES, ask, copies_of, told_apart, with_copies
from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.model.kinds import kind_of, make_model

logging.getLogger("transformers").setLevel(logging.ERROR)

COPIES = 3


def expert_of(suite, task: str) -> dict[str, torch.Tensor]:
    return load_file(suite.task(task).expert / "model.safetensors")


def unlabelled(samples: mw.Samples) -> mw.Samples:
    return replace(samples, labels=torch.full_like(samples.labels, UNKNOWN))


def taught(suite, size: int = 24, copies: int = COPIES, labels: bool = False, weights=None) -> mw.Objective:
    """The objective of all tasks of a suite, each taught by its own expert when it arrived."""
    names = [t.name for t in suite.tasks]
    tasks = [suite.samples(name, "train") for name in names]
    objective = mw.Objective(
        suite.model, tasks if labels else [unlabelled(t) for t in tasks], size=size, batch=7, copies=copies
    )
    weights = weights or [1.0] * len(names)
    for k, name in enumerate(names, 1):
        objective = objective.taught(weights[:k], lambda name=name: expert_of(suite, name), always=True)
    return objective.seen(len(names), weights)


def kl(p_logits: np.ndarray, q_logits: np.ndarray) -> np.ndarray:
    """Σ p (log p − log q), written out in float64."""

    def log_softmax(x):
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = log_softmax(p_logits.astype(np.float64)), log_softmax(q_logits.astype(np.float64))
    return (np.exp(p) * (p - q)).sum(-1)


# --- what an arrival says ---------------------------------------------------------------------------------------------


def test_divergence_is_that_of_numpy():
    generator = torch.Generator().manual_seed(0)
    logits, answers = (8 * torch.randn(20, 5, generator=generator) for _ in range(2))
    found = divergence(logits, answers.half())
    assert np.allclose(found.numpy(), kl(answers.half().numpy(), logits.numpy()), rtol=1e-5, atol=1e-6)
    assert float(divergence(answers, answers).abs().max()) < 1e-6
    assert bool((found > 0).all())


@pytest.mark.parametrize("temperature", [1.0, 2.0, 7.5])
def test_a_temperature_divides_both_logits(temperature):
    """T²·KL of the divided logits, in float64; the factor keeps the gradient's size where the two are near."""
    generator = torch.Generator().manual_seed(1)
    logits, answers = (8 * torch.randn(20, 5, generator=generator) for _ in range(2))
    wanted = temperature**2 * kl(answers.numpy() / temperature, logits.numpy() / temperature)
    assert np.allclose(divergence(logits, answers, temperature).numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_at_a_high_temperature_it_is_the_distance_of_the_logits():
    """Half the variance over classes of what the logits differ by (Hinton et al. 2015), whatever the arrival is sure of."""
    generator = torch.Generator().manual_seed(2)
    logits, answers = (4 * torch.randn(20, 5, generator=generator).double() for _ in range(2))
    gap = (logits - answers).numpy()
    found = divergence(logits, answers, 300.0).numpy()
    assert np.allclose(found, gap.var(-1) / 2, rtol=0.1)


@pytest.mark.parametrize("suite", ["vision", "text"])
def test_a_softened_objective_is_the_same_loss_at_a_temperature(suite, request):
    """Of a batch, of a task and of all tasks; the objective itself, and what is made of it anew, stay at 1."""
    suite = request.getfixturevalue(suite)
    objective, params = taught(suite), load_file(suite.base / "model.safetensors")
    soft = objective.softened(3.0)
    for task, rows in zip(soft.tasks, objective.tasks, strict=True):
        logits = suite.model(params, rows.inputs, rows.head).detach().numpy()
        wanted = 9 * kl(rows.answers[:, 0].double().numpy() / 3, logits / 3).mean()
        assert soft.task_losses(params)[task.task] == pytest.approx(wanted, rel=1e-4)
    assert float(soft(params)) == pytest.approx(np.mean(list(soft.task_losses(params).values())), rel=1e-5)
    [batch] = soft.batches(1, 12)
    wanted = 0.0
    for rows in batch:
        logits = suite.model(params, rows.inputs, rows.head).detach().numpy()
        wanted += 9 * kl(rows.answers[:, 0].double().numpy() / 3, logits / 3).mean() / len(batch)
    assert gradient(soft, params, batch)[0] == pytest.approx(wanted, rel=1e-4)
    assert objective.task_losses(params) != soft.task_losses(params)
    assert soft.seen(2).temperature == objective.temperature == 1.0


def test_labels_have_no_temperature(vision):
    objective = vision.objective([t.name for t in vision.tasks], size=24)
    params = load_file(vision.base / "model.safetensors")
    assert float(objective.softened(5.0)(params)) == float(objective(params))


@pytest.mark.parametrize("suite", ["vision", "text"])
def test_answers_are_the_experts_logits(suite, request):
    """On every sample and on every copy of it, in half precision, and in the order of the samples."""
    suite = request.getfixturevalue(suite)
    name = suite.tasks[0].name
    samples, expert = suite.samples(name, "train"), expert_of(suite, suite.tasks[0].name)
    answered = ask(suite.model, expert, unlabelled(samples), COPIES)
    assert answered.answers.shape == (len(samples), 1 + COPIES, len(samples.head))
    assert answered.answers.dtype is torch.float16
    with torch.no_grad():
        for number in range(COPIES + 1):
            rows = with_copies(samples, range(len(samples)), [number] * len(samples))
            logits = suite.model(expert, rows.inputs, rows.head)
            assert torch.allclose(answered.answers[:, number].float(), logits, rtol=2e-3, atol=2e-3)
    assert samples.answers is None
    # The samples themselves are number 0.
    own = with_copies(samples, [2, 0], [0, 0])
    assert all(torch.equal(own.inputs[n], samples.inputs[n][[2, 0]]) for n in samples.inputs)


def test_a_copy_comes_with_its_own_answer(vision):
    samples = ask(vision.model, expert_of(vision, "ants"), vision.samples("ants", "train"), COPIES)
    rows = with_copies(samples, [5, 5, 1], [0, 3, 2])
    assert rows.answers.shape == (3, 1, 3)
    assert torch.equal(rows.answers[:, 0], samples.answers[[5, 5, 1], [0, 3, 2]])
    assert torch.equal(rows.labels, samples.labels[[5, 5, 1]])


def test_an_expert_with_infinite_answers_is_refused(vision):
    head = 1e6 * vision.samples("ants", "train").head
    with pytest.raises(OptionError, match="answers on the samples of 'ants' are not finite in half precision"):
        ask(vision.model, expert_of(vision, "ants"), replace(vision.samples("ants", "train"), head=head), 0)


@pytest.mark.parametrize(("size", "copies"), [(1024, 7), (128, 63), (64, 63), (2048, 3), (8192, 0), (100_000, 0)])
def test_copies_make_up_for_a_small_memory(size, copies):
    assert copies_of(size) == copies <= MOST_COPIES


# --- the objective ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suite", ["vision", "text"])
def test_the_loss_is_the_mean_divergence_from_the_experts(suite, request):
    suite = request.getfixturevalue(suite)
    objective = taught(suite, weights=[2.0, 1.0, 1.0][: len(suite.tasks)])
    params = load_file(suite.base / "model.safetensors")
    losses = []
    for task in objective.tasks:
        with torch.no_grad():
            ours = suite.model(params, task.inputs, task.head).numpy()
            theirs = suite.model(expert_of(suite, task.task), task.inputs, task.head).half().numpy()
        losses.append(kl(theirs, ours).mean())
    assert list(objective.task_losses(params).values()) == pytest.approx(losses, rel=1e-4, abs=1e-6)
    expected = np.average(losses, weights=[2.0, 1.0, 1.0][: len(suite.tasks)])
    assert float(objective(params)) == pytest.approx(expected, rel=1e-4)
    for task in suite.tasks:
        assert objective.task_losses(expert_of(suite, task.name))[task.name] < 1e-5


def test_each_arrival_is_asked_once_about_the_share_of_its_fold(vision):
    names = [t.name for t in vision.tasks]
    objective = mw.Objective(vision.model, [unlabelled(vision.samples(n, "train")) for n in names], size=24, copies=1)
    asked = []
    for k, name in enumerate(names, 1):

        def arrival(name=name):
            asked.append(name)
            return expert_of(vision, name)

        before = objective
        objective = objective.taught([1.0] * k, arrival, always=True)
        assert before.pool[k - 1].answers is None
        assert len(objective.pool[k - 1]) == len(objective.pool[k - 1].answers) == 24 // k
        # Asked again about the same task it has nothing to say.
        assert objective.taught([1.0] * k, arrival, always=True) is objective
    assert asked == names
    assert [len(t) for t in objective.seen(3).tasks] == [8, 8, 8]
    assert all(t.answers.shape == (8, 2, 3) for t in objective.seen(3).tasks)


def test_labels_are_enough_where_nobody_wants_answers(vision):
    samples = vision.samples("ants", "train")
    labelled, bare = (mw.Objective(vision.model, [s], size=8, copies=0) for s in (samples, unlabelled(samples)))
    never = pytest.fail
    assert labelled.taught([1.0], lambda: never("asked"), always=False) is labelled
    assert bare.taught([1.0], lambda: expert_of(vision, "ants"), always=False).pool[0].answers is not None
    with pytest.raises(OptionError, match="have no labels"):
        bare(load_file(vision.base / "model.safetensors"))


@pytest.mark.parametrize("width", [2, 4])
def test_answers_of_another_width_are_refused(vision, width):
    samples = replace(vision.samples("ants", "train"), answers=torch.zeros(24, 1, width, dtype=torch.float16))
    with pytest.raises(OptionError, match=f"'ants': the arrival answered for {width} classes, but the head has 3"):
        mw.Objective(vision.model, [samples], size=8)
    with pytest.raises(OptionError, match=f"answered for {width} classes, but the head has 3"):
        divergence(torch.zeros(2, 3), torch.zeros(2, width))


def test_answers_to_fewer_samples_are_refused(vision):
    samples = replace(vision.samples("ants", "train"), answers=torch.zeros(5, 1, 3, dtype=torch.float16))
    with pytest.raises(OptionError, match="answers to 5 samples for 24 labels"):
        mw.Objective(vision.model, [samples], size=8)


# --- what is held back ------------------------------------------------------------------------------------------------


def seen_by(rows: torch.Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in rows}


@pytest.mark.parametrize(("size", "held_back"), [(120, [1, 17]), (15, [1]), (6, [1]), (3, [])])
def test_the_second_of_each_sixteen_is_held_back(vision, size, held_back):
    whole = taught(vision, size)
    fit, judge = whole.split()
    for all_of, kept, held in zip(whole._held, fit.tasks, judge.tasks, strict=True):
        rows = range(len(all_of))
        images = all_of.inputs["images"]
        assert torch.equal(held.inputs["images"], images[held_back or [0]])  # a single row teaches and judges
        assert torch.equal(kept.inputs["images"], images[[row for row in rows if row not in held_back]])
        assert torch.equal(held.answers, all_of.answers[held_back or [0]])
    assert fit.shares == judge.shares == whole.shares


def test_what_judges_was_never_taught(vision):
    """However many tasks come, and however few samples are left of each."""
    taught_ever: list[set[bytes]] = [set() for _ in vision.tasks]
    whole = taught(vision, 120)
    for count in (1, 2, 3):
        fit, judge = whole.seen(count).split()
        for ever, kept, held in zip(taught_ever, fit.tasks, judge.tasks, strict=False):
            ever |= seen_by(kept.inputs["images"])
            assert not ever & seen_by(held.inputs["images"])
        for batch in fit.batches(40, 30):
            for ever, rows in zip(taught_ever, batch, strict=False):
                ever |= seen_by(rows.inputs["images"])


def test_nothing_of_what_is_held_back_is_fitted_on(vision):
    """Not as a sample, not as the other half of a copy: other pictures there change no batch."""
    whole = taught(vision, 60)
    other = copy(whole)
    other._hold([replace(task, inputs={"images": _changed(task.inputs["images"])}) for task in whole._held])
    (fit, _), (changed, _) = whole.split(), other.split()
    for ours, theirs in zip(fit.batches(6, 30), changed.batches(6, 30), strict=True):
        for left, right in zip(ours, theirs, strict=True):
            assert torch.equal(left.inputs["images"], right.inputs["images"])
            assert torch.equal(left.answers, right.answers)


def _changed(images: torch.Tensor) -> torch.Tensor:
    images = images.clone()
    images[1::16] = 255 - images[1::16]
    return images


# --- minibatches ------------------------------------------------------------------------------------------------------


def test_batches_share_samples_and_copies_evenly(vision):
    objective = taught(vision, 24)
    one, two, other = (list(objective.batches(4, 13, seed)) for seed in (3, 3, 4))
    for left, right in zip(one, two, strict=True):
        assert [len(rows) for rows in left] == [5, 4, 4]
        assert all(torch.equal(a.inputs["images"], b.inputs["images"]) for a, b in zip(left, right, strict=True))
        assert all(rows.answers.shape == (len(rows), 1, 3) for rows in left)
    assert not torch.equal(one[0][0].inputs["images"], other[0][0].inputs["images"])
    # Over many batches every sample and every copy of it turns up, each once in a batch.
    found = set()
    for [rows, *_] in objective.batches(60, 24, 0):
        here = seen_by(rows.inputs["images"])
        assert len(here) == 8
        found |= here
    assert len(found) == 8 * (1 + COPIES)


def test_a_batch_larger_than_all_there_is(vision):
    objective = taught(vision, 6, copies=1)
    [batch] = objective.batches(1, 1000)
    assert [len(rows) for rows in batch] == [4, 4, 4]


def test_tasks_with_different_numbers_of_copies(vision):
    names = [t.name for t in vision.tasks]
    tasks = [
        ask(vision.model, expert_of(vision, name), vision.samples(name, "train"), copies)
        for name, copies in zip(names, (0, 2, 5), strict=True)
    ]
    objective = mw.Objective(vision.model, tasks, size=12)
    seen = [set() for _ in names]
    for batch in objective.batches(80, 12):
        assert [len(rows) for rows in batch] == [4, 4, 4]
        for found, rows in zip(seen, batch, strict=True):
            found |= seen_by(rows.inputs["images"])
    assert [len(found) for found in seen] == [4, 12, 24]
    assert np.isfinite(gradient(objective, load_file(vision.base / "model.safetensors"), batch)[0])


def gradient(objective, params, batch) -> tuple[float, dict[str, torch.Tensor]]:
    leaves = {n: p.clone().requires_grad_(p.is_floating_point()) for n, p in params.items()}
    value = objective.accumulate_batch(leaves, batch)
    return value, {n: p.grad for n, p in leaves.items() if p.grad is not None}


def check_batch(model, objective, params, batch) -> None:
    """Value and gradient against the plain sum over the tasks, one forward each, nothing trimmed."""
    leaves = {n: p.clone().requires_grad_(p.is_floating_point()) for n, p in params.items()}
    expected = torch.zeros(())
    for share, rows in zip(objective.shares, batch, strict=True):
        logits = model(leaves, rows.inputs, rows.head)
        if rows.answers is None:
            loss = functional.cross_entropy(logits, rows.labels)
        else:
            target = rows.answers[:, 0].float().softmax(-1)
            loss = functional.kl_div(logits.log_softmax(-1), target, reduction="batchmean")
        expected = expected + share * loss
    expected.backward()
    value, found = gradient(objective, params, batch)
    assert value == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6)
    assert found
    for name, grad in found.items():
        torch.testing.assert_close(grad, leaves[name].grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("suite", ["vision", "text"])
def test_a_batch_is_the_sum_over_its_tasks(suite, labels, request):
    suite = request.getfixturevalue(suite)
    weights = [2.0, 1.0, 0.5][: len(suite.tasks)]
    if labels:
        objective = suite.objective([t.name for t in suite.tasks], size=24).seen(len(weights), weights)
    else:
        objective = taught(suite, weights=weights)
    params = load_file(suite.base / "model.safetensors")
    for batch in objective.batches(2, 17, 1):
        check_batch(suite.model, objective, params, batch)


def test_an_encoder_reads_all_tasks_at_once(vision, monkeypatch):
    objective = taught(vision)
    objective.batch = 64
    calls = []
    features = type(vision.model).features

    def watched(self, params, inputs):
        calls.append(len(inputs["images"]))
        return features(self, params, inputs)

    monkeypatch.setattr(type(vision.model), "features", watched)
    [batch] = objective.batches(1, 24)
    gradient(objective, load_file(vision.base / "model.safetensors"), batch)
    assert calls == [24]
    objective.batch = 10
    gradient(objective, load_file(vision.base / "model.safetensors"), batch)
    assert calls[1:] == [10, 10, 4]


def test_a_batch_of_classifiers_with_heads_of_their_own(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=2, **small)).save_pretrained(tmp_path)
    model = make_model(tmp_path, kind_of(tmp_path), Compute())
    params = {n: t for n, t in load_file(tmp_path / "model.safetensors").items() if not n.startswith("classifier")}
    generator = torch.Generator().manual_seed(1)
    tasks = []
    for name, classes in (("few", 2), ("many", 5)):
        images = torch.randint(0, 256, (20, 8, 8, 3), generator=generator, dtype=torch.uint8)
        shapes = {"classifier.weight": (classes, 16), "classifier.bias": (classes,)}
        head = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
        tasks.append(mw.Samples(name, {"images": images}, torch.full((20,), UNKNOWN), head))
    objective = mw.Objective(model, tasks, size=24, batch=5, copies=2)
    for k in (1, 2):
        moved = {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in params.items()}
        objective = objective.taught([1.0] * k, lambda moved=moved: moved, always=True)
    assert [t.answers.shape for t in objective.seen(2).tasks] == [(12, 3, 2), (12, 3, 5)]
    for batch in objective.batches(2, 14):
        check_batch(model, objective, params, batch)


def test_nothing_that_moves_takes_part_in_a_batch(vision):
    objective = taught(vision)
    [batch] = objective.batches(1, 12)
    params = load_file(vision.base / "model.safetensors")
    value = objective.accumulate_batch(params | {"unused": torch.zeros(3, requires_grad=True)}, batch)
    assert value == pytest.approx(gradient(objective, params, batch)[0], rel=1e-5)


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_memory_keeps_answers_to_the_bit(vision, tmp_path):
    objective = taught(vision, 24)
    tasks = [replace(t, head=t.head.clone()) for t in objective._held]
    tasks[1] = replace(tasks[1], answers=tasks[1].answers[:, :2])  # fewer copies than the others
    tasks[2] = replace(tasks[2], answers=None)
    memory = CalibrationMemory(vision.model.settings, tasks, Bounds(24, copies=COPIES))
    memory.write(tmp_path)
    again = CalibrationMemory.read(tmp_path)
    assert again is not None and again.bounds == memory.bounds
    for ours, theirs in zip(again.tasks, tasks, strict=True):
        assert torch.equal(ours.labels, theirs.labels) and not ours.labelled
        assert (ours.answers is None) == (theirs.answers is None)
        if theirs.answers is not None:
            assert ours.answers.dtype is torch.float16
            assert torch.equal(ours.answers.view(torch.int16), theirs.answers.view(torch.int16))
    rows = again.summary(tmp_path)["tasks"]
    assert [row["answers"] for row in rows] == [8 * 4, 8 * 2, 0]
    # Cut to its first rows, a task keeps the answers of those rows.
    cut = again.shared_out(["ants", "bees", "cats", "dogs"])
    assert torch.equal(cut.tasks[0].answers, tasks[0].answers[:6])


def test_the_memory_takes_the_answers_of_a_fold(vision):
    samples = unlabelled(vision.samples("ants", "train"))
    memory = CalibrationMemory({}, bounds=Bounds(8, copies=1)).holding(vision.model.settings, samples)
    memory = memory.shared_out(["ants"])
    objective = memory.objective(vision.model, [1.0])
    answered = memory.answered(objective.taught([1.0], lambda: expert_of(vision, "ants"), always=True), "ants", "5ee")
    assert memory.tasks[0].answers is None
    assert answered.tasks[0].answers.shape == (8, 2, 3)
    assert answered.tasks[0].asked == "5ee"
    assert memory.answered(None, "ants", "5ee") is memory


def test_an_arrival_agrees_with_itself_on_what_is_held_back_and_on_copies_of_it(vision):
    """An answer belongs to the copy that is made of a row's number in the whole task, not of its number among the held-back."""
    name = vision.tasks[0].name
    expert = expert_of(vision, name)
    objective = mw.Objective(vision.model, [unlabelled(vision.samples(name, "train"))], size=20, copies=3)
    for part in (
        objective.taught([1.0], lambda: expert, always=True),
        *objective.taught([1.0], lambda: expert, True).split(),
    ):
        for batch in part.batches(3, 16):
            with torch.no_grad():
                assert part.accumulate_batch(expert, batch) < 1e-4
        assert float(part(expert)) < 1e-4


# --- inputs that are like nothing the arrival knows -------------------------------------------------------------------


def test_how_far_answers_tell_inputs_apart(vision):
    """The mutual information in plain sums, over the logarithm of the classes or of the samples if those are fewer."""
    samples, draw = vision.samples("ants", "train").rows(slice(16)), np.random.default_rng(5)
    logits = draw.normal(scale=4, size=(16, 1, 3))
    answered = replace(samples, answers=torch.from_numpy(logits))
    p = np.exp(logits[:, 0]) / np.exp(logits[:, 0]).sum(1, keepdims=True)
    wanted = sum(p[i, c] / 16 * np.log(p[i, c] / p[:, c].mean()) for i in range(16) for c in range(3)) / np.log(3)
    assert told_apart(answered) == pytest.approx(wanted, rel=1e-9)
    alike = replace(samples, answers=torch.from_numpy(logits[:1]).expand(16, 1, 3))
    assert told_apart(alike) == pytest.approx(0.0, abs=1e-12)
    assert told_apart(samples) is None
    assert told_apart(replace(answered.rows(slice(15)))) is None


def test_random_pixels_are_noticed_and_a_task_s_own_pictures_are_not(tmp_path, call):
    """On real experts: `add` says so, and `log` and `show` afterwards."""
    suite = mw.load_suite(suite_directory("digits"))
    draw = np.random.default_rng(0)
    for task in suite.tasks[:2]:
        with np.load(task.data) as file:
            own = file["x_train"][:64]
        pictures = {"own": own, "noise": draw.integers(0, 256, own.shape, dtype=np.uint8)}
        for kind, x in pictures.items():
            data, trunk = tmp_path / f"{task.name}-{kind}.npz", tmp_path / f"{task.name}-{kind}"
            np.savez(data, x=x)
            call("init", trunk, "--base", suite.base, "--rule", "steer").ok()
            words = [task.expert, "--task", task.name, "--data", data, "--head", task.head, "--copies", 0]
            for out in (call("add", trunk, *words).ok().out, call("log", trunk).ok().out, call("show", trunk).ok().out):
                noted = f"the answers of '{task.name}' hardly depend on the input" in " ".join(out.split())
                assert noted == (kind == "noise"), (task.name, kind, out)
