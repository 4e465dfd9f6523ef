"""A training step beside its floor: its matrix products, the fastest attention and copies of its bytes, alone.

    python scripts/bench/step_floor.py [--model gpt gpt2] [--rounds 3] [--results FILE.jsonl]

The floor launches what no implementation of the step in bf16 with fp32 main weights can do without, one after the
other: the products of forward and backward by torch, forward and backward of the attention backends that are fastest,
and a copy of as many bytes as the pointwise parts must read and write. It has no dependencies and computes nothing of
use. Models as in `training_step.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import training_step
from attention_peers import PEERS as ATTENTION
from attention_peers import Shape as Call
from peers import Shape
from rounds import Length, Row, result, run_benchmark, time_windows
from torch import Tensor

from stoker.kernels.timing import Event, in_turns, record_event

TITLES = {"stoker": "stoker", "floor": "floor: products, fastest attention and bytes alone"}
GATED_AND_UNTIED = {"gpt": True, "gpt2": False}
"""Models with a gated MLP, rotary embeddings and a head of its own; the other has GELU and a tied head."""
BACKENDS = ("ours", "SDPA cuDNN")
OPTIMIZER_BYTES = 30
"""Per parameter: fp32 main weight and two moments read and written, gradient read twice, weight written in bf16."""


def products(tokens: int, inputs: int, outputs: int) -> list[Callable[[], Tensor]]:
    """Return the products of a linear layer: its output, and the gradients of input and weight."""
    sizes = (tokens, inputs), (outputs, inputs), (tokens, outputs)
    rows, weight, gradient = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    return [lambda: rows @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ rows]


def fastest_attention(shape: Shape) -> list[Callable[[], object]]:
    """Return forward and backward of causal attention, each by the backend that is fastest."""
    width = shape.hidden // shape.heads
    call = Call(
        head_dim=width,
        heads=shape.heads,
        groups=shape.groups,
        tokens=shape.sequence,
        batch=shape.micro_batch,
        causal=True,
    )
    leaves = call.tensors()
    upstream = torch.randn_like(leaves[0])
    attend = {name: ATTENTION[name](call) for name in BACKENDS}
    outputs = {name: function(*leaves, None) for name, function in attend.items()}
    passes: list[dict[str, Callable[[], object]]] = [{}, {}]
    for name, function in attend.items():
        passes[0][name] = lambda function=function: function(*leaves, None)
        passes[1][name] = lambda name=name: torch.autograd.grad(outputs[name], leaves, upstream, retain_graph=True)

    def timed(run: Callable[[], object]) -> Callable[[], list[Event]]:
        def call() -> list[Event]:
            start = record_event()
            run()
            return [start, record_event()]

        return call

    found: list[Callable[[], object]] = []
    for runs in passes:
        milliseconds: dict[str, Any] = in_turns({name: timed(run) for name, run in runs.items()}, 3, 40.0)
        found.append(runs[min(runs, key=lambda name: min(milliseconds[name][0]))])
    return found


def layer_bytes(shape: Shape, *, gated: bool) -> int:
    """Return the bytes that the norms, rotary embeddings, activation and residual adds of a layer read and write."""
    tokens, width = shape.micro_batch * shape.sequence, shape.hidden // shape.heads
    stream, inner = 2 * tokens * shape.hidden, 2 * tokens * shape.ffn
    rotated = 2 * tokens * (shape.heads + shape.groups) * width
    norms = 2 * (2 + 4) * stream  # each reads and writes it; backward reads two gradients and its input, writes one
    adds = 2 * stream  # read by the product before
    # forward reads one input, or two if gated, and writes one; backward reads a gradient and these, and writes theirs
    return norms + adds + (8 * inner + 4 * rotated if gated else 5 * inner)


def floor(shape: Shape, *, gated: bool) -> list[float]:
    """Return the seconds per step of each window."""
    tokens, qkv = shape.micro_batch * shape.sequence, (shape.heads + 2 * shape.groups) * (shape.hidden // shape.heads)
    attention = (shape.hidden, qkv), (shape.hidden, shape.hidden)
    linears = *attention, (shape.hidden, shape.ffn * (1 + gated)), (shape.ffn, shape.hidden)
    layer = [*(run for sizes in linears for run in products(tokens, *sizes)), *fastest_attention(shape)]
    head = products(tokens, shape.hidden, shape.vocab)
    parameters = shape.layers * sum(a * b for a, b in linears) + (1 + gated) * shape.vocab * shape.hidden
    ends = 2 * 2 * tokens * (shape.vocab + shape.hidden)  # logits and embeddings, and their gradients
    copies = [layer_bytes(shape, gated=gated) // 2, (ends + OPTIMIZER_BYTES * parameters) // 2 // shape.layers]
    source, target = (torch.empty(max(copies), dtype=torch.uint8, device="cuda") for _ in range(2))

    def step() -> None:
        for _ in range(shape.layers):
            for run in layer:
                run()
            for size in copies:
                target[:size].copy_(source[:size])
        for run in head:
            run()

    return time_windows(step, Length())


def measure(name: str, case: str) -> Row:
    """Run one contender in this process."""
    if name == "stoker":
        return training_step.measure(name, case)
    shape = training_step.MODELS[case].shape
    return result(name, floor(shape, gated=GATED_AND_UNTIED[case]), shape.micro_batch * shape.sequence)


if __name__ == "__main__":
    run_benchmark(
        __file__,
        __doc__,
        TITLES,
        measure,
        lambda case: [f"step_floor_{case}"],
        option="--model",
        cases=list(training_step.MODELS),
    )
