"""Optimizers of a run, all over the same base: decay groups, main weights, clipping, rows of sharded parameters."""
