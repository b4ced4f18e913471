"""The suites on real models, whole: built from the packages in $MERGEWAY_PACKAGES, folded, and read.

They take an hour or more on one core; docs/suites.md says how to get the packages.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mergeway.bench import bench
from mergeway.bench.suites.trained import build_trained
from mergeway.model.compute import Compute

PACKAGES = os.environ.get("MERGEWAY_PACKAGES")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PACKAGES, reason="$MERGEWAY_PACKAGES names no packages")]
COMPUTE = Compute("cpu", autocast=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A suite by its name, built once; one that an earlier test run left in $MERGEWAY_BUILT is taken as it is."""
    root = Path(os.environ.get("MERGEWAY_BUILT") or tmp_path_factory.mktemp("built"))

    def build(name):
        if not (root / name / "suite.json").exists():
            build_trained(name, root / name, Path(str(PACKAGES)), COMPUTE)
        return root / name

    return build


def said(folder, prompt, tokens=20):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        found = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(found[0], skip_special_tokens=True)


def test_stories(built):
    folder = built("stories")
    assert "there was a little girl named Lily" in said(folder / "base", "Once upon a time")
    run = bench(folder, ["average"], orders=1, compute=COMPUTE)
    for task, loss in run.losses["experts"].items():
        assert loss < 0.85 * run.losses["base"][task]
    means = {side: sum(each.values()) / len(each) for side, each in run.losses.items()}
    assert means["experts"] < 0.75 * means["base"]
    (row,) = run.rows()
    assert 20 < row["loss_gap"] < 100


def test_smol(built):
    folder = built("smol")
    assert "Paris" in said(folder / "base", "The capital of France is")
    run = bench(folder, ["average"], orders=1, compute=COMPUTE)
    for task in ("spam", "json"):
        assert run.experts[task] > run.base[task] + 20


def test_vit(built):
    run = bench(built("vit"), ["average"], orders=1, compute=COMPUTE)
    assert run.ends_of(list(run.base))[0] > 70  # it was pre-trained
    assert run.ends_of(list(run.base))[1] > run.ends_of(list(run.base))[0] + 3
