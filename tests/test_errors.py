"""Messages speak Python in Python and flags in the shell; what is a command stays one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mergeway as mw
from mergeway.errors import OptionError, speaking_to_a_shell

SAYINGS = {
    "--threads is 0; it must be at least 1": "threads is 0; it must be at least 1",
    "exists already; choose another, or pass --force to replace it": "exists already; choose another, or pass force=True to replace it",
    "give data with --check TASK=DATA, or keep some with --holdout": "give data with check={TASK: DATA}, or keep some with holdout",
    "--min ants=…: nothing judges it; give --check ants=DATA": "at_least={'ants': …}: nothing judges it; give check={'ants': DATA}",
    "--min ants=101: it is a percentage": "at_least={'ants': 101}: it is a percentage",
    "another process is writing; leave out --no-wait": "another process is writing; leave out wait=False",
    "name it with --base REF, or with 'mergeway relocate --base REF'": "name it with base=REF, or with 'mergeway relocate --base REF'",
    "download it with 'hf download me/x --revision y'": "download it with 'hf download me/x --revision y'",
    "give one with --objective module:function": "give one with objective=FUNCTION",
    "runs/my--model: the task's head is needed too; give --head FILE": "runs/my--model: the task's head is needed too; give head=FILE",
    "--memory is 0; --memory-share '': known": "size is 0; share '': known",
}


@pytest.mark.parametrize("flags", SAYINGS)
def test_arguments_are_named_as_the_reader_wrote_them(flags):
    problem = OptionError(flags)
    assert str(problem) == SAYINGS[flags]
    with speaking_to_a_shell():
        assert str(problem) == flags
    assert str(OptionError(str(problem))) == SAYINGS[flags]  # handed on, it does not change again


def test_the_same_mistake_in_both_languages(vision, tmp_path, call):
    trunk = mw.Trunk.create(tmp_path / "trunk", vision.base, "average")
    expert = vision.task("ants").expert
    trunk.add(expert)
    with pytest.raises(mw.MergewayError, match="pass again=True to count them once more"):
        trunk.add(expert)
    assert "pass --again to count them once more" in call("add", trunk.path, expert).mistake()
    with pytest.raises(mw.MergewayError, match=r"max_drop: nothing is judged; give data with check={TASK: DATA}"):
        trunk.add(vision.task("bees").expert, max_drop=1.0)


def test_no_message_of_the_library_has_a_flag_in_python():
    """Every flag in the source of a message is one that the translation finds."""
    source = Path(mw.__file__).parent
    told = [
        line
        for path in source.rglob("*.py")
        if "cli" not in path.parts
        for line in re.findall(r"Error\(\s*f?\"([^\"]*--[a-z][^\"]*)\"", path.read_text(encoding="utf-8"))
    ]
    assert len(told) > 50
    for line in told:
        left = re.sub(r"'(?:mergeway|hf|pip)[^']*'", "", str(OptionError(line)))
        assert not re.search(r"(?<![\w/])--[a-z]", left), line
