"""Recomputation: the same bits in every mode, each part run as often as it says, and less kept than without."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from compiled_graphs import CompiledGraphs
from gpt_builder import build_model
from tiers import cases, extra, full_only
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.kernels import gated_activation as gated_activation_module
from stoker.kernels import gated_down_projection as gated_projection_module
from stoker.kernels.attention import recompute_scores
from stoker.models.bert import BERT
from stoker.models.build import LanguageModel
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.bert import BertKeys
from stoker.models.config.families import FamilyKeys
from stoker.models.config.gpt import GPTKeys
from stoker.models.config.t5 import T5Keys
from stoker.models.gpt import GPT
from stoker.models.layer import Layer
from stoker.models.layers import mlp as mlp_module
from stoker.models.moe.moe_layer import find_moe_layers
from stoker.models.t5 import T5

VOCAB, TOKENS, LAYERS = 50, 12, 5
STACK: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 4, "num_query_groups": 2,
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "ffn_dropout": 0.1, "init_method_std": 0.3,
}  # fmt: skip
LLAMA = {"activation": "swiglu", "normalization": "rmsnorm", "bias": False, "position_embedding_type": "rope"}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.2,
    "moe_input_jitter_eps": 0.2, "moe_dropout": 0.1, "moe_layer_freq": 2, "moe_shared_expert_intermediate_size": 16,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
}  # fmt: skip


def full(method: str, number: int) -> dict[str, Any]:
    return {
        "activations_checkpoint_granularity": "full",
        "activations_checkpoint_method": method,
        "activations_checkpoint_num_layers": number,
    }


def modules(*names: str) -> dict[str, Any]:
    return {"activations_checkpoint_modules": list(names)}


SELECTIVE = {"activations_checkpoint_granularity": "selective"}
MODES: dict[str, dict[str, Any]] = {
    "uniform 1": full("uniform", 1),
    "uniform 2": full("uniform", 2),
    "uniform 99": full("uniform", 99),
    "block 2": full("block", 2),
    "block 99": full("block", 99),
    "selective": SELECTIVE,
    "norm": modules("norm"),
    "mlp_activation": modules("mlp_activation"),
    "cheap": modules("norm", "mlp_activation", "core_attention"),
    "block 2, cheap in the others": full("block", 2) | modules("norm", "mlp_activation", "core_attention"),
}
MOE_MODES = MODES | {
    "experts": {"moe_layer_recompute": True},
    "everything": modules("norm", "mlp_activation", "core_attention", "moe"),
    "block 3, experts in the others": full("block", 3) | modules("moe"),
}


def built(keys: FamilyKeys, dtype: torch.dtype = torch.float32, device: str = "cpu", **form: Any) -> LanguageModel:
    shape = BatchSpec(seq_length=TOKENS, **form)
    return build_model(keys, vocab_size=VOCAB, device=device, dtype=dtype, batch_spec=shape)


def gpt(**changes: Any) -> GPT:
    device, dtype = changes.pop("device", "cpu"), changes.pop("dtype", torch.float32)
    model = built(GPTKeys.model_validate(STACK | {"encoder_seq_length": TOKENS} | changes), dtype, device)
    assert isinstance(model, GPT)
    return model


def t5(**changes: Any) -> T5:
    stack = STACK | {"position_embedding_type": "relative", "num_layers": 3}
    of = {name: changes.pop(name, {}) for name in ("encoder", "decoder")}
    keys = {name: stack | changes | own for name, own in of.items()} | {"seq_length": TOKENS}
    model = built(T5Keys.model_validate(keys), decoder_seq_length=8, padded=True)
    assert isinstance(model, T5)
    return model


def bert(**changes: Any) -> BERT:
    keys = BertKeys.model_validate(STACK | {"encoder_seq_length": TOKENS} | changes)
    model = built(keys, padded=True)
    assert isinstance(model, BERT)
    return model


def drawn(seed: int, tokens: int = TOKENS) -> Tensor:
    return torch.randint(0, VOCAB, (2, tokens), generator=torch.Generator().manual_seed(seed))


def loss_of(model: LanguageModel) -> Tensor:
    torch.manual_seed(3)
    device = next(model.parameters()).device
    padding = torch.ones(2, TOKENS, dtype=torch.bool, device=device)
    padding[1, 9:] = False
    fields = [drawn(seed).to(device) for seed in (0, 1)]
    match model:
        case T5():
            written = [drawn(seed, 8).to(device) for seed in (1, 2)]
            return model.loss(fields[0], written[0], written[1], 16.0, encoder_padding=padding)
        case BERT():
            return model.loss(fields[0], fields[1], 24.0, padding=padding)
        case _:
            return model.loss(fields[0], fields[1], 24.0)


def trained(model: LanguageModel) -> dict[str, Tensor]:
    """The loss, every gradient and every count of a step; which random numbers come next."""
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    found = {"loss": loss.detach(), "random": torch.rand(3)}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    for name, layer in find_moe_layers(model).items():
        found[f"{name}.statistics"] = layer.statistics.clone()
        if layer.step_counts is not None:
            found[f"{name}.step_counts"] = layer.step_counts.clone()
    return found


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# ---------------------------------------------------------------- the same bits


STYLES: dict[str, dict[str, Any]] = {"gpt": {}, "llama": LLAMA, "experts": LLAMA | EXPERTS}


@cache
def plainly_trained(style: str) -> dict[str, Tensor]:
    return trained(t5() if style == "t5" else gpt(**STYLES[style]))


@pytest.mark.parametrize("mode", cases(MODES, fast=5))
@pytest.mark.parametrize("style", cases(["gpt", "llama"], fast=1))
def test_a_gpt_is_trained_alike(style: str, mode: str) -> None:
    assert_same(trained(gpt(**STYLES[style], **MODES[mode])), plainly_trained(style))


@pytest.mark.parametrize("mode", cases(MOE_MODES, fast=3))
def test_a_mixture_of_experts_is_trained_alike(mode: str) -> None:
    """Noise, losses of the router and counts are those of one run."""
    plain = plainly_trained("experts")
    assert plain["decoder.layers.0.mlp.statistics"][-1] == 1  # calls
    assert_same(trained(gpt(**STYLES["experts"], **MOE_MODES[mode])), plain)


@pytest.mark.parametrize("mode", cases(MODES, fast=2))
def test_a_t5_is_trained_alike(mode: str) -> None:
    assert_same(trained(t5(**MODES[mode])), plainly_trained("t5"))


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_each_stack_of_a_t5_has_a_mode_of_its_own(stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plainly_trained("t5")
    runs = layer_runs(monkeypatch)
    model = t5(**{stack: full("block", 2)})
    assert_same(trained(model), plain)
    for name, part in zip(("encoder", "decoder"), model.stacks, strict=True):
        assert [runs[id(layer)] for layer in part.layers] == [2, 2, 1] if name == stack else [1, 1, 1]


@pytest.mark.parametrize("mode", cases(["uniform 2", "cheap"], fast=1))
@pytest.mark.parametrize("block", ["pre_ln", "post_ln", "normformer"])
def test_every_order_of_norms_and_bert(block: str, mode: str) -> None:
    plain, ours = (trained(bert(transformer_block_type=block, **mode)) for mode in ({}, MODES[mode]))
    assert_same(ours, plain)


@pytest.mark.parametrize("mode", cases(MODES, fast=4))
def test_frozen_parameters_stop_no_gradient(mode: str) -> None:
    """Nothing that goes into the first layers needs a gradient: reentrant checkpoints lose all of theirs."""
    found: list[dict[str, Tensor | None]] = []
    for keys in ({}, MODES[mode]):
        model = gpt(**LLAMA, **keys, share_embeddings_and_output_weights=False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers" in name and "qkv" in name)
        loss_of(model).backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    plain, ours = found
    for name, gradient in plain.items():
        other = ours[name]
        assert (gradient is None) == (other is None) == ("qkv" not in name)
        assert gradient is None or (other is not None and torch.equal(gradient, other))


# ---------------------------------------------------------------- how often


def layer_runs(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    runs: Counter[int] = Counter()
    run = Layer._run

    def counted(self: Layer, *given: Any) -> Any:
        runs[id(self)] += 1
        return run(self, *given)

    monkeypatch.setattr(Layer, "_run", counted)
    return runs


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("uniform 1", [2, 2, 2, 2, 2]),
        ("uniform 2", [2, 2, 2, 2, 2]),
        ("uniform 99", [2, 2, 2, 2, 2]),
        ("block 2", [2, 2, 1, 1, 1]),
        ("block 99", [2, 2, 2, 2, 2]),
        ("selective", [1, 1, 1, 1, 1]),
        ("cheap", [1, 1, 1, 1, 1]),
    ],
)
def test_layers_run_as_often_as_the_mode_says(mode: str, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    runs = layer_runs(monkeypatch)
    model = gpt(**MODES[mode])
    layers = list(model.decoder.layers)
    trained(model)
    assert [runs[id(layer)] for layer in layers] == expected
    runs.clear()
    with torch.no_grad():
        loss_of(model)
    loss_of(model.eval())
    assert [runs[id(layer)] for layer in layers] == [2] * LAYERS  # once each: nothing is recomputed there


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.made[name] += name in ("mm", "addmm", "bmm", "baddbmm")
        return func(*args, **(kwargs or {}))


def products(**keys: Any) -> Counter[str]:
    model = gpt(**LLAMA, num_layers=2, hidden_dropout=0.0, **keys)
    with Products() as counted:
        loss_of(model).backward()
    return +counted.made


def test_cheap_parts_make_no_matrix_product_twice() -> None:
    """The second run of a norm or an activation ends before the product that reads it."""
    plain = products()
    assert plain["mm"] >= 2 * 4 * 3
    assert products(**modules("norm", "mlp_activation")) == plain
    attention = products(**SELECTIVE)
    assert attention - plain == Counter(baddbmm=2)  # of each layer the scores, but not what they weigh
    whole = products(**full("uniform", 1)) - plain
    assert whole == Counter(mm=2 * 3, baddbmm=2, bmm=2)  # all but the last product of each layer


# ---------------------------------------------------------------- what is kept


def kept_bytes(model: LanguageModel) -> int:
    """Bytes that the graph of a step holds, each storage once, without those of parameters."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model)
    loss.backward()
    return sum(kept.values())


