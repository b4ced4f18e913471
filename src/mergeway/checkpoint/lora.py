"""A PEFT LoRA adapter seen as the checkpoint it makes of its base: W + scaling·BA, computed when read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from torch import Tensor

from mergeway.checkpoint.naming import names_of
from mergeway.checkpoint.source import Checkpoint, SafetensorsFiles, read_json
from mergeway.core.tensors import TensorInfo, wide
from mergeway.errors import CheckpointError

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_FACTOR = re.compile(
    r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.weight)?$"
)

# Variants of LoRA, by their key in the config, that make of the base something other than W + scaling·BA.
_VARIANTS = (
    "use_dora",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "monteclora_config",
    "arrow_config",
    "alora_invocation_tokens",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
)
# Initialisations that also change the base, so that the adapter does not belong to the base as it was published.
_CHANGE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True)
class _Factors:
    a: str
    b: str
    scaling: float
    transposed: bool


class LoraCheckpoint:
    """The base with the adapter's low-rank updates added, tensor by tensor."""

    def __init__(self, source: str, directory: Path, base: Checkpoint) -> None:
        self.source = source
        self.directory: Path | None = directory
        self._base = base
        config = _lora_config(directory)
        if not (directory / _WEIGHTS).exists():
            raise CheckpointError(f"{directory}: {_WEIGHTS} is missing beside {CONFIG}")
        self.adapter = SafetensorsFiles(source, [directory / _WEIGHTS], directory)
        self._factors = _pair_factors(directory, config, self.adapter.infos, base)
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(info.shape, wide(info.dtype)) if name in self._factors else info
            for name, info in base.infos.items()
        }

    @property
    def digest_extra(self) -> str:
        """What besides the adapter's own tensors decides the result: where each pair goes, and its scaling."""
        return repr(sorted((name, f.a, f.b, f.scaling, f.transposed) for name, f in self._factors.items()))

    def changes(self, name: str) -> bool:
        """Whether the adapter has an update for the tensor."""
        return name in self._factors

    def read(self, name: str) -> Tensor:
        weight = self._base.read(name)
        factors = self._factors.get(name)
        if factors is None:
            return weight
        dtype = wide(weight.dtype)
        update = self.adapter.read(factors.b).to(dtype) @ self.adapter.read(factors.a).to(dtype)
        return weight.to(dtype).add(update.mT if factors.transposed else update, alpha=factors.scaling)


def _lora_config(directory: Path) -> dict:
    config = read_json(directory / CONFIG, "the adapter's config")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{directory}: the adapter is of type {kind}, and only LORA can be added to its base")
    for key in _VARIANTS:
        if config.get(key):
            what = "DoRA" if key == "use_dora" else key
            raise CheckpointError(
                f"{directory}: an adapter with {what} is not a sum W + BA; merge it into its base with peft first"
            )
    start = str(config.get("init_lora_weights"))
    if start.startswith(_CHANGE_BASE):
        raise CheckpointError(
            f"{directory}: the adapter was started with init_lora_weights={start}, which also changes the base; merge it into its base with peft first"
        )
    if config.get("bias", "none") != "none":
        raise CheckpointError(
            f"{directory}: the adapter also trains biases (bias={config['bias']}); merge it into its base with peft first"
        )
    if config.get("modules_to_save"):
        raise CheckpointError(
            f"{directory}: the adapter also holds whole modules ({config['modules_to_save']}); merge it into its base with peft first"
        )
    for key in ("r", "lora_alpha"):
        if not isinstance(config.get(key), int | float) or config[key] <= 0:
            raise CheckpointError(
                f"{directory}: {key} is {config.get(key)!r} in {CONFIG}; it must be a positive number"
            )
    for key in ("rank_pattern", "alpha_pattern"):
        if not _is_pattern(config.get(key) or {}):
            raise CheckpointError(
                f"{directory}: {key} in {CONFIG} must map regular expressions to positive numbers, not {config[key]!r}"
            )
    return config


def _is_pattern(value: object) -> bool:
    if not isinstance(value, dict) or not all(isinstance(v, int | float) and v > 0 for v in value.values()):
        return False
    try:
        return all(re.compile(pattern) for pattern in value)
    except re.error:
        return False


def _pair_factors(
    directory: Path, config: dict, infos: Mapping[str, TensorInfo], base: Checkpoint
) -> dict[str, _Factors]:
    sides: dict[tuple[str, bool], dict[str, str]] = {}
    for key in infos:
        found = _FACTOR.match(key)
        if not found:
            raise CheckpointError(
                f"{directory}: tensor '{key}' is not a LoRA factor; merge the adapter into its base with peft first"
            )
        sides.setdefault((found["module"], bool(found["embedding"])), {})[found["side"]] = key
    if not sides:
        raise CheckpointError(f"{directory}: the adapter holds no tensors")
    factors = {}
    for (module, embedding), pair in sides.items():
        if pair.keys() != {"A", "B"}:
            raise CheckpointError(f"{directory}: '{module}' has only one of lora_A and lora_B")
        name = _weight_name(directory, module, base)
        transposed = embedding or bool(config.get("fan_in_fan_out"))
        a, b, shape = infos[pair["A"]].shape, infos[pair["B"]].shape, base.infos[name].shape
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or ((a[1], b[0]) if transposed else (b[0], a[1])) != shape:
            raise CheckpointError(
                f"{directory}: lora_A {list(a)} and lora_B {list(b)} of '{module}' do not make an update of '{name}' {list(shape)}"
            )
        factors[name] = _Factors(pair["A"], pair["B"], _scaling(config, module), transposed)
    return factors


def _weight_name(directory: Path, module: str, base: Checkpoint) -> str:
    """The base tensor a module's factors belong to; a head model's prefix may stand on either side."""
    wanted = f"{module}.weight"
    if wanted in base.infos:
        return wanted
    near = [name for name in base.infos if name.endswith(f".{wanted}") or wanted.endswith(f".{name}")]
    if not near and (names := names_of(base.directory)) is not None:
        near = [name for name in [names.stored(wanted)] if name in base.infos]
    if len(near) != 1:
        raise CheckpointError(
            f"{directory}: the base has no tensor '{wanted}' for the adapter's module '{module}'; is it an adapter of another model?"
        )
    return near[0]


def _scaling(config: dict, module: str) -> float:
    """alpha/r, or alpha/√r for rsLoRA, with the patterns that override alpha and r for some modules."""
    rank = _pattern(config.get("rank_pattern"), module, config["r"])
    alpha = _pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    return alpha / (sqrt(rank) if config.get("use_rslora") else rank)


def _pattern(patterns: dict | None, module: str, default: float) -> float:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
