"""Flash attention in plain Triton, for every architecture."""