@full_only
def test_less_is_kept_the_more_is_recomputed() -> None:
    """Spec 3.3: full < selective < none, and each layer more of `block` keeps less."""
    long = {"encoder_seq_length": TOKENS, "hidden_size": 16, "ffn_hidden_size": 16, "num_layers": LAYERS}
    kept = {mode: kept_bytes(gpt(**long, **keys)) for mode, keys in MODES.items()}
    none = kept_bytes(gpt(**long))
    assert kept["uniform 1"] < kept["selective"] < none
    assert kept["uniform 2"] < kept["uniform 1"] == kept["block 99"]
    assert kept["cheap"] < min(kept["norm"], kept["mlp_activation"], kept["selective"])
    blocks = [none, *(kept_bytes(gpt(**long, **full("block", n))) for n in range(1, LAYERS + 1))]
    assert blocks == sorted(blocks, reverse=True)
    assert len(set(blocks)) == len(blocks)
    assert blocks[-1] == kept["uniform 1"]


def test_nothing_is_kept_that_a_part_makes_again() -> None:
    """To the byte: what a layer saves without a part, less what that part is."""
    keys = LLAMA | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0}

    def of_layer(**changes: Any) -> int:
        two, one = (kept_bytes(gpt(**keys, num_layers=n, attention_backend="unfused", **changes)) for n in (2, 1))
        return two - one

    plain, rows, width, inner = of_layer(), 2 * TOKENS, 24, 40
    normed = 2 * (rows * width * 4 + rows * width * 4 + rows * 4)  # twice: the result, the quotient, the root
    assert plain - of_layer(**modules("norm")) == normed
    activated = rows * inner * 4 * 3  # the gate once activated, its sigmoid or what else SiLU makes, the product
    assert 0 < plain - of_layer(**modules("mlp_activation")) <= activated
    scores = 2 * 4 * TOKENS * TOKENS * 4
    assert plain - of_layer(**SELECTIVE) >= scores
    assert of_layer(**full("uniform", 1)) == rows * width * 4


