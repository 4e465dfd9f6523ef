"""NeMo's keys: the state of each, their spellings, and other frameworks' names."""
