"""`python -m mergeway` is the `mergeway` command."""

import sys

from mergeway.cli import run

sys.exit(run())
