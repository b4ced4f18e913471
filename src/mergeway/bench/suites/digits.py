"""The suite `digits`: eight tasks on real handwritten digits, a small CLIP vision tower and its eight experts.

The packages that carry the digits are needed to build the suite, not to use it. Everything follows from the seed: on one
machine with one thread, two builds are equal.

The base is trained for a while on a small share of every task, together with the heads, which are frozen from then on. An
expert starts from the base and sees one task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR

from mergeway.bench.suites.description import SuiteJson, TaskJson
from mergeway.bench.suites.embedded import embedded
from mergeway.bench.suites.written import PATCH, SIDE, TASKS, Examples, make_examples
from mergeway.checkpoint.writer import save_tensors
from mergeway.core.files import copy_file, make_directory, replace_text, replaced
from mergeway.core.progress import SILENT, Progress
from mergeway.core.stages import staged
from mergeway.errors import OptionError

if TYPE_CHECKING:
    from transformers import CLIPVisionModelWithProjection

WIDTH = 64
SCALE, MEAN, STD = 20.0, 0.5, 0.5
TRAIN = 1000  # training images a task ships, besides all it has for testing
# How the experts are trained, for those who train further models on the suite.
TRAINING: dict[str, float | str] = {
    "steps": 600,
    "lr": 1e-3,
    "weight_decay": 0.01,
    "batch": 64,
    "freeze": "^visual_projection",
}


def build(out: Path, progress: Progress = SILENT) -> SuiteJson:
    """Train the suite into a directory and return its description; a build that was interrupted goes on where it stopped."""
    if (out / "suite.json").exists():
        raise OptionError(f"{out}: there is a suite already; remove it or give another --out")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            return _build(out, progress)
    finally:
        torch.set_num_threads(threads)


def _build(out: Path, progress: Progress) -> SuiteJson:
    examples = make_examples()
    for folder in ("data", "heads", "experts"):
        make_directory(out / folder)
    for name, own in examples.items():
        _write_data(out / "data" / f"{name}.npz", own)
    if not (out / "base").exists():
        base, heads = _train_base(examples)
        for name, head in heads.items():
            with replaced(out / "heads" / f"{name}.safetensors") as new:
                save_tensors(new, {"weight": head})
        _write_model(out / "base", base)
    base = _load(out / "base")
    tasks: list[TaskJson] = []
    for task in TASKS:
        name, own = task.name, examples[task.name]
        head = load_file(out / "heads" / f"{name}.safetensors")["weight"]
        folder = out / "experts" / name
        if not folder.exists():
            expert, moments = _train_expert(_load(out / "base"), head, own)
            _write_model(folder, expert, moments)
        before, after = _accuracy(base, head, own), _accuracy(_load(folder), head, own)
        progress.note(f"{name}: base {before:.1f} %, expert {after:.1f} %")
        tasks.append(
            {
                "name": name,
                "expert": f"experts/{name}",
                "data": f"data/{name}.npz",
                "head": f"heads/{name}.safetensors",
                "classes": len(head),
                "zero_shot": round(before, 2),
                "expert_accuracy": round(after, 2),
                "source": task.source,
                "licence": task.licence,
            }
        )
    suite: SuiteJson = {
        "name": "digits",
        "kind": "clip-vision",
        "base": "base",
        "logit_scale": SCALE,
        "image_mean": [MEAN] * 3,
        "image_std": [STD] * 3,
        "training": TRAINING,
        "tasks": tasks,
    }
    readme = embedded("digits") / "README.md"
    if not (out / "README.md").exists():
        with replaced(out / "README.md") as new:
            copy_file(readme, new)
    replace_text(out / "suite.json", json.dumps(suite, indent=1) + "\n")
    return suite


def _new_model() -> CLIPVisionModelWithProjection:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    return CLIPVisionModelWithProjection(
        CLIPVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=SIDE,
            patch_size=PATCH,
            projection_dim=WIDTH,
        )
    )


def _load(folder: Path) -> CLIPVisionModelWithProjection:
    model = _new_model()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


def _features(model: nn.Module, images: Tensor) -> Tensor:
    pixels = ((images.float() / 255 - MEAN) / STD).unsqueeze(1).expand(-1, 3, -1, -1)
    return functional.normalize(model(pixel_values=pixels).image_embeds, dim=-1)


def _accuracy(model: nn.Module, head: Tensor, examples: Examples) -> float:
    with torch.no_grad():
        guessed = (_features(model.eval(), examples.x_test) @ head.mT).argmax(-1)
    return 100.0 * float((guessed == examples.y_test).double().mean())


def _train_base(
    examples: Mapping[str, Examples], steps: int = 600, batch: int = 16, lr: float = 1e-3
) -> tuple[CLIPVisionModelWithProjection, dict[str, Tensor]]:
    """The base and the heads, trained together on the first few written digits of every task."""
    torch.manual_seed(0)
    model = _new_model()
    heads = {t.name: nn.Parameter(torch.randn(max(t.ask) + 1, WIDTH)) for t in TASKS}
    optimiser, schedule = _adamw([*model.parameters(), *heads.values()], lr, steps)
    for _ in range(steps):
        drawn = [_draw_share(examples[t.name], t.share, batch) for t in TASKS]
        features = _features(model, torch.cat([x for x, _ in drawn])).split(batch)
        losses = [
            functional.cross_entropy(SCALE * f @ functional.normalize(heads[t.name], dim=-1).mT, y)
            for f, (_, y), t in zip(features, drawn, TASKS, strict=True)
        ]
        _step(torch.stack(losses).mean(), optimiser, schedule)
    return model, {name: functional.normalize(head.detach(), dim=-1) for name, head in heads.items()}


def _draw_share(examples: Examples, share: int, batch: int) -> tuple[Tensor, Tensor]:
    """Some of the task's first written digits, as written or shifted."""
    copies = len(examples.y_train) // examples.written
    index = torch.randint(share, (batch,)) + examples.written * torch.randint(copies, (batch,))
    return examples.x_train[index], examples.y_train[index]


