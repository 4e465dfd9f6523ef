"""Training-step benchmark of MoE: `experiment=moe_bench` and transformers' Mixtral; see `rounds.py` for the method.

    python scripts/bench/moe_step.py [--rounds 3] [--only stoker hf_grouped_compiled ...] [--seconds 500]
        [--results FILE.jsonl]

Shape (`conf/model/gpt_moe_8x.yaml`): 16 layers, hidden 1024, 16 heads / 8 groups, 8 experts top-2 of width 3584,
vocabulary 32000, sequence 4096, micro batch 4: 1.5 B parameters. Random tokens, AdamW, clipping to 1.0.

Mixtral runs in pure bf16, optimizer moments included, its fastest and smallest setting: its grouped matmul does not
support autocast. It routes in bf16, without auxiliary losses or load counts. stoker routes in fp32 with both losses and
counts, and keeps main weights and moments in fp32; `stoker_bf16` keeps neither in fp32. `stoker_fp8` multiplies in fp8
(docs/fp8.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peers import build_optimizer, finish_step
from rounds import Length, Row, result, run_benchmark, stoker_result, time_windows

MICRO_BATCH, SEQUENCE, VOCAB = 4, 4096, 32000
TOKENS = MICRO_BATCH * SEQUENCE
LENGTH = Length(warm_up=10, windows=4, window=5)
Step = Callable[[], object]


def hf_mixtral(*, experts: str, compiled: bool) -> Step:
    """Train step of transformers' MixtralForCausalLM in bf16, with experts in a loop (`eager`) or `grouped_mm`."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config_values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": SEQUENCE,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": False,
        "experts_implementation": experts,
    }
    with torch.device("cuda"):
        model: Any = MixtralForCausalLM(MixtralConfig(**config_values))
    model.to(torch.bfloat16).train()
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    optimizer = build_optimizer(model)
    generator = torch.Generator(device="cuda").manual_seed(0)

    def step() -> object:
        drawn = torch.randint(0, VOCAB, (MICRO_BATCH, SEQUENCE + 1), device="cuda", generator=generator)
        logits = model(input_ids=drawn[:, :-1].contiguous()).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), drawn[:, 1:].flatten())
        return finish_step(loss, model.parameters(), optimizer)

    return step


STOKER: dict[str, tuple[str, list[str]]] = {
    "stoker": ("stoker: `stoker train experiment=moe_bench`", []),
    "stoker_bf16": ("stoker, `trainer.precision=bf16-true`", ["trainer.precision=bf16-true"]),
    "stoker_fp8": ("stoker, `model.fp8=true`", ["model.fp8=true"]),
}
PEERS: dict[str, tuple[str, Callable[[], Step]]] = {
    "hf_grouped_compiled": (
        "HF Mixtral, grouped_mm, compiled",
        partial(hf_mixtral, experts="grouped_mm", compiled=True),
    ),
    "hf_grouped": ("HF Mixtral, grouped_mm", partial(hf_mixtral, experts="grouped_mm", compiled=False)),
    "hf_eager": ("HF Mixtral, eager", partial(hf_mixtral, experts="eager", compiled=False)),
}
TITLES = {name: title for name, (title, _) in {**STOKER, **PEERS}.items()}


def measure(name: str, _: str) -> Row:
    """Run one contender in this process."""
    if name in STOKER:
        return stoker_result(name, ["experiment=moe_bench", *STOKER[name][1]], LENGTH, TOKENS)
    return result(name, time_windows(PEERS[name][1](), LENGTH), TOKENS)


if __name__ == "__main__":
    run_benchmark(__file__, __doc__, TITLES, measure, lambda _: ["moe_step"])
