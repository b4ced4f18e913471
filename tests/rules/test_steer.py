"""The rule `steer` against its page's equations in plain NumPy: full SVD, Adam in two groups, and what is carried on."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from streams import LINEAR, UNIFORM, WEIGHTED, make_stream, relative_error, updates_of

import mergeway as mw
from mergeway.calibration.function_objective import FunctionObjective
from mergeway.errors import OptionError
from mergeway.fold.merge import fold_steps
from mergeway.rules.steer.course import Course
from mergeway.rules.steer.directions import Directions
from mergeway.rules.steer.looks import doubt_of, glance_at, is_clearly_lower
from mergeway.rules.steer.start import line_search

# Small numbers of the test's own; those of the rule are not what is tested here.
OPTIONS = {
    "start": "flat",
    "steps": 2,
    "most": 7,
    "rate": 0.1,
    "weight_rate": 0.1,
    "shrink": 0.8,
    "carry": 0.6,
    "far": 0.0,
}


def loss_of(targets, weights):
    """A loss with a valley that bends: squared distances to the arrivals, weighed, and a quartic wall."""

    def torch_loss(params):
        total = 0.0
        for target, weight in zip(targets, weights, strict=True):
            for name, value in target.items():
                gap = (params[name] - value) / 0.02
                total = total + weight * (gap.square().mean() + 0.02 * gap.pow(4).mean())
        return total / sum(weights)

    def gradient(params):
        grads = {name: np.zeros_like(p) for name, p in params.items()}
        for target, weight in zip(targets, weights, strict=True):
            for name, tensor in target.items():
                gap = (params[name] - tensor.numpy()) / 0.02
                grads[name] += weight / sum(weights) * (2 * gap + 0.08 * gap**3) / gap.size / 0.02
        return grads

    return torch_loss, gradient


class Adam:
    """Kingma and Ba's algorithm 1 on one tensor."""

    def __init__(self, start):
        self.at, self.first, self.second, self.t = start, np.zeros_like(start), np.zeros_like(start), 0

    def step(self, gradient, rate):
        self.t += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        first, second = self.first / (1 - 0.9**self.t), self.second / (1 - 0.999**self.t)
        self.at = self.at - rate * first / (np.sqrt(second) + 1e-12)


