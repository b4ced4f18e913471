"""`opcm` on a ViT-B/32-shaped stream (base and three arrivals, 87 M parameters) against full-SVD OPCM as FusionBench does it.

Both are whole processes, imports, reading and writing included, with the same number of threads. The two results are
compared as well: a fast answer that is another answer would be no gain.

    python benchmarks/opcm.py [--data DIR] [--runs 2] [--threads N]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from measure import (
    HERE,
    MERGEWAY,
    Command,
    Outcome,
    Ratio,
    data_directory,
    finish,
    options,
    report,
    seconds,
    start,
    write_stream,
)

WIDTH, INNER, LAYERS = 768, 3072, 12


def main(arguments: list[str] | None = None) -> int:
    chosen = options(__doc__, runs=2).parse_args(arguments)
    return report(measure(chosen))


def measure(chosen: argparse.Namespace) -> list[Outcome]:
    """How many times faster, and how far apart the results are."""
    with data_directory(chosen.data) as data:
        base, arrivals = write_stream(data / "vit-b-32", _vit_shapes(), 3, {"model_type": "clip_vision_model"})
        inputs = [str(path) for path in (base, *arrivals)]
        shared = ["--quiet", "--threads", str(chosen.threads)]
        commands: dict[str, Command] = {
            "mergeway": lambda out: [*MERGEWAY, "merge", *inputs, "--rule", "opcm", "--out", str(out), *shared],
            "full SVD": lambda out: [sys.executable, str(HERE / "peers/full_svd_opcm.py"), str(out), *inputs],
        }
        scratch = data / "scratch"
        scratch.mkdir(exist_ok=True)
        spent = seconds(commands, chosen.runs, chosen.threads, scratch)
        error = _difference(commands, chosen.threads, base, scratch)
    speed = spent["full SVD"].wall / spent["mergeway"].wall
    detail = f"{spent['full SVD']} / {spent['mergeway']}"
    return [
        Ratio("opcm speed over full-SVD OPCM (FusionBench's way)", speed, 3.0, detail, at_least=True),
        Ratio("opcm difference from full-SVD OPCM, relative", error, 1e-3, "the peer works in float32"),
    ]


def _difference(commands: dict[str, Command], threads: int, base: Path, scratch: Path) -> float:
    """‖update − peer's update‖ / ‖peer's update‖."""
    from safetensors.torch import load_file

    models = []
    for name, command in commands.items():
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            out = Path(folder) / "result"
            finish(name, start(command(out), threads))
            models.append(load_file(out / "model.safetensors"))
    origin = load_file(base / "model.safetensors")
    ours, theirs = models
    gap = sum(float((ours[n] - theirs[n]).double().norm()) ** 2 for n in origin)
    return (gap / sum(float((theirs[n] - origin[n]).double().norm()) ** 2 for n in origin)) ** 0.5


def _vit_shapes() -> dict[str, tuple[int, ...]]:
    """The vision tower of CLIP ViT-B/32."""
    shapes: dict[str, tuple[int, ...]] = {
        "vision_model.embeddings.class_embedding": (WIDTH,),
        "vision_model.embeddings.patch_embedding.weight": (WIDTH, 3, 32, 32),
        "vision_model.embeddings.position_embedding.weight": (50, WIDTH),
    }
    norms = ["vision_model.pre_layrnorm", "vision_model.post_layernorm"]
    linear = {}
    for layer in range(LAYERS):
        prefix = f"vision_model.encoder.layers.{layer}."
        norms += [f"{prefix}layer_norm1", f"{prefix}layer_norm2"]
        linear |= {f"{prefix}self_attn.{name}_proj": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
        linear |= {f"{prefix}mlp.fc1": (INNER, WIDTH), f"{prefix}mlp.fc2": (WIDTH, INNER)}
    for name in norms:
        shapes |= {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


if __name__ == "__main__":
    sys.exit(main())
