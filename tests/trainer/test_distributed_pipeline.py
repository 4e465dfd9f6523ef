"""Runs over the stages of a pipeline train as one process does: in fp64 to 1e-12, with dropout and uneven targets."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
from distributed_runs import DistributedRuns
from run_metrics import metric_rows
from test_distributed_parity import EMA, LAYOUTS, NO_BIAS, OPTIMIZERS, RAMP_UP, T5, check_equal
from test_distributed_tensor_parallel import CONTEXT, EXPERT, MOE, SEQUENCE
from tiers import full_only

TWO = {"model__pipeline_model_parallel_size": 2}
FOUR = {"model__pipeline_model_parallel_size": 4}
INTERLEAVED = TWO | {"model__virtual_pipeline_model_parallel_size": 2}
GPT = {"model__num_layers": 4, "model__num_attention_heads": 4}
PACKED = {"model__data__data_impl": "mock", "model__reset_attention_mask": True, "model__reset_position_ids": True}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "relative": GPT | NO_BIAS | {"model__position_embedding_type": "relative"},
    "untied": GPT
    | NO_BIAS
    | {
        "model__share_embeddings_and_output_weights": False,
        "model__position_embedding_type": "rope",
        "model__activation": "fast-swiglu",
    },
    "moe": MOE | {"model__num_layers": 4, "model__moe_layer_freq": [0, 1, 0, 1]},
    "bert": GPT | NO_BIAS | {"model__family": "bert"},
}
"""Dropout is on in all of them; `relative` has a table that all stages share."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


def compare(
    runs: DistributedRuns, model: str, ranks: int, layout: dict[str, Any], changes: dict[str, Any] | None = None
) -> None:
    """Compare a run on so many ranks with one process; `changes` are those of both."""
    changes = changes or {}
    number = len(list(runs.folder.iterdir()))
    alone = runs.run(f"alone-{model}-{zlib.crc32(repr(changes).encode())}", **MODELS[model], **changes)
    together = runs.run(f"{model}-{number}", ranks, **MODELS[model], **changes, **layout)
    averaged = ("ema",) if "exp_manager__ema" in changes else ()
    check_equal(together, alone, changes.get("trainer__max_steps", 3), kinds=("model", "optimizer", *averaged))
    for mine, expected in zip(expert_load(together), expert_load(alone), strict=True):
        assert mine == pytest.approx(expected, rel=1e-6)


@full_only
@pytest.mark.parametrize("pipeline", [TWO, INTERLEAVED])
@pytest.mark.parametrize("layout", ["grad", "full"])
def test_copy_engines_gather_the_weights_of_stages(runs, layout, pipeline):
    changes = {"model__num_layers": 16}
    alone = runs.run("alone-of-16", **MODELS["relative"] | changes)
    keys = MODELS["relative"] | changes | LAYOUTS[layout] | pipeline
    together = runs.run(f"copy-engines-{layout}-{len(pipeline)}", 4, copy_engines=True, **keys)
    check_equal(together, alone)


def expert_load(directory: Path) -> list[dict[str, float]]:
    """Return what metrics.jsonl says about the experts of all layers."""
    names = ("load_balancing_loss", "z_loss", "load_cv", "expert_share_min", "expert_share_max", "router_entropy")
    return [{name: row[name] for name in names if name in row} for row in metric_rows(directory)]


@full_only
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("ranks", "layout"), [(2, TWO), (4, FOUR), (2, INTERLEAVED)])
def test_a_pipeline_equals_one_process(runs, model, ranks, layout):
    compare(runs, model, ranks, layout)


@full_only
@pytest.mark.parametrize("model", ["relative", "untied"])
@pytest.mark.parametrize("pipeline", [TWO, INTERLEAVED])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pipelines_and_data_parallel_ranks_equal_one_process(runs, model, pipeline, layout):
    compare(runs, model, 8 if layout == "hybrid" else 4, pipeline | LAYOUTS[layout])


@full_only
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_equal_one_process(runs, optimizer):
    compare(runs, "relative", 4, TWO | SEQUENCE, OPTIMIZERS[optimizer])


@full_only
@pytest.mark.parametrize("axes", [SEQUENCE, CONTEXT, SEQUENCE | CONTEXT])
@pytest.mark.parametrize("pipeline", [TWO, INTERLEAVED])
def test_pipelines_and_other_axes_equal_one_process(runs, axes, pipeline):
    ranks = 8 if len(axes) == 3 else 4
    compare(runs, "untied" if "model__context_parallel_size" in axes else "relative", ranks, pipeline | axes)


@full_only
@pytest.mark.parametrize("axes", [EXPERT, EXPERT | SEQUENCE, EXPERT | {"model__fsdp": True}])
@pytest.mark.parametrize("pipeline", [TWO, INTERLEAVED])
def test_pipelines_with_experts_equal_one_process(runs, axes, pipeline):
    compare(runs, "moe", 8 if "model__fsdp" not in axes else 4, pipeline | axes)


@full_only
def test_uneven_stages_equal_one_process(runs):
    ends = {"model__num_layers_in_first_pipeline_stage": 1, "model__num_layers_in_last_pipeline_stage": 1}
    compare(runs, "gpt", 3, ends | {"model__pipeline_model_parallel_size": 3})
    counted = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    counts = {f"model__{name}": value for name, value in counted.items()}
    compare(runs, "gpt", 3, counts | {"model__pipeline_model_parallel_size": 3})


@full_only
def test_fewer_micro_batches_than_stages_equal_one_process(runs):
    compare(runs, "gpt", 4, FOUR, {"model__global_batch_size": 4})


@full_only
def test_a_growing_batch_and_an_average_equal_one_process(runs):
    compare(runs, "gpt", 4, TWO, EMA | RAMP_UP)


@full_only
@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_t5_equals_one_process_at_every_split(runs, split, shared):
    encoder = T5["model"]["encoder"] | {"num_attention_heads": 4, "num_layers": 6}
    decoder = T5["model"]["decoder"] | {"num_layers": 6}
    model = T5["model"] | {"encoder": encoder, "decoder": decoder, "share_token_embeddings": shared}
    layout = {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_split_rank": split}
    alone = runs.run(f"alone-t5-{shared}", model=model)
    check_equal(runs.run(f"t5-{split}-{shared}", 4, model=model | layout), alone)


@full_only
@pytest.mark.parametrize(
    "axes",
    [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "fsdp": True},
        {"tensor_model_parallel_size": 2},
        {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    ],
)
def test_t5_with_other_axes_equals_one_process(runs, axes):
    encoder = T5["model"]["encoder"] | {"num_attention_heads": 4}
    model = T5["model"] | {"encoder": encoder}
    layout = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_split_rank": 1}
    name = "-".join(str(value) for value in axes.values())
    check_equal(runs.run(f"t5-{name}", 8, model=model | layout | axes), runs.run("alone-t5", model=model))
