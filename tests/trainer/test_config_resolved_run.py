"""Facts of a run are derived from its keys once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_helpers import load
from tiny_run import tiny_config

from stoker.models import build
from stoker.models.config.peft import LoRASlice
from stoker.models.config.t5 import T5Slice
from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.core import run_checks, run_context
from stoker.trainer.plan import run_inputs
from stoker.trainer.train import run_training


def test_slices_know_recomputation_and_offloading_of_their_layers() -> None:
    keys = ["model.encoder.activations_checkpoint_granularity=full", "model.decoder.cpu_offloading=true"]
    method = ["model.encoder.activations_checkpoint_method=block", "model.encoder.activations_checkpoint_num_layers=1"]
    run = resolve_run(load("model=t5_tiny", *keys, *method, "model.decoder.cpu_offloading_num_layers=1").root)
    assert isinstance(run.family, T5Slice)
    encoder, decoder = run.family.stacks
    assert encoder.recompute is not None
    assert encoder.recompute.layers == 1
    assert decoder.offload is not None
    assert decoder.offload.layers == 1
    assert (encoder.offload, decoder.recompute) == (None, None)


def test_what_depends_on_the_device_and_the_processes() -> None:
    more = ("model.global_batch_size=4", "model.fsdp=true", "peft=lora")
    root = load("model=gpt_tiny", "data=mock", "model.micro_batch_size=1", *more).root
    alone, many = resolve_run(root), resolve_run(root, world_size=2, capability=(9, 0))
    assert isinstance(alone.peft, LoRASlice)
    assert alone.layout is None
    assert many.layout is not None
    assert many.layout.shards == 2
    assert alone.micro_batches == 2 * many.micro_batches
    assert (alone.precision.weights, many.precision.weights) == ("fp32", "bf16")
    assert (alone.precision.main_weight_bytes, many.precision.main_weight_bytes) == (0, 4)


def test_soft_prompts_lengthen_what_layers_see() -> None:
    more = ["peft=ptuning", "model.peft.p_tuning.virtual_tokens=3", "model.encoder_seq_length=64"]
    more.append("model.max_position_embeddings=100")
    run = resolve_run(load("model=gpt_tiny", "data=mock", *more).root)
    assert run.layer_batch_spec.seq_length == run.batch_spec.seq_length + 3


def test_a_run_is_resolved_once_and_chooses_its_attention_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: calls.append(name) or function(*given, **named)

    monkeypatch.setattr(run_context, "resolve_run", counted("resolve", run_context.resolve_run))
    plan_model = counted("attention", build.plan_model)
    for module in (build, run_checks, run_inputs):
        monkeypatch.setattr(module, "plan_model", plan_model)
    run_training(tiny_config(tmp_path / "run", trainer__max_steps=1))
    assert calls == ["resolve", "attention"]
