"""What a fold needs at any size: the formulas of docs/scaling.md beside measurements of three small models, by every rule.

Measured is the second fold into a trunk of ViT classifiers: bytes written, peak of private memory, CPU seconds. Memory is
compared by its growth from the smallest model to the largest, so that what an import takes does not count; CPU seconds of
the largest, and of a model of half its depth and twice its width, are compared with what the work in the two smaller ones
foretells. At the end `ode` on several ranks.

    python benchmarks/scaling.py [--data DIR] [--rules a,b] [--ranks 1,2,4]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path

from measure import MERGEWAY, data_directory, options, private_memory, watched

import mergeway as mw
from mergeway.core.tensors import is_linear
from mergeway.rules import RULES

SIZES = ((384, 4), (384, 8), (384, 16))  # width and depth
WIDER = (768, 4)
SAMPLES, CLASSES = 16, 4
FEW_STEPS = {"dop": {"steps": 4}, "ode": {"step": 0.25}, "steer": {"steps": 4}}


@dataclass(frozen=True)
class Measured:
    """One rule at one size."""

    shapes: dict[str, tuple[int, ...]]
    written: int
    memory: int
    cpu: float


def main(arguments: list[str] | None = None) -> int:
    parser = options(__doc__, runs=1)
    parser.add_argument("--rules", default=",".join(RULES), help="rules with commas between them")
    parser.add_argument("--ranks", default="1,2,4", help="how many ranks 'ode' runs on; nothing for none")
    chosen = parser.parse_args(arguments)
    with data_directory(chosen.data) as data:
        streams = [write_stream(data / f"vit-{width}x{depth}", width, depth) for width, depth in SIZES]
        wider = write_stream(data / f"vit-{WIDER[0]}x{WIDER[1]}", *WIDER)
        print(
            "| rule | written, and by formula | memory, bytes a parameter | by formula | CPU | foretold | wider | foretold |"
        )
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for rule in chosen.rules.split(","):
            found = [measure(rule, stream, data) for stream in (*streams, wider)]
            print(row(rule, found[:3], found[3]), flush=True)
        counts = [int(n) for n in chosen.ranks.split(",") if n]
        if counts:
            print(
                "\n| ranks | peak of each rank, by size | bytes a parameter | by formula |\n|---|---|---|---|",
                flush=True,
            )
        for count in counts:  # the smallest and the largest
            print(rank_row(count, [on_ranks(count, stream, data) for stream in streams[::2]], streams[::2]), flush=True)
    return 0


# --- the formulas -----------------------------------------------------------------------------------------------------


def snapshot(rule: str, shapes: dict[str, tuple[int, ...]]) -> int:
    """(b + 4s)·P; the Gram matrices of `regmean` are as wide as the inputs of its layers."""
    size, linear = _size(shapes), _linear(shapes)
    if rule == "regmean":
        return 4 * size + 4 * size + 4 * sum(prod(s) + s[1] ** 2 for s in linear)
    return (4 + 4 * len(RULES[rule].slots)) * size


def memory(rule: str, shapes: dict[str, tuple[int, ...]]) -> float:
    """What grows with the model, on one thread."""
    size, linear = _size(shapes), _linear(shapes)
    if rule in ("opcm", "iso", "dop"):
        return (200.0 if rule == "dop" else 90.0) * max(map(prod, linear))
    return {"ode": 12.0 * size, "steer": 19.0 * size, "regmean": 12.0 * sum(s[1] ** 2 for s in linear)}.get(rule, 0.0)


def work(rule: str, shapes: dict[str, tuple[int, ...]]) -> float:
    """What time is spent on: numbers passed by, or the products of a decomposition."""
    if rule in ("opcm", "iso", "dop", "steer", "regmean"):
        return float(sum(prod(s) * min(s) for s in _linear(shapes)))
    return float(_size(shapes))


def _size(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(map(prod, shapes.values()))


def _linear(shapes: dict[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [s for n, s in shapes.items() if is_linear(n, s)]


def row(rule: str, found: list[Measured], wider: Measured) -> str:
    first, middle, last = found
    formula = [snapshot(rule, m.shapes) for m in found]
    written = ", ".join(f"{m.written / 1e6:.1f} ({f / 1e6:.1f})" for m, f in zip(found, formula, strict=True))
    grown = (last.memory - first.memory) / (_size(last.shapes) - _size(first.shapes))
    rise = (memory(rule, last.shapes) - memory(rule, first.shapes)) / (_size(last.shapes) - _size(first.shapes))
    done = [work(rule, m.shapes) for m in found]
    rate = (middle.cpu - first.cpu) / (done[1] - done[0])
    cpu = ", ".join(f"{m.cpu:.1f}" for m in found)
    deep, wide = (middle.cpu + rate * (there - done[1]) for there in (done[2], work(rule, wider.shapes)))
    return f"| `{rule}` | {written} MB | {grown:.1f} | {rise:.1f} | {cpu} s | {deep:.1f} s | {wider.cpu:.1f} s | {wide:.1f} s |"


# --- the measurements -------------------------------------------------------------------------------------------------


def write_stream(folder: Path, width: int, depth: int) -> Path:
    """A base, two arrivals with moments, and labelled noise; what exists is taken as it is."""
    if (folder / "done").exists():
        return folder
    import numpy as np
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import ViTConfig, ViTForImageClassification

    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(0)
    made = ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        image_size=32,
        patch_size=8,
        num_labels=CLASSES,
    )
    ViTForImageClassification(made).save_pretrained(folder / "base")
    base = load_file(folder / "base" / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        shutil.copytree(folder / "base", folder / name)
        tuned = {n: t + 0.002 * torch.randn_like(t) for n, t in base.items()}
        save_file(tuned, folder / name / "model.safetensors", metadata={"format": "pt"})
        save_file({n: torch.rand_like(t) for n, t in base.items()}, folder / name / "moments.safetensors")
        x = rng.integers(0, 256, (SAMPLES, 32, 32, 3)).astype(np.uint8)
        np.savez(folder / f"{name}.npz", x_train=x, y_train=np.arange(SAMPLES) % CLASSES)
    (folder / "done").touch()
    return folder


def shapes_of(stream: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    with safe_open(stream / "base" / "model.safetensors", "np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def begun(rule: str, stream: Path, trunk: Path) -> list[str]:
    """A trunk with one fold; the words of the second."""
    shutil.rmtree(trunk, ignore_errors=True)
    fed = "calibration" in RULES[rule].needs
    data = {name: str(stream / f"{name}.npz") if fed else None for name in ("one", "two")}
    made = mw.Trunk.create(trunk, stream / "base", mw.rules.make(rule, FEW_STEPS.get(rule, {})))
    made.add(stream / "one", data=data["one"])
    # Activations are another formula: few inputs at once, so that a layer's take less than its weights.
    given = ["--data", data["two"], "--micro-batch", "2"] if fed else []
    return ["add", str(trunk), str(stream / "two"), *given, "--threads", "1"]


def measure(rule: str, stream: Path, data: Path) -> Measured:
    trunk = data / "trunk"
    line = begun(rule, stream, trunk)
    spent, peak = watched(rule, lambda _: [*MERGEWAY, *line], 1, data)
    step = trunk / "steps" / "000002"
    written = sum(p.stat().st_size for p in step.glob("*.safetensors"))
    return Measured(shapes_of(stream), written, peak, spent.cpu)


def on_ranks(count: int, stream: Path, data: Path) -> int:
    """The highest peak of private memory of any rank of `ode`."""
    trunk = data / "trunk"
    line = begun("ode", stream, trunk)
    program = [*MERGEWAY, *line]
    if count > 1:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(count), "--rdzv-backend", "c10d"]
        program = [sys.executable, *launch, "--rdzv-endpoint", "localhost:0", "-m", "mergeway", *line]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as log:
        job = subprocess.Popen(program, env=environment, stdout=log, stderr=log)
        peak = 0
        while job.poll() is None:
            ranks = [job.pid] if count == 1 else _children(job.pid)
            peak = max([peak, *map(private_memory, ranks)])
            time.sleep(0.01)
        log.seek(0)
        if job.returncode:
            raise SystemExit(f"ode on {count} ranks failed:\n{log.read()[-2000:]}")
    return peak


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def rank_row(count: int, peaks: list[int], streams: list[Path]) -> str:
    sizes = [_size(shapes_of(stream)) for stream in streams]
    grown = (peaks[-1] - peaks[0]) / (sizes[-1] - sizes[0])
    shown = ", ".join(f"{peak / 1e6:.0f}" for peak in peaks)
    return f"| {count} | {shown} MB | {grown:.1f} | {12 if count == 1 else 20 / count:.1f} |"


if __name__ == "__main__":
    raise SystemExit(main())
