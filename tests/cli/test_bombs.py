"""Small files that claim or become something huge, endless or absurd: bounded memory and work, one line, exit 2."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

DEEP = "[" * 100_000
LONG = "9" * 5000


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join([chunk(b"IHDR", header), *chunks, chunk(b"IEND", b"")])


def text_png() -> bytes:
    """A picture with a comment that unpacks to much more."""
    packed = zlib.compressobj(9)
    comment = b"".join(packed.compress(bytes(1 << 20)) for _ in range(1 << 5)) + packed.flush()
    return png(8, 8, chunk(b"iTXt", b"c\0\1\0\0\0" + comment), chunk(b"IDAT", zlib.compress(bytes(8 * 25))))


def npy(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The header of an array, without its values."""
    text = repr({"descr": dtype, "fortran_order": False, "shape": shape}) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def npz(path: Path, head: bytes, zeros: int = 0, name: str = "x.npy") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as file:
        file.write(head)
        for _ in range(zeros >> 20):
            file.write(bytes(1 << 20))
    return path


def pictures(path: Path, rows: list[bytes]) -> Path:
    pq.write_table(pa.table({"image": pa.array(rows, pa.binary()), "label": [0] * len(rows)}), path)
    return path


def repeated(path: Path, value: object, rows: int, column: str) -> Path:
    """One value in a dictionary, named by a great many rows."""
    index = pa.array(np.zeros(rows, np.int8))
    pq.write_table(pa.table({column: pa.DictionaryArray.from_arrays(index, pa.array([value]))}), path)
    return path


def folder_of(folder: Path, data: bytes) -> Path:
    for name in ("a", "b", "c"):
        (folder / name).mkdir(parents=True)
        (folder / name / "x.png").write_bytes(data)
    return folder


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def link(path: Path, to: str) -> Path:
    path.symlink_to(to)
    return path


def lines(path: Path, *rows: str) -> Path:
    path.write_text("".join(row + "\n" for row in rows))
    return path


IMAGES: dict[str, Callable[[Path], Path]] = {
    "npz that claims a petabyte": lambda f: npz(f / "d.npz", npy("|u1", (1 << 43, 8, 8, 3))),
    "npz of zeros": lambda f: npz(f / "d.npz", npy("|u1", (3 << 19, 8, 8, 3)), 300 << 20),
    "npz of a shape below zero": lambda f: npz(f / "d.npz", npy("|u1", (-1, 8, 8, 3)), 1 << 20),
    "npz of objects": lambda f: npz(f / "d.npz", npy("|O", (3,)), 1 << 20),
    "npz with a deep header": lambda f: npz(f / "d.npz", b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 30) + b"(" * 9000),
    "npz that is a pipe": lambda f: fifo(f / "d.npz"),
    "npz that never ends": lambda f: link(f / "d.npz", "/dev/zero"),
    "picture with a long comment": lambda f: folder_of(f / "d", text_png()),
    "picture in a table": lambda f: pictures(f / "d.parquet", [png(1 << 30, 1 << 30)] * 3),
    "table of one picture many times": lambda f: repeated(f / "d.parquet", png(8, 8) + bytes(1 << 20), 1 << 14, "image"),
    "table of very many rows": lambda f: repeated(f / "d.parquet", b"", 1 << 26, "image"),
    "table that is a pipe": lambda f: fifo(f / "d.parquet"),
    "table that never ends": lambda f: link(f / "d.parquet", "/dev/zero"),
}  # fmt: skip

TEXTS: dict[str, Callable[[Path], Path]] = {
    "label of 5000 digits": lambda f: lines(f / "d.jsonl", f'{{"text": "a", "label": {LONG}}}'),
    "label of 30 digits": lambda f: lines(f / "d.jsonl", f'{{"text": "a", "label": {LONG[:30]}}}'),
    "label below zero by 30 digits": lambda f: lines(f / "d.jsonl", f'{{"text": "a", "label": -{LONG[:30]}}}'),
    "deep line": lambda f: lines(f / "d.jsonl", DEEP),
    "deep text": lambda f: lines(f / "d.jsonl", f'{{"label": 0, "text": {DEEP}'),
    "lines that are a pipe": lambda f: fifo(f / "d.jsonl"),
    "lines that never end": lambda f: link(f / "d.jsonl", "/dev/zero"),
    "one text many times": lambda f: repeated(f / "d.parquet", "a" * (1 << 20), 1 << 14, "text"),
}


