"""`verify` finds any changed byte of a trunk and says where it is."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import mergeway as mw

FLIPS = 12  # in each file, besides the first and the last byte


@pytest.fixture
def trunk(stream, tmp_path):
    """Three snapshots by OPCM and a rollback: everything a trunk can hold."""
    s = stream(3)
    made = mw.Trunk.create(tmp_path / "trunk", s.base, "opcm", keep=5)
    for arrival in s.arrivals:
        made.add(arrival)
    made.rollback(2)
    return tmp_path / "trunk"


def problems(path) -> list[str]:
    """What `verify` finds, be it in opening the trunk or in checking it."""
    try:
        return mw.Trunk.open(path).verify()
    except mw.MergewayError as problem:
        return [str(problem)]


def contents(path):
    """All files of a trunk that hold something: the lock is empty, and the base's stamps are a hint that may be wrong."""
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name not in ("lock", "base.seen"))


def test_intact(trunk):
    assert problems(trunk) == []
    names = {p.name for p in contents(trunk)}
    assert names == {"trunk.json", "journal.jsonl", "head", "digests.json", "model.safetensors", "state.safetensors"}


def test_any_changed_byte_of_any_file(trunk):
    draw = random.Random(0)
    found = 0
    for path in contents(trunk):
        original = path.read_bytes()
        places = {0, len(original) - 1, *(draw.randrange(len(original)) for _ in range(FLIPS))}
        for place in places:
            changed = bytearray(original)
            changed[place] ^= 1 << draw.randrange(8)
            shutil.copyfile(path, path.with_suffix(".was"))  # a new file: two snapshots may share one by a link
            path.unlink()
            path.write_bytes(changed)
            path.with_suffix(".was").unlink()
            said = problems(trunk)
            assert said, f"byte {place} of {path} was changed and nobody noticed"
            assert any(path.name in line for line in said), f"byte {place} of {path}: {said}"
            found += 1
            path.write_bytes(original)
    assert found > 100
    assert problems(trunk) == []


def test_every_byte_of_the_small_files(trunk):
    """Where a single bit decides over a name, a number or the end of a line."""
    for path in (trunk / "head", trunk / "trunk.json"):
        original = path.read_bytes()
        for place in range(len(original)):
            changed = bytearray(original)
            changed[place] ^= 1 << (place % 7)
            path.write_bytes(changed)
            assert any(path.name in line for line in problems(trunk)), f"byte {place} of {path.name}: {problems(trunk)}"
        path.write_bytes(original)
    assert problems(trunk) == []


@pytest.mark.parametrize("how", ["shortened", "lengthened", "emptied", "gone"])
def test_files_of_another_length(trunk, how):
    for path in contents(trunk):
        original = path.read_bytes()
        path.unlink()
        if how != "gone":
            path.write_bytes({"shortened": original[:-1], "lengthened": original + b"\n", "emptied": b""}[how])
        assert any(path.name in line for line in problems(trunk)), f"{path} {how}: {problems(trunk)}"
        path.write_bytes(original)
    assert problems(trunk) == []


def test_a_changed_value_names_its_tensor(trunk):
    path = trunk / "steps" / "000001" / "state.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    start, _ = json.loads(data[8 : 8 + length])["sum/layer.bias"]["data_offsets"]
    data[8 + length + start] ^= 1
    path.write_bytes(data)
    assert problems(trunk) == [f"{path}: tensor 'sum/layer.bias' was changed"]


def test_an_extra_file_in_a_snapshot(trunk):
    (trunk / "steps" / "000003" / "model-00002.safetensors").write_bytes(b"x")
    assert "does not belong" in problems(trunk)[0]


def test_a_missing_snapshot(trunk):
    shutil.rmtree(trunk / "steps" / "000004")
    assert "000004: the snapshot of the last step is missing" in problems(trunk)[0]
    shutil.rmtree(trunk / "steps")
    assert "steps" in problems(trunk)[0]


def test_snapshots_exchanged(trunk):
    one, two = trunk / "steps" / "000001", trunk / "steps" / "000003"
    one.rename(trunk / "aside")
    two.rename(one)
    (trunk / "aside").rename(two)
    assert {"000001", "000003"} <= {line.split("steps/")[1][:6] for line in problems(trunk)}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda lines: lines[:2] + lines[3:], id="removed"),
        pytest.param(lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], id="reordered"),
        pytest.param(lambda lines: lines[1:], id="first-removed"),
        pytest.param(lambda lines: lines[:-1], id="last-removed"),
        pytest.param(lambda lines: lines[:-3], id="last-three-removed"),
        pytest.param(lambda lines: [*lines[:-1], lines[-1][:-20]], id="last-cut"),
        pytest.param(lambda lines: [*lines, lines[-1]], id="doubled"),
        pytest.param(lambda lines: [*lines, "{}"], id="not-a-record"),
        pytest.param(
            lambda lines: [*lines[:2], lines[2].replace('"weight":1.0', '"weight":1.00'), *lines[3:]], id="respelled"
        ),
        pytest.param(
            lambda lines: [*lines[:2], lines[2].replace('"weight":1.0', '"weight":2.0'), *lines[3:]], id="weight"
        ),
        pytest.param(lambda lines: [lines[0] + " ", *lines[1:]], id="blank"),
        pytest.param(lambda lines: [*lines[:1], "", *lines[1:]], id="empty-line"),
        pytest.param(lambda lines: [], id="emptied"),
    ],
)
def test_a_changed_journal(trunk, change, call):
    path = trunk / "journal.jsonl"
    lines = path.read_text().splitlines()
    changed = "".join(line + "\n" for line in change(lines))
    assert changed != path.read_text()
    path.write_text(changed)
    assert "journal.jsonl" in problems(trunk)[0]
    assert "journal.jsonl" in call("verify", trunk).mistake()
    before = {p: p.read_bytes() for p in contents(trunk)}
    call("rollback", trunk, 1).mistake()
    assert {p: p.read_bytes() for p in contents(trunk)} == before, "a writer changed a trunk it could not trust"


