"""Metric loggers, the run log and the progress bar."""
