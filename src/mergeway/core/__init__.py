"""What every room builds on: tensors and their parts, linear algebra, ranks, workers, progress."""
