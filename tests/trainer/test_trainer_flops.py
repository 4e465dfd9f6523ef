"""Model FLOPs against torch's counter, and the peaks of cards."""

from pathlib import Path

import pytest
import torch
from gpt_builder import build_gpt
from tiers import looped
from tiny_run import tiny_config
from torch.utils.flop_counter import FlopCounterMode

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.gpt import GPTKeys
from stoker.models.model_cost import training_flops_per_sample
from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.core import training_loop
from stoker.trainer.plan.hardware import bf16_peak_flops

SHAPE = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "encoder_seq_length": 16}


def training_flops_per_token(keys, vocab, tokens):
    return training_flops_per_sample(keys, vocab, BatchSpec(seq_length=tokens)) / tokens


@pytest.mark.parametrize(
    "extra",
    [{}, {"num_query_groups": 2, "activation": "swiglu", "bias": False}, {"kv_channels": 24}],
    ids=["gpt", "llama", "wide heads"],
)
def test_formula_equals_counted_flops(extra):
    keys = GPTKeys.model_validate(SHAPE | {"attention_backend": "unfused"} | extra)
    model = build_gpt(
        keys, vocab_size=100, device="cpu", dtype=torch.float32, flags=AttentionFlags(), micro_batch_size=1
    )
    model.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros((1, 16), dtype=torch.int64))
    tokens = 16
    attention = 6 * 2 * 4 * (keys.kv_channels or 8) * tokens
    # Unfused attention computes the masked half too, the formula does not count it.
    expected = counter.get_total_flops() * 3 / tokens - attention
    assert training_flops_per_token(keys, 128, tokens) == expected


def test_a_window_is_counted_by_the_keys_it_leaves():
    """Twice the mean number of keys that a token sees, as for the causal mask, up to the diagonal."""
    tokens, per_key = 1000, 6 * 2 * 32
    shape = SHAPE | {"encoder_seq_length": tokens}
    whole = training_flops_per_token(GPTKeys.model_validate(shape), 128, tokens)
    for width in (1, 100, 999, 1000, 5000):
        keys = GPTKeys.model_validate(shape | {"window_size": [width - 1, 0]})
        seen = sum(min(place + 1, width) for place in range(tokens)) / tokens
        dense = (tokens + 1) / 2
        saved = whole - training_flops_per_token(keys, 128, tokens)
        assert saved == pytest.approx(2 * per_key * (dense - seen), abs=2 * per_key)


def test_the_head_counts_and_the_embedding_table_does_not():
    keys = GPTKeys.model_validate(SHAPE)
    assert training_flops_per_token(keys, 200, 16) - training_flops_per_token(keys, 100, 16) == 6 * 100 * 32


@looped(
    ("card", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121),
        ("NVIDIA GB200", 2500),
    ],
)
def test_dense_peaks(card, teraflops):
    assert bf16_peak_flops(card) == teraflops * 1e12


@pytest.mark.parametrize(
    "card", ["cpu", "Tesla V100-SXM2-16GB", "NVIDIA RTX A4000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_unknown_cards_have_no_peak(card):
    assert bf16_peak_flops(card) is None


def test_the_peak_is_that_of_all_processes(monkeypatch):
    """Tokens per second are those of all, so MFU would be too large by their number."""
    config = tiny_config(Path("run"), model__override_vocab_size=64)
    monkeypatch.setattr(training_loop, "device_name", lambda device: "NVIDIA H200")
    one, two = (
        training_loop.build_throughput(resolve_run(config.root, world_size=processes), 64, torch.device("cpu"))
        for processes in (1, 2)
    )
    assert one.peak_flops == 989e12
    assert two.peak_flops == 2 * 989e12
    assert two.flops_per_token == one.flops_per_token
