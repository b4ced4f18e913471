"""A hub cache as `hf download` leaves it: tiny CLIP models with a text tower, fine-tuned towers, parquet datasets."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from PIL import Image

from mergeway.calibration.hub import load_split

SIDE = 8
HUB = Path(os.environ["HF_HOME"]) / "hub"


def repository(name: str, kind: str = "model") -> Path:
    """An empty snapshot of a repository; files are put into it as the library would, but not as links."""
    root = HUB / f"{kind}s--{name.replace('/', '--')}"
    commit = hashlib.sha1(name.encode()).hexdigest()
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def clip_model(name: str, seed: int = 0):
    """A CLIP model with random weights, its tokenizer of single letters and its processor; returns the model."""
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizerFast

    torch.manual_seed(seed)
    folder = repository(name)
    letters = [chr(c) for c in range(33, 127)]
    vocabulary = {
        w: k for k, w in enumerate([*letters, *(c + "</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"])
    }
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {
        "bos_token_id": len(vocabulary) - 2,
        "eos_token_id": len(vocabulary) - 1,
        "pad_token_id": len(vocabulary) - 1,
    }
    config = CLIPConfig(
        vision_config={**small, "image_size": SIDE, "patch_size": 4},
        text_config={**small, "vocab_size": len(vocabulary), "max_position_embeddings": 64, **ends},
        projection_dim=8,
    )
    model = CLIPModel(config).eval()
    with torch.no_grad():
        for part, weight in model.named_parameters():
            # Random towers tell little apart: wider weights make answers differ, but attention must go on to see every letter.
            if weight.ndim == 2 and not part.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(8)
    save(model, folder)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=64).save_pretrained(
        folder
    )
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": SIDE},
        "crop_size": {"height": SIDE, "width": SIDE},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.25, 0.3],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


def clip_tower(name: str, model, seed: int):
    """A fine-tuned vision tower in a repository of its own, saved as the class that FusionBench's experts have."""
    from transformers import CLIPVisionModel

    folder = repository(name)
    save_part = CLIPVisionModel(model.config.vision_config)
    torch.manual_seed(seed)
    tower = model.vision_model.state_dict()
    tuned = {n: t + 0.5 * t.std(correction=0) * torch.randn(t.shape) for n, t in tower.items() if t.is_floating_point()}
    missing = save_part.load_state_dict(tuned, strict=False)
    assert not missing.unexpected_keys
    save(save_part, folder)
    return tuned


def save(model, folder: Path) -> None:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model.save_pretrained(folder)


def dataset(
    name: str, splits: dict[str, int], classes: int, seed: int, columns=("image", "label"), files=None, **more
) -> dict:
    """Parquet files of PNG pictures of several sizes; returns the pictures and labels by split.

    `files`: the name of a picture's file by its row; `more`: column -> f(row).
    """
    rng = np.random.default_rng(seed)
    folder, made = repository(name, "dataset"), {}
    load_split.cache_clear()  # another test may have had a dataset of that name
    (folder / "data").mkdir(exist_ok=True)
    for split, count in splits.items():
        pictures = [rng.integers(0, 256, (*rng.integers(SIDE, 3 * SIDE, 2), 3), dtype=np.uint8) for _ in range(count)]
        labels = (np.arange(count) % classes).tolist()
        paths = [files(row) if files else None for row in range(count)]
        stored = [{"bytes": png(p), "path": path} for p, path in zip(pictures, paths, strict=True)]
        table = {columns[0]: stored, columns[1]: labels}
        table |= {column: [value(row) for row in range(count)] for column, value in more.items()}
        pyarrow.parquet.write_table(pyarrow.table(table), folder / "data" / f"{split}-00000-of-00001.parquet")
        made[split] = (pictures, labels)
    return made


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
