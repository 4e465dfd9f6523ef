"""The public Python API; the names that `stoker` exports."""
