"""Weights that are trained and kept in fp8 alone: the bits of weights in bf16 beside their casts, in every layout."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed_runs import DistributedRuns, records, tensors
from test_distributed_fp8 import FP8, MOE, PIPELINE
from test_distributed_parity import AT_ONCE, EMA, LAYOUTS, OPTIMIZERS, T5, figures, step
from test_distributed_tensor_parallel import CONTEXT, EXPERT, SEQUENCE, TENSOR
from tiers import extra, full_only

from stoker.kernels.fp8.recipe import Fp8Recipe
from stoker.models.fp8 import keep_fp8_weights
from stoker.models.layers.fp8_linear import with_fp8
from stoker.models.parallel.fp8 import Fp8Product
from stoker.trainer.optim.fp8_weights import Fp8Weights
from stoker.trainer.optim.parameter_sharding import ParameterSharding
from stoker.trainer.utils.local_shard import whole_shard

BF16 = FP8 | {"trainer__precision": "bf16"}
T5_FP8 = {"model": T5["model"] | {"fp8": True, "decoder": T5["model"]["decoder"] | {"kv_channels": 8}}}
SECOND_LAYER = {"model__first_last_layers_bf16": True, "model__num_layers_at_end_in_bf16": 0}
VALIDATED = {"trainer__val_check_interval": 1, "model__optim__lr": 0.1}  # at which the EMA is another model
EXPERTS = MOE | {"registers": "eager_fp8_experts"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, EMA | VALIDATED),
    "zero1": (2, LAYOUTS["zero1"] | EMA | VALIDATED),
    "uneven rows": (3, LAYOUTS["zero1"]),
    "grad": (2, LAYOUTS["grad"]),
    "ddp": (2, LAYOUTS["ddp"]),
    "at once": (2, LAYOUTS["zero1"] | AT_ONCE | EMA),
    "copy engines": (2, LAYOUTS["zero1"] | {"copy_engines": True}),
    "tensor": (2, TENSOR),
    "sequence, zero1": (4, SEQUENCE | LAYOUTS["zero1"]),
    "context, zero1": (2, CONTEXT | LAYOUTS["zero1"] | {"model__attention_dropout": 0.0}),
    "pipeline": (2, PIPELINE),
    "pipeline, first stage in bf16, zero1": (4, PIPELINE | LAYOUTS["zero1"] | SECOND_LAYER),
    "experts": (1, EXPERTS | EMA),
    "experts, zero1": (2, EXPERTS | LAYOUTS["zero1"]),
    "experts of each rank, zero1": (2, EXPERTS | EXPERT | LAYOUTS["zero1"]),
    "experts of two ranks, grad": (4, EXPERTS | EXPERT | LAYOUTS["grad"]),
    "experts, sequence, zero1": (4, EXPERTS | SEQUENCE | LAYOUTS["zero1"]),
    "experts, rowwise": (1, EXPERTS | {"model__fp8_recipe": "rowwise"}),
    "encoder and decoder": (2, T5_FP8 | LAYOUTS["zero1"]),
    "blockwise": (1, {"model__fp8_recipe": "blockwise"}),
    "rowwise, ddp": (2, {"model__fp8_recipe": "rowwise"}),
    **{name: (2, optimizer) for name, optimizer in OPTIMIZERS.items()},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


def check_same(kept: Path, beside: Path, kinds: tuple[str, ...], last: int = 3) -> None:
    """Checkpoints and figures of every step are equal; those of validation are near, and finite."""
    for kind in kinds:
        first, second = tensors(step(kept, last), kind), tensors(step(beside, last), kind)
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            assert tensor.dtype == second[name].dtype, name
            assert torch.equal(tensor, second[name]), name
    for mine, expected in zip(figures(kept), figures(beside), strict=True):
        assert mine.keys() == expected.keys()
        for name, value in expected.items():
            wanted = pytest.approx(value, rel=1e-3) if name in ("val_loss", "bits_per_byte") else value
            assert mine[name] == wanted, name
    for record in records(kept):
        assert all(map(math.isfinite, record["validation"]))


@pytest.mark.parametrize("name", ["zero1", *extra(*(name for name in CASES if name != "zero1"))])
def test_weights_in_fp8_train_to_the_same_bits(runs: DistributedRuns, name: str) -> None:
    ranks, changes = CASES[name]
    settings = (BF16 if "model" not in changes else {"trainer__precision": "bf16"}) | changes
    kept, beside = (
        runs.run(f"{name}-{on}".replace(", ", "-"), ranks, **settings, model__fp8_params=on) for on in (True, False)
    )
    check_same(kept, beside, ("model", "optimizer", *(["ema"] if "exp_manager__ema" in changes else [])))
    assert "weights kept in fp8" in (kept / "run.log").read_text()


@pytest.mark.parametrize("place", ["cast", *extra("loss", "shard")])
def test_a_skipped_step_leaves_the_casts_as_they_are(runs: DistributedRuns, place: str) -> None:
    """The ranks themselves check that weights and state do not change in the step, the last, which saves them."""
    changes = BF16 | LAYOUTS["zero1"] | {"planted": [1, 3, float("nan"), place]}
    kept, beside = (runs.run(f"nan-{place}-{on}", 2, **changes, model__fp8_params=on) for on in (True, False))
    check_same(kept, beside, ("model", "optimizer"))
    assert [line["skipped_steps"] for line in figures(kept) if "loss" in line] == [0, 0, 1]


@full_only
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("params", [True, False])
def test_saved_by_ranks_and_resumed_by_others(runs: DistributedRuns, ranks: int, params: bool) -> None:
    """A checkpoint has weights in bf16, and says nothing of how they are kept."""
    layout = LAYOUTS["zero1"] if ranks > 1 else {}
    six = BF16 | {"trainer__max_steps": 6, "trainer__val_check_interval": 3}
    start = step(runs.run("resume-start", 2, **six | LAYOUTS["zero1"], model__fp8_params=True), 3)
    resumed, beside = (
        runs.run(
            f"resumed-{ranks}-{on}",
            ranks,
            **six | layout,
            exp_manager__resume_from_checkpoint=str(start),
            model__fp8_params=on,
        )
        for on in (params, False)
    )
    check_same(resumed, beside, ("model", "optimizer"), 6)


def test_a_rank_without_rows_of_a_weight_has_its_scale() -> None:
    """Of fewer rows than ranks some have none: they take part in the agreement, and write nothing."""
    model = torch.nn.Sequential(with_fp8(torch.nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)))
    linear: Any = model[0]
    product: Any = Fp8Product(Fp8Recipe())
    linear.fp8 = product
    main = whole_shard(linear.weight.detach().float()[:0])
    keep_fp8_weights(model)
    cast = product.cast.rows
    optimizer: Any = SimpleNamespace(
        local_shards=lambda: {"0.weight.main": main},
        sharding=ParameterSharding(local_rows=lambda rows, part: rows[:0]),
    )
    data, ours = cast.data.view(torch.uint8).clone(), []

    def agree(bits: torch.Tensor) -> torch.Tensor:
        ours.append(bits.view(torch.float32).item())
        return torch.full_like(bits.view(torch.float32), 7.0).view(torch.int32)  # of the other ranks

    Fp8Weights(model, optimizer, {"tensor": agree}).cast()
    assert ours == [0.0]
    assert cast.scale == 7.0 / 448.0
    assert torch.equal(cast.data.view(torch.uint8), data)
    assert optimizer.main_alone == {linear.weight}
