"""Evaluation: held-out loss, answer scores, lm-evaluation-harness."""
