"""The one fold on two ranks: the bits of one rank without data, heads included, and its numbers to rounding with data."""

from __future__ import annotations

import pytest
import torch
import torchrun
from model_kinds import CLASSES, KINDS, QUICK, bits, heads_in, weights_in

import mergeway as mw
from mergeway.rules import RULES, make

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize(
    ("rule", "kind"), [("opcm", "classifier"), ("fisher", "encoder"), ("ode", "encoder"), ("steer", "encoder")]
)
def test_two_ranks_are_one(tmp_path, rule, kind):
    """A rule without data, one whose arrivals bring more, one that cuts the model over the ranks, one that does not."""
    stream = KINDS[kind](tmp_path)
    options = QUICK.get(rule, {})
    whole = (stream.base, stream.arrivals, make(rule, options), stream.weights)
    mw.merge_into(tmp_path / "one", *whole, **stream.for_stream(rule))
    line = ["merge", stream.base, *stream.arrivals, "--rule", rule, "--out", tmp_path / "two"]
    line += ["--weights", ",".join(map(str, stream.weights))]
    line += [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    line += ["--suite", tmp_path] if RULES[rule].needs else []
    code, _, err = torchrun.finish(torchrun.start(*line))
    assert code == 0, err
    one, two = weights_in(tmp_path / "one"), weights_in(tmp_path / "two")
    if rule in ("ode", "steer"):
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-5)
    else:
        assert bits(one) == bits(two)
    assert heads_in(tmp_path / "one") == heads_in(tmp_path / "two")
    assert len(heads_in(tmp_path / "two")) == (len(CLASSES) if kind == "classifier" else 0)
