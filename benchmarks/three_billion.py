"""A Llama of 3 B parameters in bf16, folded into a trunk: peak private memory, bytes and GB/s of `add`, beside the formulas of docs/scaling.md.

Base and two arrivals are generated in shards (18 GB at full size). Each rule gets a trunk of its own; the first arrival is folded in
to have a state, the second is measured. `--scale 0.01` divides width and depth so that a hundredth of the parameters is left,
`--layers` takes so many layers of the full width. A rule that decomposes matrices takes half an hour at full size: measure one layer,
and multiply. The result of the last rule is exported as an adapter of rank 16 with `--lora`.

    python benchmarks/three_billion.py [--data DIR] [--scale 1] [--layers N] [--rules average,ties] [--threads N] [--lora]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from math import prod
from pathlib import Path

from measure import MERGEWAY, Spent, data_directory, finish, options, start, watched
from streams import large_stream, llama_shapes

FULL = (3072, 8192, 26, 32000)
# Walks over base, arrival and state of one `add`, and passes over the arrival before them; `opcm` reads base and state once more.
WALKS = {"average": (1, 0), "ties": (4, 0), "iso": (1, 1), "opcm": (1, 1)}


def main(arguments: list[str] | None = None) -> int:
    parser = options(__doc__, runs=1)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the parameters (default 1)")
    parser.add_argument("--layers", type=int, help="so many layers, at full width")
    parser.add_argument("--rules", default="average,ties", help="which rules (default average,ties)")
    parser.add_argument(
        "--lora", action="store_true", help="export the result of the last rule as an adapter of rank 16"
    )
    chosen = parser.parse_args(arguments)
    size = sized(chosen.scale, chosen.layers)
    shapes = llama_shapes(*size)
    count = sum(map(prod, shapes.values()))
    print(f"{count / 1e9:.3f} B parameters, {2 * count / 1e9:.2f} GB in bf16, {chosen.threads} threads", flush=True)
    print(
        "| rule | wall | CPU | CPU s per B | GB read and written, by formula | GB/s | private memory | snapshot, by formula |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with data_directory(chosen.data) as data:
        base, arrivals = large_stream(data / "-".join(["llama", *map(str, size)]), size)
        trunk = data / "three-billion-trunk"
        for rule in chosen.rules.split(","):
            shutil.rmtree(trunk, ignore_errors=True)
            print(measured(rule, base, arrivals, trunk, chosen, count), flush=True)
        if chosen.lora:
            out = data / "three-billion-lora"
            shutil.rmtree(out, ignore_errors=True)
            spent, peak = watched(
                "export",
                lambda _: [*MERGEWAY, "export", str(trunk), str(out), "--lora", "16", "--quiet"],
                chosen.threads,
                data,
            )
            print(
                f"export --lora 16: {spent}, {peak / 1e6:.0f} MB private, {_weight(out) / 1e6:.0f} MB written",
                flush=True,
            )
            shutil.rmtree(out)
        shutil.rmtree(trunk, ignore_errors=True)
    return 0


def sized(scale: float, layers: int | None) -> tuple[int, int, int, int]:
    """Width, inner width, layers and vocabulary: all but the last shrink alike, in steps of 64."""
    if layers is not None:
        return (FULL[0], FULL[1], layers, 64)
    width, inner = (max(64, round(side * scale ** (1 / 3) / 64) * 64) for side in FULL[:2])
    return (width, inner, max(1, round(FULL[2] * scale ** (1 / 3))), max(64, round(FULL[3] * scale ** (2 / 3))))


def measured(rule: str, base: Path, arrivals: list[Path], trunk: Path, chosen: argparse.Namespace, count: int) -> str:
    """The second fold by a rule as a row of the table."""
    call = [*MERGEWAY, "init", str(trunk), "--base", str(base), "--rule", rule, "--keep", "1", "--quiet"]
    finish("init", start(call, chosen.threads))
    add = [*MERGEWAY, "add", str(trunk), "--quiet", "--threads", str(chosen.threads)]
    finish("add", start([*add, str(arrivals[0])], chosen.threads))
    spent, peak = watched("add", lambda _: [*add, str(arrivals[1])], chosen.threads, trunk.parent)
    walks, before = WALKS[rule]
    moved = (walks * (2 * 2 + 4) + 2 * before + (2 + 4 if rule == "opcm" else 0) + 2 + 4) * count
    return row(rule, spent, peak, moved, _weight(trunk), count)


def row(rule: str, spent: Spent, peak: int, moved: int, snapshot: int, count: int) -> str:
    return (
        f"| `{rule}` | {spent.wall:.0f} s | {spent.cpu:.0f} s | {spent.cpu * 1e9 / count:.0f} | {moved / 1e9:.2f} | "
        f"{moved / 1e9 / spent.wall:.2f} | {peak / 1e6:.0f} MB | {snapshot / 1e9:.3f} GB ({6 * count / 1e9:.3f}) |"
    )


def _weight(folder: Path) -> int:
    """The bytes of the tensors' files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors") if not path.is_symlink())


if __name__ == "__main__":
    sys.exit(main())
