"""LoRA kernels: frozen linear layers with low-rank updates, forward and backward."""
