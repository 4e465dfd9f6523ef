"""Compose YAML files and overrides into one frozen, typed configuration. Imports no torch."""
