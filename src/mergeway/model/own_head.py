"""Models that bring their own head: causal language models and classifiers, as functions of named parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergeway.checkpoint.source import read_json
from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.model.encoders import ClipVision, TextEncoder, load_model, make_predictor
from mergeway.model.runner import Runner

LONGEST = 512  # tokens in a block of text, unless the model takes fewer

# What a task's head is to a classifier: tensors that take the place of the model's own.
Head = Tensor | Mapping[str, Tensor] | None


class CausalLM:
    """A causal language model: the logits of every next token."""

    reads = "documents"

    def __init__(self, directory: Path, max_length: int, compute: Compute | None = None) -> None:
        from transformers import AutoModelForCausalLM

        self.model = load_model(AutoModelForCausalLM, directory)
        self.compute = compute or Compute()
        self.run = Runner(self.model, self.compute)
        self.tokenizer = load_tokenizer(directory)
        self.max_length = max_length

    def __call__(self, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor], head: Head) -> Tensor:
        told: dict[str, Any] = {**inputs, "use_cache": False}
        # One number for every word of the vocabulary at every place: the loss is taken where they are.
        return self.run(params, told).logits


class TextClassifier:
    """A sequence classifier; a task's head stands in for the base's."""

    reads = "texts"

    def __init__(self, directory: Path, max_length: int, compute: Compute | None = None) -> None:
        from transformers import AutoModelForSequenceClassification

        self.model = load_model(AutoModelForSequenceClassification, directory)
        self.compute = compute or Compute()
        self.run = Runner(self.model, self.compute)
        self.tokenizer = load_tokenizer(directory)
        config: Any = self.model.config
        pad = self.tokenizer.pad_token_id
        if pad is None:
            raise OptionError(f"{directory}: the tokenizer has no padding token; set one and save the tokenizer again")
        # A decoder judges the last token that is no padding, so it has to know what padding is.
        config.pad_token_id = pad
        self._length = max_length

    def encode(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Token ids and mask of equal length."""
        made = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self._length, return_tensors="pt"
        )
        return {"input_ids": made["input_ids"], "attention_mask": made["attention_mask"]}

    def __call__(self, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor], head: Head) -> Tensor:
        return self.run.home(self.run(with_head(params, head), inputs).logits)


class ImageClassifier:
    """An image classifier; a task's head stands in for the base's."""

    reads = "images"

    def __init__(
        self, directory: Path, mean: Sequence[float], std: Sequence[float], compute: Compute | None = None
    ) -> None:
        from transformers import AutoModelForImageClassification

        self.model = load_model(AutoModelForImageClassification, directory)
        self.compute = compute or Compute()
        self.run = Runner(self.model, self.compute)
        self._mean = torch.tensor(list(mean)).view(1, -1, 1, 1)
        self._std = torch.tensor(list(std)).view(1, -1, 1, 1)
        config: Any = self.model.config
        vision = getattr(config, "vision_config", config)
        size = vision.image_size
        self.image_size = int(size if isinstance(size, int) else size[0])

    def __call__(self, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor], head: Head) -> Tensor:
        pixels = (inputs["images"].permute(0, 3, 1, 2).float() / 255 - self._mean) / self._std
        return self.run.home(self.run(with_head(params, head), {"pixel_values": pixels}).logits)


def make_model(
    base: Path, settings: Mapping[str, Any], compute: Compute | None = None
) -> CausalLM | TextClassifier | ImageClassifier | ClipVision | TextEncoder:
    """The model of a base directory, as its settings describe it."""
    if settings["kind"] == "causal-lm":
        return CausalLM(base, settings["max_length"], compute)
    if settings["kind"] == "sequence-classification":
        return TextClassifier(base, settings["max_length"], compute)
    if settings["kind"] == "image-classification":
        return ImageClassifier(base, settings["image_mean"], settings["image_std"], compute)
    return make_predictor(base, settings, compute)


def own_settings(base: Path) -> dict[str, Any] | None:
    """How a model with a head of its own reads its inputs, from its config; None for a bare encoder."""
    config = read_json(base / "config.json", "the base's config")
    architecture = str((config.get("architectures") or [""])[0])
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        longest = config.get("max_position_embeddings") or config.get("n_positions") or LONGEST
        return {"kind": "causal-lm", "max_length": min(int(longest), LONGEST)}
    if architecture.endswith("ForSequenceClassification"):
        longest = config.get("max_position_embeddings") or config.get("n_positions") or 128
        return {"kind": "sequence-classification", "max_length": min(int(longest), 128)}
    if architecture.endswith("ForImageClassification"):
        processor = base / "preprocessor_config.json"
        said = read_json(processor, "the base's preprocessor") if processor.exists() else {}
        return {
            "kind": "image-classification",
            "image_mean": said.get("image_mean", [0.5] * 3),
            "image_std": said.get("image_std", [0.5] * 3),
        }
    return None


def with_head(params: Mapping[str, Tensor], head: Head) -> Mapping[str, Tensor]:
    """Parameters with a task's head in place of the model's own."""
    return {**params, **head} if isinstance(head, Mapping) else params


def classes_of(head: Mapping[str, Tensor]) -> int | None:
    """How many classes a head of named tensors tells apart: the rows of its smallest matrix."""
    return min((len(t) for t in head.values() if t.ndim == 2), default=None)


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer that was saved with the base."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise OptionError(
            f"{directory}: has no tokenizer that can be read ({' '.join(str(problem).split())[:120]}); save the model's tokenizer beside it"
        ) from None
