"""A trunk's update as a PEFT adapter: loaded by peft, compared with NumPy's SVD; adapters fold as the weights they make."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from shared import DATA_FREE
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import mergeway as mw
from mergeway.checkpoint import open_checkpoint


def make_model(kind: str):
    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    return tiny.llama()


def moved(tensors: dict, seed: int, matrices_only: bool) -> dict:
    """The tensors with noise added, to all of them or to linear weights alone."""
    generator = torch.Generator().manual_seed(seed)

    def moves(name: str, tensor: torch.Tensor) -> bool:
        return not matrices_only or (tensor.ndim == 2 and not any(w in name for w in ("embed", "wte", "wpe")))

    return {
        n: t + 0.1 * torch.randn(t.shape, generator=generator) if moves(n, t) else t.clone() for n, t in tensors.items()
    }


@pytest.fixture(params=["llama", "gpt2"])
def trunk(request, tmp_path):
    """A trunk of two arrivals, all of whose update lies in linear weights."""
    model = make_model(request.param)
    model.save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    made = mw.Trunk.create(tmp_path / "trunk", tmp_path / "base", "average")
    for k in (1, 2):
        save_file(moved(tensors, k, True), tmp_path / f"arrival{k}.safetensors")
        made.add(tmp_path / f"arrival{k}.safetensors")
    return made


def loaded(trunk, out):
    base = AutoModelForCausalLM.from_pretrained(trunk.base_ref)
    return PeftModel.from_pretrained(base, out).merge_and_unload()


def test_full_rank_is_the_update(trunk, tmp_path):
    done = trunk.export_lora(tmp_path / "adapter", 10_000)
    assert done.rank == 16
    assert not done.left_out
    assert done.kept == pytest.approx(1.0, abs=1e-9)
    theirs = loaded(trunk, tmp_path / "adapter")
    for name, tensor in trunk.params().items():
        torch.testing.assert_close(theirs.state_dict()[name], tensor, rtol=0, atol=1e-6)
    trunk.export(tmp_path / "whole")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    ids = torch.arange(8)[None]
    torch.testing.assert_close(theirs(ids).logits, whole(ids).logits, rtol=0, atol=1e-5)


def test_each_matrix_is_the_best_of_its_rank(trunk, tmp_path, call):
    done = call("export", trunk.path, tmp_path / "adapter", "--lora", 3, "--json").json()
    theirs, base = loaded(trunk, tmp_path / "adapter").state_dict(), open_checkpoint(trunk.base_ref)
    assert done["rank"] == 3
    assert len(done["layers"]) == (8 if "transformer.h.0.ln_1.weight" in theirs else 15)
    for row in done["layers"]:
        origin = base.read(row["name"]).double().numpy()
        u, s, vt = np.linalg.svd(trunk.params()[row["name"]].double().numpy() - origin)
        best = (u[:, :3] * s[:3]) @ vt[:3]
        np.testing.assert_allclose(theirs[row["name"]].double().numpy() - origin, best, atol=1e-6)
        assert row["kept"] == pytest.approx((s[:3] ** 2).sum() / (s**2).sum(), rel=1e-5)
        assert row["energy"] == pytest.approx((s**2).sum(), rel=1e-5)
    energies = [row["energy"] for row in done["layers"]]
    assert done["kept"] == pytest.approx(np.average([r["kept"] for r in done["layers"]], weights=energies))


def test_what_is_no_linear_weight_is_said_to_be_left_out(tmp_path, call):
    model = make_model("llama")
    model.save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    save_file(moved(tensors, 1, False), tmp_path / "arrival.safetensors")
    trunk = mw.Trunk.create(tmp_path / "trunk", tmp_path / "base", "average")
    trunk.add(tmp_path / "arrival.safetensors")
    done = trunk.export_lora(tmp_path / "adapter", 16)
    assert {row.name for row in done.left_out} == {n for n in tensors if "norm" in n or "embed" in n}
    assert 0 < done.kept < 1
    table = call("export", tmp_path / "trunk", tmp_path / "again", "--lora", 16).ok().out
    assert f"{len(done.left_out)} without a place" in table and "0.00 %" in table


def test_exported_adapter_is_an_arrival_again(trunk, tmp_path):
    trunk.export_lora(tmp_path / "adapter", 16)
    ours = mw.merge(trunk.base_ref, [tmp_path / "adapter"], "average")
    for name, tensor in trunk.params().items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", DATA_FREE)
def test_adapters_fold_as_the_weights_they_make(tmp_path, rule):
    model = make_model("llama")
    model.save_pretrained(tmp_path / "base")
    base = open_checkpoint(tmp_path / "base")
    refs, full = [], []
    for k in (1, 2, 3):
        trunk = mw.Trunk.create(tmp_path / f"trunk{k}", tmp_path / "base", "average")
        tensors = {n: base.read(n) for n in base.infos}
        trunk.add(moved(tensors, k, True))
        trunk.export_lora(tmp_path / f"adapter{k}", 2)
        refs.append(tmp_path / f"adapter{k}")
        made = open_checkpoint(refs[-1], base)
        full.append({n: made.read(n).clone() for n in made.infos})
    options = {"steps": 3} if rule == "dop" else {}
    ours, theirs = (mw.merge(tmp_path / "base", arrivals, rule, [1, 2, 1], **options) for arrivals in (refs, full))
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    assert any(not torch.equal(ours[n], base.read(n)) for n in ours)


def test_mistakes(trunk, tmp_path, call):
    assert "the rank is 0; it must be at least 1" in call("export", trunk.path, tmp_path / "out", "--lora", 0).mistake()
    fresh = mw.Trunk.create(tmp_path / "fresh", trunk.base_ref, "average")
    assert "no linear weight differs" in call("export", fresh.path, tmp_path / "out", "--lora", 4).mistake()
    assert not (tmp_path / "out").exists()
