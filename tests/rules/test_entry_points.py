"""Rules from elsewhere: an installed package, a module, a file; and what happens when they are broken."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mergeway as mw
from mergeway.rules import RULES, find_rules

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "rule_package"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A directory with the example package in it, as pip installs it."""
    # pip builds inside the source folder, which is not ours to change.
    copy = shutil.copytree(PACKAGE, tmp_path_factory.mktemp("source") / "rule_package")
    target = tmp_path_factory.mktemp("site")
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*line, "--target", target, copy], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def seeing(*folders: Path) -> dict[str, str]:
    """The environment of a process that finds these packages."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), str(ROOT / "src")])}


def broken(folder: Path, name: str, text: str, word: str = "Rule") -> Path:
    """A package that is installed and whose rule cannot be used."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(text)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mergeway.rules]\n{name} = {name}:{word}\n")
    return folder


def by_hand(made, rate: float = 0.2) -> dict[str, torch.Tensor]:
    """The moving average of a stream's updates, written out."""
    merged = {}
    for name, base in made.base_tensors.items():
        if base.is_floating_point():
            updates = [arrival[name] - base for arrival in made.arrival_tensors]
            total = updates[0]
            for update in updates[1:]:
                total = (1 - rate) * total + rate * update
            merged[name] = base + total
    return merged


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in wanted.items())


def test_the_rule_of_the_package_is_short():
    assert len((PACKAGE / "mergeway_ema.py").read_text().splitlines()) < 25


def commands(folder: Path, env: dict[str, str], *lines: list[object]) -> list[str]:
    """What each of several command lines prints, all in one process of their own."""
    code = "import gc, json, sys; gc.disable(); from mergeway.cli import main; [sys.exit(c) for w in json.loads(sys.argv[1]) if (c := main(w)) or print('---')]"
    words = json.dumps([[str(word) for word in line] for line in lines])
    done = subprocess.run(
        [sys.executable, "-c", code, words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("---\n")[:-1]


def test_an_installed_rule_is_a_rule_like_any_other(run, call, site, stream, tmp_path):
    made, env, trunk = stream(2), seeing(site), tmp_path / "trunk"
    listed = {row["rule"]: row for row in run("rules", "--json", env=env).json()}
    assert {"average", "ode"} < listed.keys()
    assert listed["ema"]["options"] == {"rate": 0.2} and listed["ema"]["needs"] == []
    init = ["init", trunk, "--base", made.base, "--rule", "ema", "--set", "rate=0.5"]
    commands(tmp_path, env, init, ["add", trunk, made.arrivals[0]])
    *_, log = commands(tmp_path, env, ["add", trunk, made.arrivals[1]], ["log", trunk, "--json"])
    assert [row["kind"] for row in json.loads(log)] == ["init", "add", "add"]
    assert json.loads((trunk / "trunk.json").read_text())["rule"] == "ema"
    assert close(load_file(trunk / "steps" / "000002" / "model.safetensors"), by_hand(made, 0.5))
    origins = [row["details"]["origin"] for row in json.loads(log)]
    assert origins == [{"package": "mergeway-ema", "version": "1.0"}] * 3
    # A process that does not have the package can read, and says what it lacks when it is to fold.
    call("log", trunk).ok()
    assert "ema (rate=0.5)" in call("show", trunk).ok().out
    call("verify", trunk).ok()
    call("export", trunk, tmp_path / "out").ok()
    assert "exponential moving average" in (tmp_path / "out" / "README.md").read_text()
    assert "there is no rule 'ema'" in call("add", trunk, made.arrivals[0], "--again").mistake()


def test_the_laws_know_an_installed_rule(site):
    """They are collected for it, and it keeps them."""
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "ema", "-W", "ignore"]
    laws = [str(ROOT / "tests" / "laws" / f"test_{name}.py") for name in ("degenerate", "same_bits")]
    done = subprocess.run([*line, *laws], env=seeing(site), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 10


@pytest.mark.parametrize("word", ["mergeway_ema:Ema", "rules/ours.py:Ema"])
def test_a_class_is_named_by_its_module_or_its_file(stream, tmp_path, word):
    """Also from another directory: a trunk finds the rule again that it was made with."""
    made, env, trunk = stream(2), seeing(tmp_path), tmp_path / "trunk"
    for place in (tmp_path / "rules" / "ours.py", tmp_path / "mergeway_ema.py", tmp_path / "elsewhere" / "other"):
        place.parent.mkdir(exist_ok=True)
        place.write_text((PACKAGE / "mergeway_ema.py").read_text())
    merge = ["merge", made.base, *made.arrivals, "--rule", word, "--out", "out"]
    commands(tmp_path, env, merge, ["init", trunk, "--base", made.base, "--rule", word])
    assert close(load_file(tmp_path / "out" / "model.safetensors"), by_hand(made))
    commands(tmp_path / "elsewhere", env, *(["add", trunk, arrival] for arrival in made.arrivals))
    assert close(load_file(trunk / "steps" / "000002" / "model.safetensors"), by_hand(made))


def test_a_file_may_be_named_like_a_module_that_is_there(call, stream, tmp_path, monkeypatch):
    """The name of the file counts for nothing but finding it."""
    made = stream(2)
    (tmp_path / "json.py").write_text((PACKAGE / "mergeway_ema.py").read_text())
    monkeypatch.chdir(tmp_path)
    call("init", tmp_path / "trunk", "--base", made.base, "--rule", "json.py:Ema", "--set", "rate=0.5").ok()
    monkeypatch.chdir("/")
    for arrival in made.arrivals:
        call("add", tmp_path / "trunk", arrival).ok()
    opened = mw.Trunk.open(tmp_path / "trunk")
    assert close(opened.params(), by_hand(made, 0.5))
    # No package and no version, but the very file.
    digest = hashlib.sha256((tmp_path / "json.py").read_bytes()).hexdigest()
    origin = {"file": str(tmp_path / "json.py"), "sha256": digest}
    assert [record.details["origin"] for record in opened.log()] == [origin] * 3


def test_a_trunk_made_in_python_finds_the_file_again(stream, tmp_path, monkeypatch):
    made = stream(1)
    (tmp_path / "ours.py").write_text((PACKAGE / "mergeway_ema.py").read_text())
    monkeypatch.chdir(tmp_path)
    mw.Trunk.create(tmp_path / "trunk", made.base, "ours.py:Ema", rate=0.5)
    monkeypatch.chdir("/")
    assert mw.Trunk.open(tmp_path / "trunk").rule.options() == {"rate": 0.5}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise RuntimeError('no such driver')", "no such driver"),
        ("import a_module_that_nobody_has", "a_module_that_nobody_has"),
        ("", "Rule"),
        ("class Rule: ...", "is not a PartRule or ModelRule"),
        (
            "from mergeway.rules import PartRule\nclass Rule(PartRule):\n    name = title = 'x'\n",
            "the class has no text 'paper'",
        ),
    ],
)
def test_a_broken_package_breaks_nothing_else(monkeypatch, tmp_path, text, why):
    monkeypatch.syspath_prepend(broken(tmp_path / "site", "odd", text))
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    with pytest.warns(UserWarning, match=r"rule 'odd' of odd 1\.0 cannot be loaded") as told:
        found = find_rules()
    assert [why in str(warning.message) for warning in told] == [True]
    assert found.keys() == RULES.keys()


