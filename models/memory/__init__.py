"""Memory policies: recompute and CPU offload."""
