"""Text generation: sampling, beam search, the decode loop."""
