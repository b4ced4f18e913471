"""No changed byte of a snapshot is believed: a command refuses and names the file, or comes to what it comes to without it."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import save_file
from shared import draw_tensors

import mergeway as mw

FLIPS = 8  # in each file, besides the first and the last byte


def flipped(path: Path, flips: int = FLIPS):
    """Each of many bytes of a file changed in turn; afterwards the file is as it was."""
    original = path.read_bytes()
    draw = random.Random(path.name)
    for place in sorted({0, len(original) - 1, *(draw.randrange(len(original)) for _ in range(flips))}):
        changed = bytearray(original)
        changed[place] ^= 1 << draw.randrange(8)
        path.unlink()  # two snapshots may share a file by a link
        path.write_bytes(changed)
        yield place
    path.unlink()
    path.write_bytes(original)


def place_of(path: Path, place: int) -> str:
    """Where a byte of a file lies: in which tensor or which record, if it is in one."""
    if path.name == "journal.jsonl":
        return f"record {path.read_bytes()[:place].count(10)}"
    if path.suffix != ".safetensors":
        return ""
    content = path.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    if place < length:
        return ""
    header = json.loads(content[8:length])
    spans = {name: row["data_offsets"] for name, row in header.items() if name != "__metadata__"}
    return next(name for name, (start, stop) in spans.items() if start <= place - length < stop)


def files_of(trunk: Path, step: int) -> list[Path]:
    return sorted((trunk / "steps" / f"{step:06d}").iterdir())


def own_files(trunk: Path) -> list[Path]:
    """The files beside the snapshots that hold something; the stamps of the base are a hint, and cost a pass when they lie."""
    return sorted(p for p in trunk.iterdir() if p.is_file() and p.name not in ("lock", "base.seen"))


def outcome(call, words, out: Path):
    """What a command comes to, apart from the time of day."""
    done = call(*words, "--json").ok()
    result = {"report": None, "export": done.out}.get(words[0]) or json.loads(done.out).get("result")
    return result, [p.read_bytes() for p in sorted(out.rglob("*.safetensors"))] if out.is_dir() else None


@pytest.mark.parametrize("rule", ["average", "opcm"])
def test_every_command_refuses_or_is_right(stream, tmp_path, call, rule, capsys):
    s = stream(3)
    start, trunk, out = tmp_path / "start", tmp_path / "trunk", tmp_path / "out"
    made = mw.Trunk.create(start, s.base, rule, keep=5)
    for arrival in s.arrivals[:2]:
        made.add(arrival)
    commands = [["add", trunk, s.arrivals[2]], ["export", trunk, out], ["rollback", trunk, 2]]
    commands += [["report", trunk, "--out", tmp_path / "page.html"], ["export", trunk, out, "--lora", 1]]
    commands += [["remove", trunk, "task2", "--from", s.arrivals[1]]] if rule == "average" else []

    def fresh():
        for path in (trunk, out):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(start, trunk)

    # By command, file and tensor: how many bytes were changed, and how many of these changes were refused.
    refused, found = 0, Counter()
    tried: Counter[tuple[str, str, str]] = Counter()
    for words in commands:
        fresh()
        expected = outcome(call, words, out)
        for path in [*files_of(start, 2), *own_files(start)]:
            fresh()
            path = trunk / path.relative_to(start)
            for place in flipped(path, FLIPS if "steps" in path.parts else 3):
                kept = path.read_bytes()
                done = call(*words, "--json")
                where = (
                    " ".join([words[0], *words[3:4]] if "--lora" in words else words[:1]),
                    path.name,
                    place_of(start / path.relative_to(trunk), place),
                )
                tried[where] += 1
                if done.code:
                    line = done.mistake()
                    assert path.name in line and "bug" not in line, f"{words[0]}, byte {place} of {path.name}: {line}"
                    refused += 1
                    found[where] += 1
                    assert (trunk / "journal.jsonl").read_bytes().count(b"\n") == 3 or path.name == "journal.jsonl"
                else:
                    fresh()
                    path.unlink()
                    path.write_bytes(kept)
                    assert outcome(call, words, out) == expected, f"{words[0]}, byte {place} of {path}"
                    fresh()
                shutil.rmtree(out, ignore_errors=True)
    read = {where: n for where, n in tried.items() if found[where]}
    with capsys.disabled():
        print(f"\n{refused} of {sum(read.values())} refused in what is read, {tried.total()} in all", flush=True)
    assert found == read, "a command refused one changed byte of a tensor and believed another"
    files = {where[:2] for where in read}
    # The update of an integer buffer is none: a report and an adapter do without it. An add follows the last record.
    unread = {where for where in tried.keys() - read.keys() if where[:2] in files}
    buffers = {(command, "model.safetensors", "position_ids") for command in ("report", "export --lora")}
    assert unread <= buffers | {("add", "journal.jsonl", "record 0"), ("add", "journal.jsonl", "record 1")}
    assert refused > tried.total() / 2


def test_the_tensor_is_named(stream, tmp_path, call):
    s = stream(2)
    mw.Trunk.create(tmp_path / "trunk", s.base, "average").add(s.arrivals[0])
    path = tmp_path / "trunk" / "steps" / "000001" / "state.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    start, _ = json.loads(data[8 : 8 + length])["sum/layer.bias"]["data_offsets"]
    data[8 + length + start] ^= 1
    path.write_bytes(data)
    line = call("add", tmp_path / "trunk", s.arrivals[1]).mistake()
    assert f"{path}: tensor 'sum/layer.bias' was changed after step 1 was committed" in line
    assert "rollback" in line


def test_align_and_the_calibration_memory(tmp_path, call):
    """Samples, their description and heads are checked before a rule or a person sees them."""
    folder = tiny.vision_suite(tmp_path / "suite")
    start, trunk = tmp_path / "start", tmp_path / "trunk"
    made = mw.Trunk.create(start, folder / "base", "ode", threads=1)
    given = [
        (
            folder / "experts" / t,
            {"data": str(folder / "data" / f"{t}.npz"), "head": folder / "heads" / f"{t}.safetensors"},
        )
        for t in tiny.TASKS
    ]
    for expert, how in given[:2]:
        made.add(expert, **how)
    shutil.copytree(start, trunk)
    found = {p.name for p in files_of(trunk, 2)}
    assert {"calibration.json", "calibration.parquet", "calibration-heads.safetensors"} <= found
    expert, how = given[2]
    add = ["add", trunk, expert, "--data", how["data"], "--head", how["head"], "--threads", 1]
    last = given[1][1]
    align = ["align", trunk, "--data", last["data"], "--head", last["head"]]
    for path in files_of(trunk, 2):
        for place in flipped(path, 3):
            for words in (add, align, ["memory", trunk]):
                done = call(*words)
                if done.code:
                    assert path.name in done.mistake(), done.err
                    continue
                # Nobody asked for this file.
                used = path.name.startswith("calibration") or path.name == "digests.json"
                assert not used and words[0] != "align", f"{words[0]} believed byte {place} of {path.name}"
                changed = path.read_bytes()
                if words[0] == "add":
                    assert mw.Trunk.open(trunk).log()[-1].step == 3
                    shutil.rmtree(trunk)
                    shutil.copytree(start, trunk)
                    path.unlink()
                    path.write_bytes(changed)


def test_heads_are_checked(tmp_path, call):
    """A head with a changed byte, a head that is gone, and one that was put there by somebody else."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_labels=2
    )
    for name in ("base", "a", "b"):
        BertForSequenceClassification(config).save_pretrained(tmp_path / name)
    trunk = tmp_path / "trunk"
    made = mw.Trunk.create(trunk, tmp_path / "base", "average")
    made.add(tmp_path / "a")
    for name in ("heads.json", "heads.safetensors"):
        path = trunk / "steps" / "000001" / name
        for _ in flipped(path, 4):
            for words in (["add", trunk, tmp_path / "b"], ["export", trunk, tmp_path / "out", "--backbone"]):
                line = call(*words).mistake()
                assert name in line and "bug" not in line
        original = path.read_bytes()
        path.unlink()
        assert f"{name}: is missing" in call("export", trunk, tmp_path / "out", "--backbone").mistake()
        path.write_bytes(original)
    call("export", trunk, tmp_path / "out", "--backbone").ok()


