"""How a model turns inputs into logits, as a function of named parameters: the kinds of model an objective knows."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mergeway.calibration.samples import Samples
from mergeway.core.ranks import team
from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.model.runner import Runner
from mergeway.model.skeleton import hollow_model


class ClipVision:
    """A CLIP vision tower with a frozen zero-shot head: logits = scale·cos(features, head)."""

    def __init__(
        self, directory: Path, scale: float, mean: Sequence[float], std: Sequence[float], compute: Compute | None = None
    ) -> None:
        from transformers import CLIPVisionModelWithProjection

        self.model = load_model(CLIPVisionModelWithProjection, directory)
        self.compute = compute or Compute()
        self.run = Runner(self.model, self.compute)
        self.scale = scale
        self._mean = torch.tensor(list(mean)).view(1, -1, 1, 1)
        self._std = torch.tensor(list(std)).view(1, -1, 1, 1)
        config: Any = self.model.config
        self.image_size, self.width = int(config.image_size), int(config.projection_dim)

    def features(self, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        """Normalised image features."""
        return functional.normalize(self.embed(params, inputs), dim=-1)

    def embed(self, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        """Image features before they are normalised."""
        images: Any = inputs["images"]
        images = images if isinstance(images, Tensor) else images.load()
        pixels = (images.permute(0, 3, 1, 2).float() / 255 - self._mean) / self._std
        return self.run.home(self.run(params, {"pixel_values": pixels}).image_embeds)

    def __call__(self, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor], head: Tensor | None) -> Tensor:
        return _logits(self.scale, self.features(params, inputs), head)


class TextEncoder:
    """A text encoder with a frozen head: logits = scale·cos(pooled hidden states, head)."""

    def __init__(
        self, directory: Path, scale: float, max_length: int, pooling: str = "mean", compute: Compute | None = None
    ) -> None:
        from transformers import AutoModel, AutoTokenizer

        if pooling not in ("mean", "cls"):
            raise OptionError(f"{directory}: pooling is '{pooling}'; it must be mean or cls")
        self.model = load_model(AutoModel, directory)
        self.compute = compute or Compute()
        self.run = Runner(self.model, self.compute)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.scale, self._length, self._pooling = scale, max_length, pooling
        config: Any = self.model.config
        self.width = int(config.hidden_size)

    def encode(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Token ids and mask of equal length."""
        made = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self._length, return_tensors="pt"
        )
        return {"input_ids": made["input_ids"], "attention_mask": made["attention_mask"]}

    def features(self, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        """Normalised text features."""
        return functional.normalize(self.embed(params, inputs), dim=-1)

    def embed(self, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        """Text features before they are normalised."""
        hidden = self.run.home(self.run(params, inputs).last_hidden_state)
        keep = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        return (hidden * keep).sum(1) / keep.sum(1) if self._pooling == "mean" else hidden[:, 0]

    def __call__(self, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor], head: Tensor | None) -> Tensor:
        return _logits(self.scale, self.features(params, inputs), head)


class Classifier:
    """A `transformers` classifier (or any module that returns logits) with its head among its own parameters."""

    def __init__(self, model: nn.Module, compute: Compute | None = None) -> None:
        self.model = model.eval()
        self.compute = compute or Compute()
        self.run = Runner(self.model, self.compute)

    def __call__(self, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor], head: Tensor | None) -> Tensor:
        out = self.run(params, inputs)
        return self.run.home(out if isinstance(out, Tensor) else out.logits)


def mean_features(
    predictor: Any, params: Mapping[str, Tensor], tasks: Sequence[Samples], classes: int
) -> tuple[Tensor, Tensor]:
    """The nearest-mean classifier: each class's mean feature, of length 1, and which classes have any samples."""
    sums, counts = torch.zeros(classes, predictor.width), torch.zeros(classes)
    for task in tasks:
        for start in range(0, len(task), 64):
            rows = task.rows(slice(start, start + 64))
            sums.index_add_(0, rows.labels, predictor.features(params, rows.inputs))
            counts.index_add_(0, rows.labels, torch.ones(len(rows)))
    return functional.normalize(sums, dim=-1), counts > 0


# What each kind has to be told besides the base.
KINDS = {"clip-vision": ("logit_scale", "image_mean", "image_std"), "text-encoder": ("logit_scale", "max_length")}


def make_predictor(base: Path, settings: Mapping[str, Any], compute: Compute | None = None) -> ClipVision | TextEncoder:
    """The model of a base directory, as its settings describe it."""
    if settings["kind"] == "clip-vision":
        return ClipVision(base, settings["logit_scale"], settings["image_mean"], settings["image_std"], compute)
    return TextEncoder(base, settings["logit_scale"], settings["max_length"], settings.get("pooling", "mean"), compute)


def _logits(scale: float, features: Tensor, head: Tensor | None) -> Tensor:
    if head is None:
        raise OptionError("this kind of model needs a head for every task")
    return scale * features @ head.to(features.dtype).mT


def load_model(kind: Any, directory: Path) -> nn.Module:
    """A model in eval mode, without the library's chatter."""
    from transformers.utils import logging as chatter

    level = chatter.get_verbosity()
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = hollow_model(kind, directory) if team().count > 1 else kind.from_pretrained(directory)
            return made.eval().requires_grad_(False)
    except (OSError, ValueError, KeyError) as problem:
        raise OptionError(
            f"{directory}: the base cannot be loaded as {kind.__name__} ({' '.join(str(problem).split())[:160]})"
        ) from None
    finally:
        chatter.set_verbosity(level)
