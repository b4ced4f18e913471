"""Safetensors files that were changed, cut or made up: read as they are or refused, never a crash, nothing half-written."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from mergeway.checkpoint import inspect_checkpoint, open_checkpoint
from mergeway.cli import main
from mergeway.errors import CheckpointError

TENSORS = {"w.weight": torch.arange(12.0).reshape(3, 4), "b.bias": torch.ones(4).half(), "ids": torch.arange(3)}
VALID = save(TENSORS, metadata={"format": "pt"})
HEAD = 8 + int.from_bytes(VALID[:8], "little")

DTYPES = st.sampled_from(["F64", "F32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "F7", "", None, 3])
NUMBERS = st.one_of(st.integers(-2, 70), st.sampled_from([2**31, 2**63 - 1, 2**64, -(2**63), 1e300, None, "8", []]))
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": DTYPES,
        "shape": st.lists(NUMBERS, max_size=4),
        "data_offsets": st.lists(NUMBERS, max_size=3),
        "more": NUMBERS,
    },
)
NAMES = st.one_of(
    st.sampled_from(["w.weight", "b.bias", "ids", "__metadata__", "", "\0", "../x", "é\u2028"]), st.text(max_size=5)
)
HEADERS = st.one_of(
    st.dictionaries(NAMES, st.one_of(ENTRIES, NUMBERS, st.dictionaries(NAMES, NAMES, max_size=2)), max_size=4),
    st.recursive(st.one_of(NUMBERS, st.booleans(), NAMES), lambda inner: st.lists(inner, max_size=3), max_leaves=5),
)


@st.composite
def flipped(draw: st.DrawFn) -> bytes:
    """A valid file with a few bytes changed, most of them in its header."""
    data = bytearray(VALID)
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.one_of(st.integers(0, HEAD - 1), st.integers(0, len(data) - 1)))] = draw(st.integers(0, 255))
    return bytes(data)


@st.composite
def rewritten(draw: st.DrawFn) -> bytes:
    """A file whose header is well-formed JSON that says something else, with a length that may lie."""
    text = json.dumps(draw(HEADERS)).encode()
    length = draw(
        st.one_of(st.just(len(text)), st.integers(0, 2 * len(text)), st.sampled_from([2**31, 2**63, 2**64 - 1]))
    )
    return length.to_bytes(8, "little") + text + bytes(draw(st.integers(0, 80)))


@st.composite
def edited(draw: st.DrawFn) -> bytes:
    """The valid header with one entry changed in one place: the near misses."""
    header = json.loads(VALID[8:HEAD])
    name = draw(st.sampled_from(sorted(TENSORS)))
    part = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
    if part == "dtype":
        header[name][part] = draw(DTYPES)
    else:
        header[name][part][draw(st.integers(0, len(header[name][part]) - 1))] = draw(NUMBERS)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + VALID[HEAD:]


FILES = st.one_of(
    flipped(), rewritten(), edited(), st.binary(max_size=64), st.integers(0, len(VALID) - 1).map(lambda n: VALID[:n])
)


@settings(max_examples=400)
@given(FILES)
def test_reading_works_or_says_why_not(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(data)
        try:
            checkpoint = open_checkpoint(path)
            seen = inspect_checkpoint(checkpoint)
        except CheckpointError:
            return
        # What we accept, the library that defines the format accepts as well, and it says the same.
        theirs = load_file(path)
        assert checkpoint.infos.keys() == theirs.keys() == seen.tensors.keys()
        for name, tensor in theirs.items():
            info = checkpoint.infos[name]
            assert (info.shape, info.dtype) == (tuple(tensor.shape), tensor.dtype)
            assert checkpoint.read(name).reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


@settings(max_examples=80)
@given(FILES, st.booleans(), st.sampled_from(["average", "opcm", "ties"]))
def test_the_command_line_never_crashes(data, as_base, rule):
    with tempfile.TemporaryDirectory() as folder:
        good, bad, out = (Path(folder) / name for name in ("good.safetensors", "bad.safetensors", "out"))
        save_file(TENSORS, good)
        bad.write_bytes(data)
        words = ["merge", *((bad, good) if as_base else (good, bad)), "--rule", rule, "--out", out]
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
            code = main([str(w) for w in words])
        assert code in (0, 2), stderr.getvalue()
        assert good.read_bytes() == save(TENSORS) and bad.read_bytes() == data
        left = {p.name for p in Path(folder).iterdir()} - {"good.safetensors", "bad.safetensors"}
        if code == 0:
            assert left == {"out"}
            assert {p.name for p in out.iterdir()} == {"model.safetensors", "README.md"}
            assert all(
                t.isfinite().all() for t in load_file(out / "model.safetensors").values() if t.is_floating_point()
            )
        else:
            assert left == set()
            assert stderr.getvalue().startswith("error: ") and stderr.getvalue().count("\n") == 1


def test_the_fuzz_meets_both_outcomes():
    """A valid file passes, so a refusal above is the file's fault; and most made-up files are refused."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(VALID)
        assert open_checkpoint(path).infos.keys() == TENSORS.keys()
