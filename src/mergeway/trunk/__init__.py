"""The trunk: what a reader sees of it (`view`), what a writer does to it (`changes`)."""

from mergeway.trunk.changes import Trunk
from mergeway.trunk.view import TrunkView

__all__ = ["Trunk", "TrunkView"]
