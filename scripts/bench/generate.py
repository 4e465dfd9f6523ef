"""Generation benchmark: tokens per second of stoker and transformers' `generate`; see `rounds.py` for the method.

    python scripts/bench/generate.py [--rounds 3] [--batch 1 32] [--only stoker hf ...] [--seconds 500]
        [--results FILE.jsonl]

Shape (`conf/model/llama_1b.yaml`): 24 layers, hidden 2048, 16 heads, 4 query groups, SwiGLU 5632, vocabulary 32000.
bf16, random weights, no EOS token. A prompt of 128 random tokens, then 256 greedy tokens, prefill included.

A step of a small batch is bound by reading all weights and the KV cache: `of the limit` is the time of that at the
measured copy bandwidth of this GPU, divided by the time of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from peers import Shape
from rounds import Length, Row, result, run_benchmark, time_windows

PROMPT, NEW = 128, 256
LENGTH = Length(warm_up=2, windows=4, window=1)
TITLES = {
    "stoker": "stoker: KV cache, split-KV kernel, CUDA graph of a step",
    "stoker_compiled": "the same, layers compiled (`stoker generate --compile`)",
    "hf": "transformers' `generate`, SDPA, dynamic cache",
    "hf_static": "transformers' `generate`, static cache, compiled by transformers",
}
Generate = Callable[[torch.Tensor], int]
"""Function from prompts (B, S) to the number of generated tokens per prompt."""


def stoker(batch: int, *, compiled: bool) -> Generate:
    """stoker's decoder in the decode loop of `stoker generate`."""
    from stoker.kernels.attention.flags import read_flags
    from stoker.models.build import build_model
    from stoker.models.config.batch_shape import BatchSpec
    from stoker.models.config.gpt import GPTKeys
    from stoker.models.gpt import GPT
    from stoker.models.incremental_decoding import GPTDecoder
    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.generation.decode_loop import DecodeLoop
    from stoker.trainer.generation.sampling import SamplingParams

    keys = load_run_config(None, None, ["model=llama_1b"]).root.model
    assert isinstance(keys, GPTKeys)
    device = torch.device("cuda")
    model = build_model(
        keys.model_copy(update={"compile": False}),
        vocab_size=Shape.vocab,
        device=device,
        dtype=torch.bfloat16,
        flags=read_flags(),
        micro_batch_size=1,
        batch_spec=BatchSpec(seq_length=keys.encoder_seq_length),
        kinds=("evaluation", "generation"),
    ).eval()
    assert isinstance(model, GPT)
    if compiled:
        model.decoder.compile_decode_step()
    loop = DecodeLoop(
        GPTDecoder(model, batch, PROMPT + NEW),
        SamplingParams(),
        NEW,
        vocab_size=Shape.vocab,
        device=device,
        autocast=nullcontext,
        cuda_graph=True,
    )

    def generate(prompts: torch.Tensor) -> int:
        return sum(1 for _ in loop.generate(prompts.tolist(), [0] * batch))

    return generate


def hf(_: int, *, static: bool) -> Generate:
    """transformers' LlamaForCausalLM in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=Shape.vocab,
        hidden_size=Shape.hidden,
        intermediate_size=Shape.ffn,
        num_hidden_layers=Shape.layers,
        num_attention_heads=Shape.heads,
        num_key_value_heads=Shape.groups,
        max_position_embeddings=Shape.sequence,
        tie_word_embeddings=False,
    )
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"cache_implementation": "static"} if static else {}

    def generate(prompts: torch.Tensor) -> int:
        mask = torch.ones_like(prompts)
        sequences = model.generate(
            prompts, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
        )
        return sequences.shape[1] - PROMPT

    return generate


def limit_seconds(batch: int) -> float:
    """Return the minimum time of a step: reading the weights without the embedding, and an average KV cache."""
    shape = Shape()
    width = shape.hidden // shape.heads
    attention = shape.hidden * (2 * shape.heads + 2 * shape.groups) * width
    weights = shape.layers * (attention + 3 * shape.hidden * shape.ffn) + shape.hidden * shape.vocab
    cached = batch * (PROMPT + NEW / 2) * 2 * shape.groups * width * shape.layers
    return 2 * (weights + cached) / copy_speed()


def copy_speed() -> float:
    """Measure the bytes per second that a copy of 4 GiB reads and writes."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)  # warm up
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 10 * 2 * source.numel() / (start.elapsed_time(end) / 1e3)


def measure(name: str, batch: int) -> Row:
    """Run one contender in this process."""
    builders: dict[str, Callable[[], Generate]] = {
        "stoker": lambda: stoker(batch, compiled=False),
        "stoker_compiled": lambda: stoker(batch, compiled=True),
        "hf": lambda: hf(batch, static=False),
        "hf_static": lambda: hf(batch, static=True),
    }
    limit = limit_seconds(batch)
    torch.cuda.empty_cache()
    generate = builders[name]()
    generator = torch.Generator(device="cuda").manual_seed(0)

    @torch.no_grad()
    def run() -> None:
        count = generate(torch.randint(0, Shape.vocab, (batch, PROMPT), device="cuda", generator=generator))
        assert count == NEW, f"{count} tokens were generated"

    return result(name, time_windows(run, LENGTH), batch * NEW) | {"limit": limit}


if __name__ == "__main__":
    run_benchmark(
        __file__, __doc__, TITLES, measure, lambda batch: [f"generate_{batch}"], option="--batch", cases=[1, 32]
    )
