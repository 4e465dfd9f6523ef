"""Model parallelism: the ranks that share one replica of the model, and its experts."""

from __future__ import annotations

from typing import Annotated, Literal

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
    ub_tp_comm_overlap: bool = False
    """With `sequence_parallel` on GPUs that read each other's memory: the all-gather before a matrix product and the
    reduce-scatter after it run in parts beside those of the product (asynchronous tensor parallelism). Not in layers
    with a LoRA update."""
    tp_comm_overlap_ag: bool = True
    """With `ub_tp_comm_overlap`: of all-gathers."""
    tp_comm_overlap_rs: bool = True
    """With `ub_tp_comm_overlap`: of reduce-scatters."""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """Ranks of a pipeline: each has some of the layers, and sends their output to the next (1F1B schedule)."""
    virtual_pipeline_model_parallel_size: int | None = Field(None, ge=1)
    """With pipeline parallelism: stages of each rank, which it runs interleaved, so that the pipeline fills sooner;
    null: 1."""
    pipeline_model_parallel_split_rank: int = Field(0, ge=0)
    """T5 with pipeline parallelism: number of ranks that have the encoder; the others have the decoder."""
    num_layers_in_first_pipeline_stage: int | None = Field(None, ge=1)
    """Layers of the first rank of a pipeline; null: as many as the others."""
    num_layers_in_last_pipeline_stage: int | None = Field(None, ge=1)
    """Layers of the last rank of a pipeline; null: as many as the others."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embeddings as a layer when layers are distributed over the ranks of a pipeline."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and the loss as a layer when layers are distributed over the ranks of a pipeline."""
    context_parallel_size: int = Field(1, ge=1)
    """Ranks that share the tokens of every sequence; they communicate in attention only."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] = "p2p"
    """How context-parallel ranks share attention. `p2p`: keys and values travel from rank to rank (ring). `all_gather`:
    each rank gathers all keys and values. `a2a`: each rank computes some of the heads (Ulysses). `a2a+p2p`: `a2a` among
    neighbouring ranks, `p2p` between these groups."""
    hierarchical_context_parallel_sizes: list[Annotated[int, Field(ge=2)]] | None = Field(
        None, min_length=2, max_length=2
    )
    """`[a2a, p2p]`: the ranks of each kind of group with `cp_comm_type` `a2a+p2p`, which needs it."""
    expert_model_parallel_size: int = Field(1, ge=1)
    """Ranks that share the experts of every layer; consecutive ranks, whatever else these share. 1: every rank has all
    experts."""
