"""A sharded bf16 checkpoint, folded by every data-free rule in a process that may not have the memory to hold it."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from shared import DATA_FREE

# An interpreter with torch takes some 200 MB of these before it has read a byte.
SMALL_LIMIT, LIMIT = 300 * 10**6, 700 * 10**6
EMBEDDING, SQUARE, TALL = (32768, 1024), (1024, 1024), (4096, 256)  # 64 MB, 2 MB and 2 MB in bf16


def shapes(layers: int) -> dict[str, tuple[int, int]]:
    """One large table, a square matrix in every hundredth layer, and many that are quicker to decompose."""
    found = {"embed_tokens.weight": EMBEDDING}
    for k in range(layers):
        found[f"layers.{k}.down.weight"] = SQUARE if k % 100 == 0 else TALL
    return found


def write(folder: Path, layers: int, shards: int, seed: int) -> Path:
    """Numbers drawn once and shifted from tensor to tensor: only their shapes matter here. Seed 0 is the base."""
    folder.mkdir(parents=True)
    origin, noise = (torch.randn(prod(SQUARE), generator=torch.Generator().manual_seed(s)) for s in (0, seed))
    moved = (origin + 0.05 * noise if seed else origin).bfloat16()
    names = list(shapes(layers))
    where = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        tensors = {}
        for name in names[shard::shards]:
            shape = shapes(layers)[name]
            rolled = moved[: min(len(moved), prod(shape))].roll(len(where) + len(tensors))
            tensors[name] = rolled.repeat(prod(shape) // len(rolled)).view(shape)
        save_file(tensors, folder / file)
        where |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def weigh(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def limited(words: list[str], limit: int) -> subprocess.CompletedProcess[str]:
    """A command that may have so many bytes of private writable memory: heap, stacks and anonymous pages."""

    def obey() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    return subprocess.run([sys.executable, *words], preexec_fn=obey, capture_output=True, text=True, check=False)


def fold(stream: Path, out: Path, rule: str, limit: int) -> None:
    options = ["--set", "steps=2"] if rule == "dop" else []
    arrivals = [str(path) for path in sorted(stream.glob("arrival*"))]
    words = ["merge", str(stream / "base"), *arrivals, "--rule", rule, *options, "--out", str(out)]
    done = limited(["-m", "mergeway", *words, "--shard-size", "500MB", "--threads", "1"], limit)
    assert done.returncode == 0, done.stderr[-2000:]
    assert weigh(out) == pytest.approx(weigh(stream / "base"), rel=1e-3)
    shutil.rmtree(out)  # pytest keeps what a test leaves, and every rule leaves two gigabytes


@pytest.mark.parametrize("limit", [SMALL_LIMIT, LIMIT])
def test_the_limit_is_enforced(limit):
    assert limited(["-c", f"bytearray({limit // 2})"], limit).returncode == 0
    assert "MemoryError" in limited(["-c", f"bytearray({limit})"], limit).stderr


def test_two_hundred_megabytes_in_what_an_import_leaves(tmp_path):
    for seed, name in enumerate(("base", "arrival1")):
        assert weigh(write(tmp_path / name, layers=65, shards=2, seed=seed)) > 2 * 10**8
    fold(tmp_path, tmp_path / "out", "task-arithmetic", SMALL_LIMIT)


@pytest.fixture(scope="module")
def two_gigabytes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-gigabytes")
    for seed, name in enumerate(("base", "arrival1", "arrival2")):
        assert weigh(write(folder / name, layers=930, shards=5, seed=seed)) > 2 * 10**9
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("rule", DATA_FREE)
def test_two_gigabytes_in_seven_hundred_megabytes(two_gigabytes, tmp_path, rule):
    fold(two_gigabytes, tmp_path / "out", rule, LIMIT)
