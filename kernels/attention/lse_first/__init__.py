"""LSE-first attention: first the log-sum-exp over all keys, then outputs and gradients summed over chunks of keys."""
