"""Make a small stream to play with: a tiny CLIP vision tower as the base, three fine-tuned copies of it, one LoRA adapter.

    python examples/make_stream.py STREAM

The updates are drawn at random and not trained: this shows how the tool works, not how well a rule does.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection
from transformers.utils.logging import disable_progress_bar


def main(folder: Path) -> None:
    disable_progress_bar()
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=16,
    )
    model = CLIPVisionModelWithProjection(config)
    model.save_pretrained(folder / "base")
    base = {name: weight.clone() for name, weight in model.state_dict().items()}
    for task in ("mnist", "svhn", "dtd"):
        model.load_state_dict({name: weight + update(weight) for name, weight in base.items()})
        model.save_pretrained(folder / task)
    write_adapter(folder / "eurosat-lora", base)


def update(weight: torch.Tensor, rank: int = 4) -> torch.Tensor:
    """What fine-tuning does to a weight, roughly: low rank for a matrix, small, and nothing for a buffer of integers."""
    if not weight.is_floating_point():
        return torch.zeros_like(weight)
    if weight.ndim != 2:
        return 0.01 * torch.randn_like(weight)
    return 0.01 * torch.randn(weight.shape[0], rank) @ torch.randn(rank, weight.shape[1])


def write_adapter(folder: Path, base: dict[str, torch.Tensor], rank: int = 4) -> None:
    """An adapter as PEFT writes it, on every query and value projection."""
    factors = {}
    for name, weight in base.items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            factors[f"{module}.lora_A.weight"] = 0.1 * torch.randn(rank, weight.shape[1])
            factors[f"{module}.lora_B.weight"] = 0.1 * torch.randn(weight.shape[0], rank)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/make_stream.py STREAM")
    main(Path(sys.argv[1]))
