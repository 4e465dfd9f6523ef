"""Transformer modules built from plain values; `build.py` is the only reader of the configuration."""
