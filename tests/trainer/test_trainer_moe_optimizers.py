"""Optimizers over the weights of experts: Muon moves every expert's matrices as if each were a weight of its own."""

from __future__ import annotations

import pytest
import torch
from tiny_run import tiny_config
from torch import nn

from stoker.trainer.optim.muon import Muon, is_hidden_matrix, orthogonalize
from stoker.trainer.optim.optimizer_factory import fused_projection_rows
from stoker.trainer.train import run_training

pytestmark = pytest.mark.usefixtures("without_plots")

EXPERTS, ROWS, COLUMNS = 3, 6, 4


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("shape", [(EXPERTS, ROWS, COLUMNS), (EXPERTS, COLUMNS, ROWS), (0, ROWS, COLUMNS)])
def test_a_stack_is_orthogonalised_matrix_by_matrix(shape):
    stack = random(*shape)
    found = orthogonalize(stack, 5)
    assert found.shape == shape
    for ours, matrix in zip(found, stack, strict=True):
        torch.testing.assert_close(ours, orthogonalize(matrix, 5), rtol=1e-12, atol=1e-12)


def test_experts_move_as_weights_of_their_own():
    start, gradient = random(EXPERTS, ROWS, COLUMNS), random(EXPERTS, ROWS, COLUMNS).flip(0)
    gradient[1] *= 1e-3  # beside the others it would hardly move

    def moved(name, weight, grad, rows):
        parameter = nn.Parameter(weight.clone())
        parameter.grad = grad.clone()
        Muon([(name, parameter)], lr=0.1, weight_decay=0.1, fused={name.partition(".")[2]: rows}).step()
        return parameter.detach()

    together = moved("a.mlp.experts.up", start, gradient, (2, 4))
    for expert in range(EXPERTS):
        alone = moved("a.up.weight", start[expert], gradient[expert], (2, 4))
        torch.testing.assert_close(together[expert], alone, rtol=1e-12, atol=1e-12)


def test_biases_of_experts_are_no_matrix():
    at = "decoder.layers.0.mlp."
    shapes = {"experts.up": (4, 8, 4), "experts.down": (4, 4, 8), "experts.up_bias": (4, 8), "router.weight": (4, 4)}
    chosen = [name for name, shape in shapes.items() if is_hidden_matrix(at + name, shape)]
    assert chosen == ["experts.up", "experts.down", "router.weight"]


GATED = {
    "model__num_moe_experts": 4,
    "model__moe_ffn_hidden_size": 24,
    "model__moe_shared_expert_intermediate_size": 40,
    "model__activation": "swiglu",
    "model__bias": False,
}


def test_gated_experts_are_fused(tmp_path):
    keys = tiny_config(tmp_path, **GATED).root.model
    assert {name: rows for name, rows in fused_projection_rows(keys).items() if "mlp." in name} == {
        "mlp.up.weight": (64, 64),
        "mlp.experts.up": (24, 24),
        "mlp.shared.up.weight": (40, 40),
    }


@pytest.mark.parametrize(
    "optim",
    [
        {"name": "muon", "lr": 1e-2},
        {"name": "adafactor", "lr": 1e-2, "weight_decay": 0.0},
        {"name": "sgd", "lr": 1e-1},
        {"name": "adamw", "scale_parameter": True, "lr": 1e-2},
    ],
    ids=lambda optim: optim["name"],
)
def test_every_optimizer_trains_experts(tmp_path, optim):
    result = run_training(tiny_config(tmp_path, **GATED, model__optim=optim, trainer__max_steps=2))
    assert result.step == 2
    assert result.validation is not None
    assert 0 < result.validation.loss < 6
