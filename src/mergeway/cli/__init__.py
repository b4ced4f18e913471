"""The command line: thin commands over the library; nothing here imports torch until a command needs it."""

from mergeway.cli.app import main as main
from mergeway.cli.app import run as run
