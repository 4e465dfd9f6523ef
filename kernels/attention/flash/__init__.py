"""Flash attention in Triton: portable forward and backward kernels, with trainable biases."""
