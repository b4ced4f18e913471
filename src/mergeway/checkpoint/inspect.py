"""What is checked before anything is committed: every tensor's digest, finite values, and whether an arrival fits the base."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from functools import cached_property

import torch
from torch import Tensor

from mergeway.checkpoint.lora import LoraCheckpoint
from mergeway.checkpoint.source import Checkpoint, spell_dtype
from mergeway.core.ranks import team
from mergeway.core.tensors import BLOCK, TensorInfo, as_bytes, begin_digest, is_embedding
from mergeway.errors import CheckpointError

SHOWN = 5  # how many tensors of a kind an error names


class Inspection:
    """A checkpoint each of whose tensors is digested, and checked for values that are not finite, when it is first read.

    Of an adapter, these are its own tensors. `known` are digests that need not be worked out again.
    """

    def __init__(self, checkpoint: Checkpoint, known: Mapping[str, str] | None = None) -> None:
        self.source, self.directory, self.infos = checkpoint.source, checkpoint.directory, checkpoint.infos
        self._checkpoint = self._own = checkpoint
        self._extra = ""
        if isinstance(checkpoint, LoraCheckpoint):
            self._own, self._extra = checkpoint.adapter, checkpoint.digest_extra
        if not self._own.infos:
            raise CheckpointError(f"{self.source}: the checkpoint holds no tensors")
        self._known = dict(known or {})
        self._locks = {name: threading.Lock() for name in self._own.infos}

    def read(self, name: str) -> Tensor:
        """One tensor, looked at."""
        tensor = self._checkpoint.read(name)
        if self._own is self._checkpoint:
            self._look(name, lambda: tensor)
        return tensor

    def expect(self, name: str) -> None:
        """The tensor will be read soon."""
        self._checkpoint.expect(name)

    def look(self, name: str) -> str:
        """The digest of a tensor, whose values must be finite."""
        return self._look(name, lambda: self._own.read(name))

    def _look(self, name: str, read: Callable[[], Tensor]) -> str:
        if name not in self._known:
            with self._locks[name]:
                if name not in self._known:
                    self._known[name] = self._digest(name, read())
        return self._known[name]

    def _digest(self, name: str, tensor: Tensor) -> str:
        digest, finite = begin_digest(), True
        for block in _blocks(tensor):
            digest.update(as_bytes(block))
            finite = finite and (not self._own.infos[name].merges or is_finite(block))
        if not finite:
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(
                f"{self.source}: tensor '{name}' holds {bad} values that are NaN or infinite; the checkpoint is damaged"
            )
        return digest.hexdigest()

    def complete(self, pool: Executor | None = None, progress: Callable[[int], object] = lambda _: None) -> None:
        """Look at every tensor that nobody has read, on whatever rank."""
        for known in team().gather(self._known):
            self._known |= known
        left = [name for name in self._own.infos if name not in self._known]

        def look(name: str) -> str:
            found = self.look(name)
            progress(self._own.infos[name].nbytes)
            return found

        self._known |= zip(left, (pool.map if pool else map)(look, left), strict=True)

    @cached_property
    def digest(self) -> str:
        """The digest of the checkpoint as a whole; on several ranks only after `complete`."""
        return combine_digests({name: self.look(name) for name in self._own.infos}, self._own.infos, self._extra)

    @property
    def tensors(self) -> Mapping[str, str]:
        """The digests of all tensors."""
        return {name: self.look(name) for name in self._own.infos}


def inspect_checkpoint(
    checkpoint: Checkpoint, pool: Executor | None = None, progress: Callable[[int], object] = lambda _: None
) -> Inspection:
    """Digest every tensor now and refuse a checkpoint with a value that is not finite; of an adapter, its own tensors."""
    seen = Inspection(checkpoint)
    seen.complete(pool, progress)
    return seen


def combine_digests(tensors: Mapping[str, str], infos: Mapping[str, TensorInfo], extra: str = "") -> str:
    """One digest for a set of tensors, whatever files they lie in."""
    whole = hashlib.sha256(extra.encode())
    for name in sorted(tensors):
        shape = ",".join(map(str, infos[name].shape))
        whole.update(f"{name}\t{spell_dtype(infos[name].dtype)}\t{shape}\t{tensors[name]}\n".encode())
    return whole.hexdigest()


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; the extremes carry a NaN or an infinity, and are found far faster than a mask."""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor in pieces that stay in the cache from one use to the next."""
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), BLOCK):
        yield flat[start : start + BLOCK]


def tied_names(base: Checkpoint, inspection: Inspection) -> dict[str, str]:
    """Matrices stored twice with equal values, one of them an embedding: alias -> the embedding's name."""
    tables = [n for n, i in base.infos.items() if i.merges and len(i.shape) == 2 and is_embedding(n)]
    tied: dict[str, str] = {}
    for table in tables:
        if table not in tied:
            tied |= dict.fromkeys(_twins(table, base, inspection, base.infos), table)
    return tied


