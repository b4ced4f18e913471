"""Any vision backbone of `transformers` without its head, under a task's frozen one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.model.inputs import Inputs, Params
from mergeway.model.model import Encoder, ImageModel


class ImageEncoder(ImageModel, Encoder):
    """A vision backbone; features are the class token or the mean of the patches.

    `image_size` may be smaller than what the backbone was trained at: its positions are interpolated then.
    """

    kind = "image-encoder"
    needs = ("logit_scale", "image_mean", "image_std")
    takes = ("pooling", "image_size")

    def __init__(self, directory: Path, settings: Mapping[str, Any], compute: Compute | None = None) -> None:
        super().__init__(directory, settings, compute)
        self.scale = settings["logit_scale"]
        self._pooling = settings.get("pooling", "cls")
        if self._pooling not in ("mean", "cls"):
            raise OptionError(f"{directory}: pooling is '{self._pooling}'; it must be mean or cls")
        side, patch = self.image_size, getattr(self.config, "patch_size", 1)
        if type(side) is not int or side < 1 or (isinstance(patch, int) and side % patch):
            raise OptionError(f"{directory}: image_size is {side!r}; it must be a multiple of the patch, {patch}")

    @property
    def image_size(self) -> int:
        """The side of the images, by default what the backbone was trained at."""
        return self.settings.get("image_size", super().image_size)

    @property
    def width(self) -> int:
        """The length of an image feature."""
        return int(getattr(self.config, "hidden_size", 0) or self.config.hidden_sizes[-1])

    def embed(self, params: Params, inputs: Inputs) -> Tensor:
        """Image features before they are normalised."""
        given: dict[str, Any] = {"pixel_values": self.pixels(inputs)}
        if "interpolate_pos_encoding" in inspect.signature(self.module.forward).parameters:
            given["interpolate_pos_encoding"] = self.image_size != super().image_size
        hidden = self.run.home(self.run(params, given).last_hidden_state)
        if hidden.ndim == 4:  # a convolutional backbone: a map of features without a class token
            return hidden.mean((2, 3))
        return hidden[:, 0] if self._pooling == "cls" else hidden[:, self._before_patches :].mean(1)

    @property
    def _before_patches(self) -> int:
        """Tokens before the first patch: the class token, and registers where the backbone has them."""
        return 1 + int(getattr(self.config, "num_register_tokens", 0) or 0)

    def _family(self) -> Any:
        from transformers import AutoModel

        return AutoModel
