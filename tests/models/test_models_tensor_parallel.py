"""Models split over tensor-parallel ranks have the loss, gradients and logits of one process, in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from parallel_models import LENGTH, VOCAB, keys_of
from tiers import extra, full_only

from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.families import family_slice
from stoker.models.tensor_parallel import rank_slice

LLAMA: dict[str, Any] = {
    "activation": "swiglu", "num_query_groups": 2, "normalization": "rmsnorm", "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False, "bias": False,
}  # fmt: skip
SHARED_HEADS: dict[str, Any] = {
    "num_query_groups": 1, "qk_layernorm": True, "headscale": True, "label_smoothing": 0.1, "logits_soft_cap": 5.0,
    "softmax_type": "learnable",
}  # fmt: skip
RECOMPUTE = "activations_checkpoint"
T5: dict[str, Any] = {"family": "t5", "position_embedding_type": "relative", "relative_attention_num_buckets": 8}
GATED_T5 = {
    **T5, "activation": "geglu", "num_query_groups": 1, "share_token_embeddings": False, "label_smoothing": 0.1,
    "normalization": "rmsnorm", "bias": False,
}  # fmt: skip
WHOLE = ("adafactor", "muon", "scaled")
"""Optimizers whose updates are not elementwise."""
DROPOUTS: dict[str, Any] = {"hidden_dropout": 0.2, "attention_dropout": 0.3, "ffn_dropout": 0.4}
FULL = {f"{RECOMPUTE}_granularity": "full", f"{RECOMPUTE}_method": "uniform", f"{RECOMPUTE}_num_layers": 1}
CASES: list[tuple[Any, ...]] = [
    (SHARED_HEADS, False),
    (SHARED_HEADS, True),
    ({"family": "bert"}, True),
    (GATED_T5, True, (True, True)),
    ({"position_embedding_type": "kerple", "transformer_block_type": "parallel_ln"}, True),
    ({"transformer_block_type": "normformer", "init_method_std": 0.5}, True),
    ({**LLAMA, f"{RECOMPUTE}_modules": ["norm", "mlp_activation", "core_attention"]}, True),
    ({**LLAMA, **DROPOUTS, f"{RECOMPUTE}_modules": ["norm", "mlp_activation", "core_attention"]}, True),
    ({**T5, **DROPOUTS, "embedding_dropout": 0.25}, True),
    ({"position_embedding_type": "own_kerple", "activation": "own_mish-glu"}, True),
    *extra(
        *(
            ({**keys, **DROPOUTS}, sequence)
            for keys in (SHARED_HEADS, {"family": "bert"})
            for sequence in (False, True)
        ),
        ({**GATED_T5, **DROPOUTS, "embedding_dropout": 0.25}, False),
        *((keys, True, overlap) for keys in (SHARED_HEADS, LLAMA, T5) for overlap in ((True, False), (False, True))),
        (GATED_T5, True),
        *(({**LLAMA, **DROPOUTS, **FULL, "attention_backend": name}, True) for name in ("unfused", "reference")),
        ({**DROPOUTS, **FULL, f"{RECOMPUTE}_num_layers": 2}, True),
        *((keys, sequence) for keys in ({}, LLAMA, T5) for sequence in (False, True)),
        (GATED_T5, False),
        ({**LLAMA, "transformer_block_type": "normformer", f"{RECOMPUTE}_modules": ["norm", "mlp_activation"]}, True),
        ({**SHARED_HEADS, "transformer_block_type": "normformer", "normalization": "layernorm1p"}, False),
        ({**T5, "transformer_block_type": "normformer"}, True),
        ({"family": "bert", "bert": {"mlm_transform": False}}, False),
        ({"position_embedding_type": "alibi"}, False),
        ({"position_embedding_type": "sandwich", "transformer_block_type": "post_ln"}, True),
        (FULL, True),
    ),
]


@pytest.mark.parametrize("size", [2, *extra(4)])
def test_ranks_together_are_one_process(size: int, forks: ForkServer, tmp_path: Path) -> None:
    found = forks.call("parallel_models", "compare", str(tmp_path), size, CASES)
    for (keys, *options), differences in zip(CASES, found, strict=True):
        exact = {name: value for name, value in differences.items() if name != "parts"}
        assert all(value < 1e-12 for value in exact.values()), (keys, options, differences)
        # norms, position embeddings and shared key heads are on every rank
        assert differences["parts"] < 1 / size + 0.15, (keys, differences)


def test_steps_with_data_parallelism_are_those_of_one_process(forks: ForkServer, tmp_path: Path) -> None:
    """Clipping below the norm, to which each parameter adds once; two data-parallel ranks of two micro batches each."""
    # the gradients of biases of keys and of their norms are rounding, of which Adam makes a step
    shared_heads = SHARED_HEADS | {"bias": False, "normalization": "rmsnorm"}
    cases = [
        *extra(
            ({**LLAMA, **DROPOUTS}, "zero1"),
            (shared_heads, "fsdp"),
            (shared_heads, "ddp"),
            (GATED_T5, "fsdp"),
            (GATED_T5, "zero1"),
        ),
        (shared_heads, "fsdp", "adafactor"),
        *extra(
            (shared_heads, "ddp", "scaled"),
            *(
                (keys, kind, name)
                for keys in (LLAMA, shared_heads, GATED_T5)
                for kind in ("ddp", "fsdp")
                for name in WHOLE
            ),
        ),
    ]
    for case, differences in zip(
        cases, forks.call("parallel_models", "compare_steps", str(tmp_path), 4, 2, cases), strict=True
    ):
        assert all(value < 1e-12 for value in differences.values()), (case, differences)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"num_attention_heads": 3, "kv_channels": 8}, "3 must be a multiple of the 2"),
    ],
)
def test_what_cannot_be_split_is_refused(keys: dict[str, Any], named: str) -> None:
    whole = family_slice(keys_of(keys), vocab_size=VOCAB, batch_spec=BatchSpec(seq_length=LENGTH))
    with pytest.raises(ValueError, match=named):
        rank_slice(whole, 2)


@full_only
def test_compiled_layers_communicate_inside_their_graphs(forks: ForkServer, tmp_path: Path) -> None:
    dropouts = [{**DROPOUTS, **keys} for keys in (LLAMA, {**T5, "embedding_dropout": 0.25}, {"family": "bert", **FULL})]
    cases: list[tuple[Any, ...]] = [
        ({**keys, "compile": True}, True) for keys in (LLAMA, SHARED_HEADS, GATED_T5, *dropouts)
    ]
    cases += [(keys, True, (True, True)) for keys, _ in cases]
    for differences in forks.call("parallel_models", "compare", str(tmp_path), 2, cases):
        assert all(value < 1e-12 for name, value in differences.items() if name != "parts"), differences
