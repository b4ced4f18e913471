"""The kinds of model that mergeway runs, which of them a directory holds, and how each prepares its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from mergeway.checkpoint import SafetensorsFiles
from mergeway.checkpoint.source import JsonObject, read_json
from mergeway.errors import OptionError, suggest
from mergeway.model.compute import Compute
from mergeway.model.image_encoder import ImageEncoder
from mergeway.model.inputs import Head, Inputs, Params, in_memory
from mergeway.model.model import Encoder, ImageModel, Model, Reads, Settings, TextModel
from mergeway.model.skeleton import Family
from mergeway.model.weights import Tokenizer, load_tokenizer

LONGEST_DOCUMENT = 512  # tokens of a text that is predicted, unless the model takes fewer
LONGEST_TEXT = 128  # tokens of a text that is classified
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


class ClipVision(ImageModel, Encoder):
    """A CLIP vision tower under a frozen zero-shot head."""

    kind = "clip-vision"
    needs = ("logit_scale", "image_mean", "image_std")

    def __init__(self, directory: Path, settings: Settings, compute: Compute | None = None) -> None:
        super().__init__(directory, settings, compute)
        self.scale = settings["logit_scale"]

    @property
    def width(self) -> int:
        """The length of an image feature."""
        return int(self.config.projection_dim)

    def embed(self, params: Params, inputs: Inputs) -> Tensor:
        """Image features before they are normalised."""
        return self.run.home(self.run(params, {"pixel_values": self.pixels(inputs)}).image_embeds)

    def _family(self) -> Family:
        from transformers import CLIPVisionModelWithProjection

        return CLIPVisionModelWithProjection

    def _config_family(self) -> Family:
        from transformers import CLIPVisionConfig

        return CLIPVisionConfig


class TextEncoder(TextModel, Encoder):
    """A text encoder under a frozen head; features are the mean of the hidden states, or that of the first token."""

    kind = "text-encoder"
    needs = ("logit_scale", "max_length")
    takes = ("pooling",)

    def __init__(self, directory: Path, settings: Settings, compute: Compute | None = None) -> None:
        super().__init__(directory, settings, compute)
        self.scale = settings["logit_scale"]
        self._pooling = settings.get("pooling", "mean")
        if self._pooling not in ("mean", "cls"):
            raise OptionError(f"{directory}: pooling is '{self._pooling}'; it must be mean or cls")

    @property
    def width(self) -> int:
        """The length of a text feature."""
        return int(self.config.hidden_size)

    def embed(self, params: Params, inputs: Inputs) -> Tensor:
        """Text features before they are normalised."""
        hidden = self.run.home(self.run(params, inputs).last_hidden_state)
        keep = in_memory(inputs["attention_mask"]).unsqueeze(-1).to(hidden.dtype)
        return (hidden * keep).sum(1) / keep.sum(1) if self._pooling == "mean" else hidden[:, 0]

    def _family(self) -> Family:
        from transformers import AutoModel

        return AutoModel


class TextClassifier(TextModel):
    """A sequence classifier; a task's head stands in for the base's."""

    kind = "sequence-classification"
    needs = ("max_length",)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the weights, which must know what padding is."""
        tokenizer = load_tokenizer(self.directory, self.compute.allow_code)
        if tokenizer.pad_token_id is None:
            raise OptionError(
                f"{self.directory}: the tokenizer has no padding token; set one and save the tokenizer again"
            )
        return tokenizer

    @cached_property
    def module(self) -> nn.Module:
        """The model of `transformers`, loaded at the first use."""
        module: Any = super().module
        # A decoder judges the last token that is no padding, so it has to know what padding is.
        module.config.pad_token_id = self.tokenizer.pad_token_id
        return module

    @property
    def classes(self) -> int:
        """How many classes the base's own head tells apart."""
        return int(self.config.num_labels)

    def __call__(self, params: Params, inputs: Inputs, head: Head) -> Tensor:
        return self.run.home(self.run(with_head(params, head), inputs).logits)

    def _family(self) -> Family:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification


class ImageClassifier(ImageModel):
    """An image classifier; a task's head stands in for the base's."""

    kind = "image-classification"
    needs = ("image_mean", "image_std")

    @property
    def classes(self) -> int:
        """How many classes the base's own head tells apart."""
        return int(self.config.num_labels)

    def __call__(self, params: Params, inputs: Inputs, head: Head) -> Tensor:
        return self.run.home(self.run(with_head(params, head), {"pixel_values": self.pixels(inputs)}).logits)

    def _family(self) -> Family:
        from transformers import AutoModelForImageClassification

        return AutoModelForImageClassification


