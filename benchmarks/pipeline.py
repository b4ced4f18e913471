"""Whether the whole pipeline (tune in the tangent space, fold in by `fisher`, align) takes the same memory for 20 tasks as for 2.

Each stream is a process of its own over a generated class-incremental suite; a model that was kept for every task would
show as 18 times 13 MB.

    python benchmarks/pipeline.py [--data DIR] [--runs 3]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from measure import HERE, Command, Outcome, Ratio, anonymous_memory, data_directory, options, report

FEW, MANY, CLASSES, EACH = 2, 20, 20, 16


def main(arguments: list[str] | None = None) -> int:
    return report(measure(options(__doc__).parse_args(arguments)))


def measure(chosen: argparse.Namespace) -> list[Outcome]:
    """The least of the peaks of several runs, for each length."""
    with data_directory(chosen.data) as data:
        suite = write_suite(data / "pipeline")
        peaks = {
            count: min(
                anonymous_memory(f"{count} tasks", _stream(suite, count), 1, data) for _ in range(max(1, chosen.runs))
            )
            for count in (FEW, MANY)
        }
        model = (data / "pipeline" / "base" / "model.safetensors").stat().st_size
    sizes = f"{peaks[MANY] / 1e6:.0f} MB / {peaks[FEW] / 1e6:.0f} MB"
    grown = (peaks[MANY] - peaks[FEW]) / (MANY - FEW) / model
    return [
        Ratio(f"memory of the pipeline, {MANY} tasks / {FEW} tasks", peaks[MANY] / peaks[FEW], None, sizes),
        Ratio("what a further task adds, in models", grown, 0.25),
    ]


def _stream(suite: Path, count: int) -> Command:
    def command(out: Path) -> list[str]:
        out.mkdir()
        return [sys.executable, str(HERE / "peers/pipeline_stream.py"), str(suite), str(count), str(out)]

    return command


def write_suite(folder: Path) -> Path:
    """Twenty tasks of one class each, for a vision tower of 3.3 million numbers; pictures of noise do."""
    import numpy as np
    import torch
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    from mergeway.bench.suites import split_suite

    if (folder / "suite" / "suite.json").exists():
        return folder / "suite"
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        projection_dim=64,
    )
    CLIPVisionModelWithProjection(config).save_pretrained(folder / "base")
    drawn = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), EACH)
    arrays = {f"x_{s}": drawn.integers(0, 256, (len(labels), 32, 32, 3), dtype=np.uint8) for s in ("train", "test")}
    np.savez(folder / "all.npz", **arrays, y_train=labels, y_test=labels)
    split_suite(str(folder / "all.npz"), folder / "suite", folder / "base", tasks=CLASSES)
    return folder / "suite"


if __name__ == "__main__":
    sys.exit(main())
