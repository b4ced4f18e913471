"""What the program checks before it works, and what it leaves behind when it ends."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import tiny

from mergeway.bench.suite import load_suite

PROGRAM = """
import atexit, sys, threading, time
import torch
from mergeway.cli import run
atexit.register(lambda: print("done at exit"))
threading.Thread(target=lambda: (time.sleep(0.2), print("done by a thread"))).start()
sys.argv = ["mergeway", *sys.argv[1:]]
run()
print("never reached")
"""


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["verify", "nowhere"], 2)], ids=["done", "a mistake"])
def test_it_ends_with_its_code_and_loses_no_word(words, code):
    """Modules are not taken apart at the end, where libraries that count their objects report what is left as leaked."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.splitlines()[-2:] == ["done by a thread", "done at exit"]
    assert ("nowhere" in ended.stderr) == (code == 2)


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