# ---------------------------------------------------------------- compiled


def compile_layers(model: GPT, graphs: CompiledGraphs) -> None:
    for layer in model.decoder.layers:
        layer.compile(fullgraph=True, dynamic=False, backend=graphs.backend)


def made(graph: torch.fx.Graph) -> Counter[str]:
    names = (str(node.target).split(".")[1] for node in graph.nodes if str(node.target).startswith("aten."))
    return Counter(name for name in names if name in ("mm", "addmm", "bmm", "baddbmm"))


NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0}


def step_of(mode: str) -> tuple[dict[str, Tensor], Counter[str], int]:
    """The results of a compiled step, the products of a layer's backward, and the bytes that are kept."""
    graphs = CompiledGraphs()
    model = gpt(**LLAMA | NO_DROPOUT, attention_backend="unfused", num_layers=2, **MODES.get(mode, {}))
    compile_layers(model, graphs)
    step = trained(model)
    (backward,) = graphs.backwards  # both layers are one compilation
    return step, made(backward), kept_bytes(model)


@pytest.fixture(scope="module")
def plainly() -> Any:
    yield step_of("none")
    torch.compiler.reset()


@full_only
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo hides it, not "error"
@pytest.mark.parametrize(
    ("mode", "again"),
    [
        ("cheap", Counter(baddbmm=1)),
        ("uniform 1", Counter(mm=3, baddbmm=1, bmm=1)),
        ("uniform 2", Counter()),  # whole graphs run again
        ("norm", Counter()),
        ("mlp_activation", Counter()),
        ("selective", Counter(baddbmm=1)),
    ],
)
def test_compiled_layers_are_trained_alike_and_keep_less(mode: str, again: Counter[str], plainly: Any) -> None:
    """Of the matrix products, those alone run twice that make what is recomputed; the last of a layer never does."""
    (plain, products, all_kept), (ours, remade, kept) = plainly, step_of(mode)
    assert products == Counter(mm=8, bmm=4)
    assert remade - products == again
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)
    rows, layers, angles = 2 * TOKENS * 4, 2, 2 * TOKENS * 3 * 4
    norms, activations, scores = rows * 24 * 2, rows * 40, 2 * 4 * TOKENS * TOKENS * 4
    less = {
        "norm": norms,
        "mlp_activation": activations,
        "selective": scores,
        "cheap": norms + activations + scores,
    }
    if mode in less:
        assert all_kept - kept >= layers * less[mode]
    else:
        outside = kept_bytes_outside()
        assert kept == outside + angles * (mode == "uniform 1") + rows * 24 * (layers if mode == "uniform 1" else 1)


