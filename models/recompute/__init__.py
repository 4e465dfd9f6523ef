"""Activation recomputation: policies, and their static analysis."""
