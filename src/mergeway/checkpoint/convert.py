"""Convert a pickled file, or the pickled files of a model directory, to safetensors.

python -m mergeway.checkpoint.convert IN.bin|DIRECTORY OUT.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

from mergeway.checkpoint.pickled import load_pickles, pickles_in
from mergeway.checkpoint.writer import save_tensors
from mergeway.core.files import replaced
from mergeway.core.printed import printable
from mergeway.errors import CheckpointError, MergewayError


def main(arguments: list[str]) -> int:
    """Convert; the exit code."""
    if len(arguments) != 2:
        print("usage: python -m mergeway.checkpoint.convert IN.bin|DIRECTORY OUT.safetensors", file=sys.stderr)
        return 2
    source, target = map(Path, arguments)
    try:
        if target.exists():
            raise CheckpointError(f"{target}: exists already; choose another name")
        # A pickle may hold views of one storage; a safetensors file holds each tensor by itself.
        tensors = {name: t.contiguous().clone() for name, t in load_pickles(pickles_in(source) or [source]).items()}
        with replaced(target) as new:
            save_tensors(new, tensors, {"format": "pt"})
    except (MergewayError, OSError) as problem:
        print(f"error: {printable(str(problem))}", file=sys.stderr)
        return 2
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
