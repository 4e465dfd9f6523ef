"""Imported by the ranks of a run (`registers`): installs the fake TransformerEngine."""

from __future__ import annotations

import fake_transformer_engine

fake_transformer_engine.install()
