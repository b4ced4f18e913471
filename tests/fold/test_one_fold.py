"""One fold, whoever asks for it: `merge`, `merge_into`, the last of `fold_steps`, and a trunk's adds and export, to the bit."""

from __future__ import annotations

import pytest
import torch
from model_kinds import CLASSES, KINDS, QUICK, Kind, bits, heads_in, weights_in
from safetensors.torch import load_file
from shared import Tensors

import mergeway as mw
from mergeway.calibration.alignment import Alignment
from mergeway.checkpoint.source import InMemory
from mergeway.errors import OptionError
from mergeway.fold.merge import fold_steps
from mergeway.rules import RULES, Fold, KeepsDeployed, Rule, make


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """The stream of a kind, made when it is first asked for."""
    made: dict[str, Kind] = {}

    def find(name: str) -> Kind:
        if name not in made:
            made[name] = KINDS[name](tmp_path_factory.mktemp(name))
        return made[name]

    return find


@pytest.mark.parametrize("kind", ["plain", "classifier", "lora", "tied"])
@pytest.mark.parametrize("rule", RULES)
def test_every_way_to_fold_is_the_same_fold(kinds, tmp_path, kind, rule):
    stream = kinds(kind)
    if not stream.allows(rule):
        pytest.skip("plain tensors have no layers to take Gram matrices from")
    chosen = make(rule, QUICK.get(rule, {}))
    whole = (stream.base, stream.arrivals, chosen, stream.weights)
    merged = mw.merge(*whole, **stream.for_stream(rule))
    *_, last = fold_steps(*whole, **stream.for_stream(rule))
    into = mw.merge_into(tmp_path / "into", *whole, **stream.for_stream(rule))
    trunk = stream.grown(tmp_path / "trunk", rule)
    trunk.export(tmp_path / "export", backbone=bool(trunk.heads))
    assert bits(merged) == bits(last.params)
    assert bits(merged) == bits(trunk.params())
    assert bits(merged) == bits(weights_in(tmp_path / "into"))
    assert bits(merged) == bits(weights_in(tmp_path / "export"))
    assert any(not torch.equal(t, stream.tensors[n]) for n, t in merged.items())
    assert [a.task for a in into.arrivals] == [f.task for f in trunk.folded()] == stream.names
    # The card names tasks, digests and weights; beside it lie the heads.
    cards = [(tmp_path / side / "README.md").read_text() for side in ("into", "export")]
    assert cards[0] == cards[1]
    assert heads_in(tmp_path / "into") == heads_in(tmp_path / "export")
    assert len(heads_in(tmp_path / "into")) == (len(CLASSES) if kind == "classifier" else 0)
    if kind == "tied":
        assert torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])


def test_gram_matrices_are_refused_the_same_way_everywhere(kinds, tmp_path):
    """No part of a rule's needs is dropped in silence by one of the callers."""
    stream = kinds("plain")
    with pytest.raises(OptionError, match="rule 'regmean' needs calibration data"):
        mw.merge(stream.base, stream.arrivals, "regmean")
    with pytest.raises(OptionError, match="rule 'regmean' needs calibration data"):
        list(fold_steps(stream.base, stream.arrivals, "regmean"))
    with pytest.raises(OptionError, match="rule 'regmean' needs calibration data"):
        mw.Trunk.create(tmp_path / "trunk", stream.base, "regmean").add(stream.arrivals[0])


# --- what the copies of the fold once did differently -----------------------------------------------------------------


def test_merge_keeps_the_head_of_every_task_and_averages_none(kinds, tmp_path):
    stream = kinds("classifier")
    merged = mw.merge(stream.base, stream.arrivals)
    base = stream.tensors
    assert all(torch.equal(merged[n], base[n]) for n in ("classifier.weight", "classifier.bias"))
    mw.merge_into(tmp_path / "out", stream.base, stream.arrivals)
    for (task, classes), arrival in zip(CLASSES.items(), stream.arrivals, strict=True):
        head = load_file(tmp_path / "out" / "heads" / f"{task}.safetensors")
        assert len(head["classifier.weight"]) == classes
        assert bits(head) == bits({n: t for n, t in weights_in(arrival).items() if n.startswith("classifier.")})


