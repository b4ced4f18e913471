"""Steps as objects: exported, compared, named, dropped, and folded again by another rule."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file
from shared import listing

import mergeway as mw
from mergeway.errors import MergewayError, TrunkError
from mergeway.trunk.diff import diff
from mergeway.trunk.replay import replay


@pytest.fixture
def grown(stream, tmp_path):
    made = stream(3)
    trunk = mw.Trunk.create(tmp_path / "trunk", made.base, "average", keep=2)
    for path in made.arrivals:
        trunk.add(path)
    return made, trunk


def test_export_of_a_step(grown, tmp_path, call):
    made, trunk = grown
    call("export", trunk.path, tmp_path / "out", "--step", "2").ok()
    expected = mw.merge(made.base, made.arrivals[:2])
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[n], t) for n, t in expected.items())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "task2" in card and "task3" not in card
    assert "the snapshot of step 1 is not kept" in call("export", trunk.path, tmp_path / "no", "--step", "1").mistake()


def test_diff_is_what_the_tensors_say(grown, call):
    made, trunk = grown
    found = diff(trunk, 2, 3)
    a, b = mw.merge(made.base, made.arrivals[:2]), mw.merge(made.base, made.arrivals)
    floats = [n for n, t in a.items() if t.is_floating_point()]
    assert {row.name for row in found.tensors} == set(floats)
    assert [row.distance for row in found.tensors] == sorted((row.distance for row in found.tensors), reverse=True)
    for row in found.tensors:
        first, second = (x[row.name].double() - made.base_tensors[row.name].double() for x in (a, b))
        assert row.distance == pytest.approx(float((b[row.name].double() - a[row.name].double()).norm()))
        assert row.relative == pytest.approx(row.distance / float(a[row.name].double().norm()))
        cosine = torch.nn.functional.cosine_similarity(first.flatten(), second.flatten(), dim=0)
        assert row.cosine == pytest.approx(float(cosine))
    assert found.whole.distance == pytest.approx(sum(row.distance**2 for row in found.tensors) ** 0.5)
    assert diff(trunk, 0, 3).whole.cosine is None  # nothing has moved at the base
    out = call("diff", trunk.path, "2", "3").ok().out
    assert found.tensors[0].name in out.splitlines()[1] and "all" in out
    assert call("diff", trunk.path, "2", "3", "--json").json()["whole"]["distance"] == found.whole.distance
    shutil.move(made.base, made.base.with_suffix(".gone"))
    assert diff(trunk, 2, 3).whole.cosine is None
    assert diff(trunk, 2, 3).whole.distance == found.whole.distance


def test_tags_stand_for_steps_and_keep_them(grown, call):
    made, trunk = grown
    call("tag", trunk.path, "2", "release-1").ok()
    for path in made.arrivals:
        trunk.add(path, again=True)
    assert trunk.kept_steps() == [0, 2, 5, 6]
    assert "tag release-1" in call("log", trunk.path).ok().out
    shown = call("show", trunk.path, "release-1").ok().out
    assert "step 2" in shown and "release-1" in shown and "size" in shown
    assert call("show", trunk.path, "release-1", "--json").json()["bytes"] == trunk.sizes()[2] > 0
    assert call("tag", trunk.path, "--json").json() == {"release-1": 2}
    call("rollback", trunk.path, "release-1").ok()
    name = next(iter(made.base_tensors))
    assert torch.equal(trunk.deployed().read(name), trunk.deployed(2).read(name))
    assert trunk.verify() == []
    call("tag", trunk.path, "--remove", "release-1").ok()
    assert "there are no tags" in call("tag", trunk.path).ok().out
    trunk.prune()
    assert 2 not in trunk.kept_steps()


def test_prune_drops_and_says_how_much(grown, call):
    _, trunk = grown
    sizes = trunk.sizes()
    done = call("prune", trunk.path, "--keep", "1", "--json").json()
    assert done == {"steps": [2], "bytes": sizes[2]}
    assert trunk.kept_steps() == [0, 3]
    assert call("prune", trunk.path, "--keep", "1").ok().out == "nothing to drop\n"
    assert trunk.verify() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tag", "{}", "1", "old"], "the snapshot of step 1 is no longer kept"),
        (["tag", "{}", "3", "17"], "not a number alone"),
        (["tag", "{}", "3", "a b"], "a tag is of letters"),
        (["tag", "{}", "3"], "tag takes a STEP and a NAME"),
        (["tag", "{}", "--remove", "no"], "there is no tag 'no'"),
        (["tag", "{}", "9", "x"], "there is no step 9"),
        (["show", "{}", "relaese"], "neither the number of a step nor a tag"),
        (["rollback", "{}", "relaese"], "neither the number of a step nor a tag"),
        (["diff", "{}", "1", "3"], "the snapshot of step 1 is not kept"),
        (["prune", "{}", "--keep", "0"], "at least 1 snapshot"),
    ],
)
def test_mistakes(grown, call, words, said):
    _, trunk = grown
    assert said in call(*(word.replace("{}", str(trunk.path)) for word in words)).mistake()


def test_damaged_tags_are_refused(grown, call):
    _, trunk = grown
    for text in ("no", "[]", '{"a": "b"}', '{"7": 1}'):
        (trunk.path / "tags.json").write_text(text)
        assert "is not a list of tags" in call("tag", trunk.path).mistake()
        assert any("tags.json" in problem for problem in trunk.verify())
    (trunk.path / "tags.json").write_text('{"a": 99}')
    assert any("tag 'a'" in problem for problem in trunk.verify())


def test_replay_is_the_other_rule(grown, tmp_path, call):
    """The same bits as a trunk that had that rule from the start, weights and names as they were."""
    made, trunk = grown
    call("replay", trunk.path, tmp_path / "again", "--rule", "opcm", "--set", "alpha=0.3").ok()
    again = mw.Trunk.open(tmp_path / "again")
    expected = mw.merge(made.base, made.arrivals, "opcm", alpha=0.3)
    found = again.params()
    assert all(torch.equal(found[n], t) for n, t in expected.items())
    assert [f.task for f in again.folded()] == [f.task for f in trunk.folded()]
    assert again.verify() == []
    made.arrivals[1].write_bytes(made.arrivals[2].read_bytes())
    with pytest.raises(TrunkError, match=r"'task2' at .* has changed since step 2"):
        replay(trunk, tmp_path / "no", "opcm")
    made.arrivals[1].unlink()
    before = listing(tmp_path)
    assert "'task2' cannot be read" in call("replay", trunk.path, tmp_path / "no", "--rule", "opcm").mistake()
    assert listing(tmp_path) == before
    assert "there is no rule" in call("replay", trunk.path, tmp_path / "no", "--rule", "opmc").mistake()


def test_replay_takes_the_samples_that_are_remembered(vision, tmp_path):
    trunk = mw.Trunk.create(tmp_path / "trunk", vision.base, "ode", step=0.5)
    for task in ("ants", "bees"):
        trunk.add(vision.task(task).expert, task, data=f"{vision.path}#{task}")
    again = replay(trunk, tmp_path / "again", mw.rules.Ode(step=0.5))
    assert [t["task"] for t in again.memory()["tasks"]] == ["ants", "bees"]
    found, expected = again.params(), trunk.params()
    assert all(torch.allclose(found[n], expected[n], atol=1e-6) for n in expected)
    bare = mw.Trunk.create(tmp_path / "bare", vision.base, "average")
    bare.add(vision.task("ants").expert)
    with pytest.raises(MergewayError, match="needs calibration data"):
        replay(bare, tmp_path / "no", "ode")
    assert not (tmp_path / "no").exists()