def test_a_name_that_is_taken_stays_with_its_owner(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(broken(tmp_path / "site", "average", "raise RuntimeError"))
    with pytest.warns(UserWarning, match="names its rule 'average', which is taken"):
        assert find_rules()["average"] is mw.rules.Average


def test_the_command_line_warns_in_one_place_and_goes_on(run, stream, tmp_path):
    made, env = stream(1), seeing(broken(tmp_path / "site", "odd", "raise RuntimeError('no such driver')"))
    done = run("merge", made.base, *made.arrivals, "--out", tmp_path / "out", env=env).ok()
    assert done.err.count("rule 'odd' of odd 1.0 cannot be loaded (no such driver)") == 1
    assert "merged by average" in done.out


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("collections:OrderedDict", "is not a PartRule or ModelRule"),
        ("collections:Nothing", "has no class 'Nothing'"),
        ("a_module_that_nobody_has:Rule", "cannot be imported"),
        ("nowhere.py:Rule", "there is no file nowhere.py"),
        ("wrong.py:Rule", "cannot be imported (SyntaxError"),
        ("ema", "there is no rule 'ema'"),
    ],
)
def test_a_wrong_class_is_one_line(call, stream, tmp_path, monkeypatch, word, why):
    made = stream(1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text("class Rule(")
    assert why in call("merge", made.base, *made.arrivals, "--rule", word, "--out", tmp_path / "out").mistake()
    assert why in call("init", tmp_path / "trunk", "--base", made.base, "--rule", word).mistake()
    assert not (tmp_path / "out").exists() and not (tmp_path / "trunk").exists()
