"""How the texts of a file begin and end: as the tokenizer writes them, or as the words behind `#` say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mergeway.calibration.given import Data, is_place
from mergeway.errors import OptionError, suggest
from mergeway.model.weights import Tokenizer

# Token ids of a document, and for each whether it is to be predicted.
Document = tuple[list[int], list[bool]]

_WORDS = ("begin", "no-begin", "end")


@dataclass(frozen=True)
class Framing:
    """Whether a document begins with the begin token (None: as the tokenizer has it), and whether an end token is added."""

    begin: bool | None = None
    end: bool = False

    def __call__(self, document: Document, tokenizer: Tokenizer) -> Document:
        """The document with the tokens at its ends that were asked for; an added end is predicted, a beginning never."""
        ids, judged = document
        begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        if self.begin is not None and begin is None:
            raise OptionError("#begin, #no-begin: the base's tokenizer has no begin token; leave the word out")
        if self.end and end is None:
            raise OptionError("#end: the base's tokenizer has no end token; leave the word out")
        if self.begin and begin is not None and ids[:1] != [begin]:
            ids, judged = [begin, *ids], [False, *judged]
        if self.begin is False and ids[:1] == [begin]:
            ids, judged = ids[1:], judged[1:]
        if self.end and end is not None and ids[-1:] != [end]:
            ids, judged = [*ids, end], [*judged, True]
        return ids, judged


def framed(data: Data) -> tuple[Data, Framing]:
    """The file in `x.jsonl#no-begin,end`, and how its texts begin and end; data in memory and plain files say nothing of it."""
    if not is_place(data) or "#" not in str(data) or Path(data).exists():
        return data, Framing()
    file, _, behind = str(data).rpartition("#")
    words = behind.split(",")
    for word in words:
        if word not in _WORDS:
            raise OptionError(f"{data}: '{word}' says nothing of how texts begin or end; {suggest(word, _WORDS)}")
    if "begin" in words and "no-begin" in words:
        raise OptionError(f"{data}: begin and no-begin: give one of them")
    begin = True if "begin" in words else False if "no-begin" in words else None
    return file, Framing(begin, "end" in words)
