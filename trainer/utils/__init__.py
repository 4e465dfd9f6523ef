"""Helpers without knowledge of configuration or models."""
