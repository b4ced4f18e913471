"""The tables and figures of the ODE-M, OPCM and Holistic CMM papers, made anew for any suite."""

from mergeway.bench.paper.registry import ITEMS as ITEMS
from mergeway.bench.paper.registry import Item as Item
from mergeway.bench.paper.registry import choose as choose
from mergeway.bench.paper.study import Study as Study
from mergeway.bench.paper.study import default_lengths as default_lengths
from mergeway.bench.paper.table import Table as Table
from mergeway.bench.paper.table import Value as Value
