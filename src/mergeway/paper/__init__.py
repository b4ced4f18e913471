"""The tables and figures of the ODE-M, OPCM and Holistic CMM papers, made anew for any suite."""

from mergeway.paper.registry import ITEMS as ITEMS
from mergeway.paper.registry import Item as Item
from mergeway.paper.registry import choose as choose
from mergeway.paper.study import Study as Study
from mergeway.paper.study import default_lengths as default_lengths
from mergeway.paper.table import Table as Table
from mergeway.paper.table import Value as Value