class CausalLM(Model):
    """A causal language model: the logits of every next token."""

    kind = "causal-lm"
    reads: ClassVar[Reads] = "documents"
    needs = ("max_length",)

    def __init__(self, directory: Path, settings: Mapping[str, Any], compute: Compute | None = None) -> None:
        super().__init__(directory, settings, compute)
        most = getattr(self.config, "max_position_embeddings", None) or self.max_length
        if type(self.max_length) is not int or not 2 <= self.max_length <= most:
            raise OptionError(f"{directory}: max_length is {self.max_length!r}; it must be from 2 to {most}")

    @property
    def max_length(self) -> int:
        """The most tokens of a document; what is longer is cut."""
        return self.settings["max_length"]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the weights."""
        return load_tokenizer(self.directory, self.compute.allow_code)

    @property
    def padding(self) -> int:
        """The token behind the end of a short document; nothing sees it, so any will do where the tokenizer has none."""
        return int(self.tokenizer.pad_token_id or 0)

    def __call__(self, params: Params, inputs: Inputs, head: Head) -> Tensor:
        # One number for every word of the vocabulary at every place: the loss is taken where they are.
        return self.run(params, {**inputs, "use_cache": False}).logits

    def _family(self) -> Family:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM


KINDS: dict[str, type[Model]] = {
    family.kind: family for family in (ClipVision, ImageEncoder, TextEncoder, TextClassifier, ImageClassifier, CausalLM)
}
ENCODERS = {kind: family for kind, family in KINDS.items() if issubclass(family, Encoder)}
SUITE_KINDS: dict[str, type[Encoder] | type[CausalLM]] = {**ENCODERS, CausalLM.kind: CausalLM}


def make_model(directory: Path, settings: Settings, compute: Compute | None = None) -> Model:
    """The model of a directory, as its settings describe it; `compute` says where and how it is run."""
    if settings.get("kind") not in KINDS:
        raise OptionError(f"kind '{settings.get('kind')}' is unknown; {suggest(str(settings.get('kind')), KINDS)}")
    return KINDS[settings["kind"]](directory, settings, compute)


def kind_of(directory: Path, head: Path | None = None) -> Settings:
    """Which kind of model a directory holds and how its inputs are prepared, from its config and preprocessor files.

    With a frozen head the model is an encoder under it; the head's file may carry its 'logit_scale'.
    """
    config = read_json(directory / "config.json", "the base's config")
    architecture = str((config.get("architectures") or [""])[0])
    if head is None and architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return {"kind": CausalLM.kind, "max_length": _longest(config, LONGEST_DOCUMENT)}
    if head is None and architecture.endswith("ForSequenceClassification"):
        return {"kind": TextClassifier.kind, "max_length": _longest(config, LONGEST_TEXT)}
    if head is None and architecture.endswith("ForImageClassification"):
        return {"kind": ImageClassifier.kind, **_normalisation(directory, [0.5] * 3, [0.5] * 3)}
    scale = _logit_scale(head)
    if config.get("model_type") == "clip_vision_model":
        return {
            "kind": ClipVision.kind,
            "logit_scale": scale or 100.0,
            **_normalisation(directory, CLIP_MEAN, CLIP_STD),
        }
    if "hidden_size" in config and (directory / "tokenizer.json").exists():
        return {
            "kind": TextEncoder.kind,
            "logit_scale": scale or 20.0,
            "max_length": LONGEST_TEXT,
            "pooling": "mean",
        }
    if head is not None and "image_size" in config:
        colours = _normalisation(directory, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])  # ImageNet's
        return {"kind": ImageEncoder.kind, "logit_scale": scale or 20.0, "pooling": "cls", **colours}
    raise OptionError(
        f"{directory}: a model of type '{config.get('model_type')}' has no ready-made objective; give one of your own with --objective module:function"
    )


def with_head(params: Params, head: Head) -> Params:
    """Parameters with a task's head in place of the model's own."""
    return {**params, **head} if isinstance(head, Mapping) else params


def _longest(config: JsonObject, most: int) -> int:
    return min(int(config.get("max_position_embeddings") or config.get("n_positions") or most), most)


def _normalisation(directory: Path, mean: list[float], std: list[float]) -> Settings:
    file = directory / "preprocessor_config.json"
    stored = read_json(file, "the base's preprocessor") if file.exists() else {}
    return {"image_mean": stored.get("image_mean", mean), "image_std": stored.get("image_std", std)}


def _logit_scale(head: Path | None) -> float | None:
    stored = SafetensorsFiles(str(head), [head]) if head else None
    return float(stored.read("logit_scale").reshape(-1)[0]) if stored and "logit_scale" in stored.infos else None
