"""Attention: call specification, environment flags, backends and the dispatcher that selects among them."""
