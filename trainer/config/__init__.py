"""From YAML and overrides to one frozen, typed configuration. Imports no torch."""
