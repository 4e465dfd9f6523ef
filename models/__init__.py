"""Transformer models. Modules take plain values; `build.py` reads the configuration."""
