"""Tokenize documents into an indexed dataset: inputs, readers, work units, worker processes, journal, result."""
