"""A model of llama2.c as a directory of `transformers`: weights in one fixed order, a vocabulary with scores.

The file begins with seven numbers (width, hidden width, layers, heads, heads of keys, words, longest text). Then come the matrices of all
layers, kind by kind, and tables of rotations that nobody needs. Two rotated numbers lie side by side there and half a head apart in
`transformers`, so the rows of queries and keys are put in another order.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mergeway.checkpoint.writer import save_tensors
from mergeway.errors import OptionError

_HEADER = struct.Struct("<7i")


def write_llama2c(data: bytes, out: Path) -> None:
    """Write the model and the tokenizer behind it, both in `data`, to a directory."""
    from transformers import LlamaConfig

    width, hidden, layers, heads, keys, words, longest = _HEADER.unpack_from(data)
    if min(width, hidden, layers, heads, keys, words, longest) < 1 or width % heads:
        raise OptionError("the package holds no model of llama2.c with a shared embedding; get it anew")
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        max_position_embeddings=longest,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.architectures = ["LlamaForCausalLM"]
    tensors, used = _weights(data, width, hidden, layers, heads, keys, words, longest)
    config.save_pretrained(out)
    save_tensors(out / "model.safetensors", tensors, {"format": "pt"})
    _write_tokenizer(data[used:], words, longest, out)


def _weights(
    data: bytes, width: int, hidden: int, layers: int, heads: int, keys: int, words: int, longest: int
) -> tuple[dict[str, Tensor], int]:
    """The tensors by the names of `transformers`, and where the file goes on behind them."""
    narrow, at = width * keys // heads, _HEADER.size

    def take(*shape: int) -> Tensor:
        nonlocal at
        count = int(np.prod(shape))
        if at + 4 * count > len(data):
            raise OptionError("the package's model is cut off; get it anew")
        found = torch.from_numpy(np.frombuffer(data, "<f4", count, at).reshape(shape).copy())
        at += 4 * count
        return found

    kinds = (
        ("input_layernorm", (width,)),
        ("self_attn.q_proj", (width, width)),
        ("self_attn.k_proj", (narrow, width)),
        ("self_attn.v_proj", (narrow, width)),
        ("self_attn.o_proj", (width, width)),
        ("post_attention_layernorm", (width,)),
        ("mlp.gate_proj", (hidden, width)),
        ("mlp.down_proj", (width, hidden)),
        ("mlp.up_proj", (hidden, width)),
    )
    found = {"model.embed_tokens.weight": take(words, width)}
    for kind, shape in kinds:
        for layer, matrix in enumerate(take(layers, *shape)):
            turned = {"self_attn.q_proj": heads, "self_attn.k_proj": keys}.get(kind)
            found[f"model.layers.{layer}.{kind}.weight"] = _half_apart(matrix, turned) if turned else matrix.clone()
    found["model.norm.weight"] = take(width)
    take(2, longest, width // heads // 2)
    return found, at


def _half_apart(matrix: Tensor, heads: int) -> Tensor:
    """Rows of each head in another order: first all that come first in a rotated pair, then all that come second."""
    rows, columns = matrix.shape
    return matrix.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _write_tokenizer(data: bytes, words: int, longest: int, out: Path) -> None:
    """A vocabulary of pieces with scores, as sentencepiece has it: the better of two pieces is merged first."""
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    at, vocabulary, scores = 4, {}, {}
    for number in range(words):
        score, length = struct.unpack_from("<fi", data, at)
        text = data[at + 8 : at + 8 + length].decode("utf-8", "replace")
        at += 8 + length
        special = {0: "<unk>", 1: "<s>", 2: "</s>"}.get(number)
        byte = f"<0x{number - 3:02X}>" if 3 <= number < 259 else None
        piece = special or byte or text.replace(" ", "▁")
        vocabulary[piece] = number
        if number >= 259:
            scores[piece] = score
    tokenizer = LlamaTokenizer(
        vocab=vocabulary,
        merges=generate_merges(vocabulary, scores),
        pad_token="</s>",  # noqa: S106 - no password
        model_max_length=longest,
        add_bos_token=True,
    )
    tokenizer.save_pretrained(out)
