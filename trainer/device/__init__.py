"""The device of a run: precision, determinism, CUDA graph support, attention software."""
