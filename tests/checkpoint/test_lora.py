"""LoRA adapters made by peft itself: the checkpoint we see is the model that peft's `merge_and_unload` makes."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import tiny
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from shared import Tensors
from transformers import GPT2Config, GPT2LMHeadModel

import mergeway as mw

logging.getLogger("transformers").setLevel(logging.ERROR)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def save_adapter(model, config, folder, merge: bool = True) -> Tensors:
    """Save base and adapter as peft does; the state dict after peft has merged them, when it can."""
    model.save_pretrained(folder / "base")
    torch.manual_seed(1)
    tuned = get_peft_model(copy.deepcopy(model), config)
    for name, parameter in tuned.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    tuned.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return tuned.merge_and_unload().state_dict() if merge else {}


def assert_close(ours: Tensors, theirs: Tensors, base: Tensors) -> None:
    moved = 0
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        moved += not torch.equal(tensor, base[name])
    assert moved, "the adapter changed nothing, so the test shows nothing"


LINEAR = ["q_proj", "v_proj", "down_proj"]


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": LINEAR},
        {"target_modules": "all-linear", "r": 3, "lora_alpha": 5},
        {"target_modules": LINEAR, "use_rslora": True},
        {"target_modules": LINEAR, "rank_pattern": {"q_proj": 2, r"layers\.1\.self_attn\.v_proj": 6}},
        {"target_modules": LINEAR, "alpha_pattern": {"down_proj": 32, "^model.layers.0.self_attn.q_proj": 1}},
        {
            "target_modules": LINEAR,
            "use_rslora": True,
            "rank_pattern": {"v_proj": 2},
            "alpha_pattern": {"v_proj": 3, "q_proj": 7},
        },
        {"target_modules": ["embed_tokens", "q_proj"], "lora_alpha": 3},
        {"target_modules": ["lm_head", "gate_proj"]},
        {"target_modules": LINEAR, "layers_to_transform": [1]},
    ],
    ids=["plain", "all-linear", "rslora", "ranks", "alphas", "all-patterns", "embedding", "head", "one-layer"],
)
def test_equals_what_peft_merges(tmp_path, options):
    model = tiny.llama()
    theirs = save_adapter(model, LoraConfig(**{"r": 4, "lora_alpha": 8, **options}), tmp_path)
    ours = mw.merge(tmp_path / "base", [tmp_path / "adapter"], "average")
    assert_close(ours, theirs, model.state_dict())


def test_fan_in_fan_out(tmp_path):
    model = gpt2()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    theirs = save_adapter(model, config, tmp_path)
    ours = mw.merge(tmp_path / "base", [tmp_path / "adapter"], "average")
    assert_close(ours, theirs, model.state_dict())


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
def test_adapter_on_a_tied_embedding_moves_both_names(tmp_path):
    """The base stores the tied tensor twice; peft's merge moves the one parameter behind both names."""
    model = tiny.llama(tied=True)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["embed_tokens", "q_proj"])
    theirs = save_adapter(model, config, tmp_path)
    both = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "lm_head.weight" in both
    save_file(both, tmp_path / "both.safetensors")
    ours = mw.merge(tmp_path / "both.safetensors", [tmp_path / "adapter"], "randmix")
    assert torch.equal(ours["lm_head.weight"], ours["model.embed_tokens.weight"])
    torch.testing.assert_close(ours["model.embed_tokens.weight"], theirs["model.embed_tokens.weight"])


def test_head_model_adapter_on_a_bare_base(tmp_path):
    """The base without its head lacks the prefix that the adapter's names carry."""
    model = tiny.llama()
    theirs = save_adapter(model, LoraConfig(r=4, target_modules=["q_proj"]), tmp_path)
    model.model.save_pretrained(tmp_path / "bare")
    ours = mw.merge(tmp_path / "bare", [tmp_path / "adapter"], "average")
    assert_close(ours, {n.removeprefix("model."): t for n, t in theirs.items()}, model.model.state_dict())


def test_adapter_and_full_checkpoint_in_one_stream(tmp_path):
    model = tiny.llama()
    merged = save_adapter(model, LoraConfig(r=4, target_modules=["q_proj"]), tmp_path)
    save_file({n: t.clone() for n, t in merged.items()}, tmp_path / "full.safetensors")
    ours = mw.merge(tmp_path / "base", [tmp_path / "adapter", tmp_path / "full.safetensors"], "average")
    assert_close(ours, merged, model.state_dict())


def test_half_precision_adapter_is_added_in_float32(tmp_path):
    model = tiny.llama().to(torch.bfloat16)
    save_adapter(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]), tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = f"base_model.{'model.' + name.removesuffix('.weight')}"
    a, b = (factors[f"{prefix}.lora_{side}.weight"].double() for side in "AB")
    expected = (model.state_dict()[name].double() + 2 * b @ a).to(torch.bfloat16)
    ours = mw.merge(tmp_path / "base", [tmp_path / "adapter"], "average")[name]
    assert ours.dtype is torch.bfloat16
    # Equal but for the few values that float32 leaves on the other side of a rounding boundary.
    assert (ours != expected).float().mean() < 0.02
    torch.testing.assert_close(ours, expected)


REFUSED = {
    "dora": (LoraConfig(r=4, target_modules=["q_proj"], use_dora=True), "DoRA"),
    "bias": (LoraConfig(r=4, target_modules=["q_proj"], bias="all"), "biases"),
    "lora-bias": (LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True, init_lora_weights=False), "bias"),
    "modules-to-save": (LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]), "lm_head"),
    "ia3": (IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), "IA3"),
    "adalora": (AdaLoraConfig(target_modules=["q_proj"], total_step=10), "ADALORA"),
    "pissa": (LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa"), "pissa"),
    "olora": (LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="olora"), "olora"),
    "tokens": (LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 2]), "trainable_token"),
}


@pytest.mark.filterwarnings("ignore")  # peft warns about some of these; that they are refused is the point
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_a_plain_sum_is_refused(tmp_path, call, kind):
    config, word = REFUSED[kind]
    save_adapter(tiny.llama(), config, tmp_path, merge=False)
    line = call("merge", tmp_path / "base", tmp_path / "adapter", "--out", tmp_path / "out").mistake()
    assert word in line
    assert not (tmp_path / "out").exists()


def test_an_adapter_cannot_be_a_base(tmp_path, call):
    save_adapter(tiny.llama(), LoraConfig(r=4, target_modules=["q_proj"]), tmp_path)
    line = call("merge", tmp_path / "adapter", tmp_path / "adapter", "--out", tmp_path / "out").mistake()
    assert "adapter cannot be a base" in line


def test_trunk_folds_adapters_and_knows_them_again(tmp_path, call):
    """Two adapters with the same tensors but another alpha are two arrivals; the same one twice is refused."""
    save_adapter(tiny.llama(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]), tmp_path)
    call("init", tmp_path / "trunk", "--base", tmp_path / "base", "--rule", "average").ok()
    first = call("add", tmp_path / "trunk", tmp_path / "adapter", "--task", "a", "--json").json()
    assert "same weights" in call("add", tmp_path / "trunk", tmp_path / "adapter", "--task", "b").mistake()
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 16}))
    second = call("add", tmp_path / "trunk", tmp_path / "adapter", "--task", "b", "--json").json()
    assert first["digest"] != second["digest"]
    call("verify", tmp_path / "trunk").ok()
