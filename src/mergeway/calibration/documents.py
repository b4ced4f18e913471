"""Text for a causal language model: plain documents, prompts with answers, choices or chats, one document a row.

Text is tokenised as the tokenizer does by default, so it begins with a begin token where the tokenizer writes one, and ends with
an end token only where the text or the chat template has it, unless `framing` says otherwise. No row sees another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mergeway.calibration.framing import Document, framed
from mergeway.calibration.given import Data, is_place, rows_of
from mergeway.calibration.lines import as_object
from mergeway.calibration.samples import MASKED, Samples
from mergeway.checkpoint.source import JsonObject
from mergeway.errors import OptionError
from mergeway.model.kinds import CausalLM
from mergeway.model.weights import Tokenizer


def read_documents(data: Data, task: str, model: CausalLM) -> Samples:
    """The documents of a JSON lines or parquet file, or of rows in memory; see `document_of` for what a row may be."""
    data, framing = framed(data)
    path = data if is_place(data) else f"the data of '{task}'"
    tokenizer = model.tokenizer
    documents = [framing(document_of(where, row, tokenizer), tokenizer) for where, row in rows_of(data, task)]
    if not documents:
        raise OptionError(f"{path}: there are no samples")
    cut = [(ids[: model.max_length], judged[: model.max_length]) for ids, judged in documents]
    # A document in which nothing is judged, such as a prompt that leaves no room for its completion, would only cost a pass.
    useful = [(ids, judged) for ids, judged in cut if any(judged[1:])]
    if not useful:
        raise OptionError(
            f"{path}: there is nothing to predict within {model.max_length} tokens; a document needs two tokens, and a completion must begin before"
        )
    return padded(useful, model.padding, task)


def read_prompts(path: Data, model: CausalLM) -> list[list[int]]:
    """What texts go on from: each row has `prompt` or `text`, or `messages` that the assistant is to answer."""
    prompts: list[list[int]] = []
    for where, row in rows_of(path, "prompts"):
        prompts.append(_prompt(where, row or {}, model.tokenizer))
        if len(prompts[-1]) >= model.max_length:
            raise OptionError(
                f"{where}: a prompt of {len(prompts[-1])} tokens leaves no room to go on within {model.max_length}; give a shorter one"
            )
    if not prompts:
        raise OptionError(f"{path}: there are no prompts")
    return prompts


def _prompt(where: str, row: JsonObject, tokenizer: Tokenizer) -> list[int]:
    for key in ("prompt", "text"):
        if isinstance(row.get(key), str) and row[key]:
            ids = _ids(tokenizer, row[key])
            return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids
    if isinstance(row.get("messages"), list) and row["messages"]:
        return _templated(where, _turns(where, row["messages"], tokenizer), tokenizer, opens=True)
    raise OptionError(f"{where}: expected an object with a non-empty 'prompt' or 'text', or a list 'messages'")


def padded(documents: Sequence[Document], padding: int, task: str) -> Samples:
    """One document a row, filled up on the right; padding is neither seen nor judged."""
    length = max(len(ids) for ids, _ in documents)
    inputs = torch.full((len(documents), length), padding)
    mask, labels = torch.zeros_like(inputs), torch.full_like(inputs, MASKED)
    for row, (ids, judged) in enumerate(documents):
        inputs[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = 1
        labels[row, : len(ids)] = torch.tensor([i if j else MASKED for i, j in zip(ids, judged, strict=True)])
    return Samples(task, {"input_ids": inputs, "attention_mask": mask}, labels)


def document_of(where: str, row: JsonObject | None, tokenizer: Tokenizer) -> Document:
    """The document of a row with `text`, `prompt` and `completion` (or `answer`), `prompt`, `choices` and `answer`, or `messages`."""
    if row is not None:
        if isinstance(row.get("text"), str) and row["text"]:
            ids = _ids(tokenizer, row["text"])
            return ids, [True] * len(ids)
        if isinstance(row.get("prompt"), str) and "choices" in row:
            choices, right = choices_of(where, row)
            return completed(row["prompt"], choices[right], tokenizer)
        answer = row.get("completion", row.get("answer"))
        if isinstance(row.get("prompt"), str) and isinstance(answer, str) and answer:
            return completed(row["prompt"], answer, tokenizer)
        if isinstance(row.get("messages"), list) and row["messages"]:
            return _chat(where, row["messages"], tokenizer)
    raise OptionError(
        f"{where}: expected an object with a non-empty 'text', or 'prompt' and 'completion', or 'prompt', 'choices' and 'answer', or a list 'messages'"
    )


def choices_of(where: str, row: JsonObject) -> tuple[list[str], int]:
    """The answers that a row offers, and which of them is right: `answer` is its number from 0, or the text itself."""
    given: list[object] = row["choices"]
    choices = [text for text in given if isinstance(text, str) and text] if type(given) is list else []
    if len(choices) < 2 or len(choices) < len(given):
        raise OptionError(f"{where}: 'choices' is {given!r}; it must be a list of two or more texts")
    if len(set(choices)) < len(choices):
        raise OptionError(f"{where}: two of the choices are equal, so that neither can be the right one alone")
    answer = row.get("answer")
    if isinstance(answer, str) and answer in choices:
        return choices, choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise OptionError(
            f"{where}: 'answer' is {answer!r}; it must be one of the {len(choices)} choices, or its number from 0"
        )
    return choices, answer


def completed(prompt: str, completion: str, tokenizer: Tokenizer) -> Document:
    """A prompt and what follows it as one text; a token that reaches from one into the other is judged."""
    ids = _ids(tokenizer, prompt + completion)
    given = 0
    for own, whole in zip(_ids(tokenizer, prompt), ids, strict=False):
        if own != whole:
            break
        given += 1
    return ids, [False] * given + [True] * (len(ids) - given)


def _chat(where: str, messages: list[object], tokenizer: Tokenizer) -> Document:
    """A conversation in the model's own template; only what the assistant says is judged."""
    turns = _turns(where, messages, tokenizer)
    ids: list[int] = []
    judged: list[bool] = []
    for count, turn in enumerate(turns, 1):
        ours = turn["role"] == "assistant"
        if ours:
            # What opens the assistant's turn is given to it, not asked of it.
            opened = _templated(where, turns[: count - 1], tokenizer, opens=True)
            ids, judged = opened, judged + [False] * (len(opened) - len(judged))
        grown = _templated(where, turns[:count], tokenizer)
        if grown[: len(ids)] != ids:
            raise OptionError(
                f"{where}: the chat template changes earlier turns; give 'prompt' and 'completion' instead"
            )
        ids, judged = grown, judged + [ours] * (len(grown) - len(judged))
    return ids, judged


def _turns(where: str, messages: list[object], tokenizer: Tokenizer) -> list[JsonObject]:
    if not tokenizer.chat_template:
        raise OptionError(
            f"{where}: holds a chat, but the base's tokenizer has no chat template; give 'prompt' and 'completion' instead"
        )
    return [_turn(where, message) for message in messages]


def _turn(where: str, given: object) -> JsonObject:
    message = as_object(given)
    if message is None or not isinstance(message.get("role"), str) or "content" not in message:
        raise OptionError(f"{where}: a message is {given!r}; it needs 'role' and 'content'")
    return message


def _templated(where: str, messages: list[JsonObject], tokenizer: Tokenizer, opens: bool = False) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
    except Exception as problem:  # a template is a program of its own
        raise OptionError(
            f"{where}: the chat template failed ({' '.join(str(problem).split())[:120]}); give 'prompt' and 'completion' instead"
        ) from None
    # A template writes every special token itself.
    return _ids(tokenizer, text, add_special_tokens=False)


def _ids(tokenizer: Tokenizer, text: str, **options: bool) -> list[int]:
    return list(tokenizer(text, verbose=False, **options)["input_ids"])
