"""Memory policies: activation checkpointing and CPU offload."""
