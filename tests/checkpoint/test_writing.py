"""What is written: shards and an index, side files, a model card; complete or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shared import draw_tensors, listing
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    LlamaConfig,
    LlamaForCausalLM,
)

import mergeway as mw

CLIP = CLIPVisionConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=8,
    patch_size=4,
    projection_dim=12,
)
LLAMA = LlamaConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    tie_word_embeddings=True,
)


def save_models(make, folder: Path, count: int) -> list[dict[str, torch.Tensor]]:
    """A base and arrivals as transformers saves them; the state dicts."""
    states = []
    for k in range(count + 1):
        torch.manual_seed(0)
        model = make()
        torch.manual_seed(k)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * k * torch.randn_like(parameter))
        model.save_pretrained(folder / (f"task{k}" if k else "base"))
        states.append({n: t.double() for n, t in model.state_dict().items()})
    return states


def test_clip_vision_model_loads_and_equals(tmp_path, call):
    states = save_models(lambda: CLIPVisionModelWithProjection(CLIP), tmp_path, 2)
    (tmp_path / "base" / "preprocessor_config.json").write_text('{"size": 8}')
    call("merge", tmp_path / "base", tmp_path / "task1", tmp_path / "task2", "--out", tmp_path / "out").ok()
    model = CLIPVisionModelWithProjection.from_pretrained(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        expected = (states[1][name] + states[2][name]) / 2
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-6)
    assert AutoModel.from_pretrained(tmp_path / "out").config.model_type == "clip_vision_model"
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == '{"size": 8}'


@pytest.mark.parametrize("shard_size", ["5GB", "3KB"], ids=["one-file", "shards"])
def test_llama_exported_from_a_trunk_loads_and_equals(tmp_path, call, shard_size):
    states = save_models(lambda: LlamaForCausalLM(LLAMA), tmp_path, 2)
    trunk = tmp_path / "trunk"
    call("init", trunk, "--base", tmp_path / "base", "--rule", "average").ok()
    call("add", trunk, tmp_path / "task1", "--weight", 3).ok()
    call("add", trunk, tmp_path / "task2", "--weight", 1).ok()
    call("export", trunk, tmp_path / "out", "--shard-size", shard_size).ok()
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_size == "3KB")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (len(files) > 1)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        expected = (3 * states[1][name] + states[2][name]) / 4
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-6)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 4)


def test_shards_hold_what_the_index_says(stream, tmp_path, call):
    s = stream(1)
    call("merge", s.base, *s.arrivals, "--out", tmp_path / "whole").ok()
    call("merge", s.base, *s.arrivals, "--out", tmp_path / "cut", "--shard-size", "200B").ok()
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    for label in set(index["weight_map"].values()):
        shard = load_file(tmp_path / "cut" / label)
        assert sum(t.nbytes for t in shard.values()) <= 200 or len(shard) == 1
        assert shard.keys() == {n for n, file in index["weight_map"].items() if file == label}
        for name, tensor in shard.items():
            assert torch.equal(tensor, whole[name])


def test_a_sharded_output_can_be_a_base_again(stream, tmp_path, call):
    s = stream(2)
    call("merge", s.base, s.arrivals[0], "--out", tmp_path / "cut", "--shard-size", "200B").ok()
    call("merge", s.base, s.arrivals[0], "--out", tmp_path / "whole").ok()
    one, two = (mw.merge(tmp_path / n, [s.arrivals[1]], "opcm") for n in ("cut", "whole"))
    assert all(torch.equal(one[n], two[n]) for n in two)


def test_side_files_are_copied_and_others_are_not(stream, tmp_path, call):
    s = stream(1)
    base = tmp_path / "base"
    base.mkdir()
    save_file(s.base_tensors, base / "model.safetensors")
    copied = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "vocab.txt")
    copied += ("preprocessor_config.json", "merges.txt", "spiece.model", "chat_template.jinja", "LICENSE")
    texts = {name: "{}" if name == "config.json" else f"{name} of the base" for name in copied}
    for name, text in texts.items():
        (base / name).write_text(text)
    for name in ("README.md", "optimizer.pt", "trainer_state.json", ".gitattributes", "training_args.bin"):
        (base / name).write_text("not part of the model")
    call("merge", base, *s.arrivals, "--out", tmp_path / "out").ok()
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"model.safetensors", "README.md", *copied}
    for name, text in texts.items():
        assert (tmp_path / "out" / name).read_text() == text


def test_export_in_another_dtype(stream, tmp_path, call):
    s = stream(2)
    trunk = tmp_path / "trunk"
    call("init", trunk, "--base", s.base, "--rule", "average").ok()
    call("add", trunk, s.arrivals[0]).ok()
    call("export", trunk, tmp_path / "half", "--dtype", "bfloat16").ok()
    half = load_file(tmp_path / "half" / "model.safetensors")
    for name, tensor in mw.Trunk.open(trunk).params().items():
        assert torch.equal(half[name], tensor.bfloat16() if tensor.is_floating_point() else tensor)


def test_export_refuses_a_dtype_that_overflows(tmp_path, call):
    big = {"w.weight": torch.full((3, 3), 1e6)}
    save_file(big, tmp_path / "base.safetensors")
    call("init", tmp_path / "trunk", "--base", tmp_path / "base.safetensors", "--rule", "average").ok()
    line = call("export", tmp_path / "trunk", tmp_path / "out", "--dtype", "float16").mistake()
    assert "w.weight" in line and "float16" in line
    assert not (tmp_path / "out").exists()


def test_model_card_names_every_ingredient(stream, tmp_path, run):
    s = stream(2)
    words = ["merge", s.base, *s.arrivals, "--rule", "opcm", "--set", "alpha=0.25", "--weights", "1,2.5"]
    done = run(*words, "--out", tmp_path / "out", "--json").json()
    card = (tmp_path / "out" / "README.md").read_text()
    assert done["base"]["digest"] in card and f"Base: `{s.base.name}`" in card
    for arrival, weight in zip(done["arrivals"], ("1", "2.5"), strict=True):
        assert f"| {arrival['task']} | `{Path(arrival['source']).name}` | {weight} | `{arrival['digest']}` |" in card
    assert "opcm" in card and "`alpha=0.25`" in card and f"mergeway {mw.__version__}" in card
    assert f"mergeway merge {s.base}" in card and "--set alpha=0.25" in card
    front = card.split("---")[1]
    assert "base_model" not in front and "library_name: transformers" in front


def test_model_card_of_an_export(stream, tmp_path, call):
    s = stream(2)
    trunk = tmp_path / "trunk"
    call("init", trunk, "--base", s.base, "--rule", "average").ok()
    record = call("add", trunk, s.arrivals[0], "--task", "svhn", "--weight", 2, "--json").json()
    call("export", trunk, tmp_path / "out").ok()
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| 1 | svhn | `{s.arrivals[0].name}` | 2 | `{record['digest']}` |" in card
    assert f"mergeway export {trunk} {tmp_path / 'out'}" in card


# --- the output directory --------------------------------------------------------------------------------------------


def test_an_older_directory_is_replaced_whole_or_not_at_all(stream, tmp_path, call):
    s = stream(2)
    out = tmp_path / "out"
    call("merge", s.base, s.arrivals[0], "--out", out, "--shard-size", "200B").ok()
    (out / "old.txt").write_text("of the old model")
    before = listing(out)
    assert "not empty" in call("merge", s.base, s.arrivals[1], "--out", out).mistake()
    bad = tmp_path / "bad.safetensors"
    save_file(s.arrival_tensors[1] | {"layer.bias": torch.full((6,), float("nan"))}, bad)
    call("merge", s.base, bad, "--out", out, "--force").mistake()
    assert listing(out) == before
    call("merge", s.base, s.arrivals[1], "--out", out, "--force").ok()
    assert {p.name for p in out.iterdir()} == {"model.safetensors", "README.md"}
    assert {p.name for p in tmp_path.iterdir()} == {"stream", "out", "bad.safetensors"}


def test_force_replaces_model_directories_only(stream, tmp_path, call):
    s = stream(1)
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("three years")
    before = listing(home)
    assert "does not look like a model" in call("merge", s.base, *s.arrivals, "--out", home, "--force").mistake()
    assert listing(home) == before


def test_the_base_and_the_arrivals_are_never_the_output(stream, tmp_path, call):
    s = stream(1)
    base = tmp_path / "base"
    base.mkdir()
    save_file(s.base_tensors, base / "model.safetensors")
    trunk = tmp_path / "trunk"
    call("init", trunk, "--base", base, "--rule", "average").ok()
    call("add", trunk, s.arrivals[0]).ok()
    before = listing(base)
    assert "base" in call("merge", base, *s.arrivals, "--out", base, "--force").mistake()
    assert "base" in call("export", trunk, base, "--force").mistake()
    assert listing(base) == before


def test_an_empty_directory_is_used_and_left_alone_on_failure(stream, tmp_path, call):
    s = stream(1)
    out = tmp_path / "out"
    out.mkdir()
    call("merge", s.base, tmp_path / "nowhere.safetensors", "--out", out).mistake()
    assert out.is_dir()
    call("merge", s.base, *s.arrivals, "--out", out).ok()
    assert (out / "model.safetensors").exists()


def test_parents_are_made(stream, tmp_path, call):
    s = stream(1)
    call("merge", s.base, *s.arrivals, "--out", tmp_path / "a" / "b" / "out").ok()
    assert (tmp_path / "a" / "b" / "out" / "model.safetensors").exists()


def test_a_killed_merge_leaves_no_output_and_the_next_one_sweeps(tmp_path):
    """Killed while the weights are being written: the output is not there, and what is left goes with the next run."""
    shapes = {f"layer.{k}.weight": (400, 400) for k in range(24)}
    for name, seed in (("base", 0), ("task", 1)):
        save_file(draw_tensors(seed, shapes), tmp_path / f"{name}.safetensors")
    out = tmp_path / "out"
    words = [sys.executable, "-m", "mergeway", "merge", tmp_path / "base.safetensors", tmp_path / "task.safetensors"]
    words += ["--rule", "iso", "--out", out]
    process = subprocess.Popen([str(w) for w in words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob(".out.partial-*/model.safetensors")):
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -9, "the merge was over before it could be killed"
    assert not out.exists()
    assert list(tmp_path.glob(".out.partial-*"))
    mw.merge_into(out, tmp_path / "base.safetensors", [tmp_path / "task.safetensors"], "average")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base.safetensors", "out", "task.safetensors"]


def test_what_a_killed_process_of_the_same_id_left_is_no_obstacle(stream, tmp_path):
    """In a container every run may have the same process id."""
    s = stream(1)
    (tmp_path / f".out.partial-{os.getpid()}").mkdir()
    (tmp_path / f".trunk.partial-{os.getpid()}").mkdir()
    mw.merge_into(tmp_path / "out", s.base, s.arrivals)
    mw.Trunk.create(tmp_path / "trunk", s.base)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "stream", "trunk"]


def test_an_output_that_was_put_aside_comes_back(stream, tmp_path, call):
    """A process killed between putting the old output aside and the new one in place loses neither."""
    s = stream(2)
    out = tmp_path / "out"
    call("merge", s.base, s.arrivals[0], "--out", out).ok()
    before = listing(out)
    out.rename(tmp_path / ".out.replaced-999999999")
    assert "not empty" in call("merge", s.base, s.arrivals[1], "--out", out).mistake()
    assert listing(out) == before
    call("merge", s.base, s.arrivals[1], "--out", out, "--force").ok()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "stream"]