def small(tmp_path: Path, make: Callable[[Path], Path]) -> Path:
    made = make(tmp_path)
    if made.is_file():
        assert made.stat().st_size < 8 << 20, "a bomb is small"
    return made


@pytest.mark.parametrize("make", IMAGES.values(), ids=IMAGES.keys())
def test_pictures(vision, tmp_path, bounded, snapshot, make):
    folder = Path(vision.path)
    data = small(tmp_path, make)
    bounded("init", tmp_path / "trunk", "--base", folder / "base", "--rule", "ode").ok()
    before = snapshot(tmp_path / "trunk")
    head = folder / "heads" / "ants.safetensors"
    line = bounded("add", tmp_path / "trunk", folder / "experts" / "ants", "--data", data, "--head", head).mistake()
    assert str(data) in line and "bug" not in line and "not enough memory" not in line and len(line) < 600, line
    after = {path: digest for path, digest in snapshot(tmp_path / "trunk").items() if not path.endswith("/lock")}
    assert after == before


@pytest.mark.parametrize("make", TEXTS.values(), ids=TEXTS.keys())
def test_texts(text, tmp_path, bounded, make):
    folder = Path(text.path)
    data = small(tmp_path, make)
    bounded("init", tmp_path / "trunk", "--base", folder / "base", "--rule", "ode").ok()
    task = text.tasks[0].name
    words = ["add", tmp_path / "trunk", folder / "experts" / task, "--data", data]
    line = bounded(*words, "--head", folder / "heads" / f"{task}.safetensors").mistake()
    assert str(data) in line and "bug" not in line and "not enough memory" not in line and len(line) < 600, line


ABSURD = [0, -1, 10**18, 10**30, 1e308, -1e308, "9", None, [], {}, True]


@pytest.mark.parametrize("key", ["logit_scale", "image_mean", "image_std", "tasks", "name", "kind", "base"])
def test_numbers_in_a_suite(vision, tmp_path, bounded, key):
    """A value that no suite has: one line that names the file or the value, whatever command reads it."""
    suite = tmp_path / "suite"
    shutil.copytree(vision.path, suite)
    described = json.loads((suite / "suite.json").read_text())
    for value in (*ABSURD, [1e308] * 3, [10**400] * 3, [0, 0, 0]):
        (suite / "suite.json").write_text(json.dumps({**described, key: value}))
        done = bounded("evaluate", suite / "base", "--suite", suite)
        assert done.code in (0, 2), f"{key} = {value!r}: {done.err}"
        if done.code:
            assert "bug" not in done.mistake()
        assert "nan" not in done.out.lower(), f"{key} = {value!r}: {done.out}"
    (suite / "suite.json").write_text(DEEP)
    assert "suite.json" in bounded("evaluate", suite / "base", "--suite", suite).mistake()


@pytest.mark.parametrize("key", ["hidden_size", "image_size", "num_attention_heads", "num_hidden_layers", "projection_dim"])  # fmt: skip
def test_numbers_in_a_config(vision, tmp_path, bounded, key):
    """The model is not built before its numbers are known to be those of the weights."""
    suite = tmp_path / "suite"
    shutil.copytree(vision.path, suite)
    config = suite / "base" / "config.json"
    described = json.loads(config.read_text())
    for value in ABSURD:
        config.write_text(json.dumps({**described, key: value}))
        done = bounded("evaluate", suite / "experts" / "ants", "--suite", suite)
        assert done.code in (0, 2), f"{key} = {value!r}: {done.err}"
        if done.code:
            assert "bug" not in done.mistake(), f"{key} = {value!r}: {done.err}"
        bounded("init", tmp_path / "trunk", "--base", suite / "base", "--rule", "average").ok()
        shutil.rmtree(tmp_path / "trunk")
    for bad in (DEEP, "", "[]", "null", io.BytesIO(b"\xff\xfe").getvalue().decode("latin-1")):
        config.write_text(bad)
        assert bounded("init", tmp_path / "last", "--base", suite / "base", "--rule", "average").code in (0, 2)
        shutil.rmtree(tmp_path / "last", ignore_errors=True)
