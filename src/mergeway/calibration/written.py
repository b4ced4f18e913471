"""Samples that an arrival writes itself: `self:N`, or `self:N@PROMPTS.jsonl` to go on from prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mergeway.calibration.documents import padded, read_prompts
from mergeway.calibration.samples import Samples
from mergeway.core.ranks import team
from mergeway.errors import OptionError
from mergeway.model.generation import begin_token, write
from mergeway.model.inputs import Params
from mergeway.model.kinds import CausalLM
from mergeway.model.model import Model

SELF = "self:"
DEFAULT = f"{SELF}64"
LONGEST_WRITTEN = 128  # tokens of a document from its begin token on, or behind a prompt


@dataclass(frozen=True)
class Writing:
    """Who writes a task's samples, read when they are needed, and by which seed."""

    arrival: Callable[[], Params]
    seed: int = 0


def written_samples(data: str, task: str, model: Model, writing: Writing | None) -> Samples:
    """N documents that the arrival has drawn at temperature 1; the same ones whenever it is asked again."""
    count, file = _read(data)
    if not isinstance(model, CausalLM):
        raise OptionError(
            f"--data {data}: the base is of kind {model.kind}, which writes nothing; give the task's data, labels are not needed"
        )
    if writing is None:
        raise OptionError(f"--data {data}: only an arrival that is being added writes its own samples; give a file")
    prompts = read_prompts(file, model) if file else [[_begin(model)]]
    most = min(LONGEST_WRITTEN, model.max_length) - (0 if file else 1)
    given = [prompts[k % len(prompts)] for k in range(count)]
    key = hashlib.sha256(f"{writing.seed}:{task}:written".encode()).digest()
    seed = int.from_bytes(key[:6], "little")

    def draw() -> list[list[int]]:
        params = {n: p.float() if p.is_floating_point() else p for n, p in writing.arrival().items()}
        return write(model, params, given, most, seed)

    # One rank writes for all, so that none reads another text.
    found = zip(given, team().from_lead(draw), strict=True)
    documents = [([*begun, *rest], [False] * len(begun) + [True] * len(rest)) for begun, rest in found]
    how = (
        f"at temperature 1 from {file.name if file else 'the begin token'}, at most {most} tokens, seed {writing.seed}"
    )
    return replace(padded(documents, model.padding, task), written=how)


def _begin(model: CausalLM) -> int:
    found = begin_token(model)
    if found is None:
        raise OptionError(
            f"{model.directory}: the model has no token that a text begins with; give prompts to go on from, self:N@PROMPTS.jsonl"
        )
    return found


def _read(data: str) -> tuple[int, Path | None]:
    count, at, prompts = data.removeprefix(SELF).partition("@")
    if not (count.isascii() and count.isdigit()) or int(count) < 1 or (at and not prompts):
        raise OptionError(
            f"--data {data}: expected self:N or self:N@PROMPTS.jsonl, N being how many texts the arrival writes, at least 1"
        )
    return int(count), Path(prompts) if at else None
