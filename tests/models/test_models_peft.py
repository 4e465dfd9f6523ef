"""Parameters of fine-tuning: their arithmetic, what is frozen, and the same gradients however memory is saved."""

from __future__ import annotations

from typing import Any

import deferred_copies
import pytest
import torch
import torch.nn.functional as F
from peft_models import FULL, LENGTH, PARTS, SCHEMES, batch_of, model_of
from tiers import cases, extra, full_only
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stoker.kernels.cross_entropy import linear_cross_entropy
from stoker.kernels.lora.lora_linear import flatten_norm_factors, lora_linear, reference_lora_linear
from stoker.kernels.moe.expert_mlps import expert_mlp
from stoker.kernels.moe.grouped_matmul import grouped_matmul
from stoker.kernels.moe.lora_experts import LoRAMatrices, lora_expert_mlp
from stoker.models.build import LanguageModel
from stoker.models.layer import Layer
from stoker.models.layers.mlp import MLP
from stoker.models.layers.norm import RMSNorm
from stoker.models.peft import lora_mlp
from stoker.models.peft.added_parameters import peft_parameter_names
from stoker.models.peft.apply import trainable_parameters
from stoker.models.peft.lora import LoRALinear
from stoker.models.t5 import T5

F64 = torch.float64


def gradients(model: LanguageModel, family: str) -> dict[str, Tensor]:
    model.train()
    model.batch_loss(batch_of(family), 10.0).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


# ---------------------------------------------------------------- the operation


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, requires_grad=True)


