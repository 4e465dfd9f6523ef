"""Mixture of experts: routing of tokens to experts, and the experts' feed-forward networks without host syncs."""
