"""Training-step benchmark of T5: `experiment=t5_bench` (v1.1 base) and transformers; see `rounds.py` for the method.

    python scripts/bench/t5_step.py [--shape short long] [--rounds 3] [--only stoker hf_eager ...] [--seconds 500]
        [--results FILE.jsonl]

`short`: 512 tokens for the encoder and 114 for the decoder, micro batch 64; `long`: 2048 and 512, micro batch 16.
Tokens are counted for encoder and decoder together. No padding, no dropout, AdamW, clipping to 1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peers import finish_step
from rounds import Length, Row, result, run_benchmark, stoker_result, time_windows


class Shape(NamedTuple):
    """Encoder and decoder tokens per sample, and samples per micro batch."""

    encoder: int
    decoder: int
    micro_batch: int

    @property
    def tokens(self) -> int:
        return self.micro_batch * (self.encoder + self.decoder)

    @property
    def overrides(self) -> list[str]:
        return [
            "experiment=t5_bench",
            f"model.seq_length={self.encoder}",
            f"model.data.seq_length_dec={self.decoder}",
            f"model.micro_batch_size={self.micro_batch}",
            f"model.global_batch_size={self.micro_batch}",
        ]


SHAPES = {"short": Shape(512, 114, 64), "long": Shape(2048, 512, 16)}
VOCAB = 32128
LENGTH = Length(warm_up=10, windows=4, window=5)
Step = Callable[[], object]


def hf_t5(shape: Shape, *, attention: str, compiled: bool) -> Step:
    """Train step of transformers' T5ForConditionalGeneration: fp32 weights, bf16 autocast, fused AdamW."""
    from transformers import T5Config, T5ForConditionalGeneration

    config_values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": 768,
        "d_ff": 2048,
        "num_layers": 12,
        "num_heads": 12,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "dropout_rate": 0.0,
        "use_cache": False,
        "attn_implementation": attention,
    }
    config = T5Config(**config_values)
    with torch.device("cuda"):
        model = T5ForConditionalGeneration(config).train()
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(length: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, (shape.micro_batch, length), device="cuda", generator=generator)

    def step() -> object:
        drawn = draw(shape.decoder + 1)
        with torch.autocast("cuda", torch.bfloat16):
            logits = run(input_ids=draw(shape.encoder), decoder_input_ids=drawn[:, :-1].contiguous()).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), drawn[:, 1:].flatten())
        return finish_step(loss, model.parameters(), optimizer)

    return step


PEERS: dict[str, tuple[str, Callable[[Shape], Step]]] = {
    "hf_eager": ("HF T5, eager attention", partial(hf_t5, attention="eager", compiled=False)),
    "hf_sdpa": ("HF T5, SDPA", partial(hf_t5, attention="sdpa", compiled=False)),
    "hf_eager_compiled": ("HF T5, eager attention, compiled", partial(hf_t5, attention="eager", compiled=True)),
    "hf_sdpa_compiled": ("HF T5, SDPA, compiled", partial(hf_t5, attention="sdpa", compiled=True)),
}
STOKER: dict[str, tuple[str, list[str]]] = {
    "stoker": ("stoker: `stoker train experiment=t5_bench`", []),
    "stoker_no_graph": ("stoker, `model.enable_cuda_graph=False`", ["model.enable_cuda_graph=False"]),
}
TITLES = {name: title for name, (title, _) in {**STOKER, **PEERS}.items()}


def measure(name: str, case: str) -> Row:
    """Run one contender in this process."""
    shape = SHAPES[case]
    if name in STOKER:
        return stoker_result(name, [*shape.overrides, *STOKER[name][1]], LENGTH, shape.tokens)
    return result(name, time_windows(PEERS[name][1](shape), LENGTH), shape.tokens)


if __name__ == "__main__":
    run_benchmark(__file__, __doc__, TITLES, measure, lambda case: [f"t5_{case}"], option="--shape", cases=list(SHAPES))
