"""How the same merge is asked of mergeway, of mergekit and of FusionBench; a command writes to the path it is given."""

from __future__ import annotations

import json
from pathlib import Path

from measure import HERE, MERGEWAY, Command

# What each program calls a rule, with the settings that make them the same as far as they can be.
OURS = {
    "average": [],
    "task-arithmetic": ["scaling=0.3"],
    "ties": ["density=0.2", "scaling=0.3"],
    "opcm": ["alpha=0.5"],
}
MERGEKIT: dict[str, tuple[str, dict[str, float]]] = {
    "average": ("linear", {"weight": 1.0}),
    "task-arithmetic": ("task_arithmetic", {"weight": 0.3}),
    "ties": ("ties", {"weight": 0.3, "density": 0.2}),
}
FUSIONBENCH = {
    "average": ("weight_average", ""),
    "task-arithmetic": ("task_arithmetic", "scaling_factor=0.3"),
    "ties": ("ties_merging", "scaling_factor=0.3,threshold=20"),
    "opcm": ("opcm", "alpha=0.5"),
}


def mergeway(base: Path, arrivals: list[Path], rule: str, threads: int, *more: str) -> Command:
    inputs = [str(path) for path in (base, *arrivals)]
    settings = [word for pair in (*OURS[rule], *more) for word in ("--set", pair)]
    shared = ["--quiet", "--threads", str(threads)]
    return lambda out: [*MERGEWAY, "merge", *inputs, "--rule", rule, *settings, "--out", str(out), *shared]


def mergekit(program: str, configs: Path, base: Path, arrivals: list[Path], rule: str, files: bool = False) -> Command:
    """mergekit's form of the rule; JSON is YAML.

    `files`: by mergekit-pytorch, which takes weight files and knows no architectures. With a CLIP vision tower mergekit-yaml
    0.1.5 ends well but writes no weights.
    """
    method, each = MERGEKIT[rule]

    def name(path: Path) -> str:
        return str(path / "model.safetensors" if files else path)

    models = [{"model": name(path), "parameters": each} for path in arrivals]
    config: dict[str, object] = {"merge_method": method, "models": models, "dtype": "float32"}
    if rule != "average":
        config["base_model"] = name(base)
    configs.mkdir(exist_ok=True)
    path = configs / f"{base.parent.name}-{rule}.yml"
    path.write_text(json.dumps(config))
    words = [str(Path(program).with_name("mergekit-pytorch")) if files else program, str(path)]
    return lambda out: [*words, str(out), "--random-seed", "1", "--quiet"]


def fusionbench(python: str, base: Path, arrivals: list[Path], rule: str) -> Command:
    """FusionBench's own continual form of the rule, for CLIP vision towers."""
    script, inputs = str(HERE / "peers/fusionbench_merge.py"), [str(path) for path in (base, *arrivals)]
    return lambda out: [python, script, str(out), *FUSIONBENCH[rule], *inputs]
