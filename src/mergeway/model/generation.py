"""Greedy completions of a causal language model: what it says when it is left to go on from a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mergeway.model.inputs import Params
from mergeway.model.kinds import CausalLM


def complete(model: CausalLM, params: Params, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """The likeliest next token after each prompt, then the next, up to `tokens` of them or the end token, which is left out.

    The loop is that of `transformers`, on the model alone: what its directory says of sampling or penalties is not heard.
    """
    longest = max(len(ids) for ids in prompts)
    inputs = torch.full((len(prompts), longest), model.padding)
    mask = torch.zeros_like(inputs)
    for row, ids in enumerate(prompts):  # on the left, so that all go on from the same column
        inputs[row, longest - len(ids) :] = torch.tensor(list(ids))
        mask[row, longest - len(ids) :] = 1
    ends = _end_tokens(model)
    with torch.no_grad():
        found = model.run.through(
            _Generation, params, {"input_ids": inputs, "attention_mask": mask}, _greedy(model, tokens, ends)
        )
    return [_until(row.tolist(), ends) for row in found[:, longest:].cpu()]


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


def _greedy(model: CausalLM, tokens: int, ends: Sequence[int]) -> object:
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=False, num_beams=1, max_new_tokens=tokens, eos_token_id=list(ends) or None, pad_token_id=model.padding
    )


def _end_tokens(model: CausalLM) -> list[int]:
    """Where a text ends, by the model's own settings for generation, its config or its tokenizer."""
    module: Any = model.module
    for said in (module.generation_config.eos_token_id, model.config.eos_token_id, model.tokenizer.eos_token_id):
        if said is not None:
            return [int(said)] if isinstance(said, int) else [int(token) for token in said]
    return []


def _until(ids: list[int], ends: Sequence[int]) -> list[int]:
    stop = next((k for k, token in enumerate(ids) if token in ends), len(ids))
    return ids[:stop]
