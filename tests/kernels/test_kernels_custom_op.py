"""Custom operations: their gradients, with and without a registered backward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.kernels.custom_op import custom_op


@custom_op("stoker_test::doubled")
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@custom_op("stoker_test::square", schema="(Tensor x) -> Tensor")
def square(x: Tensor) -> Tensor:
    return x * x


def save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def multiply_doubled(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * doubled(*ctx.saved_tensors)


for name in ("doubled", "square"):
    torch.library.register_fake(f"stoker_test::{name}")(torch.empty_like)
torch.library.register_autograd("stoker_test::square", multiply_doubled, setup_context=save)


def test_what_has_no_backward_pass_refuses_a_gradient():
    x = torch.tensor([3.0], requires_grad=True)
    with pytest.raises(RuntimeError, match="stoker_test::doubled has no backward pass"):
        doubled(x)
    with torch.no_grad():
        assert doubled(x) == 6


def test_a_registered_backward_pass_is_one_and_not_two():
    x = torch.tensor([3.0], requires_grad=True)
    assert torch.autograd.grad(square(x), x)[0] == 6
    with pytest.raises(RuntimeError, match="doubled has no backward pass"):
        torch.autograd.grad(square(x), x, create_graph=True)


def test_the_operation_is_whole_in_a_compiled_function():
    compiled = torch.compile(lambda x: square(x) + 1, backend="aot_eager", fullgraph=True)
    x = torch.tensor([3.0], requires_grad=True)
    compiled(x).backward()
    assert x.grad == 6
    torch.library.opcheck(square, (x.detach(),))