class Oracle:
    """The stream as the page has it, one arrival after another, in float64.

    Where the line search ended, which lesson was the best, how much of it was kept, whether a fold fell back, and whether it carried
    on what it had taught, are taken as given.
    """

    def __init__(self, base, gradient, steps, most, rate, weight_rate, shrink, carry, start, far=0.0):
        self.base, self.gradient, self.kind = base, gradient, start
        self.steps, self.most, self.rate, self.weight_rate = steps, most, rate, weight_rate
        self.shrink, self.carry = shrink, carry
        self.deltas, self.weights = [], []
        self.carried = {n: np.zeros_like(b) for n, b in base.items()}
        self.start = self.end = None

    @property
    def update(self):
        """The mean over the arrivals of the root mean square of what each one moved."""
        moved = [np.concatenate([d.ravel() for d in delta.values()]) for delta in self.deltas]
        return np.mean([np.sqrt((m[m != 0] ** 2).mean()) for m in moved])

    def add(self, delta, weight, best=None, fell_back=None, mean=False, kept=1.0, slower=0, lost=False):
        """The deployed model after this arrival; `fell_back` says to what, `mean` or `flat`, `kept` how much of the lesson is."""
        self.deltas.append(delta)
        self.weights.append(weight)
        k = len(self.deltas)
        if k == 1:
            return {n: b + delta[n] for n, b in self.base.items()}
        total, over = sum(self.weights), list(zip(self.weights, self.deltas, strict=True))
        # S is k times the weighed mean; a matrix has a flat spectrum or that of the mean, anything else is the mean itself.
        self.factors, self.mean = {}, {}
        for name in self.base:
            s = k * sum(w * d[name] for w, d in over) / total
            if not s.any():
                continue
            if name in LINEAR:
                u, sigma, vt = np.linalg.svd(s, full_matrices=False)
                self.factors[name] = (u * (sigma / k if mean else sigma.mean()), vt)
            else:
                self.mean[name] = s / k
        self.start = {n: b + self.carried[n] + self.flat(n, self.shrink * best) for n, b in self.base.items()}
        end = self.taught(min(self.steps * k, self.most), 3.0**-slower)
        self.end = {n: (1 - kept) * self.start[n] + kept * end[n] for n in end}
        self.carried = {
            n: np.zeros_like(b) if lost else self.carry * (self.carried[n] + self.end[n] - self.start[n])
            for n, b in self.base.items()
        }
        return {n: b + self.plain(n, fell_back, over) for n, b in self.base.items()} if fell_back else self.end

    def plain(self, name, kind, over):
        """The mean of the updates, or for a linear weight U Vᵀ at 0.09·A²·‖base‖ over ‖S‖ (A² = ‖S‖²/Σ‖δ‖²), between 1.8/k and 1.5 of σ̄."""
        total = sum(w for w, _ in over)
        s = len(over) * sum(w * d[name] for w, d in over) / total
        if kind == "mean" or name not in LINEAR:
            return s / len(over)
        shares = [(len(over) * w / total, d) for w, d in over]
        base = sum((self.base[n] ** 2).sum() for n in LINEAR)
        whole = sum((sum(w * d[n] for w, d in shares) ** 2).sum() for n in LINEAR)
        apart = sum(w * (d[n] ** 2).sum() for w, d in shares for n in LINEAR)
        a = 0.09 * (whole / apart) * np.sqrt(base) / np.sqrt(whole)
        u, sigma, vt = np.linalg.svd(s, full_matrices=False)
        return min(1.5, max(1.8 / len(over), a)) * sigma.mean() * u @ vt

    def flat(self, name, gains):
        if name in self.factors:
            u, vt = self.factors[name]
            return (u * gains) @ vt
        return gains * self.mean[name] if name in self.mean else 0.0

    def taught(self, steps, share):
        moving = [*self.factors, *self.mean]
        gains = {n: Adam(np.zeros(len(self.factors[n][1]) if n in self.factors else 1)) for n in moving}
        weights = {n: Adam(np.zeros_like(self.base[n])) for n in moving}

        def model():
            moved = {n: self.start[n] + self.flat(n, gains[n].at) + weights[n].at for n in moving}
            return self.start | moved

        for t in range(steps):
            decay = share * min(1.0, (t + 1) / max(8.0, 0.05 * steps)) * 0.5 * (1 + math.cos(math.pi * t / steps))
            for name, g in self.gradient(model()).items():
                if name in self.factors:
                    u, vt = self.factors[name]
                    gains[name].step(np.einsum("ij,ij->j", u, g @ vt.T), decay * self.rate)
                elif name in self.mean:
                    gains[name].step(np.array([(g * self.mean[name]).sum()]), decay * self.rate)
                if name in moving:
                    weights[name].step(g, decay * self.weight_rate * self.update)
        return model()


class Disagreeing(FunctionObjective):
    """A function to fit on, and another one to judge by at some of the folds; at the others the whole lesson is liked best."""

    def __init__(self, fit, judge=None, folds=()):
        super().__init__(fit)
        self._judge, self._folds, self._split = judge, folds, 1

    def split(self):
        self._split += 1
        return self, (FunctionObjective(self._judge) if self._split in self._folds else _in_turn(WHOLE))


