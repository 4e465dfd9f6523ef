"""CUDA graphs of layers on one GPU: losses and gradients of eager layers, bit for bit.

With a substitute for graphs on the CPU: `tests/models/test_models_layer_graphs.py`; in runs of several ranks:
`test_distributed_gpu.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft_models import ANSWER, LENGTH, batch_of, keys_of
from torch import Tensor

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models import stack
from stoker.models.build import LanguageModel, build_model
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.layer_graphs import WARM_UP_MICRO_BATCHES
from stoker.models.moe.moe_layer import find_moe_layers
from stoker.trainer.lightning.cuda_graph import layer_capture

pytestmark = pytest.mark.gpu

SIZE: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 2}
LOSSES: dict[str, Any] = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("gpt", {}),
    "dropout": ("gpt", DROPOUT),
    "shared bias": ("gpt", {"position_embedding_type": "relative"}),
    "experts": ("experts", LOSSES),
    "up to the experts": ("experts", LOSSES),
    "t5": ("t5", {"position_embedding_type": "relative"}),  # layers share a bias, and the output of the encoder
}
PASSES = WARM_UP_MICRO_BATCHES + 4


def build(name: str, dtype: torch.dtype, *, compiled: bool) -> LanguageModel:
    family, more = MODELS[name]
    spec = BatchSpec(seq_length=LENGTH, decoder_seq_length=ANSWER if family == "t5" else 0)
    keys = keys_of(family, **SIZE, **more).model_copy(update={"compile": compiled})
    model = build_model(
        keys, vocab_size=40, device="cuda", dtype=dtype, flags=AttentionFlags(allow_nondeterministic=False),
        micro_batch_size=2, batch_spec=spec,
    )  # fmt: skip
    for layer in find_moe_layers(model).values():
        layer.loss_share.fill_(0.25)
    return model


def run_passes(model: LanguageModel, family: str, *, autocast: bool) -> list[Tensor]:
    """Return the losses of passes of which two accumulate their gradients, and these."""
    found: list[Tensor] = []
    batch = {name: tensor.cuda() for name, tensor in batch_of(family).items()}
    model.train()
    for number in range(PASSES):
        torch.manual_seed(number)
        fields = {name: tensor.roll(number, -1) for name, tensor in batch.items()}
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model.batch_loss(fields, 16.0)
        loss.backward()
        found.append(loss.detach().clone())
        del loss  # a graph that is alive has autograd's nodes of the parameters, with the stream that is not captured
        if number % 2:
            found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
            model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("precision", "compiled"), [("fp32", False), ("bf16", False), ("autocast", False), ("autocast", True)]
)
@pytest.mark.parametrize("name", MODELS)
def test_graphs_have_the_bits_of_eager_layers(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, compiled: bool
) -> None:
    if name == "up to the experts":  # as where ranks share them
        monkeypatch.setattr(stack, "_has_fixed_shapes", lambda layer: False)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    ours, theirs = build(name, dtype, compiled=compiled), build(name, dtype, compiled=compiled)
    failures: list[Exception] = []
    for each in ours.stacks:
        each.capture_layers(layer_capture, failures.append)
    if name == "up to the experts":  # the same parts of a layer compiled, but not captured
        for each in theirs.stacks:
            each.capture_layers(layer_capture, lambda error: None)
            each.release_graphs()
    found = run_passes(ours, MODELS[name][0], autocast=precision == "autocast")
    expected = run_passes(theirs, MODELS[name][0], autocast=precision == "autocast")
    assert not failures
    assert all(graphs._captured for each in ours.stacks for graphs in each._graphs)
    assert len(found) == len(expected)
    for one, another in zip(found, expected, strict=True):
        assert torch.equal(one, another)
    for each in ours.stacks:
        each.release_graphs()
