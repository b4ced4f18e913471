"""The suites that come with the package, and what a suite directory is checked for."""

from mergeway.bench.suites.check import check_suite as check_suite
from mergeway.bench.suites.embedded import EMBEDDED as EMBEDDED
from mergeway.bench.suites.embedded import build_suite as build_suite
from mergeway.bench.suites.embedded import embedded as embedded
from mergeway.bench.suites.named import named as named
from mergeway.bench.suites.named import suite_directory as suite_directory
from mergeway.bench.suites.split import split_suite as split_suite
