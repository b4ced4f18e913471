"""What a causal language model says when it is left to go on from a prompt: greedily, or drawn by a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mergeway.model.inputs import Params
from mergeway.model.kinds import CausalLM

WRITTEN_AT_ONCE = 32  # texts; not the micro-batch, because what is drawn depends on it


def complete(model: CausalLM, params: Params, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """The likeliest next token after each prompt, then the next, up to `tokens` of them or the end token, which is left out.

    The loop is that of `transformers`, on the model alone: what its directory says of sampling or penalties is not heard.
    """
    ends = end_tokens(model)
    found = _go_on(model, params, prompts, _settings(model, tokens, ends, do_sample=False, num_beams=1))
    return [row[: _end(row, ends)] for row in found]


def write(model: CausalLM, params: Params, prompts: Sequence[Sequence[int]], tokens: int, seed: int) -> list[list[int]]:
    """What the model writes behind each prompt, drawn at temperature 1: `tokens`, or fewer that end with an end token.

    The same seed gives the same texts, whatever was drawn before; nobody else's draws change.
    """
    ends, where = end_tokens(model), model.compute.where
    written: list[list[int]] = []
    for first in range(0, len(prompts), WRITTEN_AT_ONCE):
        part = prompts[first : first + WRITTEN_AT_ONCE]
        most = min(tokens, model.max_length - max(map(len, part)))
        drawn = _settings(model, most, ends, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        with torch.random.fork_rng([where] if where.type == "cuda" else []):
            torch.manual_seed(seed + first)
            found = _go_on(model, params, part, drawn)
        written += [row[: _end(row, ends) + 1] for row in found]
    return written


def _go_on(model: CausalLM, params: Params, prompts: Sequence[Sequence[int]], settings: object) -> list[list[int]]:
    """What follows each prompt, with whatever padding is behind an end token."""
    longest = max(len(ids) for ids in prompts)
    inputs = torch.full((len(prompts), longest), model.padding)
    mask = torch.zeros_like(inputs)
    for row, ids in enumerate(prompts):  # on the left, so that all go on from the same column
        inputs[row, longest - len(ids) :] = torch.tensor(list(ids))
        mask[row, longest - len(ids) :] = 1
    with torch.no_grad():
        found = model.run.through(_Generation, params, {"input_ids": inputs, "attention_mask": mask}, settings)
    return found[:, longest:].cpu().tolist()


class _Generation(nn.Module):
    """A model whose forward pass is the whole loop of generation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, inputs: Mapping[str, Tensor], config: object) -> Tensor:
        kept, self.model.generation_config = self.model.generation_config, config
        try:
            return self.model.generate(**inputs)
        finally:
            self.model.generation_config = kept


def _settings(model: CausalLM, tokens: int, ends: Sequence[int], **how: object) -> object:
    from transformers import GenerationConfig

    return GenerationConfig(max_new_tokens=tokens, eos_token_id=list(ends) or None, pad_token_id=model.padding, **how)


def end_tokens(model: CausalLM) -> list[int]:
    """Where a text ends, by the model's own settings for generation, its config or its tokenizer."""
    module: Any = model.module
    for given in (module.generation_config.eos_token_id, model.config.eos_token_id, model.tokenizer.eos_token_id):
        if given is not None:
            return [int(given)] if isinstance(given, int) else [int(token) for token in given]
    return []


def begin_token(model: CausalLM) -> int | None:
    """What a text begins with: the begin token, else the end of a text before it."""
    for found in (model.tokenizer.bos_token_id, model.config.bos_token_id, *end_tokens(model)):
        if found is not None:
            return int(found)
    return None


def _end(ids: Sequence[int], ends: Sequence[int]) -> int:
    """Where a text ends."""
    return next((k for k, token in enumerate(ids) if token in ends), len(ids))
