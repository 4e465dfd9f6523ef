"""Meaning of the keys of recomputation, and their conflicts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from config_helpers import gpt, load, problems
from gpt_builder import build_model
from resolved import build_data, cuda_graph_unsupported_reason, gpu_target, make_plan, uses_cuda_graph
from resolved import build_model as build_model_of_run
from tiers import looped
from tiny_run import tiny_config

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.families import family_slice, model_rules
from stoker.models.config.gpt import GPTKeys, gpt_slice
from stoker.models.config.memory import RecomputeSlice
from stoker.models.config.memory_rules import RECOMPUTE_RULES
from stoker.models.config.stack import StackSlice
from stoker.models.config.t5 import T5Keys
from stoker.models.layer import Layer
from stoker.models.layers.recomputed_attention import RecomputedAttention
from stoker.models.recompute.analysis import ineffective_recompute_messages, memory_saving_recompute, recompute_uses_rng
from stoker.models.stack import Stack
from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.core import run_summary
from stoker.trainer.plan.hardware import parse_gpu
from stoker.trainer.plan.search import effective_modules
from stoker.trainer.utils.errors import UserError

AT = "activations_checkpoint_"
BASE: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "encoder_seq_length": 8}
EXPERTS = {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01}
PARTIAL, FEWER = "num_micro_batches_with_partial_activation_checkpoints", f"{AT}layers_per_pipeline"
BLOCK = {f"{AT}granularity": "full", f"{AT}method": "block"}
UNIFORM = {f"{AT}granularity": "full", f"{AT}method": "uniform"}
LAST_ONLY = BLOCK | {f"{AT}num_layers": 3, f"{AT}modules": ["core_attention"], "moe_layer_freq": [0, 0, 0, 1]}


def keys(**changes: Any) -> GPTKeys:
    return GPTKeys.model_validate(BASE | changes)


def stack(**changes: Any) -> StackSlice:
    return gpt_slice(keys(**changes), vocab_size=10).stack


def sliced(chunk: int, layers: int, *modules: Any) -> RecomputeSlice:
    return RecomputeSlice(chunk=chunk, layers=layers, modules=frozenset(modules))


@looped(
    ("given", "expected"),
    [
        ({}, None),
        ({f"{AT}method": "block", f"{AT}num_layers": 2}, None),
        (UNIFORM | {f"{AT}num_layers": 1}, sliced(1, 4)),
        (UNIFORM | {f"{AT}num_layers": 3}, sliced(3, 4)),
        (UNIFORM | {f"{AT}num_layers": 9}, sliced(4, 4)),
        (UNIFORM | {f"{AT}num_layers": 0}, None),
        (BLOCK | {f"{AT}num_layers": 1, PARTIAL: 0}, sliced(1, 4)),
        (BLOCK | {f"{AT}num_layers": 1, PARTIAL: 2}, replace(sliced(1, 1), partial_micro_batches=2)),
        (BLOCK | {f"{AT}num_layers": 0, PARTIAL: 1}, replace(sliced(1, 0), partial_micro_batches=1)),
        (BLOCK | {f"{AT}num_layers": 4, FEWER: 1.5}, replace(sliced(1, 4), fewer_per_rank=1.5)),
        (UNIFORM | {f"{AT}num_layers": 1, PARTIAL: 2, FEWER: 1}, sliced(1, 4)),
        (BLOCK | {f"{AT}num_layers": 1}, sliced(1, 1)),
        (BLOCK | {f"{AT}num_layers": 9}, sliced(1, 4)),
        (BLOCK | {f"{AT}num_layers": 0}, None),
        ({f"{AT}granularity": "selective"}, sliced(1, 0, "core_attention")),
        ({f"{AT}granularity": "selective", f"{AT}modules": ["norm"]}, sliced(1, 0, "norm")),
        ({f"{AT}modules": ["norm", "mlp_activation"]}, sliced(1, 0, "norm", "mlp_activation")),
        (BLOCK | {f"{AT}num_layers": 2, f"{AT}modules": ["norm"]}, sliced(1, 2, "norm")),
        (UNIFORM | {f"{AT}num_layers": 2, f"{AT}modules": ["norm"]}, sliced(2, 4)),
        ({f"{AT}modules": ["norm"], "transformer_block_type": "post_ln"}, None),
        ({f"{AT}modules": ["moe"]}, None),
        ({"moe_layer_recompute": True}, None),
        (EXPERTS | {"moe_layer_recompute": True}, sliced(1, 0, "moe")),
        (EXPERTS | {f"{AT}modules": ["moe"]}, sliced(1, 0, "moe")),
        (EXPERTS | {f"{AT}modules": ["mlp_activation"]}, None),
        (EXPERTS | {f"{AT}modules": ["mlp_activation"], "moe_layer_freq": 2}, sliced(1, 0, "mlp_activation")),
        (
            EXPERTS | {f"{AT}modules": ["mlp_activation"], "moe_shared_expert_intermediate_size": 8},
            sliced(1, 0, "mlp_activation"),
        ),
    ],
)
def test_what_is_recomputed(given: dict[str, Any], expected: RecomputeSlice | None) -> None:
    assert stack(**given).recompute == expected


def test_what_ranks_of_a_pipeline_recompute_is_told() -> None:
    block = replace(sliced(1, 2, "norm"), fewer_per_rank=1.5)
    assert block.describe_stages(3) == "2 layers of each stage; norm of the others; rank r int(r * 1.5) layers fewer"
    partial = replace(sliced(1, 0), partial_micro_batches=1)
    assert partial.describe_stages(3) == "all layers except in 1 of the micro batches in flight"
    assert sliced(2, 8).describe_stages(3) == "3 layers of each stage in chunks of 2"


# ---------------------------------------------------------------- rules


@looped(
    ("given", "level", "first", "says"),
    [
        ({f"{AT}granularity": "full"}, "error", f"{AT}method", "to select the layers"),
        (UNIFORM, "error", f"{AT}num_layers", "to select the layers"),
        (BLOCK, "error", f"{AT}num_layers", "to select the layers"),
        ({f"{AT}granularity": "full", f"{AT}num_layers": 1}, "error", f"{AT}method", "to select the layers"),
        ({f"{AT}method": "block"}, "warning", f"{AT}method", "nothing is recomputed"),
        ({f"{AT}method": "block", f"{AT}num_layers": 0}, "warning", f"{AT}method", "have no effect without"),
        ({f"{AT}num_layers": 1}, "info", f"{AT}num_layers", "has no effect without"),
        ({f"{AT}granularity": "selective", f"{AT}method": "block"}, "info", f"{AT}method", "every layer"),
        (BLOCK | {f"{AT}num_layers": 0}, "warning", f"{AT}num_layers", "older models read it as 1"),
        (UNIFORM | {f"{AT}num_layers": 0}, "warning", f"{AT}num_layers", "recomputes no layer"),
        (BLOCK | {f"{AT}num_layers": 2, PARTIAL: 0}, "warning", PARTIAL, "every micro batch recompute all layers"),
        ({PARTIAL: 1}, "error", PARTIAL, r"needs `activations_checkpoint_granularity` \(full\)"),
        ({PARTIAL: 0}, "info", PARTIAL, "has no effect with `activations_checkpoint_granularity` .null"),
        ({f"{AT}granularity": "selective", PARTIAL: 1}, "warning", PARTIAL, r"granularity` \(selective\)"),
        (UNIFORM | {f"{AT}num_layers": 1, FEWER: 0.5}, "warning", FEWER, r"\(0.5\) has no effect with .* \(uniform\)"),
        (
            BLOCK | {f"{AT}num_layers": 1, PARTIAL: 1, f"{AT}modules": ["norm"]},
            "error",
            f"{AT}modules",
            "cannot be combined with `num_micro_batches",
        ),
        (BLOCK | {f"{AT}num_layers": 5}, "warning", f"{AT}num_layers", r"`num_layers` \(4\)"),
        (
            UNIFORM | {f"{AT}num_layers": 1, f"{AT}modules": ["norm"]},
            "warning",
            f"{AT}modules",
            "recomputes everything",
        ),
        (
            EXPERTS | UNIFORM | {f"{AT}num_layers": 1, "moe_layer_recompute": True},
            "error",
            "moe_layer_recompute",
            "cannot be combined",
        ),
        ({f"{AT}modules": ["moe"]}, "warning", f"{AT}modules", "no layer has experts"),
        (
            EXPERTS | BLOCK | {f"{AT}num_layers": 2, "moe_layer_recompute": True, "moe_layer_freq": [1, 1, 0, 0]},
            "warning",
            "moe_layer_recompute",
            "no layer that is not recomputed as a whole has experts",
        ),
        (EXPERTS | {f"{AT}modules": ["mlp_activation"]}, "warning", f"{AT}modules", "every layer has experts"),
        (
            {f"{AT}modules": ["norm"], "transformer_block_type": "post_ln"},
            "warning",
            f"{AT}modules",
            "the residual stream",
        ),
        (
            {f"{AT}granularity": "selective", f"{AT}modules": ["norm"]},
            "info",
            f"{AT}modules",
            "not `core_attention`",
        ),
    ],
)
def test_one_line_for_each_contradiction(given: dict[str, Any], level: str, first: str, says: str) -> None:
    (finding,) = [finding for rule in RECOMPUTE_RULES for finding in rule(keys(**given))]
    assert (finding.level, finding.keys[0]) == (level, first)
    assert re.search(says, finding.message)
    assert finding.fix
    assert finding in list(model_rules(keys(**given)))


@looped(
    "given",
    [
        UNIFORM | {f"{AT}num_layers": 1},
        BLOCK | {f"{AT}num_layers": 2, f"{AT}modules": ["norm", "mlp_activation", "core_attention"]},
        BLOCK | {f"{AT}num_layers": 0, PARTIAL: 1},
        BLOCK | {f"{AT}num_layers": 4, FEWER: 1, f"{AT}modules": ["norm"]},
        {FEWER: 0},
        {f"{AT}granularity": "selective"},
        {f"{AT}granularity": "selective", f"{AT}modules": ["core_attention", "norm"]},
        EXPERTS | {"moe_layer_recompute": True},
        EXPERTS | BLOCK | {f"{AT}num_layers": 2, "moe_layer_recompute": True},
        {"moe_layer_recompute": True},  # the rules of experts say it
    ],
)
def test_what_acts_has_nothing_against_it(given: dict[str, Any]) -> None:
    assert [finding for rule in RECOMPUTE_RULES for finding in rule(keys(**given))] == []


def test_the_lines_of_nemos_documents_run_verbatim() -> None:
    data = "data=mock"
    selective = gpt(load(data, "model.activations_checkpoint_granularity=selective").root)
    assert selective.activations_checkpoint_granularity == "selective"
    whole = [data, "model.activations_checkpoint_granularity=full", "model.activations_checkpoint_method=block"]
    assert gpt(load(*whole, "model.activations_checkpoint_num_layers=2").root).activations_checkpoint_num_layers == 2
    uniform = "model.activations_checkpoint_method=uniform"
    assert load(whole[0], whole[1], uniform, "+model.activations_checkpoint_num_layers=1").root
    assert "model.activations_checkpoint_method" in problems(*whole[:2])
    assert "model.activations_checkpoint_num_layers" in problems(*whole, "model.activations_checkpoint_num_layers=-1")
    assert "model.activations_checkpoint_granularity" in problems("model.activations_checkpoint_granularity=partial")
    t5 = ["model=t5_tiny", "data=mock", "model.encoder.activations_checkpoint_granularity=selective"]
    found = load(*t5, "model.encoder.attention_backend=unfused").root.model
    assert isinstance(found, T5Keys)
    assert found.encoder.activations_checkpoint_granularity == "selective"
    assert found.decoder.activations_checkpoint_granularity is None


# ---------------------------------------------------------------- where the backend keeps no scores


def stacks(backend: str, **changes: Any) -> tuple[Stack, list[str]]:
    given = keys(**{f"{AT}granularity": "selective"} | changes, attention_backend=backend)
    form = BatchSpec(seq_length=8)
    described = family_slice(given, vocab_size=10, batch_spec=form)
    model = build_model(given, vocab_size=10, batch_spec=form)
    stack = model.get_submodule("decoder")
    assert isinstance(stack, Stack)
    return stack, list(
        ineffective_recompute_messages(described, model.attention_decisions, None, compiled=model.compiled)
    )


def wrapped(stack: Stack) -> list[bool]:
    found: list[bool] = []
    for layer in stack.layers:
        assert isinstance(layer, Layer)
        found.append(isinstance(layer.attention.backends["training"], RecomputedAttention))
        assert not isinstance(layer.attention.backends["evaluation"], RecomputedAttention)
    return found


@pytest.mark.parametrize("backend", ["unfused", "sdpa_math", "reference"])
def test_core_attention_is_recomputed_where_scores_are_kept(backend: str) -> None:
    stack, notes = stacks(backend)
    assert wrapped(stack) == [True] * 4
    assert notes == []
    stack, _ = stacks(backend, **BLOCK | {f"{AT}num_layers": 3, f"{AT}modules": ["core_attention"]})
    assert wrapped(stack) == [False, False, False, True]


def test_without_scores_nothing_is_wrapped_and_one_line_names_what_saves() -> None:
    stack, (note,) = stacks("sdpa_flash", attention_dropout=0.0)
    assert wrapped(stack) == [False] * 4
    assert "sdpa_flash keeps no scores" in note
    assert "model.activations_checkpoint_modules=[norm,mlp_activation]" in note


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, "norm,mlp_activation"),
        ({f"{AT}modules": ["core_attention", "norm"]}, "norm,mlp_activation"),
        ({f"{AT}modules": ["core_attention", "norm", "mlp_activation"]}, None),
        ({"transformer_block_type": "post_ln"}, "mlp_activation"),
        (EXPERTS, "norm"),
        (EXPERTS | {"moe_shared_expert_intermediate_size": 8}, "norm,mlp_activation"),
        (EXPERTS | {"moe_layer_freq": 2}, "norm,mlp_activation"),
        (EXPERTS | {"transformer_block_type": "post_ln"}, "moe"),
        (EXPERTS | {"moe_layer_recompute": True}, "norm,moe"),
        (EXPERTS | {f"{AT}modules": ["core_attention", "norm"]}, "norm,moe"),
        (EXPERTS | {f"{AT}modules": ["core_attention", "norm", "moe"]}, None),
        (EXPERTS | LAST_ONLY, "norm"),  # which has experts
    ],
)  # fmt: skip
def test_what_is_advised_acts_in_this_stack_and_keeps_what_is_set(changes: dict[str, Any], names: str | None) -> None:
    _, (note,) = stacks("sdpa_flash", **{"attention_dropout": 0.0} | changes)
    assert note.endswith("keeps no scores" if names is None else f"_checkpoint_modules=[{names}] saves memory")
    if names is not None:
        slices = stack(**{f"{AT}modules": names.split(",")} | {k: v for k, v in changes.items() if "modules" not in k})
        assert slices.recompute is not None
        assert slices.recompute.modules == set(names.split(","))


@pytest.mark.parametrize(
    ("backend", "changes", "expected"),
    [
        ("unfused", {}, sliced(1, 0, "core_attention")),
        ("sdpa_flash", {}, None),
        ("sdpa_flash", {f"{AT}modules": ["core_attention", "norm"]}, sliced(1, 0, "norm")),
        ("sdpa_flash", BLOCK | {f"{AT}num_layers": 3, f"{AT}modules": ["core_attention"]}, sliced(1, 3)),
    ],
)
def test_a_run_tells_only_what_it_recomputes(
    tmp_path: Path, backend: str, changes: dict[str, Any], expected: RecomputeSlice | None
) -> None:
    changes = {f"{AT}granularity": "selective", "attention_backend": backend, "attention_dropout": 0.0} | changes
    root = tiny_config(
        tmp_path, model__num_layers=4, **{f"model__{name}": value for name, value in changes.items()}
    ).root
    data, cpu = build_data(root), torch.device("cpu")
    model = build_model_of_run(root, data)
    said = list(run_summary.summarize_run(resolve_run(root), model, data, cpu, cuda_graph=False))
    told = [line for line in said if line.startswith("recompute ")]
    assert told == ([f"recompute {expected.description}"] if expected else [])
    assert sum("has no effect" in line for line in said) == (backend != "unfused")


def test_each_attention_of_a_t5_is_looked_at() -> None:
    selective = {f"{AT}granularity": "selective", "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    flash = selective | {"attention_backend": "sdpa_flash", "attention_dropout": 0.0}
    given = T5Keys.model_validate({"encoder": selective | {"attention_backend": "unfused"}, "decoder": flash})
    form = BatchSpec(seq_length=8, decoder_seq_length=8)
    model = build_model(given, vocab_size=10, micro_batch_size=1, batch_spec=form)
    described = family_slice(given, vocab_size=10, batch_spec=form)
    notes = list(ineffective_recompute_messages(described, model.attention_decisions, None, compiled=model.compiled))
    assert [note.split("`")[1] for note in notes] == ["decoder training", "cross training"]
    assert all("model.decoder.activations_checkpoint_modules" in note for note in notes)


@pytest.mark.parametrize(
    ("changes", "compiled", "idle"),
    [
        ({}, False, True),
        ({}, True, False),  # it keeps besides where the result is positive
        ({"activation": "squared-relu"}, False, False),
        ({"activation": "reglu"}, False, False),
        ({"ffn_dropout": 0.1}, False, False),
        ({"transformer_block_type": "normformer"}, False, False),
    ],
)
def test_a_relu_that_is_recomputed_saves_nothing_as_written(
    changes: dict[str, Any], compiled: bool, idle: bool
) -> None:
    relu = {"openai_gelu": False, "activation": "relu", f"{AT}modules": ["mlp_activation"]} | changes
    given, form = keys(**relu, attention_backend="unfused"), BatchSpec(seq_length=8)
    described = family_slice(given, vocab_size=10, batch_spec=form)
    decisions = build_model(given, vocab_size=10, batch_spec=form).attention_decisions
    notes = list(ineffective_recompute_messages(described, decisions, None, compiled=compiled))
    assert memory_saving_recompute(described, decisions, None, compiled=compiled) == (
        None if idle else sliced(1, 0, "mlp_activation"),
    )
    assert len(notes) == idle
    assert all("relu needs only its output" in note and "=[norm] saves memory" in note for note in notes)
    overrides = [f"model.{key}={value}" for key, value in changes.items()]
    root = load(
        "model=gpt3_1b", "model.activation=relu", "model.openai_gelu=False", *overrides, f"model.compile={compiled}"
    ).root
    found = effective_modules(make_plan(root, gpu_target(root, parse_gpu("h100"))))
    assert ("mlp_activation" in found) is not idle


@pytest.mark.parametrize(
    ("changes", "compiled", "kept", "says"),
    [
        ({}, True, None, ["norm", "mlp_activation"]),
        ({f"{AT}modules": ["mlp_activation"]}, False, None, ["mlp_activation"]),
        ({}, False, "mlp activation, norm", []),  # an eager layer repeats the norm, and so cannot be one function
        ({"ffn_dropout": 0.1}, True, "mlp activation", ["norm"]),
        ({"num_layers": 3, "first_last_layers_bf16": True}, True, "mlp activation, norm", []),
    ],
)
def test_what_fp8_does_not_save_is_not_recomputed(
    changes: dict[str, Any], compiled: bool, kept: str | None, says: list[str]
) -> None:
    fp8 = {"fp8": True, "activation": "swiglu", "openai_gelu": False, "bias": False, "hidden_size": 32}
    fp8 |= {"ffn_hidden_size": 32, f"{AT}modules": ["norm", "mlp_activation"]} | changes
    given, form = keys(**fp8), BatchSpec(seq_length=8)
    described = family_slice(given, vocab_size=10, batch_spec=form)
    decisions = build_model(given, vocab_size=10, batch_spec=form).attention_decisions
    (saving,) = memory_saving_recompute(described, decisions, None, compiled=compiled)
    assert (saving and saving.description) == (kept and f"{kept} of every layer")
    notes = list(ineffective_recompute_messages(described, decisions, None, compiled=compiled))
    assert [note.split()[1] for note in notes] == says


# ---------------------------------------------------------------- CUDA graphs


@pytest.mark.parametrize("scheme", ["lora", "adapter"])
def test_recomputed_dropout_of_fine_tuning_can_be_recorded(tmp_path: Path, scheme: str) -> None:
    peft = {"peft_scheme": scheme, f"{scheme}_tuning": {"adapter_dropout": 0.1}}
    model = {"hidden_dropout": 0.1, "attention_dropout": 0.0, "peft": peft, **UNIFORM, f"{AT}num_layers": 1}
    changes = {f"model__{name}": value for name, value in model.items()}
    root = tiny_config(tmp_path, trainer__accelerator="auto", **changes).root
    assert cuda_graph_unsupported_reason(root, torch.device("cuda")) is None


@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
def test_only_masks_of_other_packages_are_not_trusted_in_compiled_layers(
    tmp_path: Path, attention_dropout: float
) -> None:
    """PyTorch 2.13 on a GPU."""
    peft = {"peft_scheme": "lora", "lora_tuning": {"adapter_dropout": 0.1}}
    attention = {"model__attention_dropout": attention_dropout, "model__attention_backend": "sdpa_flash"}
    changes = {"model__hidden_dropout": 0.1, "model__peft": peft} | attention
    root = tiny_config(tmp_path, trainer__accelerator="auto", **changes).root
    target = gpu_target(root, parse_gpu("h100"))
    target = replace(target, software=replace(target.software, torch=(2, 13)))
    assert make_plan(root, target, vocab_size=300).inputs.stacks[0].compiled == (attention_dropout == 0)


DROPOUTS = ("hidden_dropout", "attention_dropout", "ffn_dropout")
DRAWING: dict[str, tuple[dict[str, Any], str | None]] = {
    "attention": ({"attention_dropout": 0.1, "attention_backend": "sdpa_math"}, "attention"),
    "jitter": (EXPERTS | {"moe_input_jitter_eps": 0.1}, None),
    "dropouts": (EXPERTS | dict.fromkeys((*DROPOUTS, "moe_dropout"), 0.1) | {"attention_backend": "unfused"}, None),
}


@pytest.mark.parametrize("source", DRAWING)
def test_each_part_says_that_it_draws(source: str) -> None:
    changes, at = DRAWING[source]
    quiet = dict.fromkeys(DROPOUTS, 0.0)
    facts: Any = {"device": "cpu", "dtype": torch.float32, "flags": AttentionFlags(), "micro_batch_size": 1}
    given = keys(**quiet | changes | UNIFORM | {f"{AT}num_layers": 1})
    model = build_model(given, vocab_size=10, batch_spec=BatchSpec(seq_length=8), **facts)
    layer: Any = model.get_submodule("decoder.layers.0")
    assert layer.preserve_rng_state == (at is not None)
    drawing = [name for name, part in layer.named_modules() if getattr(part, "uses_rng", False)]
    assert drawing == ([] if at is None else [at])


@pytest.mark.parametrize(
    ("given", "draws"),
    [
        ({}, False),
        (UNIFORM | {f"{AT}num_layers": 1}, True),
        (UNIFORM | {f"{AT}num_layers": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0}, False),
        ({f"{AT}granularity": "selective"}, True),
        ({f"{AT}granularity": "selective", "attention_dropout": 0.0}, False),
        ({f"{AT}modules": ["norm", "mlp_activation"]}, False),
        ({f"{AT}modules": ["mlp_activation"], "ffn_dropout": 0.1}, False),
        (UNIFORM | {f"{AT}num_layers": 1, "attention_dropout": 0.0}, False),
    ],
)
def test_what_draws_again_cannot_be_recorded(tmp_path: Any, given: dict[str, Any], draws: bool) -> None:
    family = family_slice(keys(**given), vocab_size=10, batch_spec=BatchSpec(seq_length=8))
    assert recompute_uses_rng(family, {}) == draws
    dropouts = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    changes = {f"model__{name}": value for name, value in (dropouts | given).items()}
    wish, perhaps = (
        tiny_config(tmp_path, trainer__accelerator="auto", model__enable_cuda_graph=graph, **changes).root
        for graph in (True, None)
    )
    cuda = torch.device("cuda")
    assert uses_cuda_graph(perhaps, cuda, 1) != draws
    if draws:
        with pytest.raises(UserError, match=r"RNG state, which `activations_checkpoint_.*` \("):
            uses_cuda_graph(wish, cuda, 1)
