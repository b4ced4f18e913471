"""Pipes, devices, bombs and depths: bounded work and one line."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import pytest

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
