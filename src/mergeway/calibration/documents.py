"""Text for a causal language model: plain documents, prompts with completions, or chats, packed into blocks of equal length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mergeway.calibration.lines import as_object, parse_object, read_lines
from mergeway.calibration.samples import MASKED, Samples, check_samples
from mergeway.errors import OptionError
from mergeway.model.kinds import CausalLM

# Token ids of a document, and for each whether it is to be predicted.
Document = tuple[list[int], list[bool]]


def read_documents(path: Path, task: str, model: CausalLM) -> Samples:
    """The blocks of a JSON lines file; each line has `text`, or `prompt` and `completion`, or `messages`."""
    documents = [
        _document(f"{path}, line {k}", line, model.tokenizer) for k, line in enumerate(read_lines(path), 1) if line
    ]
    if not documents:
        raise OptionError(f"{path}: there are no samples")
    samples = pack(documents, model.max_length, model.tokenizer.eos_token_id, task)
    check_samples(samples, str(path))
    return samples


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
    blocks, judged_ids = torch.tensor(ids).view(-1, length), torch.tensor(labels).view(-1, length)
    # A block in which nothing is judged, such as the middle of a long prompt, would only cost a pass.
    useful = (judged_ids[:, 1:] != MASKED).any(1)
    return Samples(task, {"input_ids": blocks[useful]}, judged_ids[useful])


def _document(where: str, line: str, tokenizer: Any) -> Document:
    row = parse_object(line)
    if row is not None:
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
    for given in messages:
        message = as_object(given)
        if message is None or not isinstance(message.get("role"), str) or "content" not in message:
            raise OptionError(f"{where}: a message is {given!r}; it needs 'role' and 'content'")
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