# What a judge says of the plain merge, and of a model with all, half, a quarter, an eighth and nothing of a lesson.
WHOLE = [9.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def _in_turn(values):
    looks = iter(values)
    return FunctionObjective(lambda params: torch.tensor(next(looks)))


def in_numpy(params):
    return {n: t.numpy() for n, t in params.items()}


def compare(s, weights, options, objective=None, fall_back=True):
    """Every fold of the stream against the oracle; the facts of each."""
    torch_loss, gradient = loss_of(s.arrivals, weights)
    oracle = Oracle(in_numpy(s.base), gradient, **options)
    found = []
    for step, delta, weight in zip(
        fold_steps(
            s.base,
            s.arrivals,
            mw.rules.Steer(**options, fall_back=fall_back),
            weights,
            objective or Disagreeing(torch_loss),
        ),
        s.deltas,
        weights,
        strict=True,
    ):
        facts = dict(step.at.facts)
        mean = bool(facts.get("from_mean"))
        best = 0.0 if options["start"] == "base" else facts.get("mean" if mean else "flat")
        fell_back = ("flat" if facts["plain_flat"] else "mean") if facts.get("fell_back") else None
        lost = fall_back and facts.get("held_plain", 0.0) < facts.get("held_end", 0.0)
        assert facts.get("forgot", 0.0) == lost
        expected = oracle.add(
            delta, weight, best, fell_back, mean, facts.get("kept", 1.0), facts.get("slower", 0), lost
        )
        assert facts["update"] == pytest.approx(oracle.update, rel=1e-9)
        wanted = {n: expected[n] - oracle.base[n] for n in expected}
        assert relative_error(updates_of(s.base, step.params), wanted) < 1e-6
        found.append(facts)
    return found


# --- the equations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [UNIFORM, WEIGHTED], ids=["uniform", "weighted"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"carry": 1.0, "shrink": 1.0},
        {"carry": 0.0, "rate": 0.3},
        {"rate": 0.0},
        {"weight_rate": 0.0},
        {"steps": 9, "most": 30},
        {"steps": 50, "most": 180},
        {"steps": 0},
        {"start": "mean"},
        {"start": "base"},
        {"start": "auto"},
    ],
    ids=str,
)
def test_agrees_with_the_equations(weights, options):
    s = make_stream(11, dtype=torch.float64)
    facts = compare(s, weights, OPTIONS | options)
    counts = [min((OPTIONS | options)["steps"] * k, (OPTIONS | options)["most"]) for k in range(2, 6)]
    assert [f["gradients"] for f in facts[1:]] == counts


def test_a_tensor_that_no_arrival_moved_stays():
    s = make_stream(13, count=3, dtype=torch.float64)
    name = "model.layers.0.up.weight"
    for arrival in s.arrivals:
        arrival[name] = s.base[name].clone()
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 3)
    merged = mw.merge(s.base, s.arrivals, "steer", objective=torch_loss, **OPTIONS)
    assert torch.equal(merged[name], s.base[name])
    assert not torch.equal(merged["head.weight"], s.base["head.weight"])


def test_the_first_arrival_is_taken_whole():
    s = make_stream(12, count=2)
    asked = 0

    def counting(params):
        nonlocal asked
        asked += 1
        return params["head.weight"].square().sum()

    first, *_ = fold_steps(s.base, s.arrivals[:1], mw.rules.Steer(**OPTIONS), objective=counting)
    assert asked == 0
    assert all(torch.equal(first.params[n], t) for n, t in s.arrivals[0].items())


@pytest.mark.parametrize("carry", [0.0, 0.6, 1.0])
def test_takes_as_many_gradients_as_it_says(carry):
    s = make_stream(12, count=3)
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 3)
    backward = 0

    def counting(params):
        nonlocal backward
        value = torch_loss(params)
        backward += value.requires_grad
        return value

    options = OPTIONS | {"carry": carry, "steps": 2, "most": 5}
    *_, last = fold_steps(s.base, s.arrivals, mw.rules.Steer(**options), objective=counting)
    assert backward == 4 + 5
    whole = mw.merge(s.base, s.arrivals, "steer", objective=counting, **options)
    assert backward == 2 * (4 + 5)
    assert all(torch.equal(whole[n], last.params[n]) for n in whole)


def test_equal_weights_of_any_size_are_the_unweighted_rule():
    s = make_stream(14, count=3, dtype=torch.float64)
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 3)
    one, three = (mw.merge(s.base, s.arrivals, "steer", [w] * 3, torch_loss, **OPTIONS) for w in (1.0, 3.0))
    assert relative_error(updates_of(s.base, three), updates_of(s.base, one)) < 1e-9


