"""Hugging Face architectures: mapping of weight names and layouts, and of config.json fields."""
