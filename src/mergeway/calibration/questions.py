"""What a language model is asked: to go on from a prompt, or to choose between answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mergeway.calibration.documents import choices_of, completed, document_of
from mergeway.calibration.framing import Document, framed
from mergeway.calibration.given import Data, rows_of
from mergeway.calibration.samples import MASKED, Samples
from mergeway.model.kinds import CausalLM


@dataclass(frozen=True)
class Question:
    """A prompt as a model goes on from it, the text that is right, and how many tokens that takes."""

    prompt: Sequence[int]
    answer: str
    tokens: int


@dataclass(frozen=True)
class Choice:
    """A prompt with each of several answers behind it, and which of them is right."""

    documents: Sequence[Document]
    right: int


@dataclass(frozen=True)
class Asked:
    """The questions and the choices in a task's data; plain texts ask nothing."""

    questions: Sequence[Question] = ()
    choices: Sequence[Choice] = ()


def read_asked(data: Data, model: CausalLM) -> Asked:
    """The questions and choices of a JSON lines or parquet file, or of rows in memory.

    A row with choices is a choice. Any other whose end is to be predicted, but not its beginning, is a question: a prompt with its
    completion, or a chat that ends with what the assistant says.
    """
    questions: list[Question] = []
    choices: list[Choice] = []
    data, framing = framed(data)
    for where, row in rows_of(data, "questions"):
        document = framing(document_of(where, row, model.tokenizer), model.tokenizer)
        if row is not None and "choices" in row and "text" not in row:
            texts, right = choices_of(where, row)
            documents = [framing(completed(row["prompt"], text, model.tokenizer), model.tokenizer) for text in texts]
            choices.append(Choice([_last(d, model.max_length) for d in documents], right))
        elif (question := question_of(document, model)) is not None:
            questions.append(question)
    return Asked(questions, choices)


def asked_of(samples: Samples, model: CausalLM) -> Asked:
    """The questions among samples that were tokenised before; which of them were choices is no longer known."""
    assert samples.mask is not None
    questions: list[Question] = []
    for ids, labels, mask in zip(samples.tensors["input_ids"], samples.labels, samples.mask, strict=True):
        used = int(mask.sum())
        document = [int(i) for i in ids[:used]], [int(label) != MASKED for label in labels[:used]]
        if (question := question_of(document, model)) is not None:
            questions.append(question)
    return Asked(questions)


def question_of(document: Document, model: CausalLM) -> Question | None:
    """The question in a document: what is judged at its end is the answer, all before it the prompt."""
    ids, judged = document
    if not judged or not judged[-1] or all(judged):
        return None
    start = max(k for k, wanted in enumerate(judged) if not wanted) + 1
    tokens = len(ids) - start
    return Question(ids[max(0, start - max(1, model.max_length - tokens)) : start], plain(model, ids[start:]), tokens)


def plain(model: CausalLM, ids: Sequence[int]) -> str:
    """Tokens as a text that can be compared: without special tokens, and without blanks at its ends."""
    return str(model.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def _last(document: Document, most: int) -> Document:
    """The end of a document that is too long: the answer stays, and what is right before it."""
    ids, judged = document
    return ids[-most:], judged[-most:]