def test_zero_updates_give_the_base():
    s = make_stream(15, count=1)
    merged = mw.merge(s.base, [s.base, s.base], "steer", objective=loss_of([s.base], [1.0])[0], **OPTIONS)
    assert all(torch.equal(merged[n], t) for n, t in s.base.items())


# --- the samples that are held back -----------------------------------------------------------------------------------


def test_what_is_held_back_is_never_taught():
    s = make_stream(23, count=2)
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 2)
    asked = []

    class Noted(FunctionObjective):
        def __init__(self, name):
            super().__init__(torch_loss)
            self.name = name

        def accumulate_batch(self, params, batch):
            asked.extend([self.name] * torch.is_grad_enabled())
            return super().accumulate_batch(params, batch)

        def split(self):
            return Noted("fit"), Noted("judge")

    list(fold_steps(s.base, s.arrivals, mw.rules.Steer(**OPTIONS), objective=Noted("all")))
    assert asked == ["fit"] * 4


def test_teaching_has_a_temperature_and_judging_has_none():
    s = make_stream(23, count=2)
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 2)
    heard = []

    class Noted(FunctionObjective):
        def __init__(self, temperature=1.0):
            super().__init__(torch_loss)
            self.temperature = temperature

        def accumulate_batch(self, params, batch):
            heard.append((torch.is_grad_enabled(), self.temperature))
            return super().accumulate_batch(params, batch)

        def split(self):
            return Noted(), Noted()

        def softened(self, temperature):
            return Noted(temperature)

    list(fold_steps(s.base, s.arrivals, mw.rules.Steer(**OPTIONS, temperature=2.5), objective=Noted()))
    assert set(heard) == {(True, 2.5), (False, 1.0)}


@pytest.mark.parametrize("temperature", [0.5, 101.0, math.inf, math.nan])
def test_a_temperature_out_of_range_is_refused(temperature):
    with pytest.raises(OptionError, match=r"'temperature'.* at least 1 and at most 100"):
        mw.rules.Steer(temperature=temperature)


LITTLE = [6.0, 6.0, 6.0, 6.0, 5.9]  # a lesson of which nothing is worth keeping


@pytest.mark.parametrize("carry", [0.0, 0.6])
@pytest.mark.parametrize(
    ("said", "kept", "slower", "lessons"),
    [
        ([4.0, 4.0, 4.0, 4.0, 4.0], 1.0, 0, 1),
        ([4.0, 3.0, 5.0, 6.0, 7.0], 0.5, 0, 1),
        ([math.nan, 3.0, 2.0, 6.0, 7.0, *LITTLE, *LITTLE], 0.25, 0, 4),
        ([math.nan] * 4 + [6.0, 5.0, 3.0, 2.0, 1.0, 7.0, *LITTLE], 0.125, 1, 4),
        ([*LITTLE, 4.0, 5.0, 6.0, 6.0, 6.0], 1.0, 1, 2),
        ([*LITTLE, *LITTLE, 4.0, 3.0, 2.0, 1.0, 0.5], 0.0, 2, 3),
    ],
    ids=["all", "half", "a quarter", "an eighth at a third", "all at a third", "nothing at a ninth"],
)
def test_as_much_of_the_best_lesson_is_kept_as_what_is_held_back_likes_best(said, kept, slower, lessons, carry):
    """What is carried on is that much, too, and the next fold begins its tries one above the best of this one.

    The best one is given again if another came after it.
    """
    s = make_stream(26, count=4, dtype=torch.float64)
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 4)
    values = iter([9.0, *said])
    objective = Disagreeing(torch_loss, lambda params: torch.tensor(next(values)), {3})
    facts = compare(s, [1.0] * 4, OPTIONS | {"steps": 4, "most": 40, "carry": carry}, objective)
    assert [f["kept"] for f in facts[1:]] == [1.0, kept, 1.0]
    assert [f["slower"] for f in facts[1:]] == [0, slower, max(0, slower - 1)]
    assert [f["gradients"] for f in facts[1:]] == [8, lessons * 12, 16]
    assert [f["fell_back"] for f in facts[1:]] == [0.0] * 3
    assert next(values, None) is None


