"""Attention backends: one file each, behind the names that the dispatcher chooses from."""
