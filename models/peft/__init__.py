"""What fine-tuning with few parameters adds to a model."""
