"""Names come from files and from strangers: wherever one stands, it is shown and does nothing."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
import yaml
from safetensors.torch import save_file

import mergeway as mw
from mergeway.checkpoint.heads import Head, write_beside
from mergeway.checkpoint.source import InMemory
from mergeway.core.printed import in_json, printable
from mergeway.fold.card import model_card
from mergeway.rules import make
from mergeway.trunk.journal import Journal

NAMES = [
    "\x1b[2J\x1b[31mred",
    "\x1b]0;title\x07",
    "\x9b31m",
    "abc\u202etxt.exe",
    "new\nline: injected",
    "a\rb\bc\x7f",
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "\"quoted\" 'single' & more",
    "| cell | `code` ``` fence",
    "---\nbase_model: evil",
    "[/bold][link=file:///etc/passwd]x[/link]",
    "../../etc/passwd",
    "{{ 7 * 7 }}{% raw %}",
    "\ud800 lone",
    "\U0001f600 \U000e0041",
]
UNSAFE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f\ud800-\udfff]")


@pytest.mark.parametrize("name", NAMES)
def test_printable(name):
    assert not UNSAFE.search(printable(name)) and "\n" not in printable(name)
    assert printable("plain ünïcode 漢字 😀") == "plain ünïcode 漢字 😀"
    written = in_json(json.dumps({"a": name}, ensure_ascii=False, indent=2))
    assert not UNSAFE.search(written) and json.loads(written) == {"a": name}


def forged(trunk, **fields) -> None:
    """A journal by somebody who can write the directory: the last record says what he likes, in a chain that is right."""
    read = Journal.read(trunk / "journal.jsonl")
    last = type(read.last)(**{**read.last.__dict__, **fields}).sealed(read.last.previous)
    ends = [len(r.line().encode()) + 1 for r in (*read.records[:-1], last)]
    made = Journal(read.path, [*read.records[:-1], last], [sum(ends[: k + 1]) for k in range(len(ends))])
    (trunk / "journal.jsonl").write_text(made.text(), encoding="utf-8")
    (trunk / "head").write_bytes(made.point().head())


def test_a_forged_journal(stream, tmp_path, call):
    s = stream(2)
    start, trunk = tmp_path / "start", tmp_path / "trunk"
    mw.Trunk.create(start, s.base, "average").add(s.arrivals[0])
    page = tmp_path / "page.html"
    for name in NAMES:
        if "\ud800" in name:
            continue  # no UTF-8 file can hold it
        shutil.rmtree(trunk, ignore_errors=True)
        shutil.copytree(start, trunk)
        forged(trunk, task=name, source=name, time=name, details={"rule": name, "facts": {name: 1.0}})
        for words in (["log", trunk], ["show", trunk], ["log", trunk, "--json"], ["show", trunk, "--json"]):
            done = call(*words).ok()
            assert not UNSAFE.search(done.out + done.err), words
        assert call("log", trunk, "--json").json()[-1]["task"] == name
        line = call("add", trunk, s.arrivals[1], "--task", name).mistake()
        assert not UNSAFE.search(line)
        line = call("add", trunk, s.arrivals[0]).mistake()  # the same weights, which were folded in as ...
        assert "folded in at step 1" in line and not UNSAFE.search(line)
        call("report", trunk, "--out", page).ok()
        text = page.read_text(encoding="utf-8")
        body = text[: text.index("<script")] if "<script" in text else text
        assert not re.search(r"[\x00-\x08\x1b\x7f-\x9f\u202e]", body) and "<img src=x" not in text
        assert "<script>alert(1)" not in text
        call("export", trunk, tmp_path / "out", "--force").ok()
        check_card((tmp_path / "out" / "README.md").read_text(encoding="utf-8"), s.base.name)


def check_card(card: str, base: str) -> None:
    assert not UNSAFE.search(card)
    front = yaml.safe_load(card.split("---\n")[1])
    # A base that is no repository of the hub has no name there.
    assert set(front) == {"library_name", "tags"} and printable(base).replace("|", "\\|") in card
    rows = [line for line in card.splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(rows) == 1 and len(re.findall(r"(?<!\\)\|", rows[0])) == 6, rows


@pytest.mark.parametrize("name", NAMES)
def test_the_card(name):
    card = model_card(
        InMemory({}, name), "d" * 64, [(name, name, "e" * 64, 1.0)], make("average", {}), f"mergeway add {name}"
    )
    check_card(card, name)
    assert "<script" not in re.sub(r"`+.*?`+", "", card).replace("\\<", "").partition("| k |")[2]


@pytest.mark.parametrize(
    "wrong", [{"weight": "x"}, {"task": 3}, {"time": None}, {"details": []}, {"kind": {}}, {"stream": 1}]
)
def test_a_record_of_the_wrong_kinds(stream, tmp_path, call, wrong):
    s = stream(1)
    trunk = tmp_path / "trunk"
    mw.Trunk.create(trunk, s.base, "average").add(s.arrivals[0])
    path = trunk / "journal.jsonl"
    first, last = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps({**json.loads(last), **wrong})}\n")
    for command in ("log", "show", "verify"):
        line = call(command, trunk).mistake()
        assert "bug" not in line and "not a journal record" in line


def test_tensor_names_and_paths_in_errors(stream, tmp_path, call):
    s = stream(1)
    for number, name in enumerate(n for n in NAMES if "\ud800" not in n):
        odd = tmp_path / f"odd-{number}.safetensors"
        save_file({**s.arrival_tensors[0], name: torch.ones(2)}, odd)
        line = call("merge", s.base, odd, "--out", tmp_path / "out").mistake()
        assert not UNSAFE.search(line) and "unknown to the base" in line
        line = call("add", tmp_path / name.replace("/", "-"), odd).mistake()
        assert not UNSAFE.search(line)


def test_file_names_of_heads(tmp_path):
    """Two tasks never share a file, and no task leaves the directory."""
    names = [*(n for n in NAMES if "\ud800" not in n), "a b", "a/b", "a?b", "..", "x" * 300]
    write_beside(tmp_path / "out", {name: Head({"w": torch.tensor([float(k)])}) for k, name in enumerate(names)})
    found = sorted((tmp_path / "out").rglob("*.safetensors"))
    assert len(found) == len(names) and all(p.parent == tmp_path / "out" / "heads" for p in found)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", p.name) for p in found)
