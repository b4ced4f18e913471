"""Adam's second moments beside a checkpoint: a safetensors file with one tensor a parameter, its step and its β₂."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mergeway.checkpoint import Checkpoint, InMemory, SafetensorsFiles
from mergeway.checkpoint.writer import save_tensors
from mergeway.core.files import reading, replaced
from mergeway.core.tensors import TensorInfo
from mergeway.errors import CheckpointError, suggest

FILE = "moments.safetensors"


class Moments(Mapping[str, Tensor]):
    """v by parameter name, read from the disk one tensor at a time; tied names share what one of them has.

    Those of a head are passed over: the optimiser knew it, but each task keeps its own.
    """

    def __init__(
        self,
        source: str | Path | Mapping[str, Tensor],
        base: Mapping[str, TensorInfo],
        tied: Mapping[str, str],
        is_head: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._file: Checkpoint = (
            InMemory(source, "moments")
            if isinstance(source, Mapping)
            else SafetensorsFiles(str(source), [Path(source)])
        )
        self._stored = {name: name for name in self._file.infos if not is_head(name)}
        for alias, name in tied.items():
            for missing, found in ((alias, name), (name, alias)):
                if found in self._file.infos and missing not in self._file.infos and missing in base:
                    self._stored[missing] = found
        _check(self._file, [name for name in self._file.infos if name in self._stored], base)

    def __getitem__(self, name: str) -> Tensor:
        return self._file.read(self._stored[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _check(file: Checkpoint, names: Sequence[str], base: Mapping[str, TensorInfo]) -> None:
    """Refuse moments of another model, or values that no average of squares can have."""
    path = file.source
    if not names:
        raise CheckpointError(f"{path}: holds no moments")
    for name in names:
        info = file.infos[name]
        if name not in base:
            raise CheckpointError(
                f"{path}: moments of '{name}', which the base does not have; {suggest(name, base)[:200]}"
            )
        if info.shape != base[name].shape:
            raise CheckpointError(
                f"{path}: the moments of '{name}' are {list(info.shape)}, the parameter is {list(base[name].shape)}; they are another model's"
            )
        if not info.merges:
            raise CheckpointError(f"{path}: the moments of '{name}' have dtype {info.dtype}; they are floating-point")
        if info.numel == 0:
            continue
        low, high = (float(x) for x in torch.aminmax(file.read(name)))
        if not (low >= 0 and high < float("inf")):
            what = "negative" if low < 0 else "NaN or infinite"
            raise CheckpointError(
                f"{path}: the moments of '{name}' hold values that are {what}; second moments are averages of squares"
            )


def moments_beside(source: str) -> Path | None:
    """The moments in an arrival's own directory, if it has one and they are there."""
    path = Path(source) / FILE
    return path if path.is_file() else None


def write_moments(path: Path, moments: Mapping[str, Tensor], step: int | None, beta2: float | None) -> None:
    """Moments as a file; with step and β₂ the bias correction 1/(1 − β₂^step) stays possible."""
    known = {"step": step, "beta2": beta2}
    metadata = {"kind": "exp_avg_sq"} | {key: repr(value) for key, value in known.items() if value is not None}
    with replaced(path) as new:
        save_tensors(new, moments, metadata)


def correction(path: Path) -> float:
    """1/(1 − β₂^step), what turns a young running average into an unbiased one."""
    try:
        with reading(path), safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        step, beta2 = int(metadata["step"]), float(metadata["beta2"])
    except (KeyError, ValueError, SafetensorError):
        raise CheckpointError(f"{path}: says no 'step' and 'beta2', so its bias cannot be corrected") from None
    if step < 1 or not 0 <= beta2 < 1:
        raise CheckpointError(f"{path}: step {step} and beta2 {beta2} are not those of an optimiser")
    return 1.0 / (1.0 - beta2**step)
