"""Tokenizers, sources of text and the batches made of them."""
