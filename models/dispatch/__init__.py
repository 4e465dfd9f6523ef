"""The attention calls a model makes and the backend chosen for each. Imports no torch."""