@pytest.mark.parametrize("parts", cases([(7,), (3, 2, 2), (4, 3)], fast=1))
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_operation_is_its_reference(parts: tuple[int, ...], with_bias: bool) -> None:
    torch.manual_seed(0)
    inputs, down, up = drawn(2, 3, 5), drawn(len(parts) * 2, 5), drawn(7, 2)
    weight, bias = torch.randn(7, 5, dtype=F64), torch.randn(7, dtype=F64) if with_bias else None
    found: list[list[Tensor]] = []
    for function in (lora_linear, reference_lora_linear):
        output = function(inputs, weight, bias, down, up, scale=0.7, parts=parts)
        found.append([output.detach(), *torch.autograd.grad(output.sin().sum(), (inputs, down, up))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    if not with_bias or len(parts) == 1:
        return
    rows = inputs.detach().flatten(0, 1).requires_grad_()
    low = down.detach().requires_grad_(), up.detach().requires_grad_()
    arguments = (rows, None, None, None, weight, bias, *low, 0.7, list(parts))
    torch.library.opcheck(torch.ops.stoker.lora_linear.default, arguments)


def test_inputs_that_need_no_gradient_get_none() -> None:
    inputs, down, up = torch.randn(3, 5, dtype=F64), drawn(2, 5), drawn(7, 2)
    lora_linear(inputs, torch.randn(7, 5, dtype=F64), None, down, up, scale=1.0, parts=(7,)).sum().backward()
    assert down.grad is not None
    assert up.grad is not None
    assert inputs.grad is None


@pytest.mark.parametrize("zero_centered", cases([False, True], fast=1))
def test_a_norm_before_the_operation_is_not_kept(zero_centered: bool) -> None:
    torch.manual_seed(0)
    hidden, down, up = drawn(2, 3, 5), drawn(2, 5), drawn(7, 2)
    weight, norm = torch.randn(7, 5, dtype=F64), RMSNorm(5, 1e-5, zero_centered=zero_centered).double()
    norm.weight = nn.Parameter(torch.randn(5, dtype=F64), requires_grad=False)
    found, kept = [], []
    for parts in (None, norm.factors(hidden)):
        with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
            normed = norm(hidden)
            kept.clear()
            output = lora_linear(normed, weight, None, down, up, scale=0.7, parts=(7,), norm=parts)
        assert any(tensor.data_ptr() == normed.data_ptr() for tensor in kept) == (parts is None)
        found.append([output.detach(), *torch.autograd.grad(output.sin().sum(), (hidden, down, up))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    rows = flatten_norm_factors(norm.factors(hidden.detach()))
    arguments = (norm(hidden).detach().flatten(0, 1).requires_grad_(), *rows, weight, None, down, up, 0.7, [7])
    torch.library.opcheck(torch.ops.stoker.lora_linear.default, arguments)


def test_norms_before_updates_are_run_again_as_written_too() -> None:
    """Where nothing is compiled a norm keeps copies in fp32, unless it is run again."""
    kept = {}
    for modules in (None, ["norm"]):
        changes: dict[str, Any] = {"normalization": "rmsnorm", "activations_checkpoint_modules": modules}
        model = model_of("gpt", "lora", dtype=torch.bfloat16, **changes).train()
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model.batch_loss(batch_of("gpt"), 10.0)
        kept[modules is None] = sum(sizes.values())
        loss.backward()
    assert kept[False] < 0.9 * kept[True]


def test_dropout_is_of_the_update_alone() -> None:
    torch.manual_seed(0)
    inputs, weight, down, up = drawn(400, 50), torch.randn(7, 50, dtype=F64), drawn(2, 50), drawn(7, 2)
    plain = inputs @ weight.t()
    masked = F.dropout(inputs, 0.5)
    with_dropout = lora_linear(inputs, weight, None, down, up, scale=1.0, parts=(7,), dropped=masked)
    mean = lora_linear(inputs, weight, None, down, up, scale=1.0, parts=(7,)) - plain
    assert not torch.allclose(with_dropout, plain + mean)
    torch.testing.assert_close((with_dropout - plain).mean(0), mean.mean(0), atol=2.0, rtol=0.1)
    nothing = lora_linear(inputs, weight, None, down, torch.zeros_like(up), scale=1.0, parts=(7,), dropped=masked)
    assert torch.equal(nothing, plain)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parts": (4, 4)}, "`parts`"),
        ({"lora_b": torch.zeros(6, 2)}, "`lora_b`"),
        ({"lora_a": torch.zeros(3, 5)}, "`lora_a`"),
    ],
)
def test_shapes_that_do_not_fit(changes: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"lora_a": torch.zeros(2, 5), "lora_b": torch.zeros(7, 2), "parts": (7,), "scale": 1.0}
    with pytest.raises(ValueError, match=said):
        lora_linear(torch.zeros(3, 5), torch.zeros(7, 5), None, **{**arguments, **changes})


@pytest.mark.parametrize("capacity", [None, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_experts_are_those_with_merged_weights(capacity: int | None, bias: bool) -> None:
    torch.manual_seed(0)
    hidden, gates = drawn(9, 6), torch.rand(9, 2, dtype=F64)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(9)])
    up, down = torch.randn(3, 8, 6, dtype=F64), torch.randn(3, 6, 4, dtype=F64)
    biases = {"up_bias": torch.randn(3, 8, dtype=F64), "down_bias": torch.randn(3, 6, dtype=F64)} if bias else {}
    first = LoRAMatrices(drawn(3, 4, 6), drawn(3, 8, 2), (4, 4), 0.7, 0.0)
    second = LoRAMatrices(drawn(3, 3, 4), drawn(3, 6, 3), (6,), 0.3, 0.0)
    learnt = (hidden, first.lora_a, first.lora_b, second.lora_a, second.lora_b)
    shared: dict[str, Any] = {"nonlinearity": "silu", "gated": True, "capacity": capacity, **biases}

    def merged(weight: Tensor, low: LoRAMatrices) -> Tensor:
        lows, highs = low.lora_a.split(low.lora_b.shape[2], dim=1), low.lora_b.split(list(low.parts), dim=1)
        return weight + low.scale * torch.cat([b @ a for a, b in zip(lows, highs, strict=True)], dim=1)

    outputs = (
        lora_expert_mlp(hidden, chosen, gates, up, down, first, second, **shared),
        expert_mlp(
            hidden, chosen, gates, merged(up, first), merged(down, second), **shared,
            implementation="padded" if capacity else "sequential",
        ),
    )  # fmt: skip
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=1e-12)
    found = [torch.autograd.grad(output.sin().sum(), learnt) for output in outputs]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_frozen_weights_cost_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = drawn(6, 5), torch.randn(8, 5, dtype=F64)
    labels = torch.randint(0, 8, (6,))
    frozen = linear_cross_entropy(hidden, weight, labels, valid_vocab=8)
    (ours,) = torch.autograd.grad(frozen, hidden)
    learnt = linear_cross_entropy(hidden, weight.clone().requires_grad_(), labels, valid_vocab=8)
    (theirs,) = torch.autograd.grad(learnt, hidden)
    assert torch.equal(ours, theirs)
    outer = "stoker.kernels.moe.grouped_matmul._grouped_outer"
    monkeypatch.setattr(outer, lambda *_: pytest.fail("the gradient of a frozen matrix"))
    rows = drawn(4, 5)
    ends = torch.tensor([1, 4], dtype=torch.int32)
    grouped_matmul(rows, torch.randn(2, 5, 3, dtype=F64), ends, backend="loop").sum().backward()
    assert rows.grad is not None


# ---------------------------------------------------------------- in models


@pytest.mark.parametrize(
    ("family", "scheme"), cases(((family, scheme) for family in ("gpt", "experts", "t5") for scheme in SCHEMES), fast=8)
)
def test_what_is_added_is_trained_and_nothing_else(family: str, scheme: str) -> None:
    if (family, scheme) == ("experts", "ia3"):
        pytest.skip("a rule refuses it: experts have no factors")
    model = model_of(family, scheme)
    trained = trainable_parameters(model)
    assert gradients(model, family).keys() == trained.keys()
    assert all(gradient.any() for gradient in gradients(model, family).values())
    if scheme == "selective":
        assert trained
        assert not peft_parameter_names(model)
    else:
        assert set(trained) == set(peft_parameter_names(model))
    plain = dict(model_of(family, None).named_parameters())
    base = {name: parameter for name, parameter in model.named_parameters() if name not in peft_parameter_names(model)}
    assert base.keys() == plain.keys()
    assert all(torch.equal(parameter, plain[name]) for name, parameter in base.items())


@pytest.mark.parametrize("family", ["gpt", "experts", "t5"])
@pytest.mark.parametrize("scheme", ["lora", "adapter", "ia3"])
def test_a_model_begins_as_the_function_it_was(family: str, scheme: str) -> None:
    if (family, scheme) == ("experts", "ia3"):
        pytest.skip("a rule refuses it: experts have no factors")
    batch = batch_of(family)
    plain, adapted = (
        model.eval().batch_loss(batch, 1.0) for model in (model_of(family, None), model_of(family, scheme, peft={}))
    )
    torch.testing.assert_close(plain, adapted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("family", "how"),
    [
        pytest.param(family, how, id=f"{family}-{name}")
        for family in ("gpt", "experts", "t5")
        for name, how in (("kept", {}), ("full", FULL), ("parts", PARTS))
        if family == "gpt" or extra(family)
    ],
)
def test_a_gated_mlp_is_one_operation_in_training(
    family: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel, in the interpreter: the gradients of its parts; of the experts' layers the shared expert."""
    changes: dict[str, Any] = {"dtype": torch.float32, "bias": False, **how}
    plain = gradients(model_of(family, "lora", **changes), family)
    runs: list[bool] = []
    function = lora_mlp.lora_gated_mlp
    monkeypatch.setattr(lora_mlp, "lora_gated_mlp_runs_on", lambda *_: True)
    monkeypatch.setattr(
        lora_mlp, "lora_gated_mlp", lambda *given, **named: runs.append(True) or function(*given, **named)
    )
    model = model_of(family, "lora", **changes)
    fused = gradients(model, family)
    layers = 6 if family == "t5" else 3
    # what follows a norm that is run again is run with it, outside compiled layers; that of experts is read often
    assert len(runs) == (2 * layers if how == FULL or (how == PARTS and family != "experts") else layers)
    for name, gradient in plain.items():
        assert (fused[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    runs.clear()
    model.eval().batch_loss(batch_of(family), 1.0)
    assert not runs


@pytest.mark.parametrize(
    "changes",
    [{"bias": True}, {"activation": "gelu"}, {"transformer_block_type": "normformer"}, {"ffn_dropout": 0.1}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_not_one_operation(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_mlp, "lora_gated_mlp_runs_on", lambda *_: True)
    monkeypatch.setattr(lora_mlp, "lora_gated_mlp", lambda *_, **__: pytest.fail("it is none"))
    changes = {"bias": False, **changes}
    gradients(model_of("gpt", "lora", **changes), "gpt")
    for less in ({"adapter_dropout": 0.1}, {"target_modules": ["mlp_fc1"]}, {"target_modules": ["mlp_fc2"]}):
        peft = {"lora_tuning": {**SCHEMES["lora"]["lora_tuning"], **less}}
        gradients(model_of("gpt", "lora", peft=peft, bias=False), "gpt")


HOW = [
    ("lora", "full"),
    ("lora", "parts"),
    ("lora", "offload"),
    ("lora", "full offload"),
    ("adapter", "full"),
    ("adapter", "parts"),
    ("ptuning", "full"),
]


@pytest.mark.parametrize(
    ("family", "scheme", "how", "dropout"),
    cases(((family, *how, p) for family in ("gpt", "experts", "t5") for how in HOW for p in (0.0, 0.3)), fast=4),
)
def test_memory_is_saved_to_the_same_gradients(
    family: str, scheme: str, how: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And to the same masks of what is added, whatever runs twice."""
    if dropout and scheme == "ptuning":
        pytest.skip("it has no dropout")
    more = {} if scheme == "ptuning" else {"adapter_dropout": dropout}
    peft = {name: {**keys, **more} for name, keys in SCHEMES[scheme].items()}

    def found(**changes: Any) -> dict[str, Tensor]:
        model = model_of(family, scheme, peft=peft, **changes)
        torch.manual_seed(7)
        return gradients(model, family)

    plain = found()
    if dropout:
        torch.manual_seed(8)
        other = gradients(model_of(family, scheme, peft=peft), family)
        assert not any(torch.equal(other[name], plain[name]) for name in plain)
    changes: dict[str, Any] = {**(FULL if "full" in how else {}), **(PARTS if how == "parts" else {})}
    if "full" in how and "offload" in how:
        changes["activations_checkpoint_num_layers"] = 1
    if "offload" in how:
        deferred_copies.install(monkeypatch)
        changes |= {"cpu_offloading": True, "cpu_offloading_num_layers": 2}
    if family == "experts" and how == "parts":
        changes["moe_layer_recompute"] = True
    saved = found(**changes)
    assert saved.keys() == plain.keys()
    assert all(torch.equal(saved[name], plain[name]) for name in plain)


def test_vectors_are_seen_and_padding_is_not() -> None:
    model = model_of("t5", "ptuning").eval()
    assert isinstance(model, T5)
    tokens, answer = batch_of("t5")["encoder_tokens"], batch_of("t5")["decoder_tokens"]
    padding = torch.arange(LENGTH) < LENGTH - 4
    padded = model(tokens, answer, encoder_padding=padding.expand(2, -1))
    torch.testing.assert_close(padded, model(tokens[:, : LENGTH - 4], answer), atol=1e-10, rtol=1e-10)
    plain = model_of("t5", None).eval()
    assert isinstance(plain, T5)
    assert not torch.allclose(padded, plain(tokens[:, : LENGTH - 4], answer), atol=1e-3)


def test_every_linear_layer_has_the_updates_that_are_asked_for() -> None:
    def updated(family: str, *targets: str, **more: Any) -> set[str]:
        peft = {"lora_tuning": {"target_modules": list(targets), "adapter_dim": 2, **more}}
        return {name.rpartition(".")[0] for name in trainable_parameters(model_of(family, "lora", peft=peft))}

    at = "decoder.layers.0."
    assert {name for name in updated("gpt", "attention") if name.startswith(at)} == {
        f"{at}attention.qkv", f"{at}attention.output",
    }  # fmt: skip
    assert {name for name in updated("gpt", "mlp_fc1") if name.startswith(at)} == {f"{at}mlp.up"}
    assert {name for name in updated("experts", "mlp") if name.startswith(at)} == {
        f"{at}mlp.experts", f"{at}mlp.shared.up", f"{at}mlp.shared.down",
    }  # fmt: skip
    assert {name for name in updated("t5", "attention_qkv") if name.startswith(at)} == {
        f"{at}attention.qkv", f"{at}cross_attention.query", f"{at}cross_attention.kv",
    }  # fmt: skip
    assert {name.split(".")[2] for name in updated("gpt", "all", layer_selection=[1, 3])} == {"0", "2"}
    assert updated("gpt", "all") == updated("gpt", "mlp", "attention")


def test_a_fused_weight_has_one_pair_for_each_projection() -> None:
    layer = model_of("gpt", "lora").decoder.layers[0]  # pyrefly: ignore[missing-attribute]
    assert isinstance(layer, Layer)
    assert isinstance(layer.mlp, MLP)
    for module, parts in ((layer.attention.qkv, (16, 8, 8)), (layer.mlp.up, (24, 24)), (layer.mlp.down, (16,))):
        assert isinstance(module, LoRALinear)
        assert module.parts == parts
        assert tuple(module.lora_a.shape) == (3 * len(parts), module.in_features)
        assert tuple(module.lora_b.shape) == (module.out_features, 3)
    nemo = {"lora_tuning": {"target_modules": ["all"], "adapter_dim": 3, "variant": "nemo"}}
    layer = model_of("gpt", "lora", peft=nemo).decoder.layers[0]  # pyrefly: ignore[missing-attribute]
    assert isinstance(layer, Layer)
    assert isinstance(layer.attention.qkv, LoRALinear)
    assert tuple(layer.attention.qkv.lora_a.shape) == (3, 16)


@pytest.mark.parametrize("method", ["xavier", "normal", "kaiming", "zero"])
def test_matrices_start_as_nemo_says(method: str) -> None:
    peft = {"lora_tuning": {"adapter_dim": 64, "column_init_method": method, "target_modules": ["attention_qkv"]}}
    stack: dict[str, Any] = {"hidden_size": 512, "num_layers": 1, "num_attention_heads": 8, "num_query_groups": 8}
    down = trainable_parameters(model_of("gpt", "lora", peft=peft, **stack))["decoder.layers.0.attention.qkv.lora_a"]
    wanted = {"xavier": (2 / (512 + 64)) ** 0.5, "normal": 0.2, "kaiming": (1 / 3 / 512) ** 0.5, "zero": 0.0}[method]
    assert down.std().item() == pytest.approx(wanted, rel=0.02)
    assert method != "kaiming" or down.abs().max() <= 512**-0.5


def test_names_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="`tunable_base_param_names` \\(nowhere\\)"):
        model_of("gpt", "selective", peft={"selective_tuning": {"tunable_base_param_names": ["norm", "nowhere"]}})
    with pytest.raises(ValueError, match="`layer_selection` \\(4\\) must be from 1 to the number of layers \\(3\\)"):
        model_of("gpt", "lora", peft={"lora_tuning": {"layer_selection": [1, 4]}})


def test_the_operation_compiles_whole() -> None:
    torch.manual_seed(0)
    inputs, down, up, weight = drawn(4, 5), drawn(2, 5), drawn(7, 2), torch.randn(7, 5, dtype=F64)

    def loss(inputs: Tensor) -> Tensor:
        return lora_linear(inputs, weight, None, down, up, scale=0.5, parts=(7,)).sin().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = [torch.autograd.grad(function(inputs), (inputs, down, up)) for function in (loss, compiled)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@full_only
def test_an_adapted_model_compiles_whole() -> None:
    peft = {"lora_tuning": {"target_modules": ["all"], "adapter_dim": 3, "row_init_method": "normal"}}
    plain = gradients(model_of("gpt", "lora", peft=peft, num_layers=1), "gpt")
    compiled = gradients(model_of("gpt", "lora", peft=peft, num_layers=1, compile=True), "gpt")
    assert compiled.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(compiled[name], gradient, atol=1e-10, rtol=1e-10)


def test_autocast_is_followed() -> None:
    model = model_of("experts", "lora", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.train().batch_loss(batch_of("experts"), 10.0)
    loss.backward()
    assert all(parameter.grad is not None for parameter in trainable_parameters(model).values())
    assert isinstance(model, nn.Module)
