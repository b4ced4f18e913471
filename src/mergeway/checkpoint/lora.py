"""A PEFT LoRA adapter seen as the checkpoint it makes of its base, computed when read.

A weight is W + scaling·BA; with DoRA its rows then get the lengths m that the adapter has learned. What peft stores whole takes the
place of the base's: the modules of `modules_to_save`, such as a classifier's head, trained biases, and resized embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from torch import Tensor

from mergeway.checkpoint.naming import names_of
from mergeway.checkpoint.source import Checkpoint, JsonObject, SafetensorsFiles, read_json
from mergeway.core.tensors import TensorInfo, wide
from mergeway.errors import CheckpointError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_FACTOR = re.compile(
    r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB]|magnitude_vector)(?:\.weight)?$"
)
_SIDES = {"A": "A", "B": "B", "magnitude_vector": "m"}

# Variants of LoRA, by their key in the config, that make of the base something other than W + scaling·BA.
_VARIANTS = (
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
    magnitude: str | None
    scaling: float
    transposed: bool


class LoraCheckpoint:
    """The base with the adapter's low-rank updates added and its whole tensors put in place, tensor by tensor."""

    def __init__(self, source: str, directory: Path, base: Checkpoint) -> None:
        self.source = source
        self.directory: Path | None = directory
        self._base = base
        config = _lora_config(directory)
        if not (directory / WEIGHTS).exists():
            raise CheckpointError(f"{directory}: {WEIGHTS} is missing beside {CONFIG}")
        self.adapter = SafetensorsFiles(source, [directory / WEIGHTS], directory)
        stored = _Stored(directory, base)
        factors = {key: found for key in self.adapter.infos if (found := _FACTOR.match(key))}
        self._factors = _pair_factors(directory, config, self.adapter.infos, factors, stored)
        self._whole = {stored.whole(key): key for key in self.adapter.infos if key not in factors}
        own = {name: self.adapter.infos[key] for name, key in self._whole.items()}
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(info.shape, wide(info.dtype)) if name in self._factors else info
            for name, info in {**base.infos, **own}.items()
        }

    @property
    def digest_extra(self) -> str:
        """What besides the adapter's own tensors decides the result: where each of them goes, and its scaling."""
        pairs = repr(sorted((name, f.a, f.b, f.scaling, f.transposed) for name, f in self._factors.items()))
        return pairs + (repr(sorted(self._whole.items())) if self._whole else "")

    def changes(self, name: str) -> bool:
        """Whether the adapter has an update for the tensor, or one to put in its place."""
        return name in self._factors or name in self._whole

    def expect(self, name: str) -> None:
        """An adapter is small, and its base is expected by whoever folds onto it."""

    def read(self, name: str) -> Tensor:
        weight = self.adapter.read(self._whole[name]) if name in self._whole else self._base.read(name)
        factors = self._factors.get(name)
        if factors is None:
            return weight
        dtype = wide(weight.dtype)
        # Those of a convolution have more axes: B is 1×1, A has the kernel's.
        b, a = (self.adapter.read(key).to(dtype).flatten(1) for key in (factors.b, factors.a))
        update = (b @ a).mT if factors.transposed else (b @ a).reshape(weight.shape)
        moved = weight.to(dtype).add(update, alpha=factors.scaling)
        if factors.magnitude is None:
            return moved
        rows = moved.mT if factors.transposed else moved
        rows = rows * (self.adapter.read(factors.magnitude).to(dtype) / rows.norm(dim=1))[:, None]
        return rows.mT.contiguous() if factors.transposed else rows


