"""Calibration: samples of the tasks, the objective over them, and the memory that a trunk keeps of them."""
