"""A language model in a GGUF file as a model directory of `transformers`, whose own reader turns quantised weights into float32."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import Any

import torch

from mergeway.checkpoint.writer import save_tensors
from mergeway.errors import OptionError

_FILE = "model.gguf"


def write_gguf(data: bytes, out: Path) -> None:
    """Write the model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _FILE).write_bytes(data)
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=_FILE, trust_remote_code=False)
            family: Any = AutoModelForCausalLM
            model = family.from_pretrained(folder, gguf_file=_FILE, trust_remote_code=False, dtype=torch.float32)
        except ImportError:
            raise OptionError("the package holds its model as GGUF; pip install gguf to read it") from None
        except (ValueError, OSError, KeyError, IndexError, struct.error) as problem:
            raise OptionError(
                f"the package's model is no GGUF file that can be read ({type(problem).__name__}); get it anew"
            ) from None
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # its weights are plain numbers now
    config.architectures = [type(model).__name__]
    config.save_pretrained(out)
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name not in tied}
    save_tensors(out / "model.safetensors", tensors, {"format": "pt"})
    tokenizer.save_pretrained(out)
