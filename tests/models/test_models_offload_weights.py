"""Weights in host memory: the same steps bit for bit, on the device when they are needed, and off it meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deferred_copies import DeferredCopies
from test_models_offload import LAYERS, LEAST, assert_equal, loss_of, model_of
from tiers import extra, full_only
from torch import Tensor

from stoker.models.memory.offload_activations import ActivationOffload
from stoker.models.memory.offload_weights import WeightOffload, find_weight_offloads


def offload_weights(model: Any, layers: int, *, activations: bool = False) -> DeferredCopies:
    copies = DeferredCopies()
    for stack in model.stacks:
        stack.weight_offload = WeightOffload(copies, list(stack.layers), layers, least_size=LEAST)
        if activations:
            stack.activation_offload = ActivationOffload(DeferredCopies(), layers, least_size=LEAST)
    return copies


def steps(model: Any, micro_batches: int = 2) -> list[Tensor]:
    """Some steps of an optimizer, with validations between them; the losses and the weights in the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen: list[Tensor] = []
    for step in range(3):
        for number in range(micro_batches):
            loss = loss_of(model, 10 * step + number)
            loss.backward()
            seen.append(loss.detach())
        for offload in find_weight_offloads(model):
            offload.to_device()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen.append(loss_of(model))
        model.train()
    return seen + [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("t5", "activations", "changes"),
    [
        (False, True, {"num_moe_experts": 4, "moe_layer_recompute": True}),
        *extra((False, False, {}), (False, True, {}), (True, True, {})),
    ],
)
def test_steps_are_bit_equal(t5: bool, activations: bool, changes: dict[str, Any]) -> None:
    expected = steps(model_of(t5=t5, **changes))
    for layers in (1, LAYERS - 1):
        model = model_of(t5=t5, **changes)
        copies = offload_weights(model, layers, activations=activations)
        assert_equal(steps(model), expected)
        assert [name for name, _ in copies.events].count("fetch") >= 4 * layers * 6


@full_only
def test_steps_of_compiled_layers_are_bit_equal() -> None:
    changes: Any = {"compile": True, "hidden_dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0}
    expected = steps(model_of(**changes))
    model = model_of(**changes)
    offload_weights(model, LAYERS - 1, activations=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_equal(steps(model), expected)


def on_device(model: Any) -> list[bool]:
    """For each layer of the first stack, whether all its matrices are on the device; never some of them."""
    there: list[bool] = []
    for layer in model.stacks[0].layers:
        sizes = {p.untyped_storage().nbytes() > 0 for p in layer.parameters() if p.nbytes >= LEAST}
        assert len(sizes) == 1
        there.append(sizes.pop())
    return there


def test_weights_leave_after_the_forward_and_come_back_one_layer_before_they_are_needed() -> None:
    layers = 3
    model = model_of()
    copies = offload_weights(model, layers)
    told: dict[tuple[str, int], list[bool]] = {}

    for number, layer in enumerate(model.stacks[0].layers):
        layer.register_forward_hook(lambda *_, number=number: told.update({("forward", number): on_device(model)}))
        layer.register_full_backward_pre_hook(
            lambda *_, number=number: told.update({("backward", number): on_device(model)})
        )
    loss = loss_of(model)
    assert on_device(model) == [False] * 3 + [True] * 2
    loss.backward()
    yes, no = True, False
    assert told["forward", 0] == [yes] * 5
    assert told["forward", 1] == [yes] * 5
    assert told["forward", 2] == [no, yes, yes, yes, yes]
    assert told["forward", 3] == [no, no, yes, yes, yes]
    assert told["backward", 4] == [no, no, no, yes, yes]
    assert told["backward", 3] == [no, no, yes, yes, yes]
    assert told["backward", 2] == [no, yes, yes, yes, yes]
    assert told["backward", 1] == [yes] * 5
    names = [name for name, _ in copies.events]
    assert names.count("send") == names.count("fetch") == 4 * layers
    offload = model.stacks[0].weight_offload
    assert offload is not None
    assert sum(size for name, size in copies.events if name == "send") == offload.sent_bytes
    assert offload.sent_bytes == sum(
        parameter.nbytes
        for layer in list(model.stacks[0].layers)[:layers]
        for parameter in layer.parameters()
        if parameter.nbytes >= LEAST
    )


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_weights_have_time_to_leave(layers: int) -> None:
    """Those of layer i are gone when layer i + L - N is about to run, at the earliest i + 2."""
    model = model_of()
    offload_weights(model, layers)
    seen: list[int] = []
    for layer in model.stacks[0].layers:
        layer.register_forward_pre_hook(lambda *_: seen.append(on_device(model).index(True)))
    loss = loss_of(model)
    away = max(2, LAYERS - layers)
    assert seen == [max(0, number - away + 1) for number in range(LAYERS)]
    assert on_device(model) == [False] * layers + [True] * (LAYERS - layers)
    loss.backward()
    assert all(on_device(model))


def test_a_forward_that_has_no_backward_is_made_good() -> None:
    """Its weights are on the host; the next forward, of training or not, finds them, and `to_device` brings them."""
    model = model_of()
    expected = [loss_of(model, 1).detach(), loss_of(model.eval(), 2).detach()]
    model.train()
    offload_weights(model, LAYERS - 1)
    loss_of(model)
    assert on_device(model) == [False] * 4 + [True]
    again = [loss_of(model, 1).detach()]
    assert on_device(model) == [False] * 4 + [True]
    again.append(loss_of(model.eval(), 2).detach())
    assert_equal(again, expected)
    assert on_device(model) == [True] * 5
    before = [parameter.clone() for parameter in model.parameters()]
    loss_of(model.train())
    (offload,) = find_weight_offloads(model)
    offload.to_device()
    assert on_device(model) == [True] * 5
    assert_equal(list(model.parameters()), before)


def test_what_is_written_between_steps_is_what_the_next_step_uses() -> None:
    """As an optimizer's kernel writes it: the tensor does not tell that it changed."""
    models = [model_of(), model_of()]
    offload_weights(models[1], LAYERS - 1)
    for model in models:
        loss_of(model).backward()
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
    losses = [loss_of(model, 1) for model in models]
    assert torch.equal(*losses)
    for model, loss in zip(models, losses, strict=True):
        model.zero_grad()
        loss.backward()
    assert_equal(*[[parameter.grad for parameter in model.parameters()] for model in models])
