"""Tokenizers, data sources, and the samples and batches made from them."""
