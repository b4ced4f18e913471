"""What all tests share: a small stream on disk, and two ways to run the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before anything imports huggingface_hub: no network, and a cache of our own.
_HUB = tempfile.TemporaryDirectory(prefix="mergeway-test-hub-")
os.environ["HF_HOME"] = _HUB.name
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MERGEWAY_CACHE"] = os.path.join(_HUB.name, "mergeway")
os.environ["OMP_NUM_THREADS"] = "1"
for _name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN"):
    os.environ.pop(_name, None)

import pytest  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from shared import SHAPES, Tensors, draw_tensors, listing  # noqa: E402

from mergeway.bench.suite import Suite, load_suite  # noqa: E402

torch.set_num_threads(1)

# A slow, shared machine must not fail a property for its speed.
settings.register_profile("mergeway", deadline=None)
settings.load_profile("mergeway")


@dataclass(frozen=True)
class Stream:
    """A base and arrivals, as files and as the tensors in them."""

    base: Path
    arrivals: list[Path]
    base_tensors: Tensors
    arrival_tensors: list[Tensors]


@dataclass(frozen=True)
class Done:
    """What a command line left behind."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)

    def ok(self) -> Done:
        assert self.code == 0, self.err
        return self

    def mistake(self) -> str:
        """The one line that a user's mistake gives."""
        assert self.code == 2, f"exit {self.code}: {self.out}{self.err}"
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        assert "Traceback" not in self.err
        return lines[0]


@pytest.fixture
def stream(tmp_path: Path) -> Callable[..., Stream]:
    """Makes a base and arrivals: `stream(3)`, `stream(5, dtype=torch.bfloat16)`, `stream(2, shapes={...})`.

    All hold an integer buffer `position_ids` that differs from arrival to arrival.
    """

    def make(
        count: int = 3,
        *,
        dtype: torch.dtype = torch.float32,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        seed: int = 0,
        name: str = "stream",
    ) -> Stream:
        folder = tmp_path / name
        folder.mkdir()
        first = draw_tensors(1000 * seed, shapes)
        base = {n: t.to(dtype) for n, t in first.items()} | {"position_ids": torch.arange(5)}
        save_file(base, folder / "base.safetensors")
        paths, arrivals = [], []
        for k in range(1, count + 1):
            change = draw_tensors(1000 * seed + k, shapes)
            tuned = {n: (first[n] + 0.05 * change[n]).to(dtype) for n in shapes}
            arrivals.append(tuned | {"position_ids": torch.arange(5) + k})
            paths.append(folder / f"task{k}.safetensors")
            save_file(arrivals[-1], paths[-1])
        return Stream(folder / "base.safetensors", paths, base, arrivals)

    return make


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """A suite of pictures."""
    return load_suite(tiny.vision_suite(tmp_path_factory.mktemp("vision")))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """A suite of texts."""
    return load_suite(tiny.text_suite(tmp_path_factory.mktemp("text")))


@pytest.fixture
def run() -> Callable[..., Done]:
    """The real command line in a process of its own."""

    def call(*words: Any, **options: Any) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "mergeway", *map(str, words)], capture_output=True, text=True, timeout=300, **options
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The same command line in this process: many times faster, for tests of many cases."""
    from mergeway.cli import main

    def call(*words: Any) -> Done:
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return call


@pytest.fixture
def snapshot() -> Callable[..., dict[str, str]]:
    """See `listing`."""
    return listing
