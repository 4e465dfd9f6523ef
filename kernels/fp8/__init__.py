"""Training matmuls in fp8: casts, scaled matmuls and the layers that use them, by own kernels or TransformerEngine."""
