"""The command line, the configuration, the training loop and everything around a run."""
