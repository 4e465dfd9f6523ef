"""Models of Hugging Face's in and out: what `stoker convert` is made of."""
