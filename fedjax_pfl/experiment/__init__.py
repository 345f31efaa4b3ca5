"""Experiments: configuration, the run folder, checkpoints, comparisons, reports and the command line."""
