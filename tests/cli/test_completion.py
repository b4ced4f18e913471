"""What a shell offers behind a tab: asked for as bash asks for it, in a process of its own, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields

import pytest

import mergeway as mw
from mergeway.bench.suites import EMBEDDED
from mergeway.bench.suites.handwritten import INCREMENTAL
from mergeway.bench.suites.named import recipes
from mergeway.bench.suites.trained import TRAINED
from mergeway.cli.completion import SUITES, rule_options
from mergeway.rules import RULES


@pytest.fixture
def tab(tmp_path):
    """The words that bash shows for a line that is not finished; the last is the one being typed."""

    def press(*words) -> list[str]:
        line = ["mergeway", *map(str, words)]
        asked = {"_MERGEWAY_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(words))}
        code = "import sys; from mergeway.cli import main\ntry:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=os.environ | asked,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout.split()

    return press


def test_rules_and_what_they_can_be_set_to(tab):
    assert tab("init", "trunk", "--rule", "ra") == ["randmix"]
    assert tab("init", "trunk", "--rule", "opcm", "--set", "al") == ["alpha="]
    assert tab("bench", "digits", "--rules", "average,st") == ["average,steer"]


def test_suites_and_their_tasks(tab):
    assert tab("bench", "digits") == ["digits", "digits-light"]
    assert tab("finetune", "digits", "mn") == ["mnist"]


def test_tasks_and_steps_of_a_trunk(tab, stream, tmp_path):
    files = stream(2)
    trunk = mw.Trunk.create(tmp_path / "trunk", files.base, "average")
    trunk.add(files.arrivals[0], "ants")
    trunk.add(files.arrivals[1], "bees")
    trunk.tag(1, "stable")
    assert tab("remove", "trunk", "") == ["bees", "ants"]
    assert tab("export", "trunk", "out", "--task", "a") == ["ants"]
    assert tab("add", "trunk", "x", "--check", "b") == ["bees="]
    assert tab("rollback", "trunk", "") == ["stable", "2", "1", "0"]
    assert tab("remove", "nowhere", "") == []


def test_what_is_offered_is_what_there_is():
    """The lists are made without the modules that hold the truth."""
    assert {*SUITES} == {*EMBEDDED, *INCREMENTAL, *TRAINED, *recipes()}
    own = {name: rule for name, rule in RULES.items() if rule.__module__.startswith("mergeway.rules.")}
    assert {name: set(keys) for name, keys in rule_options().items()} == {
        name: {f.name for f in fields(rule)} for name, rule in own.items()
    }
