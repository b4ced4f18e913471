"""The forms of a checkpoint: a file, a directory, shards with an index, a hub id, a pickle."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shared import DATA_FREE, draw_tensors
from torch import nn

import mergeway as mw
from mergeway.checkpoint import open_checkpoint
from mergeway.checkpoint.convert import main as convert
from mergeway.errors import CheckpointError


def write_shards(tensors, folder: Path, count: int) -> Path:
    """A sharded model directory as transformers lays it out."""
    folder.mkdir(parents=True)
    names = sorted(tensors)
    weight_map = {}
    for number in range(count):
        label = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::count]}
        save_file(part, folder / label, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, label)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def assert_same(ours, theirs) -> None:
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name].dtype == theirs[name].dtype
        assert torch.equal(ours[name], theirs[name]), name


def mean(stream) -> dict[str, torch.Tensor]:
    """The float64 mean of a stream's arrivals, computed in the open."""
    names = [n for n, t in stream.base_tensors.items() if t.is_floating_point()]
    return {n: torch.stack([a[n].double() for a in stream.arrival_tensors]).mean(0) for n in names}


def test_file_directory_shards_modules_and_dictionaries_are_one(stream, tmp_path):
    s = stream(2)
    expected = mw.merge(s.base, s.arrivals, "opcm")
    single = tmp_path / "single"
    single.mkdir()
    save_file(s.base_tensors, single / "model.safetensors")
    odd = tmp_path / "odd"
    odd.mkdir()
    save_file(s.arrival_tensors[0], odd / "weights.safetensors")
    shards = write_shards(s.arrival_tensors[1], tmp_path / "shards", 3)
    assert_same(mw.merge(single, [odd, shards], "opcm"), expected)
    assert_same(mw.merge(s.base_tensors, s.arrival_tensors, "opcm"), expected)


def test_modules(tmp_path):
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)) for _ in range(3)]
    merged = mw.merge(modules[0], modules[1:], "average")
    for name, tensor in merged.items():
        two = [m.state_dict()[name].double() for m in modules[1:]]
        torch.testing.assert_close(tensor.double(), (two[0] + two[1]) / 2)


def test_inputs_are_not_modified(stream):
    s = stream(2)
    before = [{n: t.clone() for n, t in tensors.items()} for tensors in (s.base_tensors, *s.arrival_tensors)]
    for rule in DATA_FREE:
        mw.merge(s.base_tensors, s.arrival_tensors, rule)
    for tensors, copy in zip((s.base_tensors, *s.arrival_tensors), before, strict=True):
        assert_same(tensors, copy)


def test_buffers_come_from_the_base(tmp_path):
    base = draw_tensors(0) | {
        "ids": torch.arange(4),
        "mask": torch.tensor([True, False]),
        "u8": torch.tensor([7]).byte(),
    }
    arrival = draw_tensors(1) | {"ids": torch.zeros(9, dtype=torch.int32), "mask": torch.tensor([False, False])}
    for rule in DATA_FREE:
        merged = mw.merge(base, [arrival], rule)
        for name in ("ids", "mask", "u8"):
            assert merged[name].dtype == base[name].dtype
            assert torch.equal(merged[name], base[name])


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_float_dtype_keeps_its_kind_and_rounds_once(stream, kind):
    s = stream(3, dtype=kind)
    merged = mw.merge(s.base, s.arrivals, "average")
    allowed = {torch.float64: 1e-12, torch.float32: 1e-6}.get(kind)
    for name, exact in mean(s).items():
        assert merged[name].dtype is kind
        if allowed:
            torch.testing.assert_close(merged[name].double(), exact, rtol=allowed, atol=allowed)
            continue
        # Half precision: the nearest value to the exact mean, except where float32 rounding sits on the boundary.
        step = (exact.to(kind).double() - merged[name].double()).abs()
        assert (step > 0).float().mean() < 0.01
        assert step.max() <= torch.finfo(kind).eps * exact.abs().max()


def test_arrival_of_another_float_dtype(stream, tmp_path):
    s = stream(1)
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in s.arrival_tensors[0].items()}
    save_file(half, tmp_path / "half.safetensors")
    merged = mw.merge(s.base, [tmp_path / "half.safetensors"], "average")
    for name, tensor in half.items():
        if tensor.is_floating_point():
            assert merged[name].dtype is torch.float32
            torch.testing.assert_close(merged[name], tensor.float(), rtol=1e-6, atol=1e-6)


# --- hub ids ---------------------------------------------------------------------------------------------------------


def put_in_cache(repo: str, files: dict[str, Path], revision: str, commit: str) -> None:
    """A repository in the hub's cache, laid out as huggingface_hub does after a download."""
    root = Path(os.environ["HF_HOME"]) / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    for folder in (root / "blobs", root / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / revision).write_text(commit)
    for name, source in files.items():
        blob = root / "blobs" / f"{commit[:8]}-{name}"
        blob.write_bytes(source.read_bytes())
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))


def test_hub_id_from_the_cache(stream, tmp_path, call):
    s = stream(2)
    put_in_cache("acme/base", {"model.safetensors": s.base}, "main", "a" * 40)
    put_in_cache("acme/tuned", {"model.safetensors": s.arrivals[0]}, "main", "b" * 40)
    put_in_cache("acme/tuned", {"model.safetensors": s.arrivals[1]}, "v2", "c" * 40)
    refs = ["acme/tuned", "acme/tuned@v2", "acme/tuned@" + "c" * 40]
    merged = mw.merge("acme/base", refs, "average")
    assert_same(merged, mw.merge(s.base, [s.arrivals[0], s.arrivals[1], s.arrivals[1]], "average"))

    trunk = tmp_path / "trunk"
    call("init", trunk, "--base", "acme/base", "--rule", "average").ok()
    record = call("add", trunk, "acme/tuned@v2", "--json").json()
    assert record["source"] == "acme/tuned@v2"
    call("verify", trunk).ok()