def _lora_config(directory: Path) -> JsonObject:
    config = read_json(directory / CONFIG, "the adapter's config")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{directory}: the adapter is of type {kind}, and only LORA can be added to its base")
    for key in _VARIANTS:
        if config.get(key):
            raise CheckpointError(
                f"{directory}: an adapter with {key} is not a sum W + BA; merge it into its base with peft first"
            )
    start = str(config.get("init_lora_weights"))
    if start.startswith(_CHANGE_BASE):
        raise CheckpointError(
            f"{directory}: the adapter was started with init_lora_weights={start}, which also changes the base; merge it into its base with peft first"
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


class _Stored:
    """The names of the base's tensors, for those of a module of `peft`; a head model's prefix may stand on either side."""

    def __init__(self, directory: Path, base: Checkpoint) -> None:
        self._directory, self._infos, self._names = directory, base.infos, names_of(base.directory)

    def weight(self, module: str) -> tuple[str, TensorInfo]:
        """The tensor that a module's factors belong to."""
        name = self._find(f"{module}.weight")
        if name is None:
            raise CheckpointError(
                f"{self._directory}: the base has no tensor '{module}.weight' for the adapter's module '{module}'; is it an adapter of another model?"
            )
        return name, self._infos[name]

    def whole(self, key: str) -> str:
        """The tensor that one of the adapter takes the place of; one that the base does not have may be a head."""
        if ".lora_" in key:
            raise CheckpointError(
                f"{self._directory}: tensor '{key}' is no factor that mergeway knows; merge the adapter into its base with peft first"
            )
        wanted = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
        return self._find(wanted) or wanted

    def _find(self, wanted: str) -> str | None:
        if wanted in self._infos:
            return wanted
        near = [name for name in self._infos if name.endswith(f".{wanted}") or wanted.endswith(f".{name}")]
        if not near and self._names is not None:
            near = [name for name in [self._names.stored(wanted)] if name in self._infos]
        return near[0] if len(near) == 1 else None


def _pair_factors(
    directory: Path,
    config: JsonObject,
    infos: Mapping[str, TensorInfo],
    found: Mapping[str, re.Match[str]],
    stored: _Stored,
) -> dict[str, _Factors]:
    sides: dict[tuple[str, bool], dict[str, str]] = {}
    for key, match in found.items():
        sides.setdefault((match["module"], bool(match["embedding"])), {})[_SIDES[match["side"]]] = key
    if not sides:
        raise CheckpointError(f"{directory}: the adapter holds no LoRA factors")
    factors: dict[str, _Factors] = {}
    for (module, embedding), pair in sides.items():
        if not {"A", "B"} <= pair.keys():
            raise CheckpointError(f"{directory}: '{module}' has only one of lora_A and lora_B")
        name, info = stored.weight(module)
        pair = _Factors(
            pair["A"],
            pair["B"],
            pair.get("m"),
            _scaling(config, module),
            embedding or bool(config.get("fan_in_fan_out")),
        )
        _check_shapes(directory, module, name, info.shape, pair, infos)
        if config.get("use_dora") and (pair.magnitude is None or embedding):
            raise CheckpointError(
                f"{directory}: '{module}' is an embedding, a convolution or without its magnitudes, for which DoRA is not read; merge the adapter into its base with peft first"
            )
        factors[name] = pair
    return factors


def _check_shapes(
    directory: Path, module: str, name: str, shape: tuple[int, ...], found: _Factors, infos: Mapping[str, TensorInfo]
) -> None:
    """Refuse factors that make no update of the weight."""
    a, b = infos[found.a].shape, infos[found.b].shape
    fits = len(a) == len(b) == len(shape) >= 2 and a[0] == b[1] and set(b[2:]) <= {1}
    if not fits or ((a[1], b[0]) if found.transposed else (b[0], *a[1:])) != shape:
        raise CheckpointError(
            f"{directory}: lora_A {list(a)} and lora_B {list(b)} of '{module}' do not make an update of '{name}' {list(shape)}"
        )
    if found.magnitude is not None and infos[found.magnitude].shape != (b[0],):
        raise CheckpointError(
            f"{directory}: the magnitudes of '{module}' are {list(infos[found.magnitude].shape)}, and DoRA is read for linear layers alone; merge the adapter into its base with peft first"
        )


def _scaling(config: JsonObject, module: str) -> float:
    """alpha/r, or alpha/√r for rsLoRA, with the patterns that override alpha and r for some modules."""
    rank = _pattern(config.get("rank_pattern"), module, config["r"])
    alpha = _pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    return alpha / (sqrt(rank) if config.get("use_rslora") else rank)


def _pattern(patterns: dict | None, module: str, default: float) -> float:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
