"""What happens between steps: validation, checkpoints, reports, stopping."""