def kept_bytes_outside() -> int:
    """Bytes that embeddings, final norm and loss keep: what two layers save as written, less what each saves."""
    keys = LLAMA | NO_DROPOUT | full("uniform", 1)
    return 2 * kept_bytes(gpt(**keys, num_layers=1)) - kept_bytes(gpt(**keys, num_layers=2))


@full_only
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("style", [{}, EXPERTS], ids=["dense", "experts"])
def test_what_inductor_compiles_draws_the_same_noise_and_counts_once(style: dict[str, Any]) -> None:
    keys = LLAMA | style | {"num_layers": 2, "attention_backend": "unfused", "compile": True}
    plain = trained(gpt(**keys))
    for mode in ("uniform 1", "uniform 2", "everything" if style else "cheap"):
        torch.compiler.reset()
        for name, value in trained(gpt(**keys, **MOE_MODES[mode])).items():
            torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-5, msg=f"{mode}: {name}")
    torch.compiler.reset()


def test_the_kernel_of_a_gated_mlp_gives_the_same_bits_and_keeps_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; here in Triton's interpreter."""
    for module in (gated_activation_module, gated_projection_module, mlp_module):
        monkeypatch.setattr(module, "triton_runs_on", lambda _: True)
    keys = LLAMA | NO_DROPOUT | {"num_layers": 1}
    plain, ours = gpt(**keys), gpt(**keys, **modules("mlp_activation"))
    assert_same(trained(ours), trained(plain))
    assert kept_bytes(plain) - kept_bytes(ours) == 2 * TOKENS * 40 * 4
    calls: list[bool] = []
    function = mlp_module.gated_projection
    monkeypatch.setattr(mlp_module, "gated_projection", lambda *given: calls.append(True) or function(*given))
    trained(ours)
    assert calls == [True]
    trained(gpt(**keys | {"ffn_dropout": 0.1}, **modules("mlp_activation")))  # noise lies between: the general way
    assert calls == [True]


@pytest.mark.parametrize("compiled", [False, *extra(True)])
def test_the_kernels_of_unfused_attention_train_alike_and_keep_no_scores(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; here in Triton's interpreter."""
    keys = LLAMA | NO_DROPOUT | {"num_layers": 2, "hidden_size": 64, "attention_backend": "unfused"}
    plain, ours = gpt(**keys), gpt(**keys, **SELECTIVE)
    everything, wanted = kept_bytes(plain), trained(plain)
    monkeypatch.setattr(recompute_scores, "triton_runs_on", lambda _: True)
    graphs = CompiledGraphs()
    if compiled:
        compile_layers(ours, graphs)
    for name, value in trained(ours).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5, msg=name)
    scores, log_sum_exps = 2 * 4 * TOKENS * TOKENS * 4, 2 * 4 * TOKENS * 4
    mask = TOKENS * TOKENS  # which plain torch keeps too
    if compiled:
        assert made(graphs.forwards[0])["bmm"] == 1
        assert made(graphs.backwards[0])["bmm"] == 3
        assert not made(graphs.forwards[0])["baddbmm"] + made(graphs.backwards[0])["baddbmm"]
        torch.compiler.reset()
    else:
        assert everything - kept_bytes(ours) == 2 * (scores + mask - log_sum_exps)
