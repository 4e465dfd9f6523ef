"""Models whose tokens context-parallel ranks share have the loss, gradients and logits of one process, in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from parallel_models import BATCH, LENGTH, keys_of, samples_of
from tiers import extra, full_only

from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.families import family_slice
from stoker.models.dispatch.attention_calls import CallContext
from stoker.models.dispatch.attention_choices import plan_attentions
from stoker.models.dispatch.context_calls import ContextSplit
from stoker.models.parallel.context import (
    context_token_indices,
    natural_order,
    rank_order,
    shard_batch,
)

Case = tuple[dict[str, Any], str, str, int, int]
"""Keys, kind of samples, exchange, neighbours and tensor-parallel ranks."""

GROUPED: dict[str, Any] = {
    "num_query_groups": 2, "normalization": "rmsnorm", "activation": "swiglu", "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False, "bias": False, "label_smoothing": 0.1,
}  # fmt: skip
WINDOW: dict[str, Any] = {"window_size": [5, 0], "position_embedding_type": "rope", "attn_logit_softcapping": 3.0}
SINKS: dict[str, Any] = {**GROUPED, "softmax_type": "learnable", "attention_backend": "unfused"}
T5: dict[str, Any] = {"family": "t5"}
RELATIVE_T5: dict[str, Any] = {**T5, "position_embedding_type": "relative", "relative_attention_num_buckets": 8}
BERT: dict[str, Any] = {"family": "bert"}
NORMED = {"qk_layernorm": True, "headscale": True, "transformer_block_type": "normformer"}
RECOMPUTE = "activations_checkpoint"
UNIFORM = {f"{RECOMPUTE}_granularity": "full", f"{RECOMPUTE}_method": "uniform", f"{RECOMPUTE}_num_layers": 1}
DROPOUTS: dict[str, Any] = {"hidden_dropout": 0.2, "attention_dropout": 0.3, "ffn_dropout": 0.4}
LORA: dict[str, Any] = {
    "peft_scheme": "lora",
    "lora_tuning": {"target_modules": ["all"], "adapter_dim": 3, "adapter_dropout": 0.3, "row_init_method": "normal"},
}
EXCHANGES = ("a2a", "all_gather", "p2p")

TWO: list[Case] = [
    (GROUPED, "packed", "a2a", 1, 1),
    (WINDOW, "", "all_gather", 1, 1),
    (SINKS, "", "a2a", 1, 1),
    ({**BERT, "position_embedding_type": "alibi"}, "padded", "p2p", 1, 1),
    ({**RELATIVE_T5, **DROPOUTS}, "padded", "all_gather", 1, 1),
    ({**GROUPED, **DROPOUTS}, "", "p2p", 1, 1),
    *extra(
        (GROUPED, "packed", "all_gather", 1, 1),
        (GROUPED, "packed", "p2p", 1, 1),
        (SINKS, "packed", "all_gather", 1, 1),
        (WINDOW, "", "p2p", 1, 1),
        (RELATIVE_T5, "padded", "all_gather", 1, 1),
        ({**GROUPED, **DROPOUTS}, "packed", "a2a", 1, 1),
        *((keys | DROPOUTS, samples, exchange, 1, 1)
          for keys, samples in (({}, "restarted"), (T5, "padded"), (BERT, "padded"), ({**UNIFORM, **WINDOW}, ""),
                                ({f"{RECOMPUTE}_modules": ["core_attention"]}, ""))
          for exchange in EXCHANGES),
        *((keys, samples, exchange, 1, 1)
          for keys, samples in (({}, "restarted"), (NORMED, ""), (T5, "packed"), (T5, "padded"), (BERT, "packed"),
                                (BERT, "padded"), ({**BERT, **WINDOW, "window_size": [3, 2]}, "padded"),
                                ({**UNIFORM, **WINDOW}, ""), ({f"{RECOMPUTE}_modules": ["core_attention"]}, ""))
          for exchange in EXCHANGES),
        *(({"position_embedding_type": kind, **family}, "", exchange, 1, 1)
          for kind in ("learned_absolute", "learned_parameters", "rope", "xpos", "alibi", "sandwich", "kerple",
                       "relative", "none")
          for family in ({}, BERT)
          for exchange in EXCHANGES
          if exchange != "p2p" or kind not in ("kerple", "relative")
          if not (family and kind == "xpos")),
        ({**GROUPED, "peft": LORA}, "packed", "p2p", 1, 1),
        ({**T5, "peft": LORA}, "padded", "all_gather", 1, 1),
        (RELATIVE_T5, "", "a2a", 1, 1),
        (RELATIVE_T5, "padded", "a2a", 1, 1),
        (RELATIVE_T5, "packed", "a2a", 1, 1),
        ({"position_embedding_type": "alibi"}, "packed", "all_gather", 1, 1),
        ({**WINDOW}, "packed", "all_gather", 1, 1),
    ),
]  # fmt: skip
FOUR: list[Case] = [
    (GROUPED, "packed", "a2a+p2p", 2, 1),
    (T5, "padded", "p2p", 1, 1),
    (GROUPED, "", "all_gather", 1, 2),
    ({"position_embedding_type": "kerple"}, "", "a2a", 1, 2),
    ({**GROUPED, **DROPOUTS}, "", "all_gather", 1, 2),
    *extra(
        ({**GROUPED, **DROPOUTS}, "", "a2a+p2p", 2, 1),
        ({**DROPOUTS}, "packed", "a2a", 1, 2),
        ({**T5, **DROPOUTS}, "", "p2p", 1, 2),
        (WINDOW, "", "p2p", 1, 1),
        (WINDOW, "", "all_gather", 1, 1),
        (WINDOW, "", "a2a", 1, 1),
        (WINDOW, "", "a2a+p2p", 2, 1),
        ({**GROUPED, "peft": LORA}, "", "all_gather", 1, 2),
        ({**WINDOW, "window_size": [1, 0]}, "", "p2p", 1, 1),
        ({"position_embedding_type": "alibi"}, "", "p2p", 1, 1),
        ({"position_embedding_type": "sandwich"}, "", "a2a+p2p", 2, 1),
        (RELATIVE_T5, "", "all_gather", 1, 1),
        (RELATIVE_T5, "", "a2a", 1, 1),
        (T5, "packed", "a2a+p2p", 2, 1),
        (T5, "packed", "p2p", 1, 1),
        (T5, "packed", "all_gather", 1, 1),
        (BERT, "packed", "all_gather", 1, 1),
        (BERT, "padded", "a2a+p2p", 2, 1),
        ({**BERT, **WINDOW, "window_size": [3, 2]}, "padded", "p2p", 1, 1),
        ({**BERT, "position_embedding_type": "kerple"}, "padded", "all_gather", 1, 1),
        *((keys, samples, exchange, 1, 2)
          for keys, samples in (({}, "packed"), (RELATIVE_T5, "padded"), (BERT, "padded"),
                                )
          for exchange in EXCHANGES[:2]),
        ({"position_embedding_type": "kerple"}, "", "all_gather", 1, 2),
        ({"num_query_groups": 1, "qk_layernorm": True}, "", "p2p", 1, 2),
        ({**T5, "num_query_groups": 2}, "packed", "p2p", 1, 2),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("size", "cases"), [(2, TWO), *extra((4, FOUR))])
def test_ranks_together_are_one_process(size: int, cases: list[Case], forks: ForkServer, tmp_path: Path) -> None:
    found = forks.call("parallel_context", "compare", str(tmp_path), size, cases)
    wrong = [
        (case, differences)
        for case, differences in zip(cases, found, strict=True)
        if not all(value < 1e-12 for value in differences.values())
    ]
    assert not wrong, wrong


@full_only
def test_compiled_layers_communicate_inside_their_graphs(forks: ForkServer, tmp_path: Path) -> None:
    cases = [
        (keys | {"compile": True}, samples, exchange, 1, 1)
        for keys, samples in ((GROUPED, "packed"), (WINDOW, ""), (T5, "padded"))
        for exchange in EXCHANGES
    ]
    found = forks.call("parallel_context", "compare", str(tmp_path), 2, cases)
    for case, differences in zip(cases, found, strict=True):
        assert all(value < 1e-12 for value in differences.values()), (case, differences)


def test_collectives_move_heads_keys_or_document_ids_only(forks: ForkServer, tmp_path: Path) -> None:
    """Two layers of 4 heads in 2 groups of width 8, residual stream 32; no hidden states, keys gathered in one case."""
    cases: list[Case] = [(GROUPED, "packed", exchange, 1, 1) for exchange in EXCHANGES]
    found = forks.call("parallel_context", "messages", str(tmp_path), 2, cases)
    tokens = BATCH * LENGTH // 2
    queries, keys_and_values = tokens * 4 * 8, tokens * 2 * 2 * 8
    documents = {"all_gather_into_tensor": [tokens]}
    in_and_out = [queries + keys_and_values, queries] * 2
    assert found[0] == documents | {"all_to_all_single": in_and_out + in_and_out[::-1]}
    gathered = [keys_and_values] * 2
    whole = [2 * keys_and_values] * 2
    assert found[1] == {"all_gather_into_tensor": [tokens, *gathered], "reduce_scatter_tensor": whole}
    # forward: one block on; backward: one block on, and its gradient on and back
    assert found[2] == documents | {"all_to_all_single": [keys_and_values] * (2 + 2 * 3)}


@full_only
def test_planned_calls_are_the_longest_that_ranks_make(forks: ForkServer, tmp_path: Path) -> None:
    cases: list[Case] = [
        (GROUPED, "packed", "a2a+p2p", 2, 1),
        (WINDOW, "", "p2p", 1, 1),
        (RELATIVE_T5, "padded", "all_gather", 1, 1),
        ({**BERT, "position_embedding_type": "alibi"}, "", "all_gather", 1, 1),
        ({"position_embedding_type": "alibi"}, "", "a2a", 1, 1),
        *extra(
            ({"position_embedding_type": "alibi"}, "", "p2p", 1, 1),
            ({**BERT, "position_embedding_type": "sandwich"}, "", "p2p", 1, 1),
            (RELATIVE_T5, "packed", "a2a", 1, 1),
            (T5, "packed", "p2p", 1, 1),
            (T5, "", "all_gather", 1, 1),
        ),
    ]
    found = forks.call("parallel_context", "attention_calls", str(tmp_path), 4, cases)
    for case, calls in zip(cases, found, strict=True):
        for name, (made, planned) in calls.items():
            assert made == planned, (case, name)


@pytest.mark.parametrize(
    ("changes", "samples", "split", "named"),
    [
        ({}, {}, (3, "a2a"), r"`encoder_seq_length` \(16\) must be a multiple of 6.*pad it to 18"),
        ({"num_query_groups": 1}, {}, (2, "a2a"), r"`num_query_groups` \(1 on each rank\) must be a multiple of the 2"),
        ({"num_query_groups": 2}, {}, (8, "a2a+p2p", 4), "`num_query_groups`.*of the 4"),
        ({"position_embedding_type": "kerple"}, {}, (2, "p2p"), r"learned `position_embedding_type` \(kerple\)"),
        (RELATIVE_T5, {"packed": True}, (2, "all_gather"), "packed samples with `position_embedding_type`.*`encoder`"),
        ({"window_size": [4, 0]}, {"packed": True}, (2, "p2p"), "packed samples with `window_size`"),
        ({"attention_backend": "unfused"}, {}, (2, "p2p"), r"`attention_backend` \(unfused\) cannot be combined"),
        ({"use_flash_attention": False}, {}, (2, "a2a+p2p", 1), "`hierarchical_context_parallel_sizes`"),
        ({"use_flash_attention": False}, {}, (2, "p2p"), r"`use_flash_attention` \(False\) cannot be combined"),
        ({"softmax_type": "learnable"}, {}, (2, "p2p"), r"`softmax_type` \(learnable\), since each block"),
        ({}, {}, (2, "ring"), r"`cp_comm_type` \(ring\) must be one of"),
        ({"attention_dropout": 0.1}, {"packed": True}, (2, "p2p"), r"`attention_dropout` \(0.1\) of packed"),
    ],
)
def test_what_would_not_be_exact_is_refused(
    changes: dict[str, Any], samples: dict[str, bool], split: tuple[Any, ...], named: str
) -> None:
    form = BatchSpec(seq_length=LENGTH, decoder_seq_length=8 if "family" in changes else 0, **samples)
    model = family_slice(keys_of(changes), vocab_size=90, batch_spec=form)
    context: CallContext = {
        "device": "cpu", "capability": None, "dtype": "fp64", "batch": 2, "deterministic": False
    }  # fmt: skip

    def plan() -> None:
        list(plan_attentions(model, form, context, ContextSplit(*split)))

    with pytest.raises(ValueError, match=named):
        plan()


@pytest.mark.parametrize("zigzag", [True, False])
def test_each_token_is_on_one_rank_and_comes_back_to_its_place(zigzag: bool) -> None:
    whole = torch.arange(2 * 24).view(2, 24)
    by_rank = torch.stack([whole[:, context_token_indices(24, rank, 3, zigzag=zigzag)] for rank in range(3)])
    assert torch.equal(natural_order(by_rank, zigzag=zigzag), whole)
    assert torch.equal(rank_order(whole, 3, zigzag=zigzag), by_rank)
    first = by_rank[0, 0].tolist()
    assert first == ([0, 1, 2, 3, 20, 21, 22, 23] if zigzag else list(range(8)))


def test_the_encoder_of_a_t5_and_a_bert_have_consecutive_tokens() -> None:
    batch = samples_of("t5", "padded")
    local = shard_batch(batch, 1, 2, causal=True)
    assert torch.equal(local["encoder_padding"], batch["encoder_padding"][:, 8:])
    assert torch.equal(local["labels"], batch["labels"][:, 2:6])
    assert torch.equal(shard_batch({"tokens": batch["labels"]}, 1, 2, causal=False)["tokens"], batch["labels"][:, 4:])
    with pytest.raises(ValueError, match="multiple of 6"):
        context_token_indices(15, 0, 3, zigzag=True)
