"""Mixture of experts (MoE)."""
