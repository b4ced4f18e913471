"""A model's distance from its base as a PEFT LoRA adapter: for every linear weight the best approximation of a rank."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mergeway.checkpoint.directory import staged_directory, write_card
from mergeway.checkpoint.lora import CONFIG, WEIGHTS
from mergeway.checkpoint.naming import names_of
from mergeway.checkpoint.resolve import hub_id
from mergeway.checkpoint.source import Checkpoint, read_json
from mergeway.checkpoint.writer import FileWriter
from mergeway.core.files import write_text
from mergeway.core.linalg import squared_norm, thin_svd
from mergeway.core.progress import SILENT, Progress
from mergeway.core.tensors import TensorInfo, is_embedding, is_linear, wide
from mergeway.errors import CheckpointError, OptionError

# Models whose blocks store x·W instead of W·x (transformers' Conv1D), and the layers that do so.
_TRANSPOSED_MODELS = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}
# What peft writes before the name of a module.
_PREFIX = "base_model.model."
_CONV1D = re.compile(r"(^|\.)(c_attn|c_proj|c_fc|q_attn)\.weight$")


@dataclass(frozen=True)
class LayerEnergy:
    """One tensor's update: its squared length, and the share of it that the adapter keeps."""

    name: str
    shape: tuple[int, ...]
    energy: float
    kept: float


@dataclass(frozen=True)
class Adapter:
    """What was written: `layers` are in the adapter, `left_out` moved too but are no linear weights."""

    out: Path
    rank: int
    layers: list[LayerEnergy]
    left_out: list[LayerEnergy]

    @property
    def kept(self) -> float:
        """The share of the whole update's energy that base and adapter together reproduce."""
        total = sum(row.energy for row in (*self.layers, *self.left_out))
        return sum(row.energy * row.kept for row in self.layers) / total


def write_adapter(
    out: Path,
    model: Checkpoint,
    base: Checkpoint,
    rank: int,
    card: Callable[[Adapter], str],
    dtype: torch.dtype,
    force: bool,
    pool: Executor,
    progress: Progress = SILENT,
    head: Mapping[str, Tensor] | None = None,
    finish: Callable[[Path], None] = lambda _: None,
) -> Adapter:
    """The adapter in a directory that `peft` loads on the base; energy is ‖Δ‖², of which the rank keeps Σ_{i≤r} σ_i².

    The tensors of `head` are stored whole, as modules that `peft` puts in place of the base's.
    """
    if rank < 1:
        raise OptionError(f"the rank is {rank}; it must be at least 1")
    moved = [n for n, i in base.infos.items() if i.merges and not torch.equal(model.read(n), base.read(n))]
    transposed = _stores_transposed(base)
    chosen = [n for n in moved if _is_target(n, base, transposed)]
    if not chosen:
        raise CheckpointError(
            f"{model.source}: no linear weight differs from the base, so there is no adapter to write"
        )
    # A rank beyond the smaller side of every matrix would only add columns of zeros.
    rank = min(rank, max(min(base.infos[n].shape) for n in chosen))
    names = names_of(base.directory)
    module = {n: (names.inside(n) if names else n).removesuffix(".weight") for n in chosen}
    whole = {f"{_PREFIX}{names.inside(n) if names else n}": t.to(dtype) for n, t in (head or {}).items()}
    shapes = {module[n]: base.infos[n].shape[::-1] if transposed else base.infos[n].shape for n in chosen}
    infos = _factor_infos(shapes, rank, dtype) | {k: TensorInfo(tuple(t.shape), dtype) for k, t in whole.items()}
    with staged_directory(out, force) as stage:
        writer = FileWriter(stage / WEIGHTS, infos)
        progress.begin("decomposing", sum(base.infos[n].nbytes for n in chosen), "bytes")

        def job(name: str) -> LayerEnergy:
            update = _update(name, model, base)
            a, b, kept = _factors(update.mT if transposed else update, rank)
            for side, factor in (("A", a), ("B", b)):
                rounded = factor.to(dtype)
                if not bool(torch.isfinite(rounded).all()):
                    raise CheckpointError(f"the adapter of '{name}' does not fit into {dtype}; use a wider --dtype")
                writer.write(factor_key(module[name], side), 0, rounded)
            progress.advance(base.infos[name].nbytes)
            return LayerEnergy(name, tuple(base.infos[name].shape), squared_norm(update), kept)

        layers = list(pool.map(job, chosen))
        _write_head(writer, whole)
        writer.finish()
        rest = [n for n in moved if n not in chosen]
        left = [LayerEnergy(n, base.infos[n].shape, squared_norm(_update(n, model, base)), 0.0) for n in rest]
        done = Adapter(out, rank, layers, left)
        saved = sorted({key.removeprefix(_PREFIX).rpartition(".")[0] for key in whole})
        config = adapter_config(base, rank, list(module.values()), transposed, saved)
        write_text(stage / CONFIG, json.dumps(config, indent=2) + "\n")
        write_card(stage, card(done))
        finish(stage)
    return done


