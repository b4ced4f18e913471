"""A base as a function of named parameters: how its inputs are prepared, where and how it is run."""
