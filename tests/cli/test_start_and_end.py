"""What the program checks before it works, and what it leaves behind when it ends."""

from __future__ import annotations

import gc
import importlib
import sys

import pytest
import tiny

from mergeway.bench.suite import load_suite
from mergeway.cli import app


def test_objects_are_not_frozen_at_the_end(monkeypatch):
    """Frozen objects are never freed, and libraries that count theirs report every one of them as leaked."""
    before, threshold = gc.get_freeze_count(), gc.get_threshold()
    monkeypatch.setattr(sys, "argv", ["mergeway", "rules"])
    try:
        assert app.run() == 0
        assert gc.get_freeze_count() == before
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


@pytest.mark.parametrize("rule", ["steer", "ode"])
def test_a_missing_extra_is_named_before_the_merge(tmp_path, call, snapshot, monkeypatch, rule):
    suite = load_suite(tiny.vision_suite(tmp_path / "suite"))
    call("init", tmp_path / "trunk", "--base", suite.base, "--rule", rule).ok()
    before = snapshot(tmp_path / "trunk" / "steps", tmp_path / "trunk" / "journal.jsonl")
    found = importlib.import_module

    def without(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    started = []
    monkeypatch.setattr("mergeway.trunk.trunk.fold_stream", lambda *words: started.append(words) or iter(()))
    task = suite.tasks[0]
    words = ["add", tmp_path / "trunk", task.expert, "--data", f"{suite.path}#{task.name}"]
    line = call(*words).mistake()
    assert "pip install 'mergeway[data]'" in line and "--no-memory" in line
    assert not started
    assert snapshot(tmp_path / "trunk" / "steps", tmp_path / "trunk" / "journal.jsonl") == before
