"""Configuration keys, resolved configuration and cross-field rules of the model families, without torch."""
