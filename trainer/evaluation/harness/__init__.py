"""Models and tasks for the lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness)."""
