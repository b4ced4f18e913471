"""The trunk: what a reader sees of it (`view`), what a writer does to it (`trunk`), and its files (`store`, `journal`)."""

from mergeway.trunk.trunk import Trunk
from mergeway.trunk.view import TrunkView

__all__ = ["Trunk", "TrunkView"]
