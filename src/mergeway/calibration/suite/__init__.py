"""A suite: the base, experts, heads and data of a benchmark, described by a directory's suite.json.

Its protocol says what is asked: `task`, each task among its own classes under its own head; `cil`, tasks of disjoint classes,
and `dil`, tasks of the same classes in other domains, both under one shared head, among all classes seen so far.
"""

from mergeway.calibration.suite.description import load_suite
from mergeway.calibration.suite.suite import Suite
from mergeway.calibration.suite.task import CLASSIFIERS, PROTOCOLS, SuiteTask

__all__ = ["CLASSIFIERS", "PROTOCOLS", "Suite", "SuiteTask", "load_suite"]
