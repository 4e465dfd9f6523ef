"""Peers of the T5 step benchmark: transformers, nanoT5 and FAT5, each set up as its users would for speed.

nanoT5 (arXiv:2309.02373) and FAT5 are no packages: put a clone of each on the path.

    git clone https://github.com/PiotrNawrot/nanoT5; git clone https://github.com/catie-aq/flashT5
    PYTHONPATH=nanoT5/nanoT5/utils:flashT5 python scripts/bench/t5_step.py

All train the shape of T5 v1.1 base without dropout: fp32 weights, bf16 autocast, fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peers import finish_step
from torch import Tensor, nn

VOCAB = 32128
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 12,
    "num_decoder_layers": 12,
    "num_heads": 12,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "dropout_rate": 0.0,
    "use_cache": False,
}
Step = Callable[[], object]
LossOf = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Loss of encoder tokens, decoder tokens and labels, int64 (B, S)."""


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


def own_loss(model: nn.Module) -> LossOf:
    """Return the loss that a model computes itself."""
    return lambda tokens, decoder_tokens, labels: (
        model(input_ids=tokens, decoder_input_ids=decoder_tokens, labels=labels).loss
    )


def train_step(shape: Shape, model: nn.Module, loss_of: LossOf, *, compiled: bool) -> Step:
    """Return a step on new random tokens.

    Args:
        shape: tokens and samples.
        model: model on the GPU, in fp32.
        loss_of: returns the loss.
        compiled: compile `loss_of` as a whole.
    """
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    generator = torch.Generator(device="cuda").manual_seed(0)
    run = torch.compile(loss_of) if compiled else loss_of

    def draw(length: int) -> Tensor:
        return torch.randint(0, VOCAB, (shape.micro_batch, length), device="cuda", generator=generator)

    def step() -> object:
        drawn = draw(shape.decoder + 1)
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(draw(shape.encoder), drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())
        return finish_step(loss, model.parameters(), optimizer)

    return step


def hf_t5(shape: Shape, *, attention: str, compiled: bool) -> Step:
    """Train step of transformers' T5ForConditionalGeneration."""
    from transformers import T5Config, T5ForConditionalGeneration

    values: dict[str, Any] = {**BASE, "attn_implementation": attention}
    with torch.device("cuda"):
        model = T5ForConditionalGeneration(T5Config(**values))
    forward = torch.compile(model) if compiled else model

    def loss_of(tokens: Tensor, decoder_tokens: Tensor, labels: Tensor) -> Tensor:
        logits = forward(input_ids=tokens, decoder_input_ids=decoder_tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return train_step(shape, model, loss_of, compiled=False)


def nano_t5(shape: Shape) -> Step:
    """Train step of nanoT5's own T5 (`klass: local_t5`), compiled, with its bf16 activations and its loss."""
    import t5_model
    from transformers import T5Config

    # nanoT5 takes these two from transformers, which has dropped them: biases (B, 1, queries or 1, keys)
    def masked_bias(stack: nn.Module, mask: Tensor) -> Tensor:
        return (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min

    def self_attention_bias(stack: nn.Module, mask: Tensor, size: tuple[int, int]) -> Tensor:
        if not stack.is_decoder:
            return masked_bias(stack, mask)
        seen = torch.ones(size[1], size[1], device=mask.device).tril()
        return (1.0 - seen * mask[:, None, None, :]) * torch.finfo(torch.float32).min

    t5_model.T5Stack.get_extended_attention_mask = self_attention_bias
    t5_model.T5Stack.invert_attention_mask = masked_bias
    config = T5Config(**BASE)
    config.tie_word_embeddings = False  # as `BASE` says; transformers sets it for T5 whatever one asks for
    config.is_bf16 = True
    with torch.device("cuda"):
        model = t5_model.MyT5(config)

    return train_step(shape, model, own_loss(model), compiled=True)


def fat5(shape: Shape, *, compiled: bool) -> Step:
    """Train step of FAT5 with its Triton attention, configured as its `fat5-fr-small.yaml`.

    Its Triton norm and loss are not used where it is compiled: torch 2.11 refuses to compile the norm.
    """
    from src.model.configuration_flash_t5 import FlashT5Config
    from src.model.modeling_flash_t5 import (
        FlashT5ForConditionalGeneration,
    )

    config = FlashT5Config(
        **BASE,
        use_glu_mlp=True,
        attention_type="triton",
        attention_scale=1.0,
        max_sequence_length=shape.encoder,
        use_triton_layernorm=not compiled,
        use_triton_crossentropy=not compiled,
        z_loss=0.0,
    )
    config.tie_word_embeddings = False
    with torch.device("cuda"):
        model = FlashT5ForConditionalGeneration(config)

    return train_step(shape, model, own_loss(model), compiled=compiled)


PEERS: dict[str, tuple[str, Callable[[Shape], Step]]] = {
    "nano_t5": ("nanoT5, compiled", nano_t5),
    "fat5": ("FAT5, Triton kernels", partial(fat5, compiled=False)),
    "fat5_compiled": ("FAT5, Triton attention, compiled", partial(fat5, compiled=True)),
    "hf_eager": ("HF T5, eager attention", partial(hf_t5, attention="eager", compiled=False)),
    "hf_sdpa": ("HF T5, SDPA", partial(hf_t5, attention="sdpa", compiled=False)),
    "hf_eager_compiled": ("HF T5, eager attention, compiled", partial(hf_t5, attention="eager", compiled=True)),
    "hf_sdpa_compiled": ("HF T5, SDPA, compiled", partial(hf_t5, attention="sdpa", compiled=True)),
}