@pytest.mark.parametrize("carry", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("folds", [{2, 3, 4}, {3}, set()], ids=str)
def test_a_fold_that_ends_worse_on_what_was_held_back_deploys_the_mean(carry, folds):
    s = make_stream(16, count=4, dtype=torch.float64)
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 4)

    def judge(params):  # any step away from any start is worse
        judge.calls += 1
        return torch.tensor(float(judge.calls))

    judge.calls = 0
    options = OPTIONS | {"carry": carry}
    facts = compare(s, [1.0] * 4, options, Disagreeing(torch_loss, judge, folds))
    assert {k for k, f in enumerate(facts, 1) if f.get("fell_back")} == folds
    for f in facts[1:]:
        assert (f["held_end"] > f["held_plain"]) == bool(f["fell_back"])
        assert f["scale"] == pytest.approx(options["shrink"] * f["flat"])


@pytest.mark.parametrize("wanted", ["flat", "mean"])
@pytest.mark.parametrize("weights", [[1.0] * 3, [1.0, 4.0, 2.0]], ids=["uniform", "weighted"])
def test_all_samples_choose_what_to_fall_back_to(wanted, weights):
    """The samples want one of the two plain merges, and what is held back likes every look less than the one before."""
    s = make_stream(25, count=3, dtype=torch.float64)
    rule, options = ("iso", {"scaling": "auto"}) if wanted == "flat" else ("average", {})
    target = mw.merge(s.base, s.arrivals, rule, weights, **options)
    facts = compare(s, weights, OPTIONS, _never_content(target))[-1]
    assert (facts["fell_back"], facts["plain_flat"]) == (1.0, float(wanted == "flat"))
    *_, last = fold_steps(s.base, s.arrivals, mw.rules.Steer(**OPTIONS), weights, _never_content(target))
    assert relative_error(updates_of(s.base, last.params), updates_of(s.base, target)) < 1e-9


@pytest.mark.parametrize(("whole", "kept", "lessons"), [(1.2, 1.0, 1), (1.3, 0.5, 1), (math.inf, 0.5, 1)])
def test_a_lesson_is_kept_whole_unless_a_part_is_clearly_better(whole, kept, lessons):
    """With 16 samples, by a quarter."""
    values = iter([whole, 1.0, 2.0, 2.0, 2.0])
    loss = FunctionObjective(lambda params: torch.tensor(1.0))
    loss.tasks = [range(8)] * 2
    course = Course(dict, Directions({}, {}, {}, {}), steps=0, batch=1, rate=0.1, weight_rate=0.1, doubt=doubt_of(loss))
    _, taught, given = course.teach(loss, lambda params: next(values), slower=0)
    assert (taught.kept, given) == (kept, lessons)


@pytest.mark.parametrize(
    ("one", "samples", "wanted"),
    [(0.82, [8, 8], False), (0.79, [8, 8], True), (0.98, [1024], False), (0.96, [1024], True), (0.99, [], True)],
)
def test_few_samples_must_be_surer(one, samples, wanted):
    """One part in √n: a quarter with 16 samples, a thirty-second with 1024; a function of your own can tell all."""
    loss = FunctionObjective(lambda params: torch.tensor(1.0))
    loss.tasks = [range(count) for count in samples]
    assert is_clearly_lower(one, 1.0, doubt_of(loss)) == wanted


@pytest.mark.parametrize("one", [2.0, 0.01, 0.0, -0.01, -2.0, math.inf])
def test_no_loss_is_clearly_lower_than_itself(one):
    """Nor below zero, where an estimate of a divergence may be; and never both of two."""
    for doubt in (0.0, 0.25):
        assert not is_clearly_lower(one, one, doubt)
        for other in (one + 0.1, one - 0.1):
            assert not (is_clearly_lower(one, other, doubt) and is_clearly_lower(other, one, doubt))
    assert is_clearly_lower(-2.0, -1.0, 0.25) and not is_clearly_lower(-1.1, -1.0, 0.25)


