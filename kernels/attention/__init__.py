"""Attention: the facts of a call, the flags, the backends and the dispatcher that chooses among them."""
