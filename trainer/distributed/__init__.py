"""Distributed training: process placement and launcher, collectives, replicated and sharded data parallelism."""