def test_a_loss_that_is_no_number_is_the_worst():
    """Of the plain merge as of a taught model."""
    glance = glance_at(FunctionObjective(lambda params: torch.tensor(math.nan)))
    assert glance({}) == math.inf
    assert is_clearly_lower(3.0, glance({}), 0.25)


def taught_by(loss, judge, steps=4):
    """What a course of lessons makes of one weight from 1, how it went, and how many lessons that took."""
    directions = Directions({"w": torch.ones(1)}, {"w": None}, {"w": torch.ones(1)}, {"w": torch.ones(1)})
    course = Course(lambda: {"w": torch.ones(1)}, directions, steps, 1, rate=0.1, weight_rate=0.1, doubt=0.0)
    return course.teach(FunctionObjective(loss), glance_at(FunctionObjective(judge)), slower=0)


def test_a_lesson_that_ends_in_no_numbers_is_taken_again():
    """Full rates break the model, a third of them does not."""

    def breaks(params):  # below 0.8 its gradient is no number
        return params["w"].sum() if params["w"] > 0.8 else (params["w"] * math.nan).sum()

    model, taught, lessons = taught_by(breaks, lambda params: params["w"].sum(), steps=8)
    assert (taught.slower, taught.kept, lessons) == (1, 1.0, 2)
    assert 0.8 < float(model["w"]) < 1


def test_nothing_is_taught_again_to_keep_nothing_of_it():
    """Every step is worse than the start, at all rates: three lessons, and the start as it was."""
    model, taught, lessons = taught_by(lambda params: params["w"].sum(), lambda params: -params["w"].sum())
    assert (taught.kept, lessons, float(model["w"])) == (0.0, 3, 1.0)


def test_directions_are_multiplied_in_the_precision_of_the_model():
    """A lesson in bfloat16 products is near the one in float32, and is not the same."""
    s = make_stream(27, count=2)
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 2)

    class Rounded(Disagreeing):
        @property
        def precision(self):
            return torch.autocast("cpu", torch.bfloat16)

    name = min(LINEAR)
    exact, rounded = (
        mw.merge(s.base, s.arrivals, "steer", objective=kind(torch_loss), **OPTIONS) for kind in (Disagreeing, Rounded)
    )
    assert not torch.equal(exact[name], rounded[name])
    assert relative_error(updates_of(s.base, rounded), updates_of(s.base, exact)) < 0.02


def _never_content(target):
    looks = itertools.count(1)
    return Disagreeing(loss_of([target], [1.0])[0], lambda params: torch.tensor(float(next(looks))), {2, 3})


def test_a_real_disagreement_falls_back_to_the_mean():
    """The held-back samples want the mean of the updates, which the start and teaching leave."""
    s = make_stream(17, count=2, dtype=torch.float64)
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 2)
    mean = {n: b + sum(torch.from_numpy(d[n]) for d in s.deltas) / 2 for n, b in s.base.items()}
    objective = Disagreeing(
        torch_loss, lambda params: sum((params[n] - t).square().sum() for n, t in mean.items()), {2}
    )
    *_, last = fold_steps(s.base, s.arrivals, mw.rules.Steer(**OPTIONS), objective=objective)
    assert last.at.facts["fell_back"] == 1.0
    assert all(torch.allclose(last.params[n], t) for n, t in mean.items())


def test_a_loss_that_is_no_number_on_what_was_held_back_falls_back():
    s = make_stream(18, count=2, dtype=torch.float64)
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 2)
    values = itertools.chain([torch.tensor(1.0)], itertools.repeat(torch.tensor(math.nan)))
    facts = compare(s, [1.0] * 2, OPTIONS, Disagreeing(torch_loss, lambda params: next(values), {2}))
    assert facts[-1]["fell_back"] == 1.0


