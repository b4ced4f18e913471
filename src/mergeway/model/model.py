"""A network as a function of named parameters, and a model directory as one: inputs are prepared without its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from mergeway.checkpoint.source import read_json
from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.model.inputs import Head, Inputs, Params, in_memory
from mergeway.model.runner import Runner
from mergeway.model.skeleton import Family
from mergeway.model.weights import Tokenizer, load_config, load_tokenizer, load_weights

# How a model reads its inputs, as a suite or a trunk has it in a file.
Settings = Mapping[str, Any]

Reads = Literal["images", "texts", "documents"]


class Network(ABC):
    """A module as a function of named parameters: logits = network(params, inputs, head)."""

    compute: Compute

    @cached_property
    def module(self) -> nn.Module:
        """The module itself."""
        raise NotImplementedError

    @cached_property
    def run(self) -> Runner:
        """The module on its device."""
        return Runner(self.module, self.compute)

    @abstractmethod
    def __call__(self, params: Params, inputs: Inputs, head: Head) -> Tensor: ...


class Classifier(Network):
    """A `transformers` classifier (or any module that returns logits) with its head among its own parameters."""

    def __init__(self, model: nn.Module, compute: Compute | None = None) -> None:
        self.module = model.eval()
        self.compute = compute or Compute()
        self.run = Runner(self.module, self.compute)

    def __call__(self, params: Params, inputs: Inputs, head: Head) -> Tensor:
        out = self.run(params, inputs)
        return self.run.home(out if isinstance(out, Tensor) else out.logits)


class Model(Network):
    """A model directory as its settings describe it: the config is read now, the weights once, at the first call."""

    kind: ClassVar[str]
    reads: ClassVar[Reads]
    needs: ClassVar[tuple[str, ...]]  # settings it cannot do without
    takes: ClassVar[tuple[str, ...]] = ()  # settings that have a default

    def __init__(self, directory: Path, settings: Settings, compute: Compute | None = None) -> None:
        for name in self.needs:
            if name not in settings:
                raise OptionError(f"{directory}: a model of kind {self.kind} needs the setting '{name}'")
        self.directory, self.compute = directory, compute or Compute()
        known = [name for name in (*self.needs, *self.takes) if name in settings]
        self.settings: Settings = {"kind": self.kind, **{name: settings[name] for name in known}}
        self.config = load_config(self._config_family(), directory, self.compute.allow_code)

    @cached_property
    def module(self) -> nn.Module:
        """The model of `transformers`, loaded at the first use."""
        return load_weights(self._family(), self.directory, self.compute.allow_code)

    @property
    def classes(self) -> int | None:
        """How many classes the model's own head tells apart; None where the head comes with the task."""
        return None

    @abstractmethod
    def _family(self) -> Family:
        """The class of `transformers` that loads the weights."""

    def _config_family(self) -> Family:
        from transformers import AutoConfig

        return AutoConfig


class ImageModel(Model):
    """A model of square images: uint8 [n, side, side, 3] in, normalised pixels to the module."""

    reads: ClassVar[Reads] = "images"

    def __init__(self, directory: Path, settings: Settings, compute: Compute | None = None) -> None:
        super().__init__(directory, settings, compute)
        self._mean = torch.tensor(list(settings["image_mean"])).view(1, -1, 1, 1)
        self._std = torch.tensor(list(settings["image_std"])).view(1, -1, 1, 1)

    @property
    def image_size(self) -> int:
        """The side of the images that the model takes."""
        size = getattr(getattr(self.config, "vision_config", self.config), "image_size", None)
        if size is None:  # a convolutional network takes any, and its config says none
            size = _size_of_pictures(self.directory)
        side = size[0] if isinstance(size, list | tuple) and size else size
        if not isinstance(side, int):
            raise OptionError(f"{self.directory}: config.json says image_size {side!r}; it must be a whole number")
        return side

    def pixels(self, inputs: Inputs) -> Tensor:
        """What the module sees of a batch."""
        images = in_memory(inputs["images"])
        return (images.permute(0, 3, 1, 2).float() / 255 - self._mean) / self._std


def _size_of_pictures(directory: Path) -> object:
    """What the preprocessor makes of pictures: a side, or a dictionary of sides."""
    file = directory / "preprocessor_config.json"
    stored = read_json(file, "the base's preprocessor") if file.exists() else {}
    for size in (stored.get("crop_size"), stored.get("size")):
        for side in size.values() if isinstance(size, dict) else [size]:
            if side is not None:
                return side
    raise OptionError(
        f"{directory}: neither config.json nor preprocessor_config.json says how large pictures are; "
        'add "image_size" to config.json'
    )


class TextModel(Model):
    """A model of texts, each cut or padded to the same number of tokens."""

    reads: ClassVar[Reads] = "texts"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the weights."""
        return load_tokenizer(self.directory, self.compute.allow_code)

    def encode(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Token ids and mask of equal length."""
        length = self.settings["max_length"]
        encoded = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        )
        return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


class Encoder(Model):
    """A model without a head of its own, under a task's frozen one: logits = scale·cos(features, head)."""

    scale: float

    @property
    @abstractmethod
    def width(self) -> int:
        """The length of a feature."""

    @abstractmethod
    def embed(self, params: Params, inputs: Inputs) -> Tensor:
        """Features before they are normalised."""

    def features(self, params: Params, inputs: Inputs) -> Tensor:
        """Features of length 1."""
        return functional.normalize(self.embed(params, inputs), dim=-1)

    def __call__(self, params: Params, inputs: Inputs, head: Head) -> Tensor:
        return scaled_cosine(self.scale, self.features(params, inputs), head)


def scaled_cosine(scale: float, features: Tensor, head: Head) -> Tensor:
    """The logits of normalised features under a head of class vectors."""
    if not isinstance(head, Tensor):
        raise OptionError("this kind of model needs a head for every task")
    return scale * features @ head.to(features.dtype).mT
