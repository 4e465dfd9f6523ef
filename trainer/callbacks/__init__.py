"""Callbacks between steps: validation, checkpoints, reports, stopping."""