def test_a_directory_with_a_version_keeps_its_whole_name(kinds, tmp_path):
    """Neither a directory nor a file loses what looks like a suffix; the names are those of the trunk, the merge and the card."""
    for name, kind in (("classifier", "x-v1.5"), ("plain", "x-v1.5")):
        stream = kinds(name)
        last = stream.arrivals[-1]
        trunk = mw.Trunk.create(tmp_path / f"{name}-trunk", stream.base)
        assert trunk.add(last).task == kind
        done = mw.merge_into(tmp_path / name, stream.base, [last])
        assert [a.task for a in done.arrivals] == [kind]
        assert f"| 1 | {kind} |" in (tmp_path / name / "README.md").read_text()
        trunk.export(tmp_path / f"{name}-export", backbone=bool(trunk.heads))
        assert f"| 1 | {kind} |" in (tmp_path / f"{name}-export" / "README.md").read_text()
    assert (tmp_path / "classifier" / "heads" / "x-v1.5.safetensors").exists()


def test_a_snapshot_of_a_run_takes_the_name_of_the_run(kinds, tmp_path):
    stream = kinds("classifier")
    snapshot = stream.arrivals[1]
    assert snapshot.name == "checkpoint-96"
    assert mw.Trunk.create(tmp_path / "trunk", stream.base).add(snapshot).task == "side"
    done = mw.merge_into(tmp_path / "out", stream.base, [snapshot])
    assert [a.task for a in done.arrivals] == ["side"]
    assert list(heads_in(tmp_path / "out")) == ["side.safetensors"]


def test_names_that_are_taken_are_numbered_alike(kinds, tmp_path):
    stream = kinds("plain")
    arrivals = []
    for k, arrival in enumerate(stream.arrivals[:2]):
        folder = tmp_path / str(k)
        folder.mkdir()
        arrivals.append(folder / "tuned.safetensors")
        arrivals[-1].write_bytes(arrival.read_bytes())
    trunk = mw.Trunk.create(tmp_path / "trunk", stream.base)
    added = [trunk.add(arrival).task for arrival in arrivals]
    done = mw.merge_into(tmp_path / "out", stream.base, arrivals)
    assert added == [a.task for a in done.arrivals] == ["tuned", "tuned-2"]


# --- alignment --------------------------------------------------------------------------------------------------------

PROJECTION = "visual_projection.weight"
KEEPS = [rule for rule in RULES if issubclass(RULES[rule], KeepsDeployed)]


def test_the_rules_whose_state_is_the_deployed_model():
    assert {"ties", "dop", "fisher", "ode"} <= set(KEEPS)
    assert "average" not in KEEPS


@pytest.mark.parametrize("rule", [*KEEPS, "average"])
def test_alignment_survives_the_next_fold(kinds, tmp_path, rule):
    """The state after it is that of a stream which stands at the aligned model; of a sum, it is as it was."""
    stream = kinds("encoder")
    # Nothing is trimmed away, not even the small change of an alignment.
    options = QUICK.get(rule, {}) | ({"density": 1.0} if rule == "ties" else {})
    plain = stream.grown(tmp_path / "plain", rule, **options)
    trunk = stream.grown(tmp_path / "trunk", rule, 2, **options)
    before = state_of(trunk)
    trunk.align(stream.data[1], how=Alignment(lr=1e-2, module="projection"))
    aligned, after = trunk.params(), state_of(trunk)
    base, keeps = stream.tensors, rule != "average"
    slot = "model" if rule == "ode" else "update"
    for name, tensor in before.items():
        if keeps and name == f"{slot}/{PROJECTION}":
            wanted = aligned[PROJECTION] if slot == "model" else aligned[PROJECTION] - base[PROJECTION]
            assert torch.equal(after[name], wanted) and not torch.equal(after[name], tensor)
        else:
            assert torch.equal(after[name], tensor)
    trunk.add(stream.arrivals[2], weight=stream.weights[2], **stream.for_add(rule, 2))
    assert torch.equal(trunk.params()[PROJECTION], plain.params()[PROJECTION]) != keeps
    if keeps:
        assert bits(trunk.params()) == bits(continued(stream, make(rule, options), trunk))


def state_of(trunk: mw.Trunk) -> Tensors:
    return load_file(trunk.path / "steps" / f"{trunk.log()[-1].step:06d}" / "state.safetensors")


def continued(stream: Kind, rule: Rule, trunk: mw.Trunk) -> Tensors:
    """The third fold of a stream in memory that goes on from the state of the trunk's step 3, the alignment."""
    record = trunk.log()[3]
    assert record.kind == "align"
    state = InMemory(load_file(trunk.path / "steps" / "000003" / "state.safetensors"))
    after = (Fold(**record.stream), state)
    [step] = fold_steps(stream.base, stream.arrivals, rule, stream.weights, **stream.for_stream(rule.name), after=after)
    return step.params
