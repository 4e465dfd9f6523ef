"""Tensors in, tensors out: reference, Triton kernels, custom ops and public functions, one operation per file."""
