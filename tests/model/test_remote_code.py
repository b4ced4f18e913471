"""A base that names Python code of its own: unless it is allowed, the code never runs, nobody is asked, and one line says so."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import tiny

import mergeway as mw
from mergeway.errors import OptionError
from mergeway.model import weights

CODE = """
import pathlib
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

pathlib.Path({mark!r}).write_text("ran")

class Config(BertConfig):
    model_type = "not-of-this-world"

class Model(BertModel):
    config_class = Config

class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


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
    tokenizer |= {"tokenizer_class": "NoSuchTokenizer", "auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}}
    (base / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for expert in (suite / "experts").iterdir():
        shutil.copy(base / "config.json", expert)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield suite, mark
    for name in [n for n in sys.modules if n.startswith("transformers_modules")]:
        del sys.modules[name]


def data_of(suite, task="colour"):
    return ["--data", f"{suite}#{task}", "--head", suite / "heads" / f"{task}.safetensors"]


def test_config_weights_and_tokenizer(hostile, capsys):
    from transformers import AutoConfig, AutoModel

    suite, mark = hostile
    base = suite / "base"
    for load in (
        lambda: weights.load_config(AutoConfig, base),
        lambda: weights.load_weights(AutoModel, base),
        lambda: weights.load_tokenizer(base),
    ):
        with pytest.raises(OptionError, match=r"Python code of its own.*compute=Compute\(allow_code=True\)") as found:
            load()
        assert str(base) in str(found.value)
    assert not mark.exists()
    assert "[y/N]" not in capsys.readouterr().out


def test_add_never_asks(hostile, tmp_path, run):
    """In a process of its own, with an answer on standard input."""
    suite, mark = hostile
    trunk, expert = tmp_path / "trunk", suite / "experts" / "colour"
    run("init", trunk, "--base", suite / "base", "--rule", "ode").ok()
    line = run("add", trunk, expert, *data_of(suite), input="y\n" * 10).mistake()
    assert str(suite / "base") in line and "--allow-code" in line and "bug" not in line
    assert not mark.exists()
    assert [r.kind for r in mw.Trunk.open(trunk).log()] == ["init"]
    run("add", trunk, expert, *data_of(suite), "--allow-code", input="").ok()
    assert mark.read_text() == "ran"
    assert mw.Trunk.open(trunk).log()[-1].details["allow_code"] is True
    assert "own code was allowed" in run("show", trunk).ok().out
    assert run("verify", trunk).ok()


def commands(suite, trunk, folder):
    """Every command that loads a model, on this base."""
    expert = suite / "experts" / "colour"
    return {
        "evaluate": ["evaluate", expert, "--suite", suite],
        "evaluate a trunk": ["evaluate", trunk, "--data", f"colour={suite}#colour", "--head", f"colour={data_of(suite)[3]}"],
        "bench": ["bench", suite, "--rules", "average", "--orders", 1, "--samples", 4, "--out", folder / "run"],
        "finetune": ["finetune", suite, "colour", "--out", folder / "tuned", "--steps", 1, "--batch", 4],
        "merge": ["merge", suite / "base", expert, "--rule", "ode", "--suite", suite, "--out", folder / "merged"],
        "path": ["path", expert, suite / "experts" / "animal", "--suite", suite],
        "align": ["align", trunk, *data_of(suite, "animal"), "--module", "layer"],
        "replay": ["replay", trunk, folder / "other", "--rule", "ode",
                   *(w for t in ("colour", "animal") for w in ("--data", f"{t}={suite}#{t}", "--head", f"{t}={data_of(suite, t)[3]}"))],
        "suites check": ["suites", "check", suite],
    }  # fmt: skip


def test_every_command_has_the_option(hostile, tmp_path, call):
    suite, mark = hostile
    trunk = mw.Trunk.create(tmp_path / "trunk", suite / "base", "average")
    for task in ("colour", "animal"):
        trunk.add(suite / "experts" / task)
    for name, words in commands(suite, tmp_path / "trunk", tmp_path).items():
        line = call(*words).mistake()
        assert "--allow-code" in line and str(suite / "base") in line, f"{name}: {line}"
        assert not mark.exists(), name
    for name, words in commands(suite, tmp_path / "trunk", tmp_path / "allowed").items():
        done = call(*words, "--allow-code")
        assert done.code == 0, f"{name}: {done.err}"
    assert mark.read_text() == "ran"
    assert mw.Trunk.open(tmp_path / "trunk").log()[-1].details["allow_code"] is True


def test_python(hostile, tmp_path):
    suite, mark = hostile
    trunk = mw.Trunk.create(tmp_path / "trunk", suite / "base", "ode", compute=mw.Compute(allow_code=True))
    record = trunk.add(suite / "experts" / "colour", data=f"{suite}#colour", head=data_of(suite)[3])
    assert mark.exists() and record.details["allow_code"] is True


def test_an_export_carries_the_code(hostile, tmp_path):
    """Whoever loads it decides anew; a base that names no code gives none of its files away."""
    from transformers import AutoModel

    suite, mark = hostile
    trunk = mw.Trunk.create(tmp_path / "trunk", suite / "base", "average")
    trunk.add(suite / "experts" / "colour")
    trunk.export(tmp_path / "out")
    assert not mark.exists()
    assert type(AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True)).__name__ == "Model"
    plain = tiny.text_suite(tmp_path / "plain")
    (plain / "base" / "train.py").write_text("secret = 1")
    mw.merge_into(tmp_path / "merged", plain / "base", [plain / "experts" / "colour"], "average")
    assert not list((tmp_path / "merged").glob("*.py"))


def test_every_call_says_no():
    """A new `from_pretrained` or `from_config` without an answer would ask again."""
    for path in Path(mw.__file__).parent.rglob("*.py"):
        for found in re.findall(r"\.from_(?:pretrained|config)\(.*", path.read_text()):
            assert re.search("trust_remote_code=(False|allow_code)", found), f"{path}: {found}"