def test_a_changed_line_is_named(trunk):
    path = trunk / "journal.jsonl"
    path.write_text(path.read_text().replace('"task":"task2"', '"task":"task9"'))
    assert problems(trunk) == [f"{path}, line 3: the record of step 2 was changed after it was written"]


def test_names_with_odd_characters_survive(stream, tmp_path, call):
    """Line separators of Unicode, quotes, brackets that look like markup, all are names of files."""
    s = stream(3)
    path = tmp_path / "[/bold] trunk"
    call("init", path, "--base", s.base, "--rule", "average").ok()
    assert "printable" in call("add", path, s.arrivals[0], "--task", "a\u2028b").mistake()
    call("add", path, s.arrivals[0], "--task", "a b").ok()
    call("add", path, s.arrivals[1], "--task", '[/red] "quoted" | `x` é').ok()
    odd = tmp_path / "x[" / "y]\u2028z.safetensors"  # reads as [/y] in a line
    odd.parent.mkdir()
    save_file({n: t + 1 if t.is_floating_point() else t for n, t in s.base_tensors.items()}, odd)
    call("add", path, odd).ok()
    for words in (["log", path], ["show", path], ["verify", path], ["export", path, tmp_path / "[/out]"]):
        call(*words).ok()
    assert [r["task"] for r in call("log", path, "--json").json()][1:] == [
        "a b",
        '[/red] "quoted" | `x` é',
        "y]_z",
    ]
    call("merge", s.base, odd, "--out", tmp_path / "[/merged]").ok()


def test_json_lists_the_problems(trunk, call):
    assert call("verify", trunk, "--json").json() == {"trunk": str(trunk), "intact": True, "problems": []}
    path = trunk / "steps" / "000003" / "digests.json"
    path.write_bytes(path.read_bytes() + b" ")
    done = call("verify", trunk, "--json")
    assert done.code == 2
    said = json.loads(done.out)
    assert said["intact"] is False and said["problems"] == [f"{path}: was changed after step 3 was committed"]


def test_every_problem_gets_a_line(trunk, call):
    for step in ("000001", "000003"):
        (trunk / "steps" / step / "state.safetensors").unlink()
    done = call("verify", trunk)
    assert done.code == 2
    lines = done.err.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") and line.endswith("is missing") for line in lines)


def test_what_is_verified_is_what_is_deployed(trunk):
    opened = mw.Trunk.open(trunk)
    assert all(
        torch.equal(t, load_file(trunk / "steps" / "000004" / "model.safetensors")[n])
        for n, t in opened.params().items()
    )


def test_a_digest_kept_elsewhere_tells_a_forged_history(stream, tmp_path, call):
    """Two intact trunks that differ in one arrival: only the digest that `add` printed tells which is ours."""
    s = stream(3)
    ours, forged = tmp_path / "ours", tmp_path / "forged"
    for path, arrivals in ((ours, s.arrivals[:2]), (forged, s.arrivals[1:])):
        call("init", path, "--base", s.base, "--rule", "average").ok()
        printed = [call("add", path, arrival).ok().out for arrival in arrivals]
        if path is ours:
            heads = [text.split("head")[1].split()[0] for text in printed]
    assert heads == [r.hash for r in mw.Trunk.open(ours).log()[1:]]
    for step, digest in enumerate(heads, 1):  # an earlier one stays good: the journal only grows
        assert f"the digest given is that of step {step}" in call("verify", ours, "--against", digest).ok().out
    call("verify", forged).ok()
    line = call("verify", forged, "--against", heads[-1]).mistake()
    assert "journal.jsonl: no record has the digest" in line and "another history" in line
    assert call("verify", forged, "--against", heads[0], "--json").code == 2
    # A head in the digest's own words, a journal cut back to its first records: told apart too.
    lines = (ours / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (ours / "journal.jsonl").write_bytes(b"".join(lines[:2]))
    (ours / "head").write_text(f"1 {heads[0]}\n")
    shutil.rmtree(ours / "steps" / "000002")
    call("verify", ours).ok()
    assert "cut off" in call("verify", ours, "--against", heads[1]).mistake()
    for bad in ("", "12ab", heads[0][:-1], heads[0].upper(), "-1"):
        assert "64 hexadecimal digits" in call("verify", ours, f"--against={bad}").mistake()
