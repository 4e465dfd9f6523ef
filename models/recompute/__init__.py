"""Activation recomputation: applied to a stack, and its static analysis."""
