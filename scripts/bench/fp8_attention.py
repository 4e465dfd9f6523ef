"""Attention in fp8 beside bf16, both by TransformerEngine's cuDNN kernels, on one GPU.

    python scripts/bench/fp8_attention.py [--sections core layer] [--shapes 4x4096 2x8192 1x32768]

Causal, 16 heads in 4 groups 128 wide, as in the 1.2 B GPT (hidden 2048, gated FFN 5632). `core`: milliseconds of
attention alone, with its casts. `layer`: tokens/s of a compiled layer forward and backward, of
four, with linear layers in bf16, in fp8 with delayed scaling, and with attention in fp8 too. Medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from stoker.kernels.attention.backends.transformer_engine import te_fused
from stoker.kernels.attention.flags import AttentionFlags
from stoker.kernels.attention.inputs import AttentionInputs
from stoker.kernels.fp8.delayed_scaling import DelayedScaling
from stoker.kernels.fp8.recipe import Fp8Recipe
from stoker.kernels.fp8.te_attention import ATTENTION, TEFp8Attention
from stoker.models.build import build_model
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.gpt import GPTKeys
from stoker.models.fp8 import build_delayed_scaling

HEADS, GROUPS, WIDTH, LAYERS = 16, 4, 128, 4
DEVICE = torch.device("cuda")


def milliseconds(function: Callable[[], object]) -> float:
    """Return the median device time of a call."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=100, rep=400, return_mode="median"))  # pyrefly: ignore[bad-argument-type]


def core(batch: int, length: int) -> None:
    recipe = Fp8Recipe(scaling="delayed")
    state = DelayedScaling({"core": ATTENTION}, recipe, DEVICE)
    functions = {"bf16": te_fused, "fp8": TEFp8Attention(recipe, scales=state.scales("core"))}
    q, k, v = (
        torch.randn(batch, length, heads, WIDTH, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    )
    upstream = torch.randn_like(q)
    for name, function in functions.items():

        def forward(function: Callable[[AttentionInputs], Tensor] = function) -> Tensor:
            return function(AttentionInputs(q, k, v, causal=True))

        def both(forward: Callable[[], Tensor] = forward) -> object:
            return torch.autograd.grad(forward(), (q, k, v), upstream)

        for step in range(5):
            both()
            state.update(step)
        print(
            f"core   {batch} x {length:<6} {name:<24} forward {milliseconds(forward):8.3f} ms  "
            f"with backward {milliseconds(both):8.3f} ms"
        )


def layer(batch: int, length: int) -> None:
    tokens = torch.randint(0, 256, (batch, length), device=DEVICE)
    variants = {"bf16": (False, False), "fp8": (True, False), "fp8 with attention": (True, True)}
    for name, (fp8, attention) in variants.items():
        keys = GPTKeys.model_validate(
            {
                "num_layers": LAYERS, "hidden_size": HEADS * WIDTH, "ffn_hidden_size": 5632,
                "num_attention_heads": HEADS, "num_query_groups": GROUPS, "encoder_seq_length": length,
                "bias": False, "activation": "swiglu", "normalization": "rmsnorm", "position_embedding_type": "rope",
                "hidden_dropout": 0.0, "attention_dropout": 0.0, "transformer_engine": True, "compile": True,
                "fp8": fp8, "fp8_dot_product_attention": attention,
            }
        )  # fmt: skip
        model = build_model(
            keys,
            vocab_size=256,
            device=DEVICE,
            dtype=torch.bfloat16,
            flags=AttentionFlags(),
            micro_batch_size=batch,
            batch_spec=BatchSpec(seq_length=length),
        ).train()
        state = build_delayed_scaling(model, DEVICE)

        def step(model: torch.nn.Module = model) -> None:
            model.batch_loss({"tokens": tokens, "labels": tokens}, float(tokens.numel())).backward()  # pyrefly: ignore[not-callable]
            model.zero_grad(set_to_none=True)

        for number in range(5):
            step()
            if state is not None:
                state.update(number)
        torch.cuda.reset_peak_memory_stats()
        time = milliseconds(step)
        speed, peak = LAYERS * tokens.numel() / time * 1000, torch.cuda.max_memory_allocated() / 2**30
        print(f"layer  {batch} x {length:<6} {name:<24} {speed:12,.0f} tokens/s  peak {peak:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", default=["core", "layer"], choices=["core", "layer"])
    parser.add_argument("--shapes", nargs="+", default=["4x4096", "2x8192", "1x32768"], help="BATCHxTOKENS")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "cuDNN", torch.backends.cudnn.version())
    for section in arguments.sections:
        for shape in arguments.shapes:
            batch, length = map(int, shape.split("x"))
            (core if section == "core" else layer)(batch, length)


if __name__ == "__main__":
    main()
