"""Assembly of a run: components from the configuration, resume, summary."""