def test_what_does_not_belong_is_not_read(stream, tmp_path, call):
    s = stream(2)
    mw.Trunk.create(tmp_path / "trunk", s.base, "average").add(s.arrivals[0])
    step = tmp_path / "trunk" / "steps" / "000001"
    (step / "heads.json").write_text("[]")
    assert (
        "heads.json: does not belong to the snapshot" in call("export", tmp_path / "trunk", tmp_path / "out").mistake()
    )
    (step / "heads.json").unlink()
    save_file(draw_tensors(1), step / "model-00002.safetensors")
    call("export", tmp_path / "trunk", tmp_path / "out").ok()


def test_a_tensor_is_digested_once(stream, tmp_path, monkeypatch):
    """However many threads ask for it."""
    from concurrent.futures import ThreadPoolExecutor

    from mergeway.trunk import snapshot

    s = stream(2)
    made = mw.Trunk.create(tmp_path / "trunk", s.base, "average")
    made.add(s.arrivals[0])
    seen = []
    original = snapshot.digest_tensor
    monkeypatch.setattr(snapshot, "digest_tensor", lambda tensor: (seen.append(tensor.shape), original(tensor))[1])
    deployed = made.deployed()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(deployed.read, list(deployed.infos) * 20))
    assert len(seen) == len(deployed.infos)
