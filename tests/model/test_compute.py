"""Device, precision, micro-batches, checkpointing, compiling: what each may change, and that it changes nothing else."""

from __future__ import annotations

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import nn

import mergeway as mw
from mergeway.calibration.alignment import Alignment, align
from mergeway.calibration.statistics import fisher_diagonal, gram_matrices
from mergeway.errors import OptionError
from mergeway.model.compute import carry_back, choose
from mergeway.model.model import Classifier
from mergeway.model.tangent import Tangent
from mergeway.rules.steer.directions import Directions
from mergeway.train import Training, finetune


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.vision_suite(tmp_path_factory.mktemp("suite"))


def gradient(folder, **compute) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of all three tasks at the base."""
    suite = mw.load_suite(folder, compute=mw.Compute(**compute))
    params = {n: t.clone().requires_grad_() for n, t in load_file(folder / "base" / "model.safetensors").items()}
    value = suite.objective([t.name for t in suite.tasks]).accumulate(params)
    assert all(p.dtype is torch.float32 and (p.grad is None or p.grad.dtype is torch.float32) for p in params.values())
    return value, {n: p.grad for n, p in params.items() if p.grad is not None}


def cosine(a, b) -> float:
    x, y = (torch.cat([g[n].flatten() for n in sorted(g)]).double() for g in (a, b))
    return float(x @ y / (x.norm() * y.norm()))


# --- which device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "cuda", "mps", "chosen"),
    [
        ("auto", False, False, "cpu"),
        ("auto", True, False, "cuda"),
        ("auto", False, True, "mps"),
        ("auto", True, True, "cuda"),
        ("cpu", True, True, "cpu"),
        ("cuda", True, False, "cuda"),
        ("mps", False, True, "mps"),
    ],
)
def test_the_device_follows_from_what_there_is(asked, cuda, mps, chosen):
    assert choose(asked, cuda, mps) == chosen


@pytest.mark.parametrize(("asked", "cuda", "mps"), [("cuda", False, True), ("mps", True, False)])
def test_a_device_that_is_not_there_is_refused(asked, cuda, mps):
    with pytest.raises(OptionError, match=f"device {asked}: torch finds no such device on this machine; it has cpu"):
        choose(asked, cuda, mps)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test asks for in vain")
def test_commands_refuse_it_in_one_line(call, tmp_path):
    for words in (["add", "trunk", "x"], ["merge", "a", "b", "--out", "c"], ["evaluate", "a", "--suite", "digits"]):
        assert "--device cuda: torch finds no such device" in call(*words, "--device", "cuda").mistake()
    assert "it takes auto, cpu, cuda or mps" in call("bench", "digits", "--device", "gpu").mistake()
    assert "--micro-batch is 0" in call("path", "a", "b", "--suite", "digits", "--micro-batch", 0).mistake()
    both = call("finetune", "digits", "mnist", "--out", tmp_path / "o", "--compile", "--checkpointing").mistake()
    assert "give one of them" in both
    own = call("merge", "a", "b", "--out", "c", "--objective", "m:f", "--autocast").mistake()
    assert "a function of your own runs where and how it says itself" in own


def test_gradients_of_copies_are_added_to_those_of_the_originals():
    """What happens to parameters that are copied to another device, on the only one that every machine has."""
    params = {n: torch.randn(4, requires_grad=True) for n in "abc"}
    params["a"].grad = torch.ones(4)
    copies = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    (copies["a"].square().sum() + copies["b"].sum()).backward()
    carry_back(copies, params)
    assert torch.equal(params["a"].grad, 1 + 2 * params["a"].detach())
    assert torch.equal(params["b"].grad, torch.ones(4))
    assert params["c"].grad is None


# --- what the options change ------------------------------------------------------------------------------------------


def test_autocast_turns_the_gradient_by_no_more_than_half_precision_does(folder):
    value, exact = gradient(folder)
    cast, rounded = gradient(folder, autocast=True)
    assert cast == pytest.approx(value, rel=2e-2) and cast != value
    assert rounded.keys() == exact.keys()
    assert cosine(rounded, exact) > 0.999


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_micro_batches_change_nothing_beyond_rounding(folder, size):
    value, exact = gradient(folder)
    parts, summed = gradient(folder, micro_batch=size)
    assert parts == pytest.approx(value, rel=1e-6)
    for name, grad in exact.items():
        torch.testing.assert_close(summed[name], grad, rtol=1e-4, atol=1e-6)


def test_checkpointing_gives_the_same_bits_and_forgets_activations(folder):
    value, exact = gradient(folder)
    again, recomputed = gradient(folder, checkpointing=True)
    assert again == value
    assert all(torch.equal(recomputed[n], g) for n, g in exact.items())

    def kept(**compute) -> int:
        suite = mw.load_suite(folder, compute=mw.Compute(**compute))
        params = {n: t.requires_grad_() for n, t in load_file(folder / "base" / "model.safetensors").items()}
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            suite.model(params, suite.samples("ants", "train").inputs, suite.samples("ants", "train").head)
        return sum(sizes)

    assert kept(checkpointing=True) < 0.7 * kept()


def test_checkpointing_differentiates_where_the_parameters_are_not_where_the_model_is(folder):
    """The layers are run again when the model has its own parameters back, and must not use them."""
    suite = mw.load_suite(folder, compute=mw.Compute(checkpointing=True))
    plain = mw.load_suite(folder)
    expert = load_file(folder / "experts" / "bees" / "model.safetensors")
    grads = []
    for one in (suite, plain):
        params = {n: nn.Parameter(t.clone()) for n, t in expert.items()}
        one.objective(["bees"]).accumulate(params)
        grads.append({n: p.grad for n, p in params.items() if p.grad is not None})
    assert all(torch.equal(grads[0][n], g) for n, g in grads[1].items())


def test_checkpointing_needs_layers():
    with pytest.raises(OptionError, match="Linear has no list of layers"):
        Classifier(nn.Linear(2, 2), mw.Compute(checkpointing=True))


@pytest.mark.slow
def test_compiled_is_the_same_to_rounding(folder):
    value, exact = gradient(folder)
    compiled, grads = gradient(folder, compile=True)
    assert compiled == pytest.approx(value, rel=1e-5)
    for name, grad in exact.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5)
    suite = mw.load_suite(folder, compute=mw.Compute(compile=True))
    params = load_file(folder / "base" / "model.safetensors")
    heard = gram_matrices(suite.model, params, suite.samples("ants", "train"))
    assert heard.keys() == gram_matrices(mw.load_suite(folder).model, params, suite.samples("ants", "train")).keys()


# --- everything that runs a model -------------------------------------------------------------------------------------


def test_every_user_of_a_model_takes_them(folder):
    """Folds, evaluation, evidence, training and alignment in micro-batches are what they are without."""
    plain, small = mw.load_suite(folder), mw.load_suite(folder, compute=mw.Compute("cpu", micro_batch=7))
    names = [t.name for t in plain.tasks]
    experts = [t.expert for t in plain.tasks]
    merged = [mw.merge(s.base, experts, "ode", objective=s.objective(names)) for s in (plain, small)]
    for name in merged[0]:
        torch.testing.assert_close(merged[1][name], merged[0][name], rtol=0, atol=1e-5)
    assert small.accuracies(merged[0], names) == plain.accuracies(merged[0], names)
    samples = plain.samples("ants", "train")
    for ask in (fisher_diagonal, gram_matrices):
        ours, theirs = ask(small.model, merged[0], samples), ask(plain.model, merged[0], samples)
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-7)
    training = Training(steps=3, lr=1e-3, batch=16, warmup=0.0)
    tuned = [finetune(s, "ants", None, training).params for s in (plain, small)]
    for name in tuned[0]:
        torch.testing.assert_close(tuned[1][name], tuned[0][name], rtol=0, atol=2e-4)
    aligned = [align(s.model, merged[0], tuned[0], samples, Alignment()).after for s in (plain, small)]
    assert aligned[0] == pytest.approx(aligned[1], rel=1e-4)


@pytest.mark.parametrize("half", [False, True])
def test_a_rule_multiplies_in_the_precision_of_the_model(folder, half):
    """What `steer` learns about its directions is rounded as its model's products are, and the gains stay float32."""
    suite = mw.load_suite(folder, compute=mw.Compute(autocast=half))
    objective = suite.objective([t.name for t in suite.tasks])
    generator = torch.Generator().manual_seed(3)
    stream = [("w", torch.randn(12, 8, generator=generator))]
    directions = Directions.of_sum(stream, 1, lambda name, shape: True)
    gradient = {"w": torch.randn(12, 8, generator=generator)}
    exact = directions.of_gains(gradient)["w"]
    for part in (objective, objective.split()[0], objective.softened(2.0)):
        with part.precision:
            found = directions.of_gains(gradient)["w"]
        assert found.dtype is torch.float32
        assert torch.equal(found, exact) != half
        torch.testing.assert_close(found, exact, atol=3e-2, rtol=0)


