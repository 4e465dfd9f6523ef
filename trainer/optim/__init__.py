"""Optimizers on a common base class: weight-decay groups, main weights, clipping, sharded parameters."""
