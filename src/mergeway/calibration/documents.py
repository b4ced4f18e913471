"""Text for a causal language model: plain documents, prompts with completions, or chats, packed into blocks of equal length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mergeway.calibration.lines import read_lines
from mergeway.calibration.samples import MASKED, Samples, check_samples
from mergeway.errors import OptionError

# Token ids of a document, and for each whether it is to be predicted.
Document = tuple[list[int], list[bool]]


def read_documents(path: Path, task: str, predictor: Any) -> Samples:
    """The blocks of a JSON lines file; each line has `text`, or `prompt` and `completion`, or `messages`."""
    documents = [
        _document(f"{path}, line {k}", line, predictor.tokenizer) for k, line in enumerate(read_lines(path), 1) if line
    ]
    if not documents:
        raise OptionError(f"{path}: there are no samples")
    made = pack(documents, predictor.max_length, predictor.tokenizer.eos_token_id, task)
    check_samples(made, str(path))
    return made


def pack(documents: list[Document], length: int, end: int | None, task: str) -> Samples:
    """Documents one after the other, cut into blocks; nobody is asked for the first token of a document.

    Each document ends with the end token, if there is one. The last block is filled up with tokens that are not judged, and
    which nothing before them sees.
    """
    ids: list[int] = []
    labels: list[int] = []
    for tokens, judged in documents:
        tokens, judged = ([*tokens, end], [*judged, judged[-1]]) if end is not None else (tokens, judged)
        ids += tokens
        labels += [MASKED, *(t if j else MASKED for t, j in zip(tokens[1:], judged[1:], strict=True))]
    short = -len(ids) % length
    ids += [end if end is not None else 0] * short
    labels += [MASKED] * short
    made = torch.tensor(ids).view(-1, length), torch.tensor(labels).view(-1, length)
    # A block in which nothing is judged, such as the middle of a long prompt, would only cost a pass.
    useful = (made[1][:, 1:] != MASKED).any(1)
    return Samples(task, {"input_ids": made[0][useful]}, made[1][useful])


def _document(where: str, line: str, tokenizer: Any) -> Document:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if isinstance(row, dict):
        if isinstance(row.get("text"), str) and row["text"]:
            ids = _ids(tokenizer, row["text"])
            return ids, [True] * len(ids)
        if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str) and row["completion"]:
            prompt, answer = _ids(tokenizer, row["prompt"]), _ids(tokenizer, row["completion"])
            return prompt + answer, [False] * len(prompt) + [True] * len(answer)
        if isinstance(row.get("messages"), list) and row["messages"]:
            return _chat(where, row["messages"], tokenizer)
    raise OptionError(
        f"{where}: expected an object with a non-empty 'text', or 'prompt' and 'completion', or a list 'messages'"
    )


def _chat(where: str, messages: list[Any], tokenizer: Any) -> Document:
    """A conversation in the model's own template; only what the assistant says is judged."""
    if not tokenizer.chat_template:
        raise OptionError(
            f"{where}: holds a chat, but the base's tokenizer has no chat template; give 'prompt' and 'completion' instead"
        )
    for message in messages:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
            raise OptionError(f"{where}: a message is {message!r}; it needs 'role' and 'content'")
    ids: list[int] = []
    judged: list[bool] = []
    for count, message in enumerate(messages, 1):
        ours = message["role"] == "assistant"
        if ours:
            # What opens the assistant's turn is given to it, not asked of it.
            opened = _templated(where, messages[: count - 1], tokenizer, opens=True)
            ids, judged = opened, judged + [False] * (len(opened) - len(judged))
        grown = _templated(where, messages[:count], tokenizer)
        if grown[: len(ids)] != ids:
            raise OptionError(
                f"{where}: the chat template changes earlier turns; give 'prompt' and 'completion' instead"
            )
        ids, judged = grown, judged + [ours] * (len(grown) - len(judged))
    return ids, judged


def _templated(where: str, messages: list[Any], tokenizer: Any, opens: bool = False) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
    except Exception as problem:  # a template is a program of its own
        raise OptionError(
            f"{where}: the chat template failed ({' '.join(str(problem).split())[:120]}); give 'prompt' and 'completion' instead"
        ) from None
    return _ids(tokenizer, text)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
