"""Steer: the sum of the updates, taught by the arrivals' own answers."""

from mergeway.rules.steer.rule import Steer as Steer
