"""Low-rank factors in the place of whole weights: `peft` puts them into the model, the loop trains them, an adapter keeps them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergeway.calibration.suite import SuiteData
from mergeway.checkpoint import Checkpoint
from mergeway.checkpoint.adapter import adapter_config, factor_key
from mergeway.checkpoint.lora import CONFIG, WEIGHTS
from mergeway.checkpoint.writer import save_tensors
from mergeway.core.files import write_text
from mergeway.errors import OptionError
from mergeway.train.training import Training

_ADAPTER = "default"  # peft's name for the only adapter of a model


class LoraFactors:
    """A suite's model with factors beside its linear weights; nothing else of it is trained."""

    def __init__(self, suite: SuiteData, base: Checkpoint, training: Training, frozen: re.Pattern[str] | None) -> None:
        self._base, self._rank, self._alpha = base, training.lora, training.alpha
        # A model of its own: the factors are put into its layers, and the suite's is still asked about whole weights.
        self.model = suite.model_of(suite.base, suite.compute)
        module = self.model.module
        names = self.model.run.names
        self._modules = [m for m in _linear(module) if not (frozen and frozen.search(names.stored(f"{m}.weight")))]
        if not self._modules:
            raise OptionError(f"--lora {self._rank}: the model has no linear layer that is not frozen; train it whole")
        self._stored = {m: names.stored(f"{m}.weight") for m in self._modules}
        _inject(module, self._modules, self._rank, self._alpha, training.seed)
        del self.model.run  # what ran the model without factors
        self.params = {n: p for n, p in module.named_parameters() if ".lora_" in n}

    def merged(self) -> dict[str, Tensor]:
        """The weights that base and factors make together: W + (alpha/rank)·BA."""
        whole = {n: self._base.read(n).float() for n, i in self._base.infos.items() if i.merges}
        for module, name in self._stored.items():
            update = self._factor(module, "B") @ self._factor(module, "A")
            whole[name] = whole[name] + update * (self._alpha / self._rank)
        return whole

    def write(self, folder: Path) -> None:
        """The adapter as `peft` reads it."""
        factors = {factor_key(m, side): self._factor(m, side) for m in self._modules for side in "AB"}
        save_tensors(folder / WEIGHTS, factors, {"format": "pt"})
        config = {**adapter_config(self._base, self._rank, self._modules), "lora_alpha": self._alpha}
        write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")

    def _factor(self, module: str, side: str) -> Tensor:
        return self.params[f"{module}.lora_{side}.{_ADAPTER}.weight"].detach().cpu().contiguous()


def _linear(module: nn.Module) -> list[str]:
    """The linear layers by name, without an output layer, which may be the embedding under another name."""
    last = getattr(module, "get_output_embeddings", lambda: None)()
    return [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and layer is not last]


def _inject(module: nn.Module, modules: list[str], rank: int, alpha: float, seed: int) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise OptionError("--lora: adapters are trained with peft; pip install 'mergeway[lora]'") from None
    config: Any = LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules)  # pyright: ignore[reportArgumentType]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, module, _ADAPTER)
    module.eval()
