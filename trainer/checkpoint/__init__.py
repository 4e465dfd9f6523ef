"""Checkpoints and run directories: reading, writing, asynchronous saving."""
