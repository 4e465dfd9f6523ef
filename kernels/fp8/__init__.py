"""Training matmuls in fp8 with current scaling: casts, scaled matmuls and the layers that use them."""
