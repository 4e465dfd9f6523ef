"""Where text and records come from: files, indexed tokens, Hugging Face datasets."""