def _factor_infos(shapes: Mapping[str, tuple[int, ...]], rank: int, dtype: torch.dtype) -> dict[str, TensorInfo]:
    """The two factors of every module, by the names that peft gives them."""
    infos: dict[str, TensorInfo] = {}
    for module, (rows, columns) in shapes.items():
        infos[factor_key(module, "A")] = TensorInfo((rank, columns), dtype)
        infos[factor_key(module, "B")] = TensorInfo((rows, rank), dtype)
    return infos


def _write_head(writer: FileWriter, head: Mapping[str, Tensor]) -> None:
    for key, tensor in head.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"the head '{key}' does not fit into {tensor.dtype}; use a wider --dtype")
        writer.write(key, 0, tensor)


def _update(name: str, model: Checkpoint, base: Checkpoint) -> Tensor:
    dtype = wide(base.infos[name].dtype)
    return model.read(name).to(dtype) - base.read(name).to(dtype)


def _factors(update: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """A = √Σ Vᵀ and B = U √Σ, cut or filled with zeros to the rank, and the share of ‖update‖² they keep."""
    u, sigma, v = thin_svd(update)
    r = min(rank, len(sigma))
    a, b = torch.zeros(rank, update.shape[1]), torch.zeros(update.shape[0], rank)
    root = sigma[:r].sqrt()
    a, b = a.to(v.dtype), b.to(u.dtype)
    a[:r], b[:, :r] = root[:, None] * v[:, :r].mT, u[:, :r] * root
    whole = squared_norm(update)
    return a, b, min(float(sigma[:r].square().sum()) / whole, 1.0) if whole > 0 else 1.0


def _is_target(name: str, base: Checkpoint, transposed: bool) -> bool:
    """Linear weights; not an output layer that is the embedding under another name, for peft would not know."""
    shape = base.infos[name].shape
    if not is_linear(name, shape) or (transposed and not _CONV1D.search(name)):
        return False
    tables = [n for n, i in base.infos.items() if is_embedding(n) and i.shape == shape]
    return not any(torch.equal(base.read(name), base.read(table)) for table in tables)


def _stores_transposed(base: Checkpoint) -> bool:
    config = base.directory / "config.json" if base.directory else None
    if config is None or not config.exists():
        return False
    return read_json(config, "the base's config").get("model_type") in _TRANSPOSED_MODELS


def factor_key(module: str, side: str) -> str:
    """What peft calls a factor of a module."""
    return f"{_PREFIX}{module}.lora_{side}.weight"


def adapter_config(
    base: Checkpoint, rank: int, modules: list[str], transposed: bool = False, saved: Sequence[str] = ()
) -> dict[str, object]:
    """What peft reads of an adapter before its weights; scaling is 1 unless `lora_alpha` is set to another value."""
    found = hub_id(base.source)
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": found.repo if found else base.source,
        "revision": found.revision if found else None,
        "task_type": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "target_modules": modules,
        "modules_to_save": list(saved) or None,
    }
