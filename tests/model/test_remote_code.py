"""A base that names Python code of its own: the code never runs, nobody is asked, and one line says so."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import tiny

import mergeway
from mergeway.errors import OptionError
from mergeway.model import weights

CODE = "import pathlib\npathlib.Path({mark!r}).write_text('ran')\nclass Config:\n    pass\nclass Model:\n    pass\n"


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A base whose every part is made by its own code, and a user who answers yes to everything."""
    suite = tiny.text_suite(tmp_path / "suite")
    base, mark = suite / "base", tmp_path / "ran"
    (base / "code.py").write_text(CODE.format(mark=str(mark)))
    config = json.loads((base / "config.json").read_text())
    names = dict.fromkeys(("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"), "code.Model")
    config |= {"model_type": "not-of-this-world", "auto_map": {"AutoConfig": "code.Config", **names}}
    (base / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((base / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "NoSuchTokenizer", "auto_map": {"AutoTokenizer": ["code.Model", "code.Model"]}}
    (base / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    return suite, mark


def test_config_weights_and_tokenizer(hostile, capsys):
    from transformers import AutoConfig, AutoModel

    suite, mark = hostile
    base = suite / "base"
    for load in (
        lambda: weights.load_config(AutoConfig, base),
        lambda: weights.load_weights(AutoModel, base),
        lambda: weights.load_tokenizer(base),
    ):
        with pytest.raises(OptionError, match="Python code of its own, which mergeway never runs") as found:
            load()
        assert str(base) in str(found.value)
    assert not mark.exists()
    assert "[y/N]" not in capsys.readouterr().out


def test_the_command_line(hostile, tmp_path, call):
    suite, mark = hostile
    call("init", tmp_path / "trunk", "--base", suite / "base", "--rule", "ode").ok()
    expert = suite / "experts" / "colour"
    shutil.copy(suite / "base" / "config.json", expert)
    words = ["--data", f"{suite}#colour", "--head", suite / "heads" / "colour.safetensors"]
    line = call("add", tmp_path / "trunk", expert, *words).mistake()
    assert str(suite / "base") in line and "bug" not in line
    assert not mark.exists()


def test_every_call_says_no():
    """A new `from_pretrained` or `from_config` without an answer would ask again."""
    for path in Path(mergeway.__file__).parent.rglob("*.py"):
        for found in re.findall(r"\.from_(?:pretrained|config)\(.*", path.read_text()):
            assert "trust_remote_code=False" in found, f"{path}: {found}"
