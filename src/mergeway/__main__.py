"""`python -m mergeway` is the `mergeway` command."""

import sys

from mergeway.cli import main

sys.exit(main())
