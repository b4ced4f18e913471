"""The report: a run or a trunk as one HTML file that needs nothing but a browser."""

from mergeway.report.page import write_page as write_page
from mergeway.report.run_data import run_data as run_data
from mergeway.report.stored import read_run as read_run
from mergeway.report.stored import read_sweep as read_sweep
from mergeway.report.sweep import record_sweep as record_sweep
from mergeway.report.trunk_data import trunk_data as trunk_data
