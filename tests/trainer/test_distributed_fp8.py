"""Runs in fp8 train in every layout as one process does, in fp64 to 1e-12, and resume bit for bit; emulated on CPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runs import DistributedRuns, difference, records, tensors
from test_distributed_parity import LAYOUTS, NO_BIAS, check_equal, figures, step
from test_distributed_tensor_parallel import CONTEXT, EXPERT, SEQUENCE, TENSOR
from tiers import extra, full_only
from tiny_run import assert_resume_is_exact, final_hashes, tiny_config

from stoker.trainer.train import run_training

FP8: dict[str, Any] = NO_BIAS | {
    "model__fp8": True,
    "model__num_attention_heads": 4,
    "model__activation": "fast-swiglu",
    "model__position_embedding_type": "rope",
}
MOE = FP8 | {"model__num_moe_experts": 4, "model__moe_router_topk": 2, "model__moe_shared_expert_intermediate_size": 32}
PIPELINE = {"model__pipeline_model_parallel_size": 2}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    **{name: (2, FP8, LAYOUTS[name]) for name in ("ddp", "zero1", "full")},
    "tensor": (2, FP8, TENSOR),
    "sequence": (2, FP8, SEQUENCE),
    "sequence, zero1": (4, FP8, SEQUENCE | LAYOUTS["zero1"]),
    "sequence, full": (4, FP8, SEQUENCE | LAYOUTS["full"]),
    "context": (2, FP8, CONTEXT | {"model__attention_dropout": 0.0}),
    "pipeline": (2, FP8, PIPELINE),
    "experts, sequence": (2, MOE, SEQUENCE),  # data-parallel ranks that share experts have one scale for their batches
    "experts of each rank, sequence": (2, MOE, EXPERT | SEQUENCE),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


def compare(runs: DistributedRuns, name: str, *planted: Any) -> Path:
    """Compare a layout with one process, both with this value and place of `planted` in the second step."""
    ranks, model, layout = CASES[name]
    model = model | {key: value for key, value in layout.items() if "dropout" in key}
    kind = "-".join(["", *map(str, planted)])
    single = "moe" if model == MOE else "context" if name == "context" else "dense"
    alone = runs.run(f"alone-{single}{kind}", planted=[0, 2, *planted] if planted else None, **model)
    changes = model | layout | {"planted": [ranks - 1, 2, *planted] if planted else None}
    together = runs.run(name.replace(", ", "-") + kind, ranks, **changes)
    check_equal(together, alone)
    return together


@full_only
@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process(runs: DistributedRuns, name: str) -> None:
    compare(runs, name)


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("sequence", float("nan"), "cast"),
        *extra(*((name, float("nan"), "cast") for name in CASES if name != "sequence")),
        *extra(*((name, float("inf"), "loss") for name in CASES)),
        *extra(*((name, float("inf"), "cast") for name in ("ddp", "full", "tensor", "experts of each rank, sequence"))),
    ],
)
def test_gradients_of_one_rank_that_are_not_finite_skip_the_step_of_all(
    runs: DistributedRuns, name: str, value: float, place: str
) -> None:
    """Casts keep NaN and infinity; weights and optimizer end as those of a process that skips the step too."""
    directory = compare(runs, name, value, place)  # the ranks themselves check that nothing changes in the step
    steps = [line for line in figures(directory) if "loss" in line]
    assert [line["skipped_steps"] for line in steps] == [0, 1, 1]
    assert [line["grad_norm"] is None for line in steps] == [False, True, False]
    assert re.search(r"step 2 was skipped: loss \d.*, gradient norm (nan|inf)", (directory / "run.log").read_text())


DELAYED = FP8 | {"model__transformer_engine": True, "registers": "installed_fake_te"}
ATTENTION = {"model__fp8_dot_product_attention": True, "model__attention_dropout": 0.0}


@pytest.mark.parametrize(
    ("name", "layout", "planted"),
    [
        *extra(
            ("ddp", LAYOUTS["ddp"], ()),
            ("full", LAYOUTS["full"], ()),
            ("sequence", SEQUENCE, ()),
            ("pipeline", PIPELINE, ()),
            ("context", CONTEXT | {"model__attention_dropout": 0.0}, ()),
        ),
        ("sequence-attention", SEQUENCE | ATTENTION, ()),
        *extra(("exchange-attention", CONTEXT | {"model__cp_comm_type": "a2a"} | ATTENTION, ())),
        *extra(("ddp-attention", ATTENTION, (float("nan"), "loss"))),
        *extra(*((name, layout, (float("nan"), "loss")) for name, layout in (("ddp", {}), ("sequence", SEQUENCE)))),
    ],
)
def test_delayed_scales_of_ranks_are_those_of_one_process(
    runs: DistributedRuns, name: str, layout: Any, planted: tuple[Any, ...]
) -> None:
    """Weights, optimizer and scales, through the fake TransformerEngine: amaxes of all micro batches of all ranks.

    Those of a step that is skipped, since a rank has gradients of NaN, count on no rank.
    """
    model = DELAYED | {key: value for key, value in layout.items() if key in ATTENTION}
    of, kind = "-".join(sorted(model.keys() - DELAYED.keys())) or "dense", "-nan" * bool(planted)
    single = f"delayed-alone-{of}{kind}"
    alone = runs.run(single, planted=[0, 2, *planted] if planted else None, **model)
    changes = model | layout | {"planted": [1, 2, *planted] if planted else None}
    check_equal(runs.run(f"delayed-{name}{kind}", 2, **changes), alone, kinds=("model", "optimizer", "scales"))


@full_only
@pytest.mark.parametrize("scheme", ["lora", "ia3"])
@pytest.mark.parametrize("layout", ["zero1", "grad", "tensor", "sequence"])
def test_adapters_of_ranks_beside_weights_kept_in_fp8(runs: DistributedRuns, layout: str, scheme: str) -> None:
    """Frozen weights that are kept in fp8 alone multiply as casts beside them do; validation is near that with them."""
    base = runs.run("base", **FP8 | {"model__fp8": False})
    adapted = FP8 | {"model__restore_from_path": str(base), "model__peft__peft_scheme": scheme}
    adapted |= {"tensor": TENSOR, "sequence": SEQUENCE}.get(layout) or LAYOUTS[layout]
    names = {kept: f"{scheme}-{layout}-{kept}" for kept in (True, False)}
    alone, beside = (runs.run(name, 2, **adapted, model__fp8_params=kept) for kept, name in names.items())
    found = [tensors(each / "checkpoints/step-3", "adapter") for each in (alone, beside)]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    validated = [records(each)[0]["validation"][0] for each in (alone, beside)]
    assert validated[0] == pytest.approx(validated[1], rel=1e-3)
    assert "weights kept in fp8" in (alone / "run.log").read_text()


@full_only
def test_delayed_scales_resume(runs: DistributedRuns) -> None:
    six = DELAYED | {"trainer__max_steps": 6}
    whole = runs.run("delayed-six", **six)
    resumed = runs.run("delayed-resumed", exp_manager__resume_from_checkpoint=str(step(whole, 3)), **six)
    assert [record["steps"] for record in records(resumed)] == [record["steps"][3:] for record in records(whole)]
    assert all(difference(step(whole, 6), step(resumed, 6), kind) == 0 for kind in ("model", "optimizer", "scales"))


@pytest.mark.parametrize("recipe", ["tensorwise", *extra("rowwise", "blockwise")])
def test_train_2n_equals_train_n_resume_train_n(tmp_path: Path, recipe: str) -> None:
    """Current scaling has no state: nothing of fp8 is in a checkpoint."""
    settings = FP8 | {"model__fp8_recipe": recipe, "model__num_attention_heads": 2}
    whole, _ = assert_resume_is_exact(tmp_path, 4, **settings)
    bf16 = tmp_path / "other"
    run_training(tiny_config(bf16, trainer__max_steps=4, **{**settings, "model__fp8": False}))
    assert final_hashes(whole, 4) != final_hashes(bf16, 4)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_adapters_beside_weights_kept_in_fp8_resume_and_restore(tmp_path: Path, recipe: str) -> None:
    """The base is read in its dtype and cast again: nothing of it is in a checkpoint."""
    shape = FP8 | {"model__num_attention_heads": 2}
    run_training(tiny_config(tmp_path / "base", trainer__max_steps=1, **{**shape, "model__fp8": False}))
    settings = shape | {"model__restore_from_path": str(tmp_path / "base"), "model__peft__peft_scheme": "lora"}
    settings |= {"model__fp8_params": True, "model__fp8_recipe": recipe, "trainer__val_check_interval": 2}
    whole, halves, casts = tmp_path / "whole", tmp_path / "halves", tmp_path / "casts"
    run_training(tiny_config(whole, trainer__max_steps=4, **settings))
    run_training(tiny_config(halves, trainer__max_steps=2, **settings))
    run_training(tiny_config(halves, trainer__max_steps=4, **settings))
    run_training(tiny_config(casts, trainer__max_steps=4, **settings | {"model__fp8_params": False}))
    name = "checkpoints/step-4/adapter.safetensors"
    assert (whole / name).read_bytes() == (halves / name).read_bytes() == (casts / name).read_bytes()
    assert "weights kept in fp8" in (whole / "run.log").read_text()
