"""Tokenizers, special tokens and vocabularies."""