def test_hub_id_that_is_not_in_the_cache_names_the_download(stream, call, tmp_path):
    s = stream(1)
    line = call("merge", s.base, "acme/unknown", "--out", tmp_path / "out").mistake()
    assert "hf download acme/unknown" in line
    put_in_cache("acme/known", {"model.safetensors": s.arrivals[0]}, "main", "d" * 40)
    line = call("merge", s.base, "acme/known@v9", "--out", tmp_path / "out").mistake()
    assert "hf download acme/known --revision v9" in line


def test_a_local_path_goes_before_a_hub_id(stream, tmp_path, monkeypatch):
    s = stream(1)
    monkeypatch.chdir(tmp_path)
    Path("acme/local").mkdir(parents=True)
    save_file(s.base_tensors, "acme/local/model.safetensors")
    assert open_checkpoint("acme/local").infos.keys() == s.base_tensors.keys()


# --- pickles ---------------------------------------------------------------------------------------------------------


class Attack:
    """Writes a file when unpickled by a reader that trusts its input."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_pickle_is_refused_and_the_named_command_converts_it(stream, tmp_path, call):
    s = stream(1)
    folder = tmp_path / "my model"
    folder.mkdir()
    torch.save(s.arrival_tensors[0], folder / "pytorch_model.bin")
    line = call("merge", s.base, folder, "--out", tmp_path / "out").mistake()
    assert "--allow-pickle" in line
    words = shlex.split(line.split("convert it with: ")[1])
    assert words[0] == "python"
    done = subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True, text=True)
    assert done.stderr == ""
    assert_same(load_file(folder / "model.safetensors"), s.arrival_tensors[0])
    merged = mw.merge(s.base, [folder], "average")
    assert_same(merged, mw.merge(s.base, s.arrivals, "average"))


def test_converting_does_not_overwrite_and_says_how_it_is_used(stream, tmp_path, capsys):
    s = stream(1)
    torch.save(s.arrival_tensors[0], tmp_path / "a.pt")
    assert convert([str(tmp_path / "a.pt"), str(s.base)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert_same(load_file(s.base), s.base_tensors)
    assert convert([]) == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin"])
def test_allow_pickle_reads_a_file_and_a_directory(stream, tmp_path, call, name):
    s = stream(1)
    (tmp_path / "dir").mkdir()
    path = tmp_path / "dir" / name
    torch.save(s.arrival_tensors[0], path)
    expected = mw.merge(s.base, s.arrivals, "average")
    for k, ref in enumerate((path, path.parent)):
        assert "pickle" in call("merge", s.base, ref, "--out", tmp_path / f"out{k}").mistake()
        call("merge", s.base, ref, "--out", tmp_path / f"out{k}", "--allow-pickle").ok()
        assert_same(load_file(tmp_path / f"out{k}" / "model.safetensors"), expected)


def test_pickled_shards(stream, tmp_path):
    s = stream(1)
    names = sorted(s.arrival_tensors[0])
    folder = tmp_path / "dir"
    folder.mkdir()
    weight_map = {}
    for k in range(2):
        label = f"pytorch_model-{k + 1:05d}-of-00002.bin"
        torch.save({n: s.arrival_tensors[0][n] for n in names[k::2]}, folder / label)
        weight_map |= dict.fromkeys(names[k::2], label)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    expected = mw.merge(s.base, s.arrivals, "average")
    assert_same(mw.merge(s.base, [folder], "average", allow_pickle=True), expected)
    with pytest.raises(CheckpointError, match="convert it with") as refused:
        open_checkpoint(folder)
    words = shlex.split(str(refused.value).split("convert it with: ")[1])
    assert words[:3] == ["python", "-m", "mergeway.checkpoint.convert"]
    assert convert(words[3:]) == 0
    assert_same(mw.merge(s.base, [folder], "average"), expected)


def test_a_malicious_pickle_never_runs(stream, tmp_path, call):
    s = stream(1)
    witness = tmp_path / "witness"
    path = tmp_path / "evil.pt"
    torch.save({"layer.bias": Attack(witness)}, path)
    torch.load(path, weights_only=False)
    assert witness.exists(), "the attack does not work, so the test shows nothing"
    witness.unlink()
    call("merge", s.base, path, "--out", tmp_path / "out").mistake()
    assert "weights-only" in call("merge", s.base, path, "--out", tmp_path / "out", "--allow-pickle").mistake()
    assert convert([str(path), str(tmp_path / "x.safetensors")]) == 2
    assert not witness.exists()
    assert not (tmp_path / "x.safetensors").exists()


def test_trunk_of_a_pickled_base(stream, tmp_path, call):
    s = stream(1)
    torch.save(s.base_tensors, tmp_path / "base.pt")
    trunk = tmp_path / "trunk"
    assert "pickle" in call("init", trunk, "--base", tmp_path / "base.pt", "--rule", "average").mistake()
    call("init", trunk, "--base", tmp_path / "base.pt", "--rule", "average", "--allow-pickle").ok()
    call("add", trunk, s.arrivals[0]).ok()
    call("verify", trunk).ok()


def test_safetensors_metadata_says_pt(stream, tmp_path, call):
    """`transformers` refuses a file without it."""
    s = stream(1)
    call("merge", s.base, s.arrivals[0], "--out", tmp_path / "out").ok()
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