def test_a_control_deploys_what_it_was_taught_whatever_judges():
    """Every look is worse than the one before, and two samples of a task are too few; the oracle has no plain merge."""
    s = make_stream(16, count=4, dtype=torch.float64)
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 4)
    looks = itertools.count(1)
    objective = Disagreeing(torch_loss, lambda params: torch.tensor(float(next(looks))), {2, 3, 4})
    objective.tasks = [mw.Samples(name, {"x": torch.zeros(2, 1)}, torch.zeros(2, dtype=torch.long)) for name in "ab"]
    facts = compare(s, [1.0] * 4, OPTIONS | {"start": "base", "rate": 0.0}, objective, fall_back=False)
    for f in facts[1:]:
        assert f["held_end"] > f["held_plain"] and (f["fell_back"], f["forgot"]) == (0.0, 0.0)


def test_what_cannot_be_told_from_the_plain_merge_is_carried_on():
    """The plain merge is deployed, and the next fold builds on the lesson; the oracle has both."""
    s = make_stream(19, count=4, dtype=torch.float64)
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 4)
    level = Disagreeing(torch_loss, lambda params: torch.tensor(1.0), {2, 3})
    facts = compare(s, [1.0] * 4, OPTIONS | {"carry": 0.6}, level)
    assert [f["fell_back"] for f in facts[1:]] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("held_end", "fell_back", "forgot"), [(0.99, 0.0, 0.0), (1.0, 1.0, 0.0), (1.49, 1.0, 0.0), (1.51, 1.0, 1.0)]
)
def test_what_is_better_is_deployed_and_what_is_worse_by_two_parts_in_the_root_of_n_forgotten(
    held_end, fell_back, forgot
):
    """With 16 samples two parts are a half."""
    s = make_stream(19, count=2)
    looks = iter([1.0, held_end, 2.0, 2.0, 2.0, 2.0])
    objective = Disagreeing(loss_of(s.arrivals, [1.0] * 2)[0], lambda params: torch.tensor(next(looks)), {2})
    objective.tasks = [mw.Samples(name, {"x": torch.zeros(8, 1)}, torch.zeros(8, dtype=torch.long)) for name in "ab"]
    *_, last = fold_steps(s.base, s.arrivals, mw.rules.Steer(**OPTIONS), objective=objective)
    assert (last.at.facts["fell_back"], last.at.facts["forgot"]) == (fell_back, forgot)


