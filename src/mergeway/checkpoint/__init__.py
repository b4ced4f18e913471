"""Reading, checking and writing model checkpoints, one tensor at a time."""

from mergeway.checkpoint.inspect import Inspection as Inspection
from mergeway.checkpoint.inspect import check_fits as check_fits
from mergeway.checkpoint.inspect import inspect_checkpoint as inspect_checkpoint
from mergeway.checkpoint.resolve import open_checkpoint as open_checkpoint
from mergeway.checkpoint.source import Checkpoint as Checkpoint
from mergeway.checkpoint.source import InMemory as InMemory
from mergeway.checkpoint.source import SafetensorsFiles as SafetensorsFiles
from mergeway.checkpoint.writer import ModelWriter as ModelWriter
