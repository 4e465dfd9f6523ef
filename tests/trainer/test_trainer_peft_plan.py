"""Plans of fine-tuning: frozen weights are there, and have neither gradients nor state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from config_helpers import gpt, load
from gpt_builder import build_model
from resolved import batch_spec, check_memory, gpu_target, make_plan
from tiny_run import tiny_config
from torch.utils._pytree import tree_leaves

from stoker.models.build import num_parameters
from stoker.models.config.peft import peft_slice
from stoker.models.model_cost import training_flops_per_sample
from stoker.models.peft.apply import trainable_parameters
from stoker.trainer.core.run_summary import module_table
from stoker.trainer.plan import memory_check
from stoker.trainer.plan.hardware import parse_gpu
from stoker.trainer.plan.run_plan import Plan
from stoker.trainer.plan.state_memory import update_working_bytes
from stoker.trainer.plan.trainable_count import count_trainable
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import UserError

CPU = torch.device("cpu")
SCHEMES = ("lora", "adapter", "ptuning", "ia3", "selective")
MORE = {
    "model__peft__selective_tuning__tunable_base_param_names": ["mlp"],
    "model__max_position_embeddings": 32,
    "model__num_moe_experts": None,
}


def plan_of(*overrides: str) -> Plan:
    root = load("experiment=llama_1b_bench", *overrides).root
    return make_plan(root, gpu_target(root, parse_gpu("h100")), world_size=1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_counts_are_those_of_the_model(scheme: str, tmp_path: Path) -> None:
    run = run_training(tiny_config(tmp_path, trainer__max_steps=1, model__peft__peft_scheme=scheme, **MORE))
    root = tiny_config(tmp_path, model__peft__peft_scheme=scheme, **MORE).root
    counts = count_trainable(root.model, run.data.vocab_size, batch_spec(root))
    trained = sum(parameter.numel() for parameter in trainable_parameters(run.model).values())
    assert counts[:2] == (num_parameters(run.model), trained)
    assert sum(numbers for numbers, _ in counts.trainable_tensors) == trained
    assert f"{scheme}: {trained:,} parameters are trained" in (run.directory / "run.log").read_text()
    head, *rows = (line.split() for line in module_table(run.model))
    assert head == ["module", "type", "trainable", "parameters"]
    assert rows[-1] == ["total", f"{trained:,}", f"{num_parameters(run.model):,}"]
    columns = [[int(row[place].replace(",", "")) for row in rows] for place in (-2, -1)]
    assert all(sum(column[:-1]) == column[-1] for column in columns)


def test_frozen_weights_have_neither_gradients_nor_state() -> None:
    whole, lora = plan_of().memory, plan_of("peft=lora").memory
    counts = count_trainable(
        load("experiment=llama_1b_bench", "peft=lora").root.model,
        32000,
        batch_spec(load("experiment=llama_1b_bench").root),
    )
    assert lora.persistent.main_weights == counts.trainable * 4
    assert lora.persistent.optimizer == counts.trainable * 8
    assert lora.persistent.weights == counts.total * 2
    assert whole.persistent.main_weights > 50 * lora.persistent.main_weights
    by_moment = {moment.where: moment.gradients for moment in lora.moments}
    assert by_moment["the update"] <= counts.trainable * 2
    assert 0.4 * whole.total < lora.total < 0.75 * whole.total


def test_fp8_takes_no_more_memory_than_bf16() -> None:
    """Casts that are kept take a byte per weight, two in rowwise scaling, beside the weights or in place of them."""
    linear = 24 * (2048 * 3072 + 2048 * 2048 + 3 * 2048 * 5632)
    few = ["model.micro_batch_size=1", "model.global_batch_size=8"]
    lora = ["peft=lora", "model.fp8_params=true", "model.activations_checkpoint_modules=[norm,mlp_activation]"]
    for others, recipe, casts in (
        ([], "tensorwise", 0),
        (few, "tensorwise", 1),
        (few, "blockwise", 1),
        (few, "rowwise", 2),
        (lora, "tensorwise", 1 - 2),
        (lora, "rowwise", 2 - 2),
        (["model.fp8_params=true"], "tensorwise", 1 - 2),
        ([*few, "model.fp8_params=true"], "blockwise", 1 - 2),
    ):
        bf16 = plan_of(*(each for each in others if "fp8" not in each)).memory
        fp8 = plan_of("model.fp8=true", f"model.fp8_recipe={recipe}", *others).memory
        assert fp8.persistent.weights - bf16.persistent.weights == casts * linear, (others, recipe)
        assert fp8.total <= bf16.total or recipe == "rowwise", (others, recipe)


SELECTIVE = "model.peft.peft_scheme=selective"
NAMES = "model.peft.selective_tuning.tunable_base_param_names="


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        (["model=gpt_tiny"], (0,)),
        (["model=gpt_tiny", "peft=lora"], (0,)),
        (["model=gpt_tiny", "peft=lora", "model.peft.lora_tuning.layer_selection=[3,4]"], (2,)),
        (["model=gpt_tiny", "peft=adapter", "model.peft.adapter_tuning.layer_selection=[4]"], (3,)),
        (["model=gpt_tiny", "peft=ptuning", "model.max_position_embeddings=300"], (0,)),
        (["model=gpt_tiny", SELECTIVE, f"{NAMES}[layers.2]"], (2,)),
        (["model=gpt_tiny", SELECTIVE, f"{NAMES}[final_norm]"], (4,)),
        (["model=gpt_tiny", SELECTIVE, f"{NAMES}[token_embedding]"], (0,)),
        (["model=t5_tiny", "peft=lora", "model.peft.lora_tuning.layer_selection=[3]"], (2, 0)),
        (["model=t5_tiny", SELECTIVE, f"{NAMES}[decoder.layers.1]"], (3, 1)),
        (["model=t5_tiny", SELECTIVE, f"{NAMES}[encoder.final_norm]"], (3, 0)),
    ],
)
def test_the_backward_pass_ends_where_nothing_before_is_trained(given: list[str], begins: tuple[int, ...]) -> None:
    """By what autograd does: it goes back through the layers whose result needs a gradient."""
    start = [] if len(given) == 1 else ["model.restore_from_path=x"]
    root = load("data=mock", "model.override_vocab_size=100", *start, *given).root
    form = batch_spec(root)
    assert count_trainable(root.model, 100, form).first_backward_layers == begins
    model = build_model(
        root.model, vocab_size=100, micro_batch_size=1, batch_spec=form, peft=peft_slice(root.model.peft)
    )
    ran: set[tuple[int, int]] = set()
    for at, stack in enumerate(model.stacks):
        for number, layer in enumerate(stack.layers):

            def note(layer: object, given: object, found: Any, place: tuple[int, int] = (at, number)) -> None:
                if any(isinstance(each, torch.Tensor) and each.requires_grad for each in tree_leaves(found)):
                    ran.add(place)

            layer.register_forward_hook(note)
    lengths = (form.seq_length, *([form.decoder_seq_length] if form.decoder_seq_length else []))
    tokens = [torch.randint(100, (1, length)) for length in lengths]
    model.train()
    model.loss(*tokens, tokens[-1], 1.0)  # pyrefly: ignore[bad-argument-count]
    expected = {(at, n) for at, stack in enumerate(model.stacks) for n in range(begins[at], len(stack.layers))}
    assert ran == expected


def test_layers_behind_which_the_backward_pass_ends_keep_nothing() -> None:
    every, last = plan_of("peft=lora"), plan_of("peft=lora", "model.peft.lora_tuning.layer_selection=[24]")
    assert last.allocated < every.allocated - 10 * sum(layer.saved_bytes for layer in last.memory.layers)
    assert [layer.saved_bytes > 0 for layer in last.memory.layers] == [False] * 23 + [True]
    assert every.time is not None
    assert last.time is not None
    assert last.time.parts["matrix products"] < 0.6 * every.time.parts["matrix products"]
    full = [f"model.activations_checkpoint_{key}" for key in ("granularity=full", "method=uniform", "num_layers=4")]
    chunks = plan_of("peft=lora", "model.peft.lora_tuning.layer_selection=[22]", *full)
    assert [layer.saved_bytes > 0 for layer in chunks.memory.layers] == [False] * 20 + [True] + [False] * 3


def test_a_run_that_trains_its_last_layer_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"model__num_layers": 40, "model__override_vocab_size": 259, "model__micro_batch_size": 64}
    lora = {"model__peft__peft_scheme": "lora", "model__peft__lora_tuning__layer_selection": [40]}
    every, last = (
        tiny_config(tmp_path, **shape, model__global_batch_size=64, model__encoder_seq_length=64, **more).root
        for more in ({"model__peft__peft_scheme": "lora"}, lora)
    )
    counts, kept = count_trainable(every.model, 259, batch_spec(every)), 64 * 64 * gpt(last).hidden_size * 4
    monkeypatch.setattr(
        memory_check, "host_memory", lambda: counts.total * 4 + counts.trainable * 12 + 4 * kept + (1 << 20)
    )
    check_memory(last, CPU)
    with pytest.raises(UserError, match="activations of one micro batch"):
        check_memory(every, CPU)


def test_a_name_without_a_parameter_is_no_error_of_stoker(tmp_path: Path) -> None:
    tuning = {"tunable_base_param_names": ["mlp", "no_such"]}
    config = tiny_config(tmp_path, model__peft__peft_scheme="selective", model__peft__selective_tuning=tuning)
    with pytest.raises(UserError, match=r"`tunable_base_param_names` \(no_such\) must be part of the name"):
        run_training(config)
    assert not list(tmp_path.glob("**/run.log"))


def test_prompts_are_read_by_all_layers() -> None:
    given = ("model.peft.peft_scheme=ptuning", "model.restore_from_path=x", "model.max_position_embeddings=8192")
    few, many = (plan_of(*given, f"model.peft.p_tuning.virtual_tokens={number}") for number in (20, 2068))
    text = batch_spec(load("experiment=llama_1b_bench").root).seq_length
    assert [plan.inputs.stacks[0].length - text for plan in (few, many)] == [20, 2068]
    kept = [sum(layer.saved_bytes for layer in plan.memory.layers) for plan in (few, many)]
    assert kept[1] / kept[0] == pytest.approx((text + 2068) / (text + 20), rel=0.02)


def test_muon_makes_room_for_the_largest_matrix_that_is_trained() -> None:
    given = ("model.optim.name=muon", "model.cpu_offloading_optimizer=True", SELECTIVE, f"{NAMES}[attention]")
    plan = plan_of("model.restore_from_path=x", *given)
    largest = 2048 * 3072  # queries, keys and values of 16 heads and 4 groups, 128 wide
    assert update_working_bytes(plan.inputs) < 3 * 16 * largest + 28 * largest + (200 << 20)


def test_frozen_weights_save_a_third_of_the_work() -> None:
    whole, lora = plan_of().time, plan_of("peft=lora").time
    assert whole is not None
    assert lora is not None
    assert 0.6 < lora.parts["matrix products"] / whole.parts["matrix products"] < 0.75
    assert lora.model_flops < 0.75 * whole.model_flops
    root = load("experiment=llama_1b_bench").root
    counted = [
        training_flops_per_sample(root.model, 32000, batch_spec(root), frozen=frozen) for frozen in (True, False)
    ]
    assert 2 / 3 < counted[0] / counted[1] < 0.75


def test_frozen_weights_fit_where_trained_ones_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"model__num_layers": 50, "model__override_vocab_size": 259}
    roots = [tiny_config(tmp_path, **shape, model__peft__peft_scheme=scheme).root for scheme in (None, "lora")]
    counts = count_trainable(roots[1].model, 259, batch_spec(roots[1]))
    assert counts.trainable < counts.total / 2
    monkeypatch.setattr(memory_check, "host_memory", lambda: counts.total * 4 + counts.trainable * 12 + (1 << 19))
    check_memory(roots[1], CPU)
    with pytest.raises(UserError, match="out of memory"):
        check_memory(roots[0], CPU)
