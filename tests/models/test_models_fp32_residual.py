"""An fp32 residual stream beside 16-bit weights: its dtypes, its range, and what it saves from rounding."""

from typing import Any

import pytest
import torch
from gpt_builder import build_gpt, build_model
from parallel_models import batch_of, keys_of, samples_of
from tiers import extra, looped

from stoker.kernels.norm_functions import layer_norm, rms_norm
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.gpt import GPTKeys
from stoker.models.layer import Layer

WIDTHS = [torch.bfloat16, torch.float16]
TOKENS = torch.arange(32).view(2, 16)


def gpt(dtype, **changes) -> Any:
    keys: dict[str, Any] = {
        "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2, "encoder_seq_length": 16,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "normalization": "rmsnorm", "bias": False,
        "fp32_residual_connection": True, **changes,
    }  # fmt: skip
    return build_gpt(GPTKeys.model_validate(keys), vocab_size=90, dtype=dtype)


def streams_of(model, run):
    """Dtypes of the inputs and outputs of the layers, and of the final output."""
    found = []
    for module in model.modules():
        if isinstance(module, Layer):
            module.register_forward_hook(lambda _, given, result: found.extend((given[0].dtype, result[0].dtype)))
    last = run()
    return [*found, last.dtype]


@looped(
    "changes",
    [
        {},
        {"transformer_block_type": "parallel_ln", "normalization": "layernorm", "bias": True},
        {"transformer_block_type": "normformer", "hidden_dropout": 0.1},
        {"num_moe_experts": 4, "moe_router_topk": 2, "activation": "swiglu", "moe_shared_expert_intermediate_size": 32},
        {"activations_checkpoint_granularity": "full", "activations_checkpoint_method": "uniform",
         "activations_checkpoint_num_layers": 2},
        {"normalization": "layernorm1p", "activations_checkpoint_modules": ["norm", "mlp_activation"]},
    ],
)  # fmt: skip
def test_layers_add_in_fp32_and_the_rest_is_16_bit(changes):
    for dtype in WIDTHS:
        model = gpt(dtype, **changes)
        dtypes = streams_of(model, lambda model=model: model.hidden_states(TOKENS))
        assert dtypes == [torch.float32] * 8 + [dtype]
        model.loss(TOKENS, TOKENS, 32.0).backward()
        assert all(parameter.grad is not None and parameter.grad.dtype == dtype for parameter in model.parameters())
        narrow = gpt(dtype, **(changes | {"fp32_residual_connection": False}))
        assert streams_of(narrow, lambda narrow=narrow: narrow.hidden_states(TOKENS)) == [dtype] * 9
        model.eval()
        assert model(TOKENS[:, :7]).dtype == dtype, "generation"


@pytest.mark.parametrize("family", ["t5", *extra("bert", "gpt")])
@pytest.mark.parametrize("samples", ["packed", *extra("padded", "")])
def test_every_family_has_one(family, samples):
    keys = keys_of({"family": family, "fp32_residual_connection": True})
    model = build_model(keys, vocab_size=90, dtype=torch.bfloat16, batch_spec=BatchSpec(
            seq_length=16, decoder_seq_length=8 if family == "t5" else 0, packed=samples == "packed",
            reset_position_ids=samples == "packed", padded=samples == "padded",
        ))  # fmt: skip
    batch = samples_of(family, samples) if samples else batch_of(family)
    batch.pop("token_types", None)
    dtypes = streams_of(model, lambda: model.batch_loss(batch, 27.0))
    assert set(dtypes) == {torch.float32}
    assert len(dtypes) == 2 * (3 if family == "t5" else 2) + 1


@pytest.mark.parametrize("dtype", WIDTHS)
def test_small_branches_are_not_lost(dtype):
    """Each layer adds less than half a unit in the last place of a 16-bit stream."""
    results = {}
    for wide in (False, True):
        keys: dict[str, Any] = {"num_layers": 16, "position_embedding_type": "rope", "init_method_std": 0.3}
        model = gpt(dtype, **keys, fp32_residual_connection=wide)
        with torch.no_grad():
            model.token_embedding.weight.fill_(1.0).view(-1)[::2] = -1.0
            for layer in model.decoder.layers:
                layer.mlp.down.weight.mul_(1e-3)
                layer.attention.output.weight.mul_(1e-3)
            exact = gpt(torch.float64, **keys)
            exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
            found = []
            for each in (model, exact):
                each.decoder.final_norm = torch.nn.Identity()
                found.append(each.eval().decoder(each._embed(TOKENS), "evaluation").double())
        results[wide] = (found[0] - found[1]).norm() / (found[1] - model._embed(TOKENS)).norm()
    assert results[False] > 0.3
    assert results[True] < 0.03


def test_a_sum_beyond_the_range_of_fp16():
    for wide in (False, True):
        model = gpt(torch.float16, bias=True, fp32_residual_connection=wide)
        with torch.no_grad():
            for layer in model.decoder.layers:
                layer.mlp.down.bias.copy_(torch.linspace(-3e4, 3e4, 32))
            loss = model.loss(TOKENS, TOKENS, 32.0)
        assert bool(loss.isfinite()) == wide


def test_norms_round_an_fp32_stream_once_to_the_dtype_of_their_weights():
    stream, weight = torch.randn(5, 32), torch.randn(32)
    for dtype in WIDTHS:
        narrow, bias = weight.to(dtype), (weight / 2).to(dtype)
        for centred in (False, True):
            for found, truth in (
                (rms_norm(stream, narrow, epsilon=1e-5, zero_centered=centred),
                 rms_norm(stream, narrow.float(), epsilon=1e-5, zero_centered=centred)),
                (layer_norm(stream, narrow, bias, epsilon=1e-5, zero_centered=centred),
                 layer_norm(stream, narrow.float(), bias.float(), epsilon=1e-5, zero_centered=centred)),
            ):  # fmt: skip
                assert torch.equal(found, truth.to(dtype))
