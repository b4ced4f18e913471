"""The CLIP suites at full size without their weights: random towers of the published shapes and made-up pictures, laid out as on the hub.

Accuracy means nothing here. What counts is that every step of the real run works and what it takes: loading, preparing the pictures, merging,
judging. One line for each rule: seconds of a merge, gradients of the stream, and the command's wall, processor time and private memory. The text
tower is cut to two layers, since it is run once only, and the tokenizer knows letters. Few pictures keep it short: add what yours take.

    python benchmarks/clip_full_size.py OUT [--backbone b32|b16|l14] [--rules all] [--samples 16] [--tests 8] [--photos 64]

ODE-M's Table 5 has 123.9, 200.8 and 246.8 seconds a merge for the three backbones, on a GPU, with 1024 samples.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import MERGEWAY, watched

TASKS = 8
SIDES = {"sun397": 500, "stanford-cars": 600, "eurosat": 64, "svhn": 32, "gtsrb": 48, "mnist": 28, "dtd": 480}
USUAL_SIDE = 256
# What a real run does in the same way, only more often: a step of these takes as long as any other.
SHORTER = {"dop": "dop:steps=2", "steer": "steer:steps=2:batch=8"}


def main() -> None:
    """Lay out what OUT does not hold yet, then run every rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--backbone", choices=("b32", "b16", "l14"), default="b32")
    parser.add_argument("--rules", default="all")
    parser.add_argument("--samples", type=int, default=16, help="calibration samples in all (default 16)")
    parser.add_argument("--tests", type=int, default=8, help="test pictures of a task (default 8)")
    parser.add_argument("--photos", type=int, default=64, help="pictures of the test of decoding alone (default 64)")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    out = given.out.resolve()
    os.environ |= {"HF_HOME": str(out / "hf"), "HF_HUB_OFFLINE": "1", "MERGEWAY_CACHE": str(out / "cache")}

    from mergeway.bench.suites.datasets import known_datasets
    from mergeway.bench.suites.named import BACKBONES, CLIP_TASKS
    from mergeway.rules import RULES

    repository, names = BACKBONES[given.backbone], list(CLIP_TASKS[:TASKS])
    _lay_models(repository, names)
    for number, name in enumerate(names):
        known = known_datasets()[name]
        side = SIDES.get(name, USUAL_SIDE)
        _lay_pictures(known.reading, len(known.classes or ()), side, max(given.samples, 16), given.tests, number)

    print(_decoding(given.photos))
    suite, scratch = f"clip-vit-{given.backbone}-{TASKS}", out / "scratch"
    for step in (["suites", "check", suite], ["bench", suite, "--dry-run", "--orders", "1"]):
        spent, peak = watched(" ".join(step), lambda _, step=step: [*MERGEWAY, *step], given.threads, scratch)
        print(f"{' '.join(step)}: {spent.wall:.0f} s, {peak / 1e6:.0f} MB", flush=True)
    rules = [r for r in RULES if r != "fisher"] if given.rules == "all" else given.rules.split(",")
    print("| rule | a merge | gradients | wall | CPU | private memory |\n|---|---|---|---|---|---|")
    for rule in rules:
        asked = ["--rules", SHORTER.get(rule, rule), "--orders", "1", "--samples", str(given.samples), "--copies", "1"]
        words, kept = [*MERGEWAY, "bench", suite, *asked, "--json"], list[str]()
        spent, peak = watched(
            rule,
            lambda _, words=words: words,
            given.threads,
            scratch,
            lambda _n, _o, text, kept=kept: kept.append(text),
        )
        row = json.loads(kept[0][kept[0].index("{") :])["rows"][0]
        print(
            f"| `{SHORTER.get(rule, rule)}` | {row['seconds'] / TASKS:.1f} s | {row['gradients']:.0f} | {spent.wall:.0f} s | {spent.cpu:.0f} s | {peak / 1e6:.0f} MB |",
            flush=True,
        )


def _decoding(count: int) -> str:
    """How fast photographs become what a tower looks at."""
    from mergeway.calibration.pictures import decode_all

    photos = [_photo(np.random.default_rng(seed), 500) for seed in range(count)]
    started = time.perf_counter()
    decode_all("photos", photos, 224)
    spent = time.perf_counter() - started
    return f"decoding {count} photographs of 500 x 400: {1000 * spent / count:.1f} ms each on {len(os.sched_getaffinity(0))} cores"


def _lay_models(repository: str, names: list[str]) -> None:
    """The base with its tokenizer and processor, and a tower for each task that is the base a little moved."""
    import torch
    from safetensors.torch import save_file
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizerFast

    folder = _snapshot(repository)
    if (folder / "done").exists():
        return
    torch.manual_seed(0)
    letters = [chr(c) for c in range(33, 127)]
    words = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    ends = {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, "pad_token_id": len(words) - 1}
    large = "large" in repository
    patch = int(repository.split("patch")[1])
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    config = CLIPConfig(
        vision_config={**(vision if large else {}), "image_size": 224, "patch_size": patch},
        text_config={
            "num_hidden_layers": 2,
            **({"hidden_size": 768, "num_attention_heads": 12} if large else {}),
            **ends,
        },
        projection_dim=768 if large else 512,
    )
    model = CLIPModel(config).eval()
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({word: k for k, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77)
    tokenizer.save_pretrained(folder)
    processor: dict[str, Any] = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    base = {n: t for n, t in model.vision_model.state_dict().items() if t.is_floating_point()}
    for number, name in enumerate(names):
        torch.manual_seed(number + 1)
        moved = {f"vision_model.{n}": t + 0.01 * t.std(correction=0) * torch.randn(t.shape) for n, t in base.items()}
        tower = _snapshot(f"tanganke/{repository.removeprefix('openai/')}_{name}")
        save_file(moved, tower / "model.safetensors", metadata={"format": "pt"})
        config.vision_config.save_pretrained(tower)
    (folder / "done").touch()


def _lay_pictures(reading: Any, classes: int, side: int, train: int, test: int, seed: int) -> None:
    """Parquet files of JPEG pictures, with a card that names the configuration where there is one."""
    import pyarrow
    import pyarrow.parquet

    folder, config = _snapshot(reading["dataset"], "dataset"), reading.get("config", "default")
    draw = np.random.default_rng(seed)
    (folder / config).mkdir(exist_ok=True)
    for split, count in (("train", train), ("test", test)):
        goal = folder / config / f"{split}-00000-of-00001.parquet"
        pictures = [{"bytes": _photo(draw, side), "path": None} for _ in range(count)]
        labels = (np.arange(count) % classes).tolist()
        pyarrow.parquet.write_table(pyarrow.table({"image": pictures, "label": labels}), goal)
    splits = "".join(f"  - split: {s}\n    path: {config}/{s}-*\n" for s in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{splits}---\n")


def _photo(draw: np.random.Generator, side: int) -> bytes:
    """A JPEG of soft colours with a little grain, five by four."""
    from PIL import Image

    soft = Image.fromarray(draw.integers(0, 256, (8, 10, 3), dtype=np.uint8)).resize((side, max(1, side * 4 // 5)))
    pixels = np.asarray(soft).astype(np.int16) + draw.integers(-12, 13, (soft.height, soft.width, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def _snapshot(name: str, kind: str = "model") -> Path:
    """The directory of a repository in the hub cache."""
    root = Path(os.environ["HF_HOME"]) / "hub" / f"{kind}s--{name.replace('/', '--')}"
    commit = hashlib.sha1(name.encode()).hexdigest()
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    main()
