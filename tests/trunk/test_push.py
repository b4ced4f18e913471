"""`push` against a hub on the loopback: what arrives there is what `export` writes."""

from __future__ import annotations

import fake_hub
import pytest

import mergeway as mw


@pytest.fixture
def trunk(vision, tmp_path):
    made = mw.Trunk.create(tmp_path / "trunk", vision.base, "average")
    made.add(vision.task("ants").expert)
    return made


def test_the_hub_gets_what_export_writes(trunk, run, tmp_path):
    exported = trunk.export(tmp_path / "out")
    with fake_hub.fake_hub() as hub:
        hub.repos["me/ants"] = {"model-00007-of-00009.safetensors": b"an older shard", "notes.txt": b"mine"}
        done = run("push", trunk.path, "me/ants", "--message", "first", "--json", env=hub.environment()).json()
        assert done["commit"] == "1" * 40 and done["step"] == 1
        [commit] = hub.commits
        assert commit["summary"] == "first"
        held = hub.repos["me/ants"]
        assert held.pop("notes.txt") == b"mine"
        assert held.keys() == {p.name for p in exported.iterdir()} == set(done["files"])
        for name in ("model.safetensors", "config.json"):
            assert held[name] == (exported / name).read_bytes()
        assert b"mergeway push" in held["README.md"]
        hub.refuses = 403
        line = run("push", trunk.path, "me/ants", env=hub.environment()).mistake()
        assert "the hub refused the push (403" in line and "hf auth login" in line
    assert "cannot be reached" in run("push", trunk.path, "me/ants", env=hub.environment()).mistake()


def test_dry_run_and_mistakes(trunk, call):
    done = call("push", trunk.path, "me/ants", "--dry-run", "--json").json()
    assert done["commit"] is None and {"config.json", "model.safetensors", "README.md"} <= done["files"].keys()
    assert "would be pushed to me/ants" in call("push", trunk.path, "me/ants", "--dry-run").ok().out
    assert "ORG/NAME" in call("push", trunk.path, "ants").mistake()
    assert "HF_HUB_OFFLINE" in call("push", trunk.path, "me/ants").mistake()
