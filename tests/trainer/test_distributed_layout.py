"""The part of the parameters that each rank holds, as a run tells it."""

from __future__ import annotations

import pytest

from stoker.trainer.config.parameter_layout import plan_layout


@pytest.mark.parametrize(
    ("keys", "name", "held"),
    [
        ({}, "data parallel", "each with all weights and all optimizer state"),
        (
            {"optimizer": "distributed_fused_adam"},
            "distributed optimizer",
            "each with all weights and 1/4 of the optimizer state",
        ),
        (
            {"fsdp": True, "strategy": "grad"},
            "fsdp grad",
            "each with all weights and 1/4 of the gradients and optimizer state",
        ),
        ({"fsdp": True}, "fsdp full", "each with 1/4 of the weights and 1/4 of the optimizer state"),
        (
            {"fsdp": True, "strategy": "hybrid", "shard_size": 2},
            "fsdp hybrid",
            "each with 1/2 of the weights and 1/2 of the optimizer state; 2 copies",
        ),
    ],
)
def test_the_log_says_what_a_rank_holds(keys, name, held):
    """The distributed optimizer cuts the optimizer's state alone, FSDP the weights too."""
    defaults = {"optimizer": "adamw", "fsdp": False, "strategy": "full", "shard_size": None}
    layout = plan_layout(4, **(defaults | keys))
    assert layout is not None
    assert (layout.name, layout.description) == (name, held)
