"""Optimizer kernels over many tensors at once."""
