"""CLIP from the hub as the parts of a suite: the vision tower as base, text embeddings as heads, fine-tuned towers as experts.

Only the vision encoder is fine-tuned and merged; projection, text tower and heads stay as they are. All results are kept
in the cache, named after the snapshot they come from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from mergeway.bench.suites.description import ImageSettings
from mergeway.checkpoint import open_checkpoint
from mergeway.checkpoint.source import INDEX, read_json
from mergeway.checkpoint.writer import save_tensors
from mergeway.core.cache import cache_root, kept
from mergeway.core.files import write_text
from mergeway.errors import CheckpointError, OptionError
from mergeway.model.weights import quiet_transformers

if TYPE_CHECKING:
    from transformers import CLIPModel

PROJECTION = "visual_projection.weight"
BATCH = 128  # prompts in one pass of the text tower


class Clip:
    """A CLIP model of the hub, read when something of it is needed."""

    def __init__(self, repo: str) -> None:
        self.repo = repo
        self.config: Any = self._get("CLIPConfig")
        self.folder = cache_root() / "clip" / f"{repo.split('/')[-1]}-{_commit(repo)[:12]}"
        self._model: CLIPModel | None = None

    def base(self) -> Path:
        """The vision tower with its projection, as a model directory."""

        def make(folder: Path) -> None:
            whole = {n: t.contiguous() for n, t in self._whole().state_dict().items()}
            tower = {n: t for n, t in whole.items() if n.startswith("vision_model.") and t.is_floating_point()}
            weights = tower | {PROJECTION: whole[PROJECTION]}
            save_tensors(folder / "model.safetensors", weights, {"format": "pt"})
            config = self.config.vision_config
            config.projection_dim = self.config.projection_dim
            config.architectures = ["CLIPVisionModelWithProjection"]
            config.save_pretrained(folder)
            scale = float(self._whole().logit_scale.exp())
            settings = {"logit_scale": scale, **self._processor()}
            write_text(folder / "preprocessor_config.json", json.dumps(settings, indent=1) + "\n")

        return kept(self.folder / "base", make)

    def settings(self) -> ImageSettings:
        """What suite.json says of the base."""
        found = read_json(self.base() / "preprocessor_config.json", "the base's preprocessor")
        return {
            "logit_scale": found["logit_scale"],
            "image_mean": found["image_mean"],
            "image_std": found["image_std"],
        }

    def head(self, name: str, classes: Sequence[str], templates: Sequence[str]) -> Path:
        """The zero-shot head: each class's prompts embedded, normalised, averaged over the templates, normalised again."""
        asked = hashlib.sha256(json.dumps([list(classes), list(templates)]).encode()).hexdigest()[:12]

        def make(folder: Path) -> None:
            prompts = [template.replace("{}", c) for c in classes for template in templates]
            means = self._embed(prompts).view(len(classes), len(templates), -1).mean(1)
            save_tensors(folder / "head.safetensors", {"weight": functional.normalize(means, dim=-1)})

        return kept(self.folder / "heads" / f"{name}-{asked}", make) / "head.safetensors"

    def expert(self, repo: str) -> Path:
        """A fine-tuned tower completed by the projection: a sharded model directory of links, so nothing is stored twice."""
        source = _download(repo)
        base = self.base()

        def make(folder: Path) -> None:
            found = open_checkpoint(source)
            names = {n: i for n, i in found.infos.items() if i.merges}
            files = sorted(p for p in source.glob("*.safetensors") if p.name != "moments.safetensors")
            if len(files) == 1 and all(n.startswith("vision_model.") for n in found.infos):
                os.symlink(files[0].resolve(), folder / "tower.safetensors")
                listed = list(found.infos)
            else:
                # Newer versions of the library leave the tower's name out.
                tower = {
                    f"vision_model.{n.removeprefix('vision_model.')}": found.read(n) for n in names if n != PROJECTION
                }
                save_tensors(folder / "tower.safetensors", tower, {"format": "pt"})
                listed = list(tower)
            whole = open_checkpoint(base)
            projection = {PROJECTION: whole.read(PROJECTION)}
            save_tensors(folder / "projection.safetensors", projection, {"format": "pt"})
            index = {"weight_map": dict.fromkeys(listed, "tower.safetensors") | {PROJECTION: "projection.safetensors"}}
            write_text(folder / INDEX, json.dumps(index, indent=1) + "\n")
            os.symlink((base / "config.json").resolve(), folder / "config.json")

        return kept(self.folder / "experts" / f"{repo.split('/')[-1]}-{source.name[:12]}", make)

    def _embed(self, prompts: Sequence[str]) -> Tensor:
        model, tokenizer = self._whole(), self._get("CLIPTokenizerFast")
        features = []
        with torch.no_grad():
            for start in range(0, len(prompts), BATCH):
                texts = tokenizer(
                    list(prompts[start : start + BATCH]), padding=True, truncation=True, return_tensors="pt"
                )
                pooled = model.text_model(
                    input_ids=texts["input_ids"], attention_mask=texts["attention_mask"]
                ).pooler_output
                features.append(functional.normalize(model.text_projection(pooled), dim=-1))
        return torch.cat(features)

    def _processor(self) -> dict[str, list[float]]:
        processor = self._get("CLIPImageProcessorPil", "CLIPImageProcessor")
        return {"image_mean": list(processor.image_mean), "image_std": list(processor.image_std)}

    def _whole(self) -> CLIPModel:
        if self._model is None:
            model: CLIPModel = self._get("CLIPModel").float().eval().requires_grad_(False)
            self._model = model
        return self._model

    def _get(self, *kinds: str) -> Any:
        """A part of the repository by its class in transformers, the first of the names that this version has."""
        import transformers

        kind = next(getattr(transformers, k) for k in kinds if hasattr(transformers, k))
        try:
            with quiet_transformers():
                return kind.from_pretrained(self.repo, trust_remote_code=False)
        except (OSError, ValueError) as problem:
            raise OptionError(
                f"{self.repo}: {kind.__name__} is not in the hub cache and not to be had ({' '.join(str(problem).split())[:100]}); download it with 'hf download {self.repo}'"
            ) from None


def _commit(repo: str) -> str:
    """Which snapshot the hub cache holds, so that a newer one is not taken for it."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, "config.json")
    return Path(found).parent.name if isinstance(found, str) else "unknown"


def _download(repo: str) -> Path:
    """The snapshot of an expert."""
    from mergeway.checkpoint.resolve import from_hub

    try:
        return from_hub(repo)
    except CheckpointError as problem:
        raise OptionError(str(problem)) from None
