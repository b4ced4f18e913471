"""Pipes, devices, bombs and depths: bounded work and one line."""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from collections import Counter
from pathlib import Path

import pytest
import tiny

import mergeway as mw
from mergeway.calibration.pictures import decode
from mergeway.errors import OptionError


@pytest.fixture(params=["fifo", "/dev/zero", "/dev/null"])
def odd(request, tmp_path) -> Path:
    """Something that is no file."""
    if request.param != "fifo":
        return Path(request.param)
    os.mkfifo(tmp_path / "fifo.safetensors")
    return tmp_path / "fifo.safetensors"


def test_as_base_arrival_or_part_of_a_directory(stream, tmp_path, call, odd):
    s = stream(1)
    call("init", tmp_path / "trunk", "--base", s.base, "--rule", "average").ok()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(odd)
    index = tmp_path / "index"
    index.mkdir()
    (index / "model.safetensors.index.json").symlink_to(odd)
    for words in (
        ["init", tmp_path / "other", "--base", odd, "--rule", "average"],
        ["add", tmp_path / "trunk", odd],
        ["add", tmp_path / "trunk", folder],
        ["add", tmp_path / "trunk", index],
        ["merge", s.base, odd, "--out", tmp_path / "out"],
    ):
        line = call(*words).mistake()
        assert "not a file" in line and "bug" not in line, line


def test_deep_json(stream, tmp_path, call):
    s = stream(1)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text("[" * 200_000)
    call("init", tmp_path / "trunk", "--base", s.base, "--rule", "average").ok()
    assert "not valid JSON" in call("add", tmp_path / "trunk", folder).mistake()
    journal = tmp_path / "trunk" / "journal.jsonl"
    journal.write_text(journal.read_text() + "[" * 200_000 + "\n")
    assert "not a journal record" in call("log", tmp_path / "trunk").mistake()


def test_a_picture_that_claims_to_be_huge():
    def png(width: int, height: int) -> bytes:
        def chunk(kind: bytes, data: bytes) -> bytes:
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")

    for size in ((1 << 30, 1 << 30), (100_000, 100_000), (1_000_000, 1), (0, 5)):
        with pytest.raises(OptionError, match=r"^bomb\.png: "):
            decode("bomb.png", png(*size), 8)


def test_interrupted_after_the_commit(stream, tmp_path, call, monkeypatch):
    """The line tells what has become of the trunk."""
    from mergeway.cli import records

    s = stream(2)
    mw.Trunk.create(tmp_path / "trunk", s.base, "average")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(records, "print_record", interrupt)
    done = call("add", tmp_path / "trunk", s.arrivals[0])
    assert done.code == 130 and "step 1 is committed" in done.err and "nothing was changed" not in done.err
    monkeypatch.setattr(mw.Trunk, "add", interrupt)
    done = call("add", tmp_path / "trunk", s.arrivals[1])
    assert done.code == 130 and "nothing was changed" in done.err


KINDS = ("pipe", "endless", "deep")


def put(path: Path, kind: str) -> None:
    """Something else in the place of a file."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("[" * 100_000)


ODD = [
    pytest.param(kind, every, marks=[pytest.mark.slow] if every else []) for every in (False, True) for kind in KINDS
]


@pytest.mark.parametrize(("kind", "every"), ODD)
def test_in_the_place_of_any_file_of_a_trunk(vision, tmp_path, bounded, kind, every, capsys):
    """No command waits or goes on and on: it refuses in one line, or comes to its end without the file."""
    start, trunk, out = tmp_path / "start", tmp_path / "trunk", tmp_path / "out"
    made = mw.Trunk.create(start, vision.base, "ode", keep=2, threads=1)
    for name in ("ants", "bees"):
        task = vision.task(name)
        made.add(task.expert, name, data=f"{vision.path}#{name}", holdout=0.25)
    made.tag(1, "first")
    made.relocate(vision.base)
    task = vision.task("cats")
    commands = (
        ["log", trunk],
        ["show", trunk, "first"],
        ["memory", trunk],
        ["verify", trunk],
        ["diff", trunk, 1, 2],
        ["export", trunk, out],
        ["report", trunk, "--out", tmp_path / "page.html"],
        ["evaluate", trunk, "--suite", vision.path],
        ["replay", trunk, out, "--rule", "average"],
        ["add", trunk, task.expert, "--data", f"{vision.path}#cats"],
        ["align", trunk, "--data", f"{vision.path}#bees"],
        ["rollback", trunk, 1],
        ["tag", trunk, 2, "second"],
        ["prune", trunk, "--keep", 1],
        ["relocate", trunk, "--base", vision.base],
    )
    few = [words for words in commands if words[0] in ("log", "verify", "export", "rollback")]
    names = sorted(str(p.relative_to(start)) for p in start.rglob("*") if p.is_file() and p.name != "lock")
    assert len(names) > 15
    ends: Counter[bool] = Counter()
    for name in names:
        for words in commands if every else few:
            for folder in (trunk, out):
                shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(start, trunk)
            put(trunk / name, kind)
            done = bounded(*words)
            ends[done.code == 0] += 1
            if words[0] == "verify" and name != "base.seen":
                assert done.code, f"verify vouches for {name}"
            if done.code:
                line = done.err.splitlines()[-1]
                assert done.code == 2 and "bug" not in line, f"{words[0]}, {name}: {done.code} {line}"
    with capsys.disabled():
        print(f"\n{kind}: {ends.total()} commands, {ends[False]} refused", flush=True)


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_place_of_any_file_of_a_suite(tmp_path, bounded, kind):
    """Its description, data and heads, and every file of its models."""
    start, suite = tiny.vision_suite(tmp_path / "start", train=8, test=4), tmp_path / "suite"
    for name in sorted(str(p.relative_to(start)) for p in start.rglob("*") if p.is_file()):
        shutil.rmtree(suite, ignore_errors=True)
        shutil.copytree(start, suite)
        put(suite / name, kind)
        for words in (
            ["suites", "check", suite],
            ["bench", suite, "--rules", "average", "--orders", 1, "--samples", 4, "--out", tmp_path / "run"],
            ["merge", suite / "base", suite / "experts" / "ants", "--out", tmp_path / "out"],
            ["evaluate", suite / "experts" / "ants", "--suite", suite],
            ["finetune", suite, "ants", "--out", tmp_path / "out", "--steps", 1, "--batch", 4],
        ):
            done = bounded(*words)
            line = (done.err.splitlines() or [""])[-1]
            assert done.code in (0, 2) and "bug" not in line, f"{words[0]}, {name}: {done.code} {line}"
            for folder in (tmp_path / "run", tmp_path / "out"):
                shutil.rmtree(folder, ignore_errors=True)
