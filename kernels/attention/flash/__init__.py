"""Flash attention in Triton: portable kernels, forward and backward, with biases that have gradients."""
