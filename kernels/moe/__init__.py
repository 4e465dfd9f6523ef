"""Mixture of experts: token routing and expert MLPs without host syncs."""
