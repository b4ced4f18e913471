"""Reading a model directory with `transformers`: config, tokenizer and weights, each without the library's chatter."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast, overload

from torch import Tensor, nn

from mergeway.checkpoint.source import read_config
from mergeway.core.ranks import team
from mergeway.errors import MergewayError, OptionError
from mergeway.model.skeleton import Family, meta_model


class Tokenizer(Protocol):
    """What is asked of a tokenizer of `transformers`."""

    pad_token_id: int | None
    eos_token_id: int | None
    bos_token_id: int | None
    chat_template: object

    @overload
    def __call__(
        self, text: str, *, verbose: bool = True, add_special_tokens: bool = True
    ) -> Mapping[str, Sequence[int]]: ...

    @overload
    def __call__(
        self, text: list[str], *, padding: str, truncation: bool, max_length: int, return_tensors: Literal["pt"]
    ) -> Mapping[str, Tensor]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of tokens."""
        ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], *, tokenize: Literal[False], add_generation_prompt: bool
    ) -> str:
        """The conversation as one text."""
        ...


def load_config(family: Family, directory: Path, allow_code: bool = False) -> Any:
    """The config of a directory's model, read by a config class of `transformers`."""
    if (directory / "config.json").exists():
        read_config(directory)
    with quiet_transformers(), _one_line(family, directory):
        return family.from_pretrained(directory, trust_remote_code=allow_code)


def load_weights(family: Family, directory: Path, allow_code: bool = False) -> nn.Module:
    """A model in eval mode; several ranks get it without its weights, since each holds only its own rows of them."""
    with quiet_transformers(), _one_line(family, directory):
        if team().count > 1:
            module = meta_model(family, directory, allow_code)
        else:
            module = family.from_pretrained(directory, trust_remote_code=allow_code)
        return module.eval().requires_grad_(False)


def load_tokenizer(directory: Path, allow_code: bool = False) -> Tokenizer:
    """The tokenizer that was saved with the base."""
    from transformers import AutoTokenizer

    try:
        return cast(Tokenizer, AutoTokenizer.from_pretrained(directory, trust_remote_code=allow_code))
    except (OSError, ValueError, KeyError, TypeError) as problem:
        _refuse_code(directory, problem)
        raise OptionError(
            f"{directory}: has no tokenizer that can be read ({' '.join(str(problem).split())[:120]}); save the model's tokenizer beside it"
        ) from None


@contextlib.contextmanager
def _one_line(family: Family, directory: Path) -> Iterator[None]:
    try:
        yield
    except MergewayError:
        raise
    except Exception as problem:  # every class checks its config by itself, and says so in its own way
        _refuse_code(directory, problem)
        raise OptionError(
            f"{directory}: the base cannot be loaded as {family.__name__} ({' '.join(str(problem).split())[:160]})"
        ) from None


def _refuse_code(directory: Path, problem: Exception) -> None:
    """Without an answer `transformers` would ask on standard input whether to run a model's code; we never ask."""
    if "trust_remote_code" in str(problem):
        raise OptionError(
            f"{directory}: the base brings Python code of its own, which was not run; read it, and pass --allow-code if you trust it"
        ) from None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the warnings and progress bars of `transformers`."""
    from transformers.utils import logging as chatter

    level = chatter.get_verbosity()
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        chatter.set_verbosity(level)
