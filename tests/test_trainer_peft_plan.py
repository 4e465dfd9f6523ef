"""What a plan says of fine-tuning: frozen weights are there, and have neither gradients nor state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from config_helpers import load
from tiny_run import tiny_config

from stoker.models.build import parameter_count
from stoker.models.peft.adapt import trained_parameters
from stoker.trainer import memory
from stoker.trainer.errors import UserError
from stoker.trainer.flops import training_flops_per_sample
from stoker.trainer.memory import check_memory
from stoker.trainer.plan.cards import card_named
from stoker.trainer.plan.plan import Plan, make_plan, target_elsewhere
from stoker.trainer.precision import plan_precision
from stoker.trainer.run import run_training
from stoker.trainer.sample_form import sample_form
from stoker.trainer.trained_count import count_trained

CPU = torch.device("cpu")
SCHEMES = ("lora", "adapter", "ptuning", "ia3", "selective")
MORE = {
    "model__peft__selective_tuning__tunable_base_param_names": ["mlp"],
    "model__max_position_embeddings": 32,
    "model__num_moe_experts": None,
}


def plan_of(*overrides: str) -> Plan:
    root = load("experiment=llama_1b_bench", *overrides).root
    return make_plan(root, target_elsewhere(root, card_named("h100"), 1))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_counts_are_those_of_the_model(scheme: str, tmp_path: Path) -> None:
    run = run_training(tiny_config(tmp_path, trainer__max_steps=1, model__peft__peft_scheme=scheme, **MORE))
    root = tiny_config(tmp_path, model__peft__peft_scheme=scheme, **MORE).root
    counts = count_trained(root.model, run.data.vocab_size, sample_form(root))
    trained = sum(parameter.numel() for parameter in trained_parameters(run.model).values())
    assert counts == (parameter_count(run.model), trained)
    assert f"{scheme}: {trained:,} parameters are trained" in (run.directory / "run.log").read_text()


def test_frozen_weights_have_neither_gradients_nor_state() -> None:
    whole, lora = plan_of().memory, plan_of("peft=lora").memory
    counts = count_trained(
        load("experiment=llama_1b_bench", "peft=lora").root.model,
        32000,
        sample_form(load("experiment=llama_1b_bench").root),
    )
    assert lora.held.main_weights == counts.trained * 4
    assert lora.held.optimizer == counts.trained * 8
    assert lora.held.weights == counts.all * 2
    assert whole.held.main_weights > 50 * lora.held.main_weights
    by_moment = {moment.where: moment.gradients for moment in lora.moments}
    assert by_moment["the update"] <= counts.trained * 2
    assert 0.4 * whole.total < lora.total < 0.75 * whole.total


def test_frozen_weights_save_a_third_of_the_work() -> None:
    whole, lora = plan_of().time, plan_of("peft=lora").time
    assert whole is not None
    assert lora is not None
    assert 0.6 < lora.parts["matrix products"] / whole.parts["matrix products"] < 0.75
    assert lora.model_flops < 0.75 * whole.model_flops
    root = load("experiment=llama_1b_bench").root
    counted = [
        training_flops_per_sample(root.model, 32000, sample_form(root), frozen=frozen) for frozen in (True, False)
    ]
    assert 2 / 3 < counted[0] / counted[1] < 0.75


def test_frozen_weights_fit_where_trained_ones_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"model__num_layers": 50, "model__override_vocab_size": 259}
    roots = [tiny_config(tmp_path, **shape, model__peft__peft_scheme=scheme).root for scheme in (None, "lora")]
    plan = plan_precision(roots[0].trainer, True, CPU)
    counts = count_trained(roots[1].model, 259, sample_form(roots[1]))
    assert counts.trained < counts.all / 2
    monkeypatch.setattr(memory, "host_memory", lambda: counts.all * 4 + counts.trained * 12 + (1 << 19))
    check_memory(roots[1], plan, CPU)
    with pytest.raises(UserError, match="out of memory"):
        check_memory(roots[0], plan, CPU)
