"""Hugging Face's models as tables: name and layout of each weight, meaning of each field of a config.json."""
