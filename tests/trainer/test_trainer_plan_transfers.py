"""Waiting for copies to the host and back: as the plan simulates it, and as the engines do it on a clock."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch
from config_helpers import load
from resolved import gpu_target, make_plan
from tiers import cases
from torch import Tensor

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.build import build_model
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.gpt import GPTKeys
from stoker.models.memory.offload_activations import ActivationOffload
from stoker.models.memory.offload_weights import WeightOffload
from stoker.trainer.plan.hardware import parse_gpu
from stoker.trainer.plan.search import suggest_changes
from stoker.trainer.plan.transfers import LayerChunk, stall_seconds


def layers(count: int, offloaded: int, *, copy: float) -> list[LayerChunk]:
    """So many equal layers, of which the first send something; a forward takes 1, a backward 2."""
    return [
        LayerChunk(layers=range(number, number + 1), forward=1.0, backward=2.0, activations=copy * (number < offloaded))
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("copy", "forward", "backward"),
    [
        (0.0, 0.0, 0.0),
        (3.5, 0.0, 0.0),
        (4.0, 1.0, 0.0),  # the second has left at 8, before the last layer, which could run at 7
        # the first at 7, not at 6, the second at 14; layer 1 begins to come at 2, layer 0 follows it, needed at 14
        (7.0, 7.0, 2.0),
        (10.0, 13.0, 8.0),
    ],
)
def test_copies_of_two_layers_of_eight(copy: float, forward: float, backward: float):
    assert stall_seconds(layers(8, 2, copy=copy), 6) == pytest.approx(forward + backward)


def test_with_one_layer_left_the_link_never_rests():
    """The forward ends a layer after the last copy, the first copy back begins with the backward."""
    assert stall_seconds(layers(5, 4, copy=10.0), 1) == pytest.approx((40 + 1 - 5) + (40 + 2 - 10))
    assert stall_seconds(layers(5, 4, copy=0.5), 1) == 0


# ---------------------------------------------------------------- the engines


class Clock:
    """The time on the device, and when the link each way will be free."""

    def __init__(self) -> None:
        self.now = self.lost = 0.0
        self.free = {"send": 0.0, "fetch": 0.0}


class ClockedCopies:
    """Copies that are done at once, but take time on a clock."""

    device = torch.device("cpu")
    host_bytes = 0

    def __init__(self, clock: Clock, bytes_per_second: float) -> None:
        self._clock, self._speed = clock, bytes_per_second
        self.sent: dict[int, int] = defaultdict(int)
        self.layer = 0

    def use_current_stream(self) -> None:
        pass

    def allocate_host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def release_host(self, host: Tensor) -> None:
        pass

    def allocate_device(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        storage.resize_(size)

    def copy_to_host(self, memory: Tensor, host: Tensor) -> float:
        host.copy_(memory)
        self.sent[self.layer] += memory.numel()
        return self._copied("send", memory.numel())

    def copy_to_device(self, host: Tensor, memory: Tensor) -> float:
        memory.copy_(host)
        return self._copied("fetch", memory.numel())

    def wait(self, event: float) -> None:
        if event > self._clock.now:
            self._clock.lost += event - self._clock.now
            self._clock.now = event

    def _copied(self, way: str, size: int) -> float:
        self._clock.free[way] = max(self._clock.free[way], self._clock.now) + size / self._speed
        return self._clock.free[way]


FORWARD, BACKWARD = 1.0, 2.0


def play(count: int, chunk: int, offloaded: int, speed: float, kinds: str) -> tuple[float, list[LayerChunk]]:
    """Seconds that the engines wait in a step of a small model, and what the plan takes its layers for."""
    whole = {"granularity": "full", "method": "uniform", "num_layers": chunk} if chunk else {}
    keys: dict[str, Any] = {
        "num_layers": count, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "bias": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "normalization": "rmsnorm", "encoder_seq_length": 16,
        "position_embedding_type": "rope", **{f"activations_checkpoint_{name}": value for name, value in whole.items()},
    }  # fmt: skip
    facts: Any = {"vocab_size": 50, "device": "cpu", "dtype": torch.float32, "flags": AttentionFlags()}
    model: Any = build_model(
        GPTKeys.model_validate(keys), micro_batch_size=2, batch_spec=BatchSpec(seq_length=16), **facts
    )
    clock, stack, going_back = Clock(), model.decoder, []
    copies = {kind: ClockedCopies(clock, speed) for kind in ("activations", "weights")}
    if "activations" in kinds:
        stack.activation_offload = ActivationOffload(copies["activations"], offloaded, least_size=512)
    if "weights" in kinds:
        stack.weight_offload = WeightOffload(copies["weights"], list(stack.layers), offloaded, least_size=512)

    def ran(number: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            if going_back:
                return  # it runs again
            clock.now += FORWARD
            copies["activations"].layer = number + 1

            def reached(_: Tensor) -> None:  # the layer after it has run its backward
                clock.now += BACKWARD * (number < count - 1)

            output[0].register_hook(reached)

        return hook

    for number, layer in enumerate(stack.layers):
        layer.register_forward_hook(ran(number))
    tokens = torch.arange(16).repeat(2, 1)
    loss = model.loss(tokens, tokens, 32.0)
    going_back.append(True)
    loss.backward()
    runs: list[LayerChunk] = []
    each = sum(copies["weights"].sent.values()) / offloaded / speed
    for first in range(0, count, chunk or 1):
        numbers = range(first, min(first + (chunk or 1), count))
        activations = sum(copies["activations"].sent[number] for number in numbers) / speed
        weights = tuple(each * (number < offloaded) for number in numbers)
        times = {"forward": FORWARD * len(numbers), "backward": BACKWARD * len(numbers)}
        runs.append(LayerChunk(layers=numbers, **times, activations=activations, weights=weights))
    return clock.lost, runs


CASES = [
    (count, chunk, offloaded, seconds, kinds)
    for (count, chunk, offloaded), seconds, kinds in itertools.product(
        [(8, 0, 2), (8, 0, 5), (6, 0, 5), (8, 1, 6), (8, 2, 6), (8, 2, 3), (9, 4, 8), (3, 0, 2)],
        [0.4, 1.6, 4.0],
        ["activations", "weights", "activations and weights"],
    )
]


@pytest.mark.parametrize(("count", "chunk", "offloaded", "seconds", "kinds"), cases(CASES, fast=8))
def test_the_engines_wait_as_long(count: int, chunk: int, offloaded: int, seconds: float, kinds: str):
    """Chunk 0: nothing is recomputed. The link takes about `seconds` for what a layer that keeps all of it sends."""
    lost, runs = play(count, chunk, offloaded, 30_000 / seconds, kinds)
    assert sum(run.activations + sum(run.weights) for run in runs) > 0
    assert stall_seconds(runs, count - offloaded) == pytest.approx(lost, rel=0.05, abs=0.3)


def test_as_many_layers_as_copies_hide_are_proposed():
    """The next one more would be waited for."""
    root = load("experiment=llama_1b_bench").root
    target = gpu_target(root, parse_gpu("h100"))
    plan = make_plan(root, target)

    def time_with(layers: int) -> float:
        keys = ["cpu_offloading=True", f"cpu_offloading_num_layers={layers}", "cpu_offloading_weights=False"]
        changed = load("experiment=llama_1b_bench", *(f"model.{key}" for key in keys)).root
        return make_plan(changed, target).seconds

    proposed = [
        change.values["cpu_offloading_num_layers"]
        for change in suggest_changes(root, target, plan, limit=100)
        if not change.values.get("cpu_offloading_weights", True)
    ]
    hidden = min(proposed)
    assert 3 <= hidden < 24 // 3
    assert time_with(hidden) <= 1.03 * plan.seconds
    assert time_with(hidden + 2) > 1.03 * plan.seconds
