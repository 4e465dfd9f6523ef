"""Model parallelism: the ranks that share one replica of the model."""

from __future__ import annotations

from pydantic import Field

from .key_block import ConfigBlock


class ParallelKeys(ConfigBlock):
    """Keys of `model.*` that distribute one replica of the model over several ranks."""

    tensor_model_parallel_size: int = Field(1, ge=1)
    """Ranks that share the attention heads, MLP channels and vocabulary of every layer; neighbouring devices of one
    node."""
    sequence_parallel: bool = False
    """With tensor parallelism: shard the residual stream between attention and MLP over the tokens, so that norms,
    dropout and their activations are split as well."""