def check_fits(
    base: Checkpoint, base_seen: Inspection, arrival: Checkpoint, seen: Inspection, heads: str | None = None
) -> dict[str, str]:
    """Refuse an arrival whose tensors are not those of the base; says where to read a tied tensor that is stored once.

    Integer and boolean buffers are taken from the base, so they need not agree; nor need `heads`, a pattern for the names of
    tensors that each task keeps for itself.
    """
    shares = re.compile(heads).search if heads else lambda _: None
    ours = {n: i for n, i in base.infos.items() if (i.merges or i.dtype.is_floating_point) and not shares(n)}
    theirs = {n: i for n, i in arrival.infos.items() if i.dtype.is_floating_point and not shares(n)}
    lone = isinstance(arrival, LoraCheckpoint)
    missing, elsewhere = [], {}
    for name in ours.keys() - theirs.keys():
        partners = _twins(name, base, base_seen, theirs.keys() & ours.keys())
        if partners:
            elsewhere[name] = partners[0]
        else:
            missing.append(name)
    shared = ours.keys() & theirs.keys()
    extra = [n for n in theirs.keys() - ours.keys() if lone or not _twins(n, arrival, seen, shared)]
    dtypes = [n for n in shared if not theirs[n].merges or not ours[n].merges]
    shapes = [n for n in shared if theirs[n].shape != ours[n].shape]
    problems = [
        _listed("is missing", "are missing", missing),
        _listed("is unknown to the base", "are unknown to the base", extra),
        _listed(
            "has another shape",
            "have other shapes",
            shapes,
            lambda n: f" {list(theirs[n].shape)} for {list(ours[n].shape)}",
        ),
        _listed(
            "has a dtype that cannot be merged",
            "have dtypes that cannot be merged",
            dtypes,
            lambda n: f" {spell_dtype(theirs[n].dtype)} on {spell_dtype(ours[n].dtype)}",
        ),
    ]
    if any(problems):
        hint = _hint(ours, theirs, shapes)
        raise CheckpointError(
            f"{arrival.source} does not fit the base {base.source}: " + "; ".join(filter(None, problems)) + hint
        )
    for alias, name in tied_names(base, base_seen).items():
        if isinstance(arrival, LoraCheckpoint):
            # An adapter of one name of a tied tensor moves the tensor, whatever it is called.
            if arrival.changes(alias) != arrival.changes(name):
                moved, other = (alias, name) if arrival.changes(alias) else (name, alias)
                elsewhere[other] = moved
            differ = arrival.changes(alias) and arrival.changes(name)
        else:
            differ = alias in shared and name in shared and seen.look(alias) != seen.look(name)
        if differ:
            raise CheckpointError(
                f"{arrival.source}: '{alias}' and '{name}' are one tied tensor in the base but differ here; untie the base or tie the arrival"
            )
    return elsewhere


def _twins(name: str, checkpoint: Checkpoint, seen: Inspection, among: Iterable[str]) -> list[str]:
    """Other tensors with the same shape and bytes: what a tied weight looks like on disk.

    Equal constants are where training starts, not a tie: two biases of zeros go separate ways.
    """
    info = checkpoint.infos[name]
    # Only tensors of one shape are read to be compared.
    alike = [n for n in among if n != name and checkpoint.infos.get(n) == info and info.numel > 1]
    twins = sorted(n for n in alike if seen.look(n) == seen.look(name))
    if twins:
        low, high = torch.aminmax(checkpoint.read(name))
        if bool(low == high):
            return []
    return twins


def _listed(one: str, many: str, names: list[str], detail: Callable[[str], str] = lambda _: "") -> str:
    if not names:
        return ""
    shown = ", ".join(f"'{n}'{detail(n)}" for n in sorted(names)[:SHOWN])
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} {many if len(names) > 1 else one}: {shown}{more}"


def _hint(ours: Mapping[str, TensorInfo], theirs: Mapping[str, TensorInfo], shapes: list[str]) -> str:
    for name in sorted(shapes):
        a, b = ours[name].shape, theirs[name].shape
        if len(a) == len(b) == 2 and a[1:] == b[1:] and (is_embedding(name) or "head" in name):
            return f" (the vocabulary was resized from {a[0]} to {b[0]} rows: resize the base's or the arrival's embeddings so that they agree)"
    return "" if shapes else " (is it a fine-tuned copy of this base?)"
