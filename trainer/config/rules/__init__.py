"""Cross-field rules: pure functions from the keys to findings."""