def _train_expert(
    model: CLIPVisionModelWithProjection,
    head: Tensor,
    examples: Examples,
    steps: int = 600,
    batch: int = 64,
    lr: float = 1e-3,
) -> tuple[CLIPVisionModelWithProjection, dict[str, Tensor]]:
    """A copy of the base tuned on one task, head and visual projection frozen, with Adam's second moments."""
    torch.manual_seed(1)
    trained = {n: p for n, p in model.named_parameters() if not n.startswith("visual_projection")}
    optimiser, schedule = _adamw(list(trained.values()), lr, steps)
    for _ in range(steps):
        index = torch.randint(len(examples.y_train), (batch,))
        logits = SCALE * _features(model, examples.x_train[index]) @ head.mT
        _step(functional.cross_entropy(logits, examples.y_train[index]), optimiser, schedule)
    return model, {n: optimiser.state[p]["exp_avg_sq"].bfloat16() for n, p in trained.items()}


def _adamw(parameters: list[Tensor], lr: float, steps: int) -> tuple[torch.optim.AdamW, OneCycleLR]:
    optimiser = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)
    return optimiser, OneCycleLR(optimiser, lr, total_steps=steps, pct_start=0.1)


def _step(loss: Tensor, optimiser: torch.optim.AdamW, schedule: OneCycleLR) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    schedule.step()


def _write_data(path: Path, examples: Examples) -> None:
    """What the suite ships of a task: training digits as written, and the test digits."""
    with replaced(path) as new, open(new, "wb") as file:
        np.savez_compressed(
            file,
            x_train=examples.x_train[:TRAIN].numpy(),
            y_train=examples.y_train[:TRAIN].numpy().astype(np.uint8),
            x_test=examples.x_test.numpy(),
            y_test=examples.y_test.numpy().astype(np.uint8),
        )


def _write_model(
    folder: Path, model: CLIPVisionModelWithProjection, moments: Mapping[str, Tensor] | None = None
) -> None:
    """Write whole or not at all, so that an interrupted build can go on."""
    with staged(folder) as stage:
        # `save_pretrained` of the model itself draws a progress bar.
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(stage)
        save_tensors(stage / "model.safetensors", model.state_dict(), {"format": "pt"})
        if moments:
            save_tensors(stage / "moments.safetensors", moments)
