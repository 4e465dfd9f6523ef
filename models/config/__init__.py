"""The typed keys, slices and rules of a stack and of the model families. Imports no torch."""
