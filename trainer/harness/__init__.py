"""Benchmarks of the lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness, `stoker[eval]`)."""
