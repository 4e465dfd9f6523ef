"""LSE-first attention: log-sum-exps of all scores first, then outputs and gradients that add up chunk by chunk."""
