"""Ways in for the user's own code: entry points and `--import`."""
