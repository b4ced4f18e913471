"""The report: a run or a trunk as one HTML file that needs nothing but a browser."""

from mergeway.bench.report.page import write_page as write_page
from mergeway.bench.report.run_data import run_data as run_data
from mergeway.bench.report.stored import read_run as read_run
from mergeway.bench.report.stored import read_sweep as read_sweep
from mergeway.bench.report.sweep import record_sweep as record_sweep
from mergeway.bench.report.trunk_data import trunk_data as trunk_data
