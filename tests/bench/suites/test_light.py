"""The suite of light experts: adapters on the base of `digits`, small in every sense, and what they say they are."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from mergeway.bench.suite import load_suite
from mergeway.bench.suites import check_suite, embedded
from mergeway.checkpoint import open_checkpoint

ROOT = embedded("digits-light")
SAID = json.loads((ROOT / "suite.json").read_text())


def test_it_fits_and_stands_beside_digits():
    assert [row["task"] for row in check_suite(ROOT)] == [row["name"] for row in SAID["tasks"]]
    assert SAID["base"] == "../digits/base"
    assert all(row["data"].startswith("../digits/") and row["head"].startswith("../digits/") for row in SAID["tasks"])
    files = [path for path in ROOT.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4_000_000
    assert {path.name for path in ROOT.glob("experts/*/*")} == {"adapter_config.json", "adapter_model.safetensors"}


def test_updates_are_light_and_experts_better_than_the_base():
    base = load_file(ROOT / SAID["base"] / "model.safetensors")
    norm = sum(float(t.double().square().sum()) for t in base.values()) ** 0.5
    for row in SAID["tasks"]:
        factors = load_file(ROOT / row["expert"] / "adapter_model.safetensors")
        config = json.loads((ROOT / row["expert"] / "adapter_config.json").read_text())
        assert config["r"] <= 8
        update = 0.0
        for name, a in factors.items():
            if ".lora_A." in name:
                b = factors[name.replace(".lora_A.", ".lora_B.")]
                update += float((config["lora_alpha"] / config["r"] * (b.double() @ a.double())).square().sum())
        assert 0.01 <= update**0.5 / norm <= 0.03, row["name"]
        assert row["expert_accuracy"] > row["zero_shot"] + 5


def test_accuracies_are_what_it_says():
    suite, row = load_suite(ROOT), SAID["tasks"][1]
    expert = open_checkpoint(ROOT / row["expert"], open_checkpoint(suite.base))
    measured = suite.accuracy({name: expert.read(name) for name in expert.infos}, row["name"])
    assert abs(measured - row["expert_accuracy"]) <= 100 * 2 / 400 + 0.01


@pytest.mark.slow
def test_building_it_again_gives_the_same_accuracies(call, tmp_path):
    call("suites", "build", "digits-light", "--out", tmp_path / "light", "--quiet").ok()
    check_suite(tmp_path / "light")
    made = json.loads((tmp_path / "light" / "suite.json").read_text())
    for task, said in zip(made["tasks"], SAID["tasks"], strict=True):
        assert abs(task["expert_accuracy"] - said["expert_accuracy"]) <= 4
