"""The tangent model: f(x; θ0) + ∇f(x; θ0)·(θ − θ0), linear in θ (Eq. 2, Holistic CMM)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import jvp
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from mergeway.errors import OptionError
from mergeway.model.inputs import Head, Inputs, Params
from mergeway.model.model import Encoder, Network, scaled_cosine


class Tangent:
    """An encoder whose features are linear in the parameters; the expansion point is always the base.

    Normalisation and head come after the expansion, so that the head sees features as it always does. A model is taken as it
    is: the derivative runs through `torch.func`.
    """

    def __init__(self, encoder: Network, base: Mapping[str, Tensor]) -> None:
        if not isinstance(encoder, Encoder):
            raise OptionError("--tangent: the tangent model is of an encoder: a CLIP vision tower or a text encoder")
        self.encoder, self.scale, self.compute = encoder, encoder.scale, encoder.compute
        if self.compute.checkpointing or self.compute.compile:
            raise OptionError("--tangent: the tangent model goes with neither --checkpointing nor --compile")
        still = {name: tensor.detach() for name, tensor in base.items() if tensor.is_floating_point()}
        self._base = self.compute.put(still)

    @property
    def width(self) -> int:
        """The length of a feature."""
        return self.encoder.width

    def embed(self, params: Params, inputs: Inputs) -> Tensor:
        """The features before normalisation."""
        params = self.compute.put(params)
        moved = [name for name in self._base if name in params]
        away = {name: params[name] - self._base[name] for name in moved}
        still = {name: tensor for name, tensor in self._base.items() if name not in away}

        def features(moving: Mapping[str, Tensor]) -> Tensor:
            return self.encoder.embed({**still, **moving}, inputs)

        # The fused kernels of attention have no forward derivative, and round otherwise than the one that has: the value is
        # worked out apart, so that at the base the tangent model is the base to the bit.
        with torch.no_grad():
            value = self.encoder.embed(self._base, inputs)
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            # torch's own forward derivatives still go through what torch calls deprecated.
            warnings.filterwarnings("ignore", "`torch.jit.script` is", DeprecationWarning)
            _, change = jvp(features, ({name: self._base[name] for name in moved},), (away,))[:2]
        return value + change

    def features(self, params: Params, inputs: Inputs) -> Tensor:
        """Normalised features."""
        return functional.normalize(self.embed(params, inputs), dim=-1)

    def __call__(self, params: Params, inputs: Inputs, head: Head) -> Tensor:
        return scaled_cosine(self.scale, self.features(params, inputs), head)
