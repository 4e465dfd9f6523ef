"""Documents to tokenized data: inputs, reading, parts, workers, journal, result."""
