"""The keys of a mixture of experts: what they mean, what they have against each other, what they cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from config_helpers import gpt, historical, load, problems, write
from gpt_builder import build_gpt
from resolved import check_memory, uses_cuda_graph
from tiers import looped
from tiny_run import tiny_config
from torch.utils.flop_counter import FlopCounterMode

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.build import build_model, num_parameters
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.bert import BertKeys
from stoker.models.config.families import FamilyKeys, family_slice, model_rules
from stoker.models.config.gpt import GPTKeys, gpt_slice
from stoker.models.config.key_block import Finding
from stoker.models.config.moe import MoEKeys, MoESlice, moe_slice
from stoker.models.config.moe_rules import moe_rules
from stoker.models.config.stack import StackKeys
from stoker.models.config.t5 import T5Keys, T5StackKeys
from stoker.models.model_cost import count_parameters, training_flops_per_sample
from stoker.models.moe.moe_layer import find_moe_layers
from stoker.trainer.config.problems import ConfigError
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.plan import memory_check
from stoker.trainer.utils.errors import UserError

CPU = torch.device("cpu")
EXPERTS = {"num_moe_experts": 8}
BALANCED = {**EXPERTS, "moe_aux_loss_coeff": 0.01}
SINKHORN = {**EXPERTS, "moe_router_load_balancing_type": "sinkhorn"}
CAPACITY = {**BALANCED, "moe_expert_capacity_factor": 1.0}
FORCED = "moe_router_force_load_balancing"
SIGMOID = {**BALANCED, "moe_router_score_function": "sigmoid"}
SEED_LINES = """
num_moe_experts: 8
moe_router_topk: 2
moe_router_load_balancing_type: 'aux_loss'
moe_aux_loss_coeff: 1e-2
moe_z_loss_coeff: 1e-3
"""


def stack(changes: dict[str, Any], *, of_t5: bool = False) -> StackKeys:
    return (T5StackKeys if of_t5 else StackKeys).model_validate({"num_layers": 4, "bias": False, **changes})


def sliced(changes: dict[str, Any], *, of_t5: bool = False) -> MoESlice:
    found = moe_slice(stack(changes, of_t5=of_t5))
    assert found is not None
    return found


def found(changes: dict[str, Any], *, of_t5: bool = False) -> list[Finding]:
    return list(moe_rules(stack(changes, of_t5=of_t5)))


def told(config: RunConfig) -> dict[str, str]:
    return {finding.keys[0].removeprefix("model."): finding.level for finding in config.findings}


def origin_of(config: RunConfig, path: str) -> str:
    return next(row.origin for row in config.key_reports if row.path == path)


# ---------------------------------------------------------------- what the keys mean


def test_a_stack_is_dense_unless_it_has_experts() -> None:
    assert moe_slice(stack({})) is None
    assert sliced({"num_moe_experts": 1, "moe_router_topk": 1}).experts == 1
    assert moe_slice(stack({"num_moe_experts": 1}, of_t5=True)) is None
    assert sliced({"num_moe_experts": 2}, of_t5=True).experts == 2


@looped(
    ("changes", "gpt_has", "t5_has"),
    [
        ({}, (2, "aux_loss"), (1, "sinkhorn")),
        ({"moe_router_topk": 2}, (2, "aux_loss"), (2, "aux_loss")),
        ({"moe_router_topk": 1}, (1, "aux_loss"), (1, "aux_loss")),
        ({"moe_router_load_balancing_type": "aux_loss"}, (2, "aux_loss"), (2, "aux_loss")),
        ({"moe_router_load_balancing_type": "sinkhorn"}, (2, "sinkhorn"), (1, "sinkhorn")),
        ({"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 3}, (3, "sinkhorn"), (3, "sinkhorn")),
        ({"moe_router_load_balancing_type": "none"}, (2, "none"), (2, "none")),
    ],
)
def test_what_a_router_does_that_nobody_named(changes: Any, gpt_has: Any, t5_has: Any) -> None:
    for of_t5, expected in ((False, gpt_has), (True, t5_has)):
        router = sliced(EXPERTS | changes, of_t5=of_t5)
        assert (router.topk, router.balancing) == expected


@looped(
    ("changes", "layers"),
    [
        ({}, "1111"),
        ({"moe_layer_freq": 2}, "1010"),
        ({"moe_layer_freq": 3}, "1001"),
        ({"moe_layer_freq": 9}, "1000"),
        ({"moe_layer_freq": [0, 1, 1, 0]}, "0110"),
        ({"moe_frequency": 2}, "0101"),
        ({"moe_frequency": 3}, "0010"),
        ({"moe_frequency": 4}, "0001"),
    ],
)
def test_which_layers_have_experts(changes: Any, layers: str) -> None:
    assert "".join("01"[has] for has in sliced(EXPERTS | changes).layers) == layers


def test_what_a_slice_makes_of_the_keys() -> None:
    assert sliced({**EXPERTS, "ffn_hidden_size": 24}).ffn_hidden_size == 24
    assert sliced({**EXPERTS, "moe_ffn_hidden_size": 24}).ffn_hidden_size == 24
    assert sliced({**EXPERTS, "moe_router_topk": 1}).pre_softmax
    assert not sliced({**SIGMOID, "moe_router_topk": 1}).pre_softmax
    assert not sliced({**SINKHORN, "moe_router_topk": 1}).pre_softmax
    assert sliced({**EXPERTS, "moe_expert_capacity_factor": -1.0}).capacity_factor is None
    assert sliced({**CAPACITY, "moe_token_dropping": True}).pad_to_capacity
    assert [sliced({**EXPERTS, "moe_grouped_gemm": value}).implementation for value in (None, True, False)] == [
        "grouped",
        "grouped",
        "sequential",
    ]
    assert sliced(EXPERTS).bias_update_rate is None
    assert sliced({**SIGMOID, "moe_router_enable_expert_bias": True}).bias_update_rate == 1e-3
    assert sliced({**BALANCED, "moe_router_load_balancing_type": "none"}).aux_loss == 0
    half = sliced({**EXPERTS, "moe_router_num_groups": 4})
    assert half.num_groups is half.group_topk is None


def test_t5_keys_reach_their_own_stack() -> None:
    keys = T5Keys.model_validate({"encoder": {"num_moe_experts": 4}, "decoder": {"num_moe_experts": 1}})
    encoder, decoder = (
        each.moe
        for each in family_slice(keys, vocab_size=64, batch_spec=BatchSpec(seq_length=8, decoder_seq_length=4)).stacks
    )
    assert encoder is not None
    assert (encoder.balancing, decoder) == ("sinkhorn", None)


# ---------------------------------------------------------------- rules


@looped(
    ("changes", "expected", "words"),
    [
        # how many, and where
        ({**BALANCED, "moe_router_topk": 9}, "error moe_router_topk", "(9) must not be above `num_moe_experts` (8)"),
        ({**BALANCED, "num_moe_experts": 1}, "error moe_router_topk", "(2, the default)"),
        ({**BALANCED, "moe_layer_freq": 2, "moe_frequency": 2}, "error moe_frequency", "both select the layers"),
        ({**BALANCED, "moe_frequency": 5}, "error moe_frequency", "above `num_layers` (4)"),
        ({**BALANCED, "moe_layer_freq": [0, 1, 0]}, "error moe_layer_freq", "each of the 4 layers"),
        ({**BALANCED, "moe_layer_freq": [0, 0, 0, 0]}, "error moe_layer_freq", "leaves no layer"),
        ({**BALANCED, "transformer_block_type": "normformer"}, "error transformer_block_type", "no inner norm"),
        ({**BALANCED, "ffn_dropout": 0.1}, "warning ffn_dropout", "moe_dropout=0.1"),
        ({**BALANCED, "ffn_dropout": 0.1, "moe_frequency": 2}, "", ""),
        ({**BALANCED, "ffn_dropout": 0.1, "moe_shared_expert_intermediate_size": 8}, "", ""),
        # balance
        (BALANCED, "", ""),
        (EXPERTS, "warning moe_aux_loss_coeff", "(aux_loss, the default) has no effect"),
        (
            {**EXPERTS, "moe_router_load_balancing_type": "aux_loss"},
            "warning moe_aux_loss_coeff",
            "(aux_loss) has no effect",
        ),
        ({**EXPERTS, "moe_router_load_balancing_type": "none"}, "", ""),
        ({**BALANCED, "moe_router_load_balancing_type": "none"}, "warning moe_aux_loss_coeff", "no effect"),
        ({**BALANCED, "moe_router_topk": 8}, "warning moe_aux_loss_coeff", "goes to all experts"),
        ({**EXPERTS, "moe_router_topk": 8}, "", ""),
        # sinkhorn
        (SINKHORN, "", ""),
        ({**SINKHORN, "moe_aux_loss_coeff": 0.01}, "error moe_aux_loss_coeff", "cannot be combined"),
        ({**SINKHORN, "moe_expert_capacity_factor": 1.0}, "error moe_expert_capacity_factor", "has no capacity"),
        ({**SINKHORN, "moe_expert_capacity_factor": 0.0}, "error moe_expert_capacity_factor", "has no capacity"),
        ({**SINKHORN, "moe_expert_capacity_factor": -1.0}, "warning moe_expert_capacity_factor", "treated as null"),
        ({**SINKHORN, "moe_token_drop_policy": "position"}, "warning moe_token_drop_policy", "has no capacity"),
        ({**SINKHORN, "moe_pad_expert_input_to_capacity": True}, "error moe_pad_expert_input_to_capacity", "=false"),
        ({**SINKHORN, "moe_token_dropping": True}, "error moe_token_dropping", "has no capacity"),
        (
            {**SINKHORN, "moe_router_enable_expert_bias": True},
            "error moe_router_enable_expert_bias",
            "balances the load itself",
        ),
        ({**SINKHORN, "moe_router_pre_softmax": True}, "warning moe_router_pre_softmax", "no effect"),
        ({**SINKHORN, "moe_router_score_function": "sigmoid"}, "warning moe_router_score_function", "no effect"),
        ({**SINKHORN, "moe_router_topk_scaling_factor": 2.0}, "warning moe_router_topk_scaling_factor", "no effect"),
        ({**SINKHORN, "moe_router_num_groups": 2}, "warning moe_router_num_groups", "no effect"),
        ({**SINKHORN, "moe_router_group_topk": 2}, "warning moe_router_group_topk", "no effect"),
        # scores
        ({**BALANCED, "moe_router_topk": 1}, "warning moe_router_pre_softmax", "would get no gradient"),
        ({**BALANCED, "moe_router_topk": 1, "moe_router_pre_softmax": True}, "", ""),
        (
            {"num_moe_experts": 1, "moe_router_topk": 1, "moe_router_pre_softmax": True},
            "warning num_moe_experts",
            "also with `moe_router_pre_softmax`",
        ),
        ({**SIGMOID, "moe_router_topk": 1}, "", ""),
        ({**SIGMOID, "moe_router_pre_softmax": True}, "warning moe_router_pre_softmax", "no effect"),
        ({**BALANCED, "moe_router_enable_expert_bias": True}, "error moe_router_enable_expert_bias", "sigmoid"),
        ({**SIGMOID, "moe_aux_loss_coeff": 0.0, "moe_router_enable_expert_bias": True}, "", ""),
        (
            {
                **EXPERTS,
                "moe_router_score_function": "sigmoid",
                "moe_router_topk": 8,
                "moe_router_enable_expert_bias": True,
            },
            "warning moe_router_enable_expert_bias",
            "goes to all experts",
        ),
        ({**BALANCED, "moe_router_bias_update_rate": 0.1}, "warning moe_router_bias_update_rate", "no effect"),
        ({**BALANCED, FORCED: True}, f"warning {FORCED}", "learns nothing"),
        # groups
        ({**BALANCED, "moe_router_num_groups": 2}, "warning moe_router_num_groups", "without `moe_router_group_topk`"),
        ({**BALANCED, "moe_router_group_topk": 1}, "warning moe_router_group_topk", "without `moe_router_num_groups`"),
        ({**BALANCED, "moe_router_num_groups": 3, "moe_router_group_topk": 2}, "error moe_router_num_groups", "2, 4"),
        ({**BALANCED, "moe_router_num_groups": 2, "moe_router_group_topk": 3}, "error moe_router_group_topk", "above"),
        ({**BALANCED, "moe_router_num_groups": 8, "moe_router_group_topk": 1}, "error moe_router_group_topk", "fewer"),
        (
            {**BALANCED, "moe_router_num_groups": 2, "moe_router_group_topk": 2},
            "warning moe_router_group_topk",
            "if it equals",
        ),
        ({**BALANCED, "moe_router_num_groups": 4, "moe_router_group_topk": 2}, "", ""),
        # capacity
        (CAPACITY, "", ""),
        ({**CAPACITY, "moe_pad_expert_input_to_capacity": True}, "", ""),
        ({**CAPACITY, "moe_token_drop_policy": "position"}, "", ""),
        ({**BALANCED, "moe_expert_capacity_factor": 0.0}, "error moe_expert_capacity_factor", "drop every token"),
        ({**BALANCED, "moe_expert_capacity_factor": -1.0}, "warning moe_expert_capacity_factor", "treated as null"),
        ({**BALANCED, "moe_expert_capacity_factor": 4.0}, "warning moe_expert_capacity_factor", "at least all tokens"),
        ({**BALANCED, "moe_expert_capacity_factor": 3.9}, "", ""),
        (
            {**BALANCED, "moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 4.0},
            "",
            "",
        ),
        ({**BALANCED, "moe_pad_expert_input_to_capacity": True}, "error moe_pad_expert_input_to_capacity", "needs"),
        ({**BALANCED, "moe_token_dropping": True}, "error moe_token_dropping", "needs a capacity"),
        ({**CAPACITY, "moe_token_dropping": True}, "warning moe_token_dropping", "is read as"),
        ({**BALANCED, "moe_token_drop_policy": "position"}, "warning moe_token_drop_policy", "no effect"),
        # how they are calculated
        ({**BALANCED, "moe_grouped_gemm": True}, "", ""),
        ({**BALANCED, "moe_grouped_gemm": False}, "info moe_grouped_gemm", "slow"),
        (
            {**CAPACITY, "moe_pad_expert_input_to_capacity": True, "moe_grouped_gemm": False},
            "warning moe_grouped_gemm",
            "no effect",
        ),
        # without experts
        ({}, "", ""),
        ({"moe_router_topk": 2}, "warning moe_router_topk", "`moe_router_topk` (2) has no effect without"),
        ({"moe_dropout": 0.1, "moe_frequency": 2}, "warning moe_frequency", "have no effect without"),
    ],
)
def test_rules(changes: Any, expected: str, words: str) -> None:
    findings = found(changes)
    assert [f"{finding.level} {finding.keys[0]}" for finding in findings] == ([expected] if expected else [])
    for finding in findings:
        assert words in f"{finding.message} {finding.fix}"
        assert set(finding.keys) <= set(StackKeys.model_fields)
        assert all(f"`{key}`" in finding.message for key in finding.keys[:1])


def test_rules_of_t5() -> None:
    (info,) = found(EXPERTS, of_t5=True)
    assert (info.level, info.keys[0]) == ("info", "num_moe_experts")
    assert "sinkhorn" in info.message
    assert not found({"num_moe_experts": 1}, of_t5=True)
    (warning,) = found({"num_moe_experts": 1, "moe_dropout": 0.1}, of_t5=True)
    assert "which is a dense MLP in a T5" in warning.message
    info, error = found(BALANCED, of_t5=True)
    assert (error.level, error.keys[0]) == ("error", "moe_aux_loss_coeff")
    assert "(sinkhorn, the default of a T5)" in error.message
    assert not found({**BALANCED, "moe_router_topk": 2}, of_t5=True)


def test_rules_are_asked_for_each_stack_of_each_family() -> None:
    too_many = {"num_moe_experts": 2, "moe_router_topk": 3, "moe_aux_loss_coeff": 0.1}
    families: list[tuple[FamilyKeys, list[str]]] = [
        (GPTKeys.model_validate(too_many), [""]),
        (BertKeys.model_validate(too_many), [""]),
        (T5Keys.model_validate({"encoder": too_many, "decoder": too_many}), ["encoder.", "decoder."]),
    ]
    for keys, places in families:
        errors = [finding.keys[0] for finding in model_rules(keys) if finding.level == "error"]
        assert errors == [f"{place}moe_router_topk" for place in places]
    legacy = T5Keys.model_validate({"encoder": {"num_moe_experts": 4}, "decoder": {"num_moe_experts": 4}})
    infos = [finding.keys[0] for finding in model_rules(legacy) if finding.level == "info"]
    assert infos == ["encoder.num_moe_experts", "decoder.num_moe_experts"]


@looped(
    ("override", "rule"),
    [
        ("num_moe_experts=0", "an integer >= 1, or null"),
        ("num_moe_experts=-8", "an integer >= 1, or null"),
        ("moe_router_topk=0", "an integer >= 1, or null"),
        ("moe_aux_loss_coeff=-0.1", "a number >= 0"),
        ("moe_z_loss_coeff=-0.1", "a number >= 0, or null"),
        ("moe_input_jitter_eps=0", "a number > 0 and < 1, or null"),
        ("moe_input_jitter_eps=1", "a number > 0 and < 1, or null"),
        ("moe_token_dropping=sometimes", "true or false"),
        ("moe_token_dispatcher_type=post", "one of allgather, alltoall, alltoall_seq, flex, or null"),
        ("moe_frequency=0", "an integer >= 1"),
        ("moe_layer_freq=0", "an integer >= 1"),
        ("moe_layer_freq=[0, 2]", "a list of integers >= 0 and <= 1"),
        ("moe_layer_freq='([0]*1+[1]*3)'", "an integer >= 1"),
        ("moe_dropout=1", "a number >= 0 and < 1"),
        ("moe_router_load_balancing_type=seq_aux_loss", "use aux_loss"),
        ("moe_extended_tp=true", "the matrices of an expert are never split"),
        ("expert_tensor_parallel_size=2", "the matrices of an expert are never split"),
    ],
)
def test_values_that_are_refused(override: str, rule: str) -> None:
    key = f"model.{override.partition('=')[0]}"
    problem = problems(*(f"model.{name}={value}" for name, value in BALANCED.items()), f"model.{override}")[key]
    assert rule in problem.rule


def test_a_cure_that_adds_a_balancing_loss_gives_it_a_coefficient() -> None:
    key, coefficient = "model.moe_router_load_balancing_type", "model.moe_aux_loss_coeff"
    experts = ["model.num_moe_experts=8", "model.moe_router_topk=2"]
    fixes = [problems(*experts, f"{key}=seq_aux_loss", *more)[key].fix for more in ([], [f"{coefficient}=0.1"])]
    assert fixes == [f"{key}=aux_loss {coefficient}=0.01", f"{key}=aux_loss"]
    factor = "model.moe_expert_capacity_factor"
    fix = problems(*experts, f"{key}=sinkhorn", f"{factor}=1.0")[factor].fix
    assert f"{key}=aux_loss {coefficient}=0.01, or" in fix
    assert not load(*experts, *fixes[0].split()).findings


def test_what_means_nothing_here_is_accepted() -> None:
    config = load(
        "+model.moe_shared_expert_overlap=true",
        "+model.moe_use_legacy_grouped_gemm=true",
        "+model.moe_permute_fusion=true",
        "+model.moe_extended_tp=false",
        "+model.expert_tensor_parallel_size=1",
        "+model.expert_model_parallel_size=1",
    )
    assert len(historical(config)) == 3
    assert told(config) == {"moe_shared_expert_overlap": "info"}


def test_a_recording_does_not_wait_for_counts() -> None:
    experts = ["trainer=gpu", "model.num_moe_experts=8", "model.moe_aux_loss_coeff=0.01"]
    slow = [*experts, "model.moe_grouped_gemm=false"]
    (problem,) = problems(*slow, "model.enable_cuda_graph=true").values()
    assert problem.key == "model.moe_grouped_gemm"
    (wrong, other) = problems("model=t5_moe_base", *slow, "model.enable_cuda_graph=true")
    assert (wrong, other) == ("model.encoder.moe_grouped_gemm", "model.decoder.moe_grouped_gemm")
    card = torch.device("cuda")
    fast = load(*experts, "model.enable_cuda_graph=true").root
    assert uses_cuda_graph(fast, card, 1)
    assert uses_cuda_graph(load("model=t5_moe_base", "model.enable_cuda_graph=null").root, card, 1)
    assert not uses_cuda_graph(load(*slow, "model.enable_cuda_graph=null").root, card, 1)
    padded = ["model.moe_expert_capacity_factor=1.0", "model.moe_pad_expert_input_to_capacity=true"]
    assert uses_cuda_graph(load(*slow, *padded, "model.enable_cuda_graph=true").root, card, 1)


# ---------------------------------------------------------------- the documents of NeMo


def test_the_lines_of_the_document_load(tmp_path: Path) -> None:
    lines = "".join(f"  {line}\n" for line in SEED_LINES.split("\n") if line)
    more = "  moe_input_jitter_eps: null\n  moe_token_dropping: False\n  moe_token_dispatcher_type: 'allgather'\n"
    write(tmp_path, "moe", f"defaults: [train]\nmodel:\n{lines}{more}")
    config = load(name="moe", directory=tmp_path)
    keys = gpt(config.root)
    assert (keys.num_moe_experts, keys.moe_router_topk, keys.moe_aux_loss_coeff) == (8, 2, 0.01)
    assert keys.moe_z_loss_coeff == 0.001
    assert told(config) == {"moe_token_dispatcher_type": "info"}


def test_overrides_with_a_plus_load() -> None:
    config = load("+model.num_moe_experts=8", "+model.moe_router_topk=2")
    assert sliced(gpt(config.root).model_dump(include=set(MoEKeys.own_keys()))).topk == 2
    assert told(config) == {"moe_aux_loss_coeff": "warning"}
    config = load("++model.num_moe_experts=8", "model.moe_router_topk=2", "model.moe_aux_loss_coeff=1e-2")
    assert not config.findings


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall", "alltoall_seq", "flex"])
def test_the_typo_of_the_document_is_the_dispatcher(dispatcher: str) -> None:
    typo = f"model.moe_token_dropping={dispatcher}"
    balanced = [f"model.{name}={value}" for name, value in BALANCED.items()]
    config = load(f"+{typo}", *balanced)
    keys = gpt(config.root)
    assert (keys.moe_token_dispatcher_type, keys.moe_token_dropping) == (dispatcher, False)
    warning, info = config.findings
    assert (warning.level, info.level) == ("warning", "info")
    assert "typo" in warning.message
    assert origin_of(config, "model.moe_token_dispatcher_type").startswith(f"+{typo}")
    other = "flex" if dispatcher == "allgather" else "allgather"
    with pytest.raises(ConfigError) as error:
        load(typo, *balanced, f"model.moe_token_dispatcher_type={other}")
    (problem,) = error.value.problems
    assert (problem.key, problem.value) == ("model.moe_token_dropping", dispatcher)
    assert load(typo, *balanced, f"model.moe_token_dispatcher_type={dispatcher}").root == config.root


def test_a_key_of_a_t5_may_stand_at_model() -> None:
    """Where it is read for both stacks, the typo too."""
    config = load("model=t5_tiny", "+model.num_moe_experts=4", "model.moe_token_dropping=alltoall")
    keys = config.root.model
    assert isinstance(keys, T5Keys)
    for name, each in (("encoder", keys.encoder), ("decoder", keys.decoder)):
        assert (each.num_moe_experts, each.moe_token_dispatcher_type) == (4, "alltoall")
        path = f"model.{name}.moe_token_dispatcher_type"
        assert origin_of(config, path).startswith("model.moe_token_dropping=alltoall")
    (wrong,) = problems("model=t5_tiny", "model.num_moe_experts=4", "model.encoder.num_moe_experts=-1").values()
    assert wrong.key == "model.encoder.num_moe_experts"
    problem = problems("model=t5_tiny", "model.num_moe_experts=4", "model.moe_router_topk=5")
    assert problem["model.encoder.moe_router_topk"].origin.startswith("model.moe_router_topk=5")


def test_other_spellings_of_values() -> None:
    balanced = [f"model.{name}={value}" for name, value in CAPACITY.items()]
    config = load(*balanced, "model.moe_token_drop_policy=prob", "model.moe_router_dtype=null")
    assert told(config) == {"moe_token_drop_policy": "warning", "moe_router_dtype": "info"}
    assert gpt(config.root).moe_token_drop_policy == "probs"
    assert gpt(config.root).moe_router_dtype == "fp32"


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ("num_local_experts", "num_moe_experts"),
        ("num_experts_per_tok", "moe_router_topk"),
        ("norm_topk_prob", "moe_router_pre_softmax"),
        ("router_jitter_noise", "moe_input_jitter_eps"),
        ("moe_force_load_balance", "moe_router_force_load_balancing"),
        ("n_shared_experts", "moe_shared_expert_intermediate_size"),
        ("routed_scaling_factor", "moe_router_topk_scaling_factor"),
        ("first_k_dense_replace", "moe_layer_freq"),
        ("n_group", "moe_router_num_groups"),
        ("scoring_func", "moe_router_score_function"),
    ],
)
def test_names_of_others_are_answered_with_ours(foreign: str, ours: str) -> None:
    assert f"model.{ours}" in problems(f"+model.{foreign}=1")[f"model.{foreign}"].fix


@pytest.mark.parametrize("name", ["gpt_moe_8x", "mixtral_tiny", "t5_moe_base"])
def test_presets_have_nothing_to_say(name: str) -> None:
    assert not load(f"model={name}").findings


def test_the_benchmark() -> None:
    root = load("experiment=moe_bench").root
    assert count_parameters(root.model, 32000) == 1_525_318_656
    assert count_parameters(root.model, 32000, active=True) == 468_354_048
    assert (root.model.micro_batch_size, root.model.global_batch_size) == (4, 4)
    assert gpt(root).encoder_seq_length == 4096


# ---------------------------------------------------------------- what they cost

SHAPE = {"num_layers": 3, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 2, "encoder_seq_length": 8}
VARIANTS = [
    {},
    {"bias": False, "activation": "swiglu", "normalization": "rmsnorm"},
    {"moe_router_topk": 1, "moe_ffn_hidden_size": 40, "moe_layer_freq": [0, 1, 1]},
    {"moe_shared_expert_intermediate_size": 12, "moe_frequency": 2, "activation": "geglu"},
    {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
]


def families(changes: dict[str, Any]) -> Iterator[FamilyKeys]:
    shape = {**SHAPE, **BALANCED, "moe_router_topk": 2, **changes}
    yield GPTKeys.model_validate(shape)
    yield BertKeys.model_validate(shape)
    length = shape.pop("encoder_seq_length")
    yield T5Keys.model_validate({"encoder": shape, "decoder": {**shape, "num_moe_experts": 4}, "seq_length": length})


@pytest.mark.parametrize("changes", VARIANTS)
def test_parameters_are_those_of_the_model(changes: dict[str, Any]) -> None:
    form = BatchSpec(seq_length=8, decoder_seq_length=4)
    for keys in families(changes):
        model = build_model(
            keys,
            vocab_size=50,
            device="meta",
            dtype=torch.float32,
            flags=AttentionFlags(),
            micro_batch_size=1,
            batch_spec=form,
        )
        assert count_parameters(keys, 50, form) == num_parameters(model)
        idle = 0
        for layer in find_moe_layers(model).values():
            of_experts = sum(parameter.numel() for parameter in layer.experts.parameters())
            number = len(layer.router.weight)
            idle += of_experts // number * (number - layer.router.topk)
        assert idle > 0
        assert count_parameters(keys, 50, form, active=True) == num_parameters(model) - idle


@pytest.mark.parametrize("changes", [*VARIANTS[:4], {"moe_expert_capacity_factor": 0.5}], ids=str)
def test_flops_are_those_of_the_experts_a_token_goes_to(changes: dict[str, Any]) -> None:
    keys = next(families({"moe_grouped_gemm": False, "attention_backend": "unfused", **changes}))
    assert isinstance(keys, GPTKeys)
    model = build_gpt(
        keys, vocab_size=128, device="cpu", dtype=torch.float32, flags=AttentionFlags(), micro_batch_size=1
    )
    layers = find_moe_layers(model)
    for layer in layers.values():
        layer.zero_grad()
    with FlopCounterMode(display=False) as counter:
        model.train()(torch.arange(8)[None])
    hidden_half = 6 * 3 * 16 * 8 * 8
    forward_and_backward = counter.get_total_flops() * 3 - hidden_half
    number = len(layers[next(iter(layers))].router.weight)
    dropped = sum(layer.statistics[number + 3].item() for layer in layers.values())
    expected = training_flops_per_sample(keys, 128, BatchSpec(seq_length=8))
    if "moe_expert_capacity_factor" in changes:
        # 16 assignments and room for 8: as many are dropped at least, more where experts are loaded unevenly
        assert dropped >= 3 * 8
        forward_and_backward += (dropped - 3 * 8) * 6 * 2 * 16 * 24
    assert expected == forward_and_backward


def test_flops_of_t5_count_the_experts_of_both_stacks() -> None:
    shape = {name: SHAPE[name] for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")}
    form = BatchSpec(seq_length=8, decoder_seq_length=4)

    def flops(**changes: Any) -> float:
        keys = T5Keys.model_validate({"encoder": shape, "decoder": shape} | changes)
        return training_flops_per_sample(keys, 128, form)

    one = 3 * 6 * (2 * 16 * 24)  # of an expert in three layers, for a token
    router = 3 * 6 * 8 * 16
    dense = flops()
    assert flops(encoder=shape | EXPERTS) - dense == 8 * router, "the default of a T5 is one expert"
    two = shape | EXPERTS | {"moe_router_topk": 2}
    assert flops(encoder=two) - dense == 8 * (one + router)
    assert flops(decoder=shape | EXPERTS) - dense == 4 * router
    assert flops(decoder=two) - dense == 4 * (one + router)
    assert flops(encoder=shape | {"num_moe_experts": 1}) == dense


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe_expert_capacity_factor": 0.5},
        {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
        {"moe_grouped_gemm": False},
        {"moe_layer_freq": [0, 1, 0], "activation": "gelu"},
    ],
    ids=str,
)
def test_experts_keep_at_least_what_the_bound_says(changes: dict[str, Any]) -> None:
    keys = next(families({"activation": "swiglu", "moe_ffn_hidden_size": 32, **changes}))
    assert isinstance(keys, GPTKeys)
    model = build_gpt(
        keys, vocab_size=128, device="cpu", dtype=torch.float32, flags=AttentionFlags(), micro_batch_size=2
    )
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    described = gpt_slice(keys, vocab_size=128).stack
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model.train().loss(torch.arange(8).repeat(2, 1), torch.arange(8).repeat(2, 1), 1.0)
    bound = memory_check._saved_in_experts(described, 16) * 4
    assert 0 < bound <= sum(size for where, size in kept.items() if where not in weights)
    loss.backward()


def test_memory_names_the_keys_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"model__num_moe_experts": 1000, "model__moe_ffn_hidden_size": 64, "model__override_vocab_size": 259}
    root = tiny_config(tmp_path, **changes).root
    state = count_parameters(root.model, 259) * 16
    assert state > 16 * 1000 * 64 * 32 * 2
    monkeypatch.setattr(memory_check, "host_memory", lambda: state - 1)
    with pytest.raises(UserError) as error:
        check_memory(root, CPU)
    assert "`num_moe_experts` (1000), `moe_ffn_hidden_size` (64)" in error.value.lines[1]
    monkeypatch.setattr(memory_check, "host_memory", lambda: state)
    with pytest.raises(UserError, match="activations of one micro batch"):
        check_memory(root, CPU)
