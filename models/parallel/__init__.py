"""Parallelism over the ranks of one model replica."""
