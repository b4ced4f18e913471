"""What suite.json says, as types: a suite, and each of its tasks."""

from __future__ import annotations

from typing import TypedDict


class _Named(TypedDict):
    name: str
    data: str
    head: str


class TaskJson(_Named, total=False):
    """A task: its files, and what is known of it; an expert may be left to be fine-tuned."""

    expert: str
    classes: int
    labels: list[int]
    zero_shot: float
    expert_accuracy: float
    source: str
    licence: str


class ImageSettings(TypedDict):
    """How a CLIP vision model reads images, and what its logits are multiplied by."""

    logit_scale: float
    image_mean: list[float]
    image_std: list[float]


class BackboneSettings(ImageSettings):
    """How another vision backbone reads them: the side of a picture, and what of its output is the feature."""

    image_size: int
    pooling: str


class _Suite(ImageSettings):
    name: str
    kind: str
    base: str
    tasks: list[TaskJson]


class SuiteJson(_Suite, total=False):
    """A suite of images; `training` and `alignment` are options that its authors recommend."""

    image_size: int
    pooling: str
    protocol: str
    classifier: str
    source: str
    training: dict[str, float | str]
    alignment: dict[str, float | str]


class _Texts(TypedDict):
    name: str
    data: str


class TextsJson(_Texts, total=False):
    """A task of a language model: the beginning of its files' names, and what is known of it."""

    expert: str
    measure: str
    licence: str


class LanguageJson(TypedDict):
    """A suite of language models."""

    name: str
    kind: str
    base: str
    max_length: int
    training: dict[str, float | str]
    licence: str
    tasks: list[TextsJson]
