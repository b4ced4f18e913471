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
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

import mergeway as mw

logging.getLogger("transformers").setLevel(logging.ERROR)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def save_adapter(model, config, folder, merge: bool = True, whole: bool = False) -> Tensors:
    """Save base and adapter as peft does; the state dict after peft has merged them, when it can."""
    model.save_pretrained(folder / "base")
    torch.manual_seed(1)
    tuned = get_peft_model(copy.deepcopy(model), config)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    tuned.save_pretrained(folder / "adapter", save_embedding_layers=whole)
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
        {"target_modules": LINEAR, "use_dora": True},
        {"target_modules": LINEAR, "use_dora": True, "use_rslora": True, "rank_pattern": {"v_proj": 2}},
        {"target_modules": LINEAR, "modules_to_save": ["lm_head", "norm"]},
        {"target_modules": ["embed_tokens", "q_proj"], "bias": "all"},
    ],
    ids=[
        "plain",
        "all-linear",
        "rslora",
        "ranks",
        "alphas",
        "all-patterns",
        "embedding",
        "head",
        "one-layer",
        "dora",
        "dora-rslora",
        "saved",
        "biases",
    ],
)
def test_equals_what_peft_merges(tmp_path, options):
    model = tiny.llama()
    theirs = save_adapter(model, LoraConfig(**{"r": 4, "lora_alpha": 8, **options}), tmp_path)
    ours = mw.merge(tmp_path / "base", [tmp_path / "adapter"], "average")
    assert_close(ours, theirs, model.state_dict())


@pytest.mark.parametrize("dora", [False, True])
def test_fan_in_fan_out(tmp_path, dora):
    model = gpt2()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, use_dora=dora)
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


@pytest.mark.parametrize("whole", [False, True])
def test_embedding_that_peft_also_stores_whole(tmp_path, whole):
    model = tiny.llama()
    theirs = save_adapter(model, LoraConfig(r=4, target_modules=["embed_tokens"]), tmp_path, whole=whole)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any("base_layer" in name for name in stored) == whole
    assert_close(mw.merge(tmp_path / "base", [tmp_path / "adapter"], "average"), theirs, model.state_dict())


def bert() -> torch.nn.Module:
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=3, **size))


def vit() -> torch.nn.Module:
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **size))


def llama_classifier() -> torch.nn.Module:
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, num_key_value_heads=1, num_labels=3, pad_token_id=0, **size)
    return LlamaForSequenceClassification(config)


CLASSIFIERS = {
    "bert": (bert, ["query", "value"], "classifier"),
    "vit": (vit, ["projection", "dense"], "classifier"),  # with the convolution that cuts the picture into patches
    "llama": (llama_classifier, "all-linear", "score"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_saved_modules_are_the_head_of_the_task(tmp_path, call, kind):
    """The head may have another number of classes than the base's; the export answers as peft's merged model."""
    make, targets, head = CLASSIFIERS[kind]
    torch.manual_seed(0)
    model = make()
    model.save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    other = type(model)(type(model.config).from_dict({**model.config.to_dict(), "num_labels": 5}))
    other.load_state_dict({n: t for n, t in model.state_dict().items() if head not in n}, strict=False)
    config = LoraConfig(r=4, target_modules=targets, modules_to_save=[head], use_dora=kind == "bert")
    tuned = get_peft_model(other, config)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    tuned.save_pretrained(tmp_path / "adapter")
    theirs = tuned.merge_and_unload().state_dict()
    trunk = tmp_path / "trunk"
    call("init", trunk, "--base", tmp_path / "base", "--rule", "average").ok()
    call("add", trunk, tmp_path / "adapter", "--task", "five").ok()
    call("export", trunk, tmp_path / "out", "--task", "five").ok()
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert loaded.config.num_labels == 5
    assert_close(loaded.state_dict(), theirs, model.state_dict() | {n: theirs[n] * 0 for n in theirs if head in n})


@pytest.mark.filterwarnings("ignore")  # peft says that it stores the embeddings
def test_added_tokens_are_one_clear_line(tmp_path, call):
    """Rows that only one task has cannot be merged, and an adapter trained with them holds the whole table."""
    model = tiny.llama()
    model.save_pretrained(tmp_path / "base")
    model.resize_token_embeddings(35)
    tuned = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    )
    tuned.save_pretrained(tmp_path / "adapter")
    line = call("merge", tmp_path / "base", tmp_path / "adapter", "--out", tmp_path / "out").mistake()
    assert "the vocabulary was resized from 32 to 35 rows" in line


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
    "dora-embedding": (LoraConfig(r=4, target_modules=["embed_tokens"], use_dora=True), "DoRA"),
    "lora-bias": (LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True, init_lora_weights=False), "bias"),
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
