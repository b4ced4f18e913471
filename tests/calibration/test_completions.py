"""A language model that is merged on its own texts answers better: exact match of completions, from training to the merge."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "completions.py"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_steer_on_texts_is_ahead_of_base_and_average(tmp_path):
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("completions", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.make_models(tmp_path, 0)
    found = {"base": script.judged(tmp_path / "base", tmp_path)}
    found |= {rule: script.merged(tmp_path, rule, tmp_path / f"trunk-{rule}") for rule in ("average", "steer")}
    means = {name: sum(row.values()) / len(row) for name, row in found.items()}
    assert means["steer"] > means["average"] + 15 and means["steer"] > means["base"] + 15, found
