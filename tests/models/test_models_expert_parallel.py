"""Mixtures of experts on several ranks have the loss, gradients, statistics and logits of one process, in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from host_memory import HostMemory
from parallel_models import build
from tiers import TIER, extra, full_only

from stoker.models.parallel.collectives import TensorParallel
from stoker.models.parallel.expert import ExpertParallel
from stoker.models.parallel.peer_exchange import PeerExchange, memory_parts

Case = tuple[dict[str, Any], dict[str, int], dict[str, Any]]
MOE: dict[str, Any] = {
    "num_layers": 1, "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.5,
    "moe_per_layer_logging": True,
}  # fmt: skip
GATHER: dict[str, Any] = {"moe_token_dispatcher_type": "allgather"}
TIGHT: dict[str, Any] = {"moe_expert_capacity_factor": 0.8}
FIRST: dict[str, Any] = TIGHT | {"moe_token_drop_policy": "position"}
PADDED: dict[str, Any] = {"moe_pad_expert_input_to_capacity": True}
SHARED: dict[str, Any] = {"moe_shared_expert_intermediate_size": 16, "activation": "swiglu", "bias": False}
SINKHORN: dict[str, Any] = {
    "moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1, "moe_aux_loss_coeff": 0.0,
}  # fmt: skip
BIASED: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
RECOMPUTE: dict[str, Any] = {"moe_layer_recompute": True}
FULL_RECOMPUTE: dict[str, Any] = {
    "activations_checkpoint_granularity": "full", "activations_checkpoint_method": "uniform",
    "activations_checkpoint_num_layers": 1,
}  # fmt: skip
DROPOUTS = dict.fromkeys(
    ("hidden_dropout", "attention_dropout", "ffn_dropout", "moe_dropout", "moe_input_jitter_eps"), 0.3
)
FORCED = {"moe_router_force_load_balancing": True}
T5: dict[str, Any] = {"family": "t5", "position_embedding_type": "relative", "relative_attention_num_buckets": 8}
PAIR, QUAD = {"data": 4, "expert": 2}, {"data": 4, "expert": 4}
OVER_TENSOR, OVER_BOTH = {"data": 2, "tensor": 2, "expert": 2}, {"data": 2, "tensor": 2, "expert": 4}
REPLICATED, ONE_BATCH = {"data": 2, "tensor": 2}, {"tensor": 4, "expert": 2}
CONTEXT, CONTEXT_DATA = {"context": 4}, {"data": 2, "context": 2}
CONTEXT_PAIR = {"data": 2, "context": 2, "expert": 2}
CONTEXT_TENSOR = {"context": 2, "tensor": 2, "expert": 4}
GATHERED, RING = {"exchange": "all_gather"}, {"exchange": "p2p"}
LENGTHS, NO_TOKENS = {"padding": True}, {"without": [2, 3]}

CASES: list[Case] = [
    (MOE | SHARED | RECOMPUTE, QUAD, LENGTHS),
    (MOE | TIGHT | PADDED | SHARED, OVER_BOTH, {}),
    (MOE | GATHER | TIGHT | SHARED | DROPOUTS, OVER_TENSOR, LENGTHS),
    (MOE | FIRST | SHARED | DROPOUTS | FORCED, CONTEXT_TENSOR, LENGTHS | GATHERED),
    (MOE | SINKHORN | {"family": "bert"}, CONTEXT_DATA, LENGTHS | GATHERED),
    (MOE | T5 | GATHER | TIGHT, CONTEXT_PAIR, GATHERED),
    *extra(
        (MOE | SINKHORN, ONE_BATCH, LENGTHS),
        (MOE | TIGHT | DROPOUTS, PAIR, {}),
        *(
            (MOE | SHARED | DROPOUTS | keys | dispatcher, layout, {})
            for keys in (TIGHT | PADDED, RECOMPUTE, FULL_RECOMPUTE)
            for dispatcher in ({}, GATHER)
            for layout in (QUAD, OVER_TENSOR, OVER_BOTH, REPLICATED, ONE_BATCH)
        ),
        *(
            (MOE | keys | dispatcher, layout, options)
            for keys in (
                {}, TIGHT, FIRST | SHARED, TIGHT | PADDED, SINKHORN, SHARED | RECOMPUTE, RECOMPUTE | PADDED | FIRST,
                FULL_RECOMPUTE | SHARED,
            )
            for dispatcher in ({}, GATHER)
            for layout in (PAIR, QUAD, OVER_TENSOR, OVER_BOTH, REPLICATED, ONE_BATCH)
            for options in ({}, LENGTHS)
        ),
        *(
            (MOE | BIASED | keys | dispatcher, layout, NO_TOKENS)
            for keys in ({}, FIRST, TIGHT | PADDED, RECOMPUTE | SHARED)
            for dispatcher in ({}, GATHER)
            for layout in (PAIR, QUAD, OVER_TENSOR, OVER_BOTH)
        ),
        *(
            (MOE | family | keys | dispatcher, layout, {})
            for family in (T5, {"family": "bert"})
            for keys in (TIGHT | SHARED, FULL_RECOMPUTE)
            for dispatcher in ({}, GATHER)
            for layout in (PAIR, OVER_BOTH)
        ),
        *(
            (MOE | keys | dispatcher, layout, options | exchange)
            for keys in (
                TIGHT | DROPOUTS, FIRST | SHARED, TIGHT | PADDED, SINKHORN, RECOMPUTE | FIRST, FULL_RECOMPUTE | TIGHT,
                {"family": "bert"} | FIRST,
            )
            for dispatcher in ({}, GATHER)
            for layout in (CONTEXT, CONTEXT_DATA, CONTEXT_PAIR, CONTEXT_TENSOR)
            for options, exchange in ((LENGTHS, GATHERED), ({}, RING))
        ),
        *((MOE | T5 | keys, layout, GATHERED) for keys in (FIRST, SINKHORN) for layout in (CONTEXT, CONTEXT_TENSOR)),
        (MOE | {"num_layers": 3, "moe_layer_freq": 2, "moe_router_dtype": "fp64"} | SHARED, OVER_BOTH, LENGTHS),
        (MOE | {"transformer_block_type": "post_ln", "moe_grouped_gemm": False}, OVER_TENSOR, LENGTHS),
    ),
]  # fmt: skip


def test_ranks_together_are_one_process(forks: ForkServer, tmp_path: Path) -> None:
    found = forks.call("parallel_experts", "compare", str(tmp_path), 4, CASES)
    for case, differences in zip(CASES, found, strict=True):
        assert differences.pop("experts") == 1 / case[1].get("expert", 1), case
        assert differences.pop("fp32 statistics") < 1e-6, (case, differences)
        assert all(value < 1e-12 for value in differences.values()), (case, differences)


@pytest.mark.parametrize(
    ("keys", "ranks", "message"),
    [
        (MOE, TensorParallel(0, 2, "none"), "`sequence_parallel: True`"),
        (MOE | SHARED, TensorParallel(0, 32, "none", sequence=True), "must be a multiple of the 32"),
        (MOE, ExpertParallel(0, 3, "none"), r"`num_moe_experts` \(4\) must be a multiple"),
        ({}, ExpertParallel(0, 2, "none"), r"`expert_model_parallel_size` \(2\) must be 1"),
    ],
)
def test_what_cannot_be_split_is_refused(
    keys: dict[str, Any], ranks: TensorParallel | ExpertParallel, message: str
) -> None:
    tensor, experts = (ranks, None) if isinstance(ranks, TensorParallel) else (None, ranks)
    with pytest.raises(ValueError, match=message):
        build(keys, tensor, experts=experts)


OVERLAPPED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"compile": True}),
    *extra(({"dispatcher": "allgather"}, {"compile": True}), ({"bias": True}, {"compile": True, "dropped": True})),
    *extra(({}, {"compile": True, "frozen": True})),
    ({"bias": True, "gated": False, "nonlinearity": "gelu"}, {"dropped": True}),
    ({"dispatcher": "allgather"}, {"frozen": True}),
    *extra(({}, {"inductor": True}), ({"dispatcher": "allgather"}, {"inductor": True})),
]


def test_gradients_are_sent_beside_a_matmul_and_are_the_same_bits(forks: ForkServer, tmp_path: Path) -> None:
    found = forks.call("parallel_experts", "compare_overlapped", str(tmp_path), 2, OVERLAPPED)
    for (changes, options), counted in zip(OVERLAPPED, found, strict=True):
        if "compile" in options or "inductor" in options:
            # counts, tokens, gates and outputs; experts of tokens instead of counts
            assert (counted.pop("forward"), counted.pop("backward")) == (4, 3), (changes, options)
            assert counted.pop("read") == 0
            assert counted.pop("overlapped") == ("frozen" not in options), (changes, options)
        assert counted.keys() >= {"output", "hidden", "gates"}
        assert not any(counted.values()), (changes, options, counted)


def test_host_waits_once_for_the_sizes_of_an_exchange(forks: ForkServer) -> None:
    assert forks.call("parallel_experts", "count_waits", 4) == ["aten._to_copy.default"]


@full_only
def test_compiled_layers_exchange_tokens_inside_their_graphs(forks: ForkServer, tmp_path: Path) -> None:
    cases = [
        (MOE | SHARED | {"compile": True}, {"data": 2, "expert": 2}, LENGTHS),
        (MOE | RECOMPUTE | {"compile": True}, {"tensor": 2, "expert": 2}, {}),
        (MOE | TIGHT | PADDED | {"compile": True}, {"data": 2, "expert": 2}, {}),
        (MOE | GATHER | FIRST | {"compile": True}, {"tensor": 2, "expert": 2}, {}),
        (MOE | FIRST | {"compile": True}, {"context": 2, "expert": 2}, LENGTHS | GATHERED),
    ]
    for case, differences in zip(
        cases, forks.call("parallel_experts", "compare", str(tmp_path), 2, cases), strict=True
    ):
        assert differences.pop("experts") == 0.5
        assert differences.pop("fp32 statistics") < 1e-6
        assert all(value < 1e-12 for value in differences.values()), (case, differences)


SIZES = {} if TIER != "fast" else {"tokens": [12]}
"""A graph is compiled for each number of tokens."""
IN_MEMORY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"bias": True}, {"compile": "aot_eager", "dropped": True, **SIZES}),
    ({"dropout": 0.3}, {"fp64": True, "dropped": True}),
    *extra(({"nonlinearity": "gelu", "gated": False}, {"fp64": True, "crowded": True})),
    ({}, {"fp64": True, "crowded": True, "frozen": True}),
    # in the interpreter, slowly
    *extra(({}, {"dropped": True}), ({}, {"crowded": True, "frozen": True}), ({}, {"compile": "inductor"})),
]


@pytest.mark.parametrize("size", [2, *extra(4)])
def test_rows_in_the_memory_of_other_ranks_are_the_same_bits(forks: ForkServer, tmp_path: Path, size: int) -> None:
    found = forks.call("parallel_experts", "compare_peers", str(tmp_path), size, IN_MEMORY)
    for case, differences in zip(IN_MEMORY, found, strict=True):
        assert differences.keys() >= {"output", "hidden", "gates"}
        assert not any(differences.values()), (case, differences)


def test_results_that_a_rank_may_still_read_are_not_written(tmp_path: Path) -> None:
    exchange, rows = PeerExchange(lambda size: HostMemory(tmp_path, 0, 1, size), 1), torch.randn(6, 4)
    slots = torch.arange(6, dtype=torch.int32).view(3, 2)
    exchange.reserve(memory_parts(1, 3, 2, 2, 16), rows)
    waits = []
    for _ in range(2):
        total, _ = exchange.give_back(rows, None, slots.flatten(), slots)
        torch.testing.assert_close(total, rows.view(3, 2, 4).sum(1))
        waits.append(exchange._barriers)
    assert waits == [1, 3], "the second time also before the rows are written"
