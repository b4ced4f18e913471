"""A trunk that moves, or whose base moves: found again by its digest, and read without it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import mergeway as mw


@pytest.fixture
def there(stream, tmp_path):
    """A trunk with two arrivals in a directory with its base and its arrivals."""
    s = stream(3, name="there")
    trunk = mw.Trunk.create(tmp_path / "there" / "trunk", s.base, "average")
    for arrival in s.arrivals[:2]:
        trunk.add(arrival)
    return s


def moved(path, tmp_path, name="here"):
    return path.rename(tmp_path / name)


def test_trunk_base_and_arrivals_move_together(there, call, tmp_path):
    here = moved(there.base.parent, tmp_path)
    call("add", here / "trunk", here / "task3.safetensors").ok()
    assert call("verify", here / "trunk").ok().err == ""
    # The report reads the arrivals where they are now.
    call("report", here / "trunk", "--out", tmp_path / "page.html").ok()
    trunk = mw.Trunk.open(here / "trunk")
    assert trunk.places_of(1) == [str(there.arrivals[0]), str(here / "task1.safetensors")]
    assert trunk.log()[1].details["places"] == {"absolute": str(there.arrivals[0]), "relative": "../task1.safetensors"}


def test_replay_after_a_move(there, call, tmp_path):
    """Base and arrivals are read where they are now, and the new trunk knows them there."""
    here = moved(there.base.parent, tmp_path)
    expected = mw.merge(here / there.base.name, [here / p.name for p in there.arrivals[:2]], "opcm")
    call("replay", here / "trunk", tmp_path / "again", "--rule", "opcm").ok()
    again = mw.Trunk.open(tmp_path / "again")
    assert all(torch.equal(again.params()[name], tensor) for name, tensor in expected.items())
    assert again.base_ref == str(here / there.base.name)
    assert [f.source for f in again.folded()] == [str(here / p.name) for p in there.arrivals[:2]]
    assert again.verify() == []
    base = (here / there.base.name).rename(tmp_path / "elsewhere")
    assert "--base" in call("replay", here / "trunk", tmp_path / "no", "--rule", "opcm").mistake()
    assert not (tmp_path / "no").exists()
    base = base.rename(tmp_path / "elsewhere.safetensors")
    call("replay", here / "trunk", tmp_path / "third", "--rule", "opcm", "--base", base).ok()
    assert mw.Trunk.open(tmp_path / "third").log()[-1].result == again.log()[-1].result


def test_replay_keeps_an_embedded_base_embedded(stream, call, tmp_path):
    s = stream(1)
    old = mw.Trunk.create(tmp_path / "trunk", s.base, "average", embed_base=True)
    old.add(s.arrivals[0])
    s.base.unlink()
    call("replay", old.path, tmp_path / "far" / "again", "--rule", "opcm").ok()
    shutil.rmtree(old.path)
    call("add", tmp_path / "far" / "again", s.arrivals[0], "--again").ok()


def test_base_beside_the_trunk_under_another_name(there, call, tmp_path):
    trunk = moved(there.base.parent / "trunk", tmp_path, "trunk")
    shutil.copyfile(there.arrivals[2], tmp_path / "a.safetensors")  # another model is passed over
    there.base.rename(tmp_path / "renamed.safetensors")
    call("add", trunk, there.arrivals[2]).ok()


def test_base_named_once_or_for_good(there, call, tmp_path):
    trunk = moved(there.base.parent / "trunk", tmp_path, "trunk")
    (tmp_path / "far" / "away").mkdir(parents=True)
    base = there.base.rename(tmp_path / "far" / "away" / "x.safetensors")
    assert "mergeway relocate" in call("add", trunk, there.arrivals[2]).mistake()
    wrong = call("add", trunk, there.arrivals[2], "--base", there.arrivals[0]).mistake()
    assert str(there.arrivals[0]) in wrong and "has changed since 'init'" in wrong
    assert "has changed" in call("relocate", trunk, "--base", there.arrivals[0]).mistake()
    assert not (trunk / "base.json").exists()
    call("add", trunk, there.arrivals[2], "--base", base).ok()
    assert "cannot be opened" in call("remove", trunk, "task3", "--from", there.arrivals[2]).mistake()
    done = call("relocate", trunk, "--base", base, "--json").json()
    assert done == {"trunk": str(trunk), "base": str(base), "digest": mw.Trunk.open(trunk).base_digest}
    call("remove", trunk, "task3", "--from", there.arrivals[2]).ok()
    assert str(base) in call("show", trunk).ok().out
    call("verify", trunk).ok()
    (trunk / "base.json").write_text("{")
    assert "base.json" in call("verify", trunk).mistake()


def test_embedded_base_needs_no_other(stream, call, tmp_path):
    s = stream(2)
    call("init", tmp_path / "trunk", "--base", s.base, "--rule", "average", "--embed-base").ok()
    s.base.unlink()
    trunk = moved(tmp_path / "trunk", tmp_path)
    for arrival in s.arrivals:
        call("add", trunk, arrival).ok()
    call("export", trunk, tmp_path / "adapter", "--lora", 2).ok()
    assert call("verify", trunk).ok().err == ""
    weights = trunk / "base" / "model.safetensors"
    stored = load_file(weights)
    assert all(torch.equal(stored[name], tensor) for name, tensor in s.base_tensors.items())
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert str(trunk / "base") in call("verify", trunk).mistake()


def test_reading_needs_no_base(vision, tmp_path, call):
    """`export` takes config and tokenizer from what the trunk keeps, and loads as before."""
    base, tuned = shutil.copytree(vision.base, tmp_path / "far" / "away" / "base"), vision.task("ants").expert
    (base / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    call("init", tmp_path / "trunk", "--base", base, "--rule", "average").ok()
    call("add", tmp_path / "trunk", tuned).ok()
    call("export", tmp_path / "trunk", tmp_path / "with").ok()
    shutil.rmtree(base)
    for words in (["log"], ["show"], ["memory"], ["show", "1"]):
        call(words[0], tmp_path / "trunk", *words[1:]).ok()
    assert "not compared" in call("verify", tmp_path / "trunk").ok().err
    call("export", tmp_path / "trunk", tmp_path / "without").ok()
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
    assert 'license: "mit"' in (tmp_path / "without" / "README.md").read_text()
    assert "cannot be opened" in call("add", tmp_path / "trunk", tuned, "--again").mistake()
    config = tmp_path / "trunk" / "base" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 1}))
    done = call("verify", tmp_path / "trunk")
    assert done.code == 2 and str(config) in done.err


def test_a_bare_trunk_without_its_base_is_not_intact(stream, call, tmp_path):
    s = stream(1)
    call("init", tmp_path / "trunk", "--base", s.base, "--rule", "average").ok()
    s.base.unlink()
    assert call("verify", tmp_path / "trunk").code == 2
