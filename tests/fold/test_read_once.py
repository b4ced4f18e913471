"""How many bytes a fold reads: counted at the one place where tensors of a file are handed out, to the byte."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shared import listing

import mergeway as mw
from mergeway.checkpoint.mapped import MappedFile
from mergeway.errors import TrunkError
from mergeway.trunk import stamps

ELEMENTWISE = ["average", "task-arithmetic", "ties", "magmax", "randmix"]


@pytest.fixture
def read(monkeypatch) -> Counter[Path]:
    """The bytes that were read of every file."""
    counted: Counter[Path] = Counter()
    plain = MappedFile.read

    def reading(self: MappedFile, name: str) -> torch.Tensor:
        counted[self.path] += self.infos[name].nbytes
        return plain(self, name)

    monkeypatch.setattr(MappedFile, "read", reading)
    return counted


def weights(path: Path) -> int:
    """The bytes of the tensors of a file."""
    return sum(t.nbytes for t in load_file(path).values())


def let_age(path: Path, monkeypatch) -> None:
    """As if the file had been written long ago."""
    now = stamps.time.time_ns
    monkeypatch.setattr(stamps.time, "time_ns", lambda: now() + 10 * stamps.TOO_FRESH)
    assert path.exists()


@pytest.mark.parametrize("rule", ELEMENTWISE)
def test_an_add_reads_base_arrival_and_state_once(stream, tmp_path, read, monkeypatch, rule):
    s = stream(3)
    let_age(s.base, monkeypatch)
    trunk = mw.Trunk.create(tmp_path / "trunk", s.base, rule)
    for arrival in s.arrivals[:2]:
        trunk.add(arrival)
    read.clear()
    trunk.add(s.arrivals[2])
    state = tmp_path / "trunk" / "steps" / "000002" / "state.safetensors"
    walks = 4 if rule == "ties" else 1
    buffers = sum(t.nbytes for t in load_file(s.base).values() if not t.is_floating_point())
    assert read[state] == walks * weights(state)
    for path in (s.base, s.arrivals[2]):
        assert read[path] == walks * (weights(path) - buffers) + buffers, path.name


@pytest.mark.parametrize("rule", ["average", "task-arithmetic"])
def test_a_merge_reads_everything_once(stream, tmp_path, read, rule):
    s = stream(3)
    mw.merge_into(tmp_path / "out", s.base, s.arrivals, rule)
    assert {path: read[path] for path in (s.base, *s.arrivals)} == {p: weights(p) for p in (s.base, *s.arrivals)}


@pytest.mark.parametrize("change", ["content", "copy", "time"])
def test_a_base_is_digested_again_only_when_its_file_is_another(stream, tmp_path, read, monkeypatch, change):
    s = stream(3)
    let_age(s.base, monkeypatch)
    trunk = mw.Trunk.create(tmp_path / "trunk", s.base, "average")
    once = weights(s.base)
    read.clear()
    trunk.add(s.arrivals[0])
    assert read[s.base] == once
    status = s.base.stat()
    if change == "content":
        data = bytearray(s.base.read_bytes())
        data[-1] ^= 1
        s.base.write_bytes(data)
        os.utime(s.base, ns=(status.st_atime_ns, status.st_mtime_ns))
        before = listing(tmp_path / "trunk")
        with pytest.raises(mw.MergewayError, match="has changed since 'init'"):
            trunk.add(s.arrivals[1])
        assert listing(tmp_path / "trunk") == before
        return
    if change == "copy":
        copy = s.base.with_name("copy")
        copy.write_bytes(s.base.read_bytes())
        copy.rename(s.base)
    else:
        os.utime(s.base)
    for arrival, times in zip(s.arrivals[1:], (2, 1), strict=True):
        read.clear()
        trunk.add(arrival)
        assert read[s.base] == times * once
    read.clear()
    assert trunk.verify() == []
    assert read[s.base] == once, "verify believes no stamp"


def test_a_base_that_was_written_a_moment_ago_is_not_believed(stream, tmp_path, read):
    s = stream(1)
    trunk = mw.Trunk.create(tmp_path / "trunk", s.base, "average")
    assert (tmp_path / "trunk" / stamps.SEEN).exists()
    read.clear()
    trunk.add(s.arrivals[0])
    assert read[s.base] == 2 * weights(s.base)


@pytest.mark.parametrize("how", ["in place", "by another file"])
def test_a_base_that_changed_under_the_same_size_and_time_is_never_folded_with(
    stream, tmp_path, read, monkeypatch, how
):
    """Whoever sets the time of a file back cannot set back the time of that: it costs one pass, and the base is refused."""
    s = stream(1)
    let_age(s.base, monkeypatch)
    trunk = mw.Trunk.create(tmp_path / "trunk", s.base, "average")
    before = os.stat(s.base)
    content = bytearray(s.base.read_bytes())
    content[-1] ^= 1
    written = s.base if how == "in place" else tmp_path / "other"
    written.write_bytes(content)
    os.utime(written, ns=(before.st_atime_ns, before.st_mtime_ns))
    written.replace(s.base)
    after = os.stat(s.base)
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    read.clear()
    with pytest.raises(TrunkError, match="has changed since 'init'"):
        trunk.add(s.arrivals[0])
    assert read[s.base] == weights(s.base)
    assert len(trunk.log()) == 1
    assert any("has changed since 'init'" in line for line in trunk.verify())


@pytest.mark.parametrize("damage", ["{", '{"files": {}, "tensors": {}}', "wrong digests", '{"files": 3}'])
def test_stamps_that_are_damaged_cost_a_pass_and_nothing_else(stream, tmp_path, read, monkeypatch, damage):
    s = stream(1)
    let_age(s.base, monkeypatch)
    trunk = mw.Trunk.create(tmp_path / "trunk", s.base, "average")
    seen = tmp_path / "trunk" / stamps.SEEN
    first = seen.read_text()
    seen.write_text(first.replace('": "', '": "0') if damage == "wrong digests" else damage)
    read.clear()
    trunk.add(s.arrivals[0])
    assert read[s.base] == 2 * weights(s.base)
    assert json.loads(seen.read_text())["tensors"] == json.loads(first)["tensors"]


@pytest.mark.parametrize("rule", [*ELEMENTWISE, "opcm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_found_on_the_way(stream, tmp_path, rule, value):
    s = stream(2)
    trunk = mw.Trunk.create(tmp_path / "trunk", s.base, rule)
    trunk.add(s.arrivals[0])
    bad = load_file(s.arrivals[1])
    bad["layer.tall.weight"][7, 3] = value
    save_file(bad, s.arrivals[1])
    before = listing(tmp_path / "trunk")
    wanted = rf"{s.arrivals[1]}: tensor 'layer.tall.weight' holds 1 values that are NaN or infinite"
    with pytest.raises(mw.MergewayError, match=wanted):
        trunk.add(s.arrivals[1])
    with pytest.raises(mw.MergewayError, match=wanted):
        mw.merge_into(tmp_path / "out", s.base, s.arrivals, rule)
    assert listing(tmp_path / "trunk") == before
    assert not list(tmp_path.glob("*out*"))