def test_autocast_and_checkpointing_reach_a_trunk(folder, tmp_path, call):
    made = {}
    for name, words in {"plain": [], "cast": ["--autocast"], "again": ["--checkpointing", "--micro-batch", 8]}.items():
        call("init", tmp_path / name, "--base", folder / "base", "--rule", "ode").ok()
        for task in ("ants", "bees"):
            call("add", tmp_path / name, folder / "experts" / task, "--data", f"{folder}#{task}", *words).ok()
        made[name] = mw.Trunk.open(tmp_path / name).params()
    moved = [n for n in made["plain"] if not torch.equal(made["plain"][n], made["cast"][n])]
    assert moved and all(made["cast"][n].dtype is torch.float32 for n in moved)
    for name in made["plain"]:
        torch.testing.assert_close(made["cast"][name], made["plain"][name], rtol=0, atol=2e-2)
        torch.testing.assert_close(made["again"][name], made["plain"][name], rtol=0, atol=1e-5)


def test_the_tangent_model_is_neither_compiled_nor_checkpointed(folder):
    for options in ({"checkpointing": True}, {"compile": True}):
        suite = mw.load_suite(folder, compute=mw.Compute(**options))
        with pytest.raises(OptionError, match="goes with neither checkpointing nor compile"):
            Tangent(suite.model, {})
