"""Rules without data on a device: parts go there, all arithmetic stays there, and results come back.

This machine has no such device. So one is played: its tensors are the CPU's, but they say that they are on `cuda`, cannot be
handed to NumPy, and may not meet a tensor of the host's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from shared import DATA_FREE
from torch import Tensor
from torch.utils._pytree import tree_flatten

import mergeway as mw
from mergeway.core.linalg import flat_spectrum
from mergeway.core.tensors import Part
from mergeway.fold.merge import fold_steps, merge, merge_into
from mergeway.model import compute
from mergeway.model.compute import Compute
from mergeway.rules import Fold, Regmean

FAR = torch.device("cuda")


class Far(Tensor):
    """A tensor on the played device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return FAR
        if func in (Tensor.numpy, Tensor.__array__):
            raise TypeError("can't convert a tensor on cuda to NumPy")
        for tensor in tree_flatten((args, kwargs))[0]:
            if isinstance(tensor, Tensor) and not isinstance(tensor, Far) and tensor.ndim:
                raise RuntimeError(f"{func}: tensors on two devices")
        return super().__torch_function__(func, types, args, kwargs)


@pytest.fixture
def far(monkeypatch) -> list[int]:
    """A machine that has the device; says how many elements went there, and how many came back."""
    passed, plain = [0, 0], Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wanted = [
            a.device if isinstance(a, Tensor) else torch.device(a) for a in args if not isinstance(a, torch.dtype)
        ]
        dtypes = [a.dtype if isinstance(a, Tensor) else a for a in args if isinstance(a, Tensor | torch.dtype)]
        where, was = (wanted or [self.device])[0].type, self.device.type
        moved = self.as_subclass(Tensor)  # pyright: ignore[reportArgumentType]
        moved = plain(moved, *dtypes, **kwargs) if dtypes or kwargs else moved
        if where != was:
            passed[where == "cpu"] += self.numel()
            moved = moved.clone()
        return moved.as_subclass(Far) if where == "cuda" else moved  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(compute, "_machine", lambda: (True, False))
    return passed


def test_every_way_to_fold_a_stream_goes_there(stream, far):
    s = stream(2)
    there = Compute("cuda")
    merge(s.base, s.arrivals, "iso", compute=there)
    at_once = [*far]
    assert min(at_once) > 0
    for _ in fold_steps(s.base, s.arrivals, "iso", compute=there):
        pass
    assert min(after - before for after, before in zip(far, at_once, strict=True)) > 0


@pytest.mark.parametrize("rule", DATA_FREE)
def test_a_fold_on_a_device_is_that_of_the_cpu(stream, tmp_path, far, rule):
    s = stream(3)
    options = {"steps": 3} if rule == "dop" else {}
    merge_into(tmp_path / "near", s.base, s.arrivals, rule, **options)
    assert far == [0, 0]
    merge_into(tmp_path / "far", s.base, s.arrivals, rule, compute=Compute("cuda"), **options)
    assert min(far) > 0
    near, there = (load_file(tmp_path / side / "model.safetensors") for side in ("near", "far"))
    for name, tensor in near.items():
        torch.testing.assert_close(there[name], tensor, rtol=1e-5, atol=1e-6)


def test_an_add_goes_to_the_device_and_back(stream, tmp_path, far):
    s = stream(2)
    mw.Trunk.create(tmp_path / "trunk", s.base, "opcm")
    trunk = mw.Trunk.open(tmp_path / "trunk", compute=Compute("cuda"))
    for arrival in s.arrivals:
        trunk.add(arrival)
    assert min(far) > 0
    assert all(type(tensor) is Tensor for tensor in trunk.params().values())


def test_regmean_solves_where_its_tensors_are(far):
    rule, part, generator = Regmean(), Part("w.weight", 0, 20, (4, 5)), torch.Generator().manual_seed(0)
    delta, inputs = torch.randn(4, 5, generator=generator), torch.randn(30, 5, generator=generator)
    gram = inputs.mT @ inputs / 30
    empty = {"sum": torch.zeros(4, 5), "product": torch.zeros(4, 5), "gram": torch.zeros(5, 5)}
    at = Fold().next(1.0)
    near = rule.update(at, part, rule.fold(at, part, delta, empty, gram))
    there = {slot: tensor.to(FAR) for slot, tensor in empty.items()}
    found = rule.update(at, part, rule.fold(at, part, delta.to(FAR), there, gram.to(FAR)))
    assert isinstance(found, Far)
    torch.testing.assert_close(found.to("cpu"), near, rtol=1e-6, atol=1e-7)


def test_auto_keeps_rules_without_data_on_the_cpu(stream, tmp_path, far):
    s = stream(2)
    merge_into(tmp_path / "out", s.base, s.arrivals, "iso", compute=Compute())
    assert far == [0, 0]


def test_the_played_device_is_as_strict_as_a_real_one(far):
    there = torch.ones(4, 3).to(FAR)
    assert there.device.type == "cuda" and (there + 1).device.type == "cuda"
    with pytest.raises(RuntimeError, match="two devices"):
        there + torch.ones(4, 3)
    with pytest.raises(TypeError, match="NumPy"):
        there.numpy()
    assert isinstance(flat_spectrum(there), Far)


def test_mps_has_no_float64(stream, tmp_path, monkeypatch):
    monkeypatch.setattr(compute, "_machine", lambda: (False, True))
    s = stream(2)
    with pytest.raises(mw.errors.OptionError, match="device mps: has no float64, and rule 'iso' needs it here"):
        merge_into(tmp_path / "out", s.base, s.arrivals, "iso", compute=Compute("mps"))
    assert not (tmp_path / "out").exists()