class Shared(FunctionObjective):
    """A function that counts the samples of its tasks: n in all, the same number of each task seen, of documents or not."""

    def __init__(self, loss, n, documents, seen=1):
        super().__init__(loss)
        labels = torch.zeros(n // seen, 4, dtype=torch.long) if documents else torch.zeros(n // seen, dtype=torch.long)
        self.tasks = [mw.Samples("a task", {"input_ids": torch.zeros(n // seen, 4)}, labels) for _ in range(seen)]
        self._made = loss, n, documents

    def seen(self, count, weights=None):
        return Shared(*self._made, count)

    def split(self):
        return self, _in_turn(WHOLE)


@pytest.mark.parametrize(("n", "documents", "taught"), [(31, False, 3), (32, False, 4), (7, True, 3), (8, True, 4)])
def test_fewer_than_eight_samples_of_a_task_or_two_documents_teach_nothing(n, documents, taught):
    """The plain merge is deployed, without a gradient; what earlier folds have learned shrinks as it would have."""
    s = make_stream(24, count=4, dtype=torch.float64)
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 4)
    backward = []

    def counting(params):
        value = torch_loss(params)
        backward.append(value.requires_grad)
        return value

    folds, carried = [], []
    for step in fold_steps(s.base, s.arrivals, mw.rules.Steer(**OPTIONS), objective=Shared(counting, n, documents)):
        folds.append(dict(step.at.facts) | {"backward": sum(backward)})
        carried.append({name: step.state.read(name) for name in step.state.infos if "carried" in name})
        backward.clear()
    assert [k for k, f in enumerate(folds, 1) if f["backward"]] == list(range(2, taught + 1))
    if taught == 4:
        assert "too_few" not in folds[-1]
        return
    last = folds[-1]
    assert (last["fell_back"], last["gradients"], last["too_few"]) == (1.0, 0.0, float(n // 4))
    rule, options = ("iso", {"scaling": "auto"}) if last["plain_flat"] else ("average", {})
    plain = mw.merge(s.base, s.arrivals, rule, **options)
    assert relative_error(updates_of(s.base, step.params), updates_of(s.base, plain)) < 1e-9
    assert any(t.any() for t in carried[2].values())
    for name, before in carried[2].items():
        torch.testing.assert_close(carried[3][name], OPTIONS["carry"] * before)


def test_nothing_is_carried_on_from_a_stream_that_always_ends_worse():
    """With every fold at the mean, the third is what it would be without the second's teaching, whatever is carried."""
    s = make_stream(19, count=3, dtype=torch.float64)
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 3)
    count = iter(range(100))
    ends = []
    for carry in (0.0, 1.0):
        objective = Disagreeing(torch_loss, lambda params: torch.tensor(float(next(count))), {2, 3})
        rule = mw.rules.Steer(**(OPTIONS | {"carry": carry}))
        *_, last = fold_steps(s.base, s.arrivals, rule, objective=objective)
        ends.append(last.params)
    assert all(torch.equal(ends[0][n], t) for n, t in ends[1].items())


# --- the start ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["flat", "mean"])
def test_the_samples_choose_between_the_two_starts(wanted):
    """The loss is lowest at the flat spectrum, or at the mean, of two arrivals; the other one is farther from it at any length."""
    s = make_stream(20, count=2, dtype=torch.float64)
    goal = {n: b + sum(torch.from_numpy(d[n]) for d in s.deltas) / 2 for n, b in s.base.items()}
    for name in LINEAR if wanted == "flat" else []:
        u, sigma, vt = np.linalg.svd(sum(d[name] for d in s.deltas), full_matrices=False)
        goal[name] = s.base[name] + torch.from_numpy(0.7 * sigma.mean() * u @ vt)

    def loss(params):
        return sum((params[n] - t).square().sum() for n, t in goal.items())

    *_, last = fold_steps(s.base, s.arrivals, mw.rules.Steer(**(OPTIONS | {"start": "auto"})), objective=loss)
    facts = last.at.facts
    assert facts["from_mean"] == (wanted == "mean")
    assert facts[f"loss_{wanted}"] < facts["loss_mean" if wanted == "flat" else "loss_flat"]


def test_a_search_begins_where_the_one_before_ended():
    s = make_stream(21, count=3, dtype=torch.float64)
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 3)
    rule = mw.rules.Steer(**(OPTIONS | {"steps": 0, "carry": 0.0}))
    _, second, third = fold_steps(s.base, s.arrivals, rule, objective=torch_loss)
    assert second.at.facts["flat"] < 0.7  # so that a search from 1 takes longer
    assert third.at.facts["forwards"] < second.at.facts["forwards"]


# --- how many steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("far", "steps"), [(0.0, 40), (1e-9, 40), (2.0, 20), (3.0, 13), (1e9, 10)])
def test_a_start_that_is_near_takes_a_share_of_the_steps(far, steps):
    """The loss is 1 whatever the model: half of the steps where 2 is far, and never less than a quarter."""
    s = make_stream(22, count=2)
    rule = mw.rules.Steer(**(OPTIONS | {"far": far, "steps": 20, "most": 40}))
    *_, last = fold_steps(s.base, s.arrivals, rule, objective=lambda p: 1.0 + 0.0 * p["head.weight"].sum())
    assert last.at.facts["steps"] == last.at.facts["gradients"] == steps


# --- the length of the start ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowest", [0.03, 0.2, 0.9, 1.0, 1.2, 3.0, 30.0])
def test_the_search_finds_the_lowest_scale(lowest):
    found, _, looks = line_search(lambda c: math.log(c / lowest) ** 2)
    reach = 1.6**6.5
    assert looks <= 8
    assert found == pytest.approx(min(max(lowest, 1 / reach), reach), rel=1e-6 if 1 / reach < lowest < reach else 0.4)


def test_the_search_survives_a_loss_that_explodes():
    found, *_ = line_search(lambda c: math.inf if c > 0.5 else (c - 0.2) ** 2)
    assert 0.1 < found < 0.4
