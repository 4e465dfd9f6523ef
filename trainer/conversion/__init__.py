"""Conversion between stoker checkpoints and Hugging Face models, adapters and GGUF files."""
