"""Any number of ranks, in any layout, trains as one process does: in fp64 to 1e-12, with dropout and uneven targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from distributed_runs import DistributedRuns, difference, records, samples_by_step, step
from run_metrics import logged, metric_rows
from tiers import extra, full_only

LIMIT = 1e-12

DDP = {}
ZERO1 = {"model__optim__name": "distributed_fused_adam"}
FULL = {"model__fsdp": True}
GRAD = FULL | {"model__fsdp_sharding_strategy": "grad"}
HYBRID = FULL | {"model__fsdp_sharding_strategy": "hybrid", "model__fsdp_shard_size": 2}
LAYOUTS = {"ddp": DDP, "zero1": ZERO1, "full": FULL, "grad": GRAD, "hybrid": HYBRID}

OPTIMIZERS = {
    "adafactor": {
        "model__optim": {"name": "adafactor", "weight_decay": 0.0, "scale_parameter": True, "beta1": 0.9, "lr": 1e-2}
    },
    "muon": {"model__optim": {"name": "muon", "lr": 1e-2, "weight_decay": 0.1, "nesterov": True, "momentum": 0.9}},
    "sgd": {"model__optim": {"name": "sgd", "lr": 0.3, "weight_decay": 0.1, "momentum": 0.9}},
    "scaled": {"model__optim": {"name": "adamw", "scale_parameter": True, "lr": 0.1, "weight_decay": 0.1}},
}
NO_BIAS = {"model__bias": False, "model__normalization": "rmsnorm"}
"""The bias of the keys has no gradient but rounding, of which Adafactor and narrow numbers make a step."""
UNTIED = NO_BIAS | {
    "model__share_embeddings_and_output_weights": False,
    "model__activation": "fast-swiglu",
    "model__num_query_groups": 1,
}
"""Fused weights whose parts lie across the ranks' cuts."""
KERPLE = NO_BIAS | {
    "model__position_embedding_type": "kerple",
    "model__transformer_block_type": "normformer",
    "model__headscale": True,
    "model__qk_layernorm": True,
    "model__logits_soft_cap": 5.0,
}
BUCKETS = NO_BIAS | {
    "model__position_embedding_type": "relative",
    "model__transformer_block_type": "post_ln",
    "model__relative_attention_num_buckets": 6,
}
"""Parameters that the layers share, vectors of a few entries, and a stack without a final norm."""
_STACK = {
    "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2, "bias": False, "normalization": "rmsnorm",
    "position_embedding_type": "relative", "relative_attention_num_buckets": 8, "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}  # fmt: skip
T5 = {
    "model": {
        "family": "t5",
        "seq_length": 16,
        "encoder": _STACK | {"num_layers": 2, "activation": "geglu"},
        "decoder": _STACK | {"num_layers": 1, "num_attention_heads": 4, "kv_channels": 6},
        "share_token_embeddings": False,
        "label_smoothing": 0.1,
        "micro_batch_size": 2,
        "global_batch_size": 24,
        "data": {"data_impl": "mock", "seq_length_dec": 12},
        "optim": {"lr": 1e-2, "sched": {"max_steps": 100, "warmup_steps": 2}},
    }
}
"""Two stacks of different layers and heads, two tables, a head bias, and cross-attention between them."""
T5_MUON = {"model": T5["model"] | {"optim": {"name": "muon", "lr": 1e-2, "weight_decay": 0.1}}}
EMA = {"exp_manager__ema": {"enable": True, "decay": 0.9}}
AT_ONCE, OVERLAP = ({"model__optim__overlap_param_sync": acts} for acts in (False, True))
IN_TURN = {
    "trainer__val_check_interval": 3,
    "exp_manager__checkpoint_callback_params": {"every_n_train_steps": 2, "save_top_k": -1},
}
"""A step that is followed by the next one, one by a checkpoint, and one by a validation."""
RAMP_UP = {"model__rampup_batch_size": [8, 8, 40], "trainer__max_steps": 5, "trainer__val_check_interval": 5}
SIX = {"trainer__max_steps": 6}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


def figures(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, without clocks and sizes."""
    kept = ("step", "loss", "grad_norm", "lr", "consumed_samples", "val_loss", "bits_per_byte", "skipped_steps")
    return [{name: row[name] for name in kept if name in row} for row in metric_rows(directory)]


def check_equal(directory: Path, alone: Path, last: int = 3, *, kinds=("model", "optimizer"), limit: float = LIMIT):
    """Weights, state, figures of every step and of validation, and the samples of every step."""
    for kind in kinds:
        assert difference(step(alone, last), step(directory, last), kind) <= limit, kind
    for mine, expected in zip(figures(directory), figures(alone), strict=True):
        assert mine.keys() == expected.keys()
        for name, value in expected.items():  # None, where it is not finite
            # the loss of a step is a sum in fp32
            assert mine[name] == (None if value is None else pytest.approx(value, rel=1e-6)), name
    (validation,) = {tuple(record["validation"]) for record in records(directory)}
    assert validation == pytest.approx(records(alone)[0]["validation"], rel=max(limit, LIMIT))
    assert samples_by_step(directory) == samples_by_step(alone)


def compare(runs: DistributedRuns, name: str, ranks: int, layout: dict, changes: dict, last: int = 3, **how) -> Path:
    """Run in one process and on so many ranks, and compare; the process alone runs once for all that it is for."""
    alone = runs.run("alone-" + name.partition(" ")[0], **changes)
    together = runs.run(name.replace(" ", "-") + f"-{ranks}", ranks, **changes, **layout)
    check_equal(together, alone, last, **how)
    return together


@full_only
def test_the_comparison_is_not_empty(runs):
    directory, alone = runs.run("plain-ddp-2", 2), runs.run("alone-plain")
    first, second = (record["targets"] for record in records(directory))
    assert [a + b for a, b in zip(first, second, strict=True)] == records(alone)[0]["targets"]
    assert any(abs(a - b) > 20 for a, b in zip(first, second, strict=True)), "targets are spread too evenly"
    assert 0 in first + second, "no rank is without a target"
    assert all(line["grad_norm"] > 0.1 for line in figures(directory) if "grad_norm" in line), "nothing is clipped"
    assert len(records(directory)[0]["steps"][0]) == 6, "nothing is accumulated"


@full_only
@pytest.mark.parametrize("layout", ["full", "ddp"])
def test_two_ranks_equal_one_process(runs, layout):
    compare(runs, f"plain {layout}", 2, LAYOUTS[layout], {})


@full_only
def test_saved_by_two_ranks_and_resumed_by_one_process(runs):
    start = step(runs.run("plain-full-2", 2, **FULL), 3)
    resumed = runs.run("resumed-1", exp_manager__resume_from_checkpoint=str(start), **SIX)
    unbroken = runs.run("alone-six", **SIX)
    for kind in ("model", "optimizer"):
        assert difference(step(unbroken, 6), step(resumed, 6), kind) <= LIMIT, kind
    assert samples_by_step(unbroken)[3:] == samples_by_step(resumed)


@full_only
def test_average_and_growing_batch_of_two_ranks_equal_one_process(runs):
    directory = compare(runs, "ema-ramp full", 2, FULL, EMA | RAMP_UP, 5, kinds=("model", "optimizer", "ema"))
    assert [sum(map(len, samples)) for samples in samples_by_step(directory)] == [8, 8, 8, 16, 24]


@full_only
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_one_process(runs, layout, ranks):
    if layout == "hybrid" and ranks == 3:
        ranks = 6
    compare(runs, f"plain {layout}", ranks, LAYOUTS[layout], {})


@full_only
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layout", ["ddp", "zero1", "grad", "full"])
def test_copy_engines_equal_one_process(runs, layout, ranks):
    changes = EMA | UNTIED | {"model__num_layers": 5}
    alone = runs.run("alone-copy-engines", **changes)
    together = runs.run(f"copy-engines-{layout}-{ranks}", ranks, copy_engines=True, **changes, **LAYOUTS[layout])
    assert list(together.parent.glob(f"{together.name}.memory*")), "they were not used"
    check_equal(together, alone, kinds=("model", "optimizer", "ema"))


@pytest.mark.parametrize(
    ("layout", "changes", "engines"),
    [
        ("zero1", UNTIED, False),
        *extra(
            ("zero1", EMA, True),
            ("grad", {}, False),
            ("grad", EMA | {"model__num_moe_experts": 4, "model__moe_router_topk": 2}, True),
            ("zero1", BUCKETS | {"model__activations_checkpoint_granularity": "full"}, False),
        ),
    ],
)
def test_weights_gathered_when_layers_need_them(runs, layout, changes, engines):
    """On a CPU they are gathered when they are waited for: who reads them without waiting reads old ones."""
    number = f"{layout}-{len(changes)}-{engines}"
    alone, together = (
        runs.run(f"{name}-{number}", 2, copy_engines=engines, **LAYOUTS[layout], **changes, **IN_TURN, **more)
        for name, more in (("at-once", AT_ONCE), ("overlapped", {}))
    )
    kinds = ("model", "optimizer", *(["ema"] if "exp_manager__ema" in changes else []))
    for last in (2, 3):
        check_equal(together, alone, last, kinds=kinds, limit=0.0)


def test_a_checkpoint_holds_gathered_weights(runs):
    """Of weights that tensor-parallel ranks have whole, a rank saves 9 of the 34 rows, and has updated 17."""
    changes = ZERO1 | {"model__tensor_model_parallel_size": 2, "model__hidden_size": 34, "model__ffn_hidden_size": 64}
    saves = {"every_n_train_steps": 2, "save_top_k": -1, "save_last": False}
    changes |= {"trainer__limit_val_batches": 0, "exp_manager__checkpoint_callback_params": saves}
    alone, together = (runs.run(f"saved-{n}", 4, **changes, **more) for n, more in enumerate((AT_ONCE, {})))
    assert [difference(step(alone, 2), step(together, 2), kind) for kind in ("model", "optimizer")] == [0.0, 0.0]


def test_callbacks_read_weights_that_are_gathered(runs):
    changes = ZERO1 | {"registers": "weight_reading_callback", "trainer__callbacks": ["reads_weights"]}
    found = [runs.run(f"callback-{n}", 2, **changes, **more) for n, more in enumerate((AT_ONCE, {}, OVERLAP))]
    squares = [logged(each, "squares") for each in found]
    assert len(squares[0]) == 3
    assert squares[2] == squares[1] == squares[0]
    warned = [
        "`overlap_param_sync` (True) has no effect with callbacks" in (each / "run.log").read_text() for each in found
    ]
    assert warned == [False, False, True]


@full_only
def test_copy_engines_equal_one_process_with_t5(runs):
    together = runs.run("copy-engines-t5", 2, copy_engines=True, model=T5["model"] | {"fsdp": True})
    check_equal(together, runs.run("alone-t5", **T5))


@full_only
@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 3), ("zero1", 2), ("full", 4), ("hybrid", 4)])
def test_fused_weights_equal_one_process(runs, layout, ranks):
    compare(runs, f"untied {layout}", ranks, LAYOUTS[layout], UNTIED)


@full_only
@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("full", 2), ("full", 3), ("hybrid", 4)])
@pytest.mark.parametrize("positions", ["kerple", "buckets"])
def test_shared_positions_equal_one_process(runs, positions, layout, ranks):
    compare(runs, f"{positions} {layout}", ranks, LAYOUTS[layout], KERPLE if positions == "kerple" else BUCKETS)


@full_only
@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 3), ("zero1", 2), ("full", 2), ("grad", 3), ("hybrid", 4)])
def test_t5_equals_one_process(runs, layout, ranks):
    nested = {name.replace("model__", ""): value for name, value in LAYOUTS[layout].items()}
    distributed = {"optim": T5["model"]["optim"] | {"name": "distributed_fused_adam"}} if layout == "zero1" else nested
    alone = runs.run("alone-t5", **T5)
    together = runs.run(f"t5-{layout}-{ranks}", ranks, model=T5["model"] | distributed)
    check_equal(together, alone)


@full_only
def test_t5_with_muon_equals_one_process(runs):
    together = runs.run("t5-muon-full-3", 3, model=T5_MUON["model"] | {"fsdp": True})
    check_equal(together, runs.run("alone-t5-muon", **T5_MUON))


@full_only
@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("full", 2), ("grad", 3), ("full", 4), ("hybrid", 4)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_equals_one_process(runs, optimizer, layout, ranks):
    compare(runs, f"{optimizer} {layout}", ranks, LAYOUTS[layout], OPTIMIZERS[optimizer] | UNTIED)


@full_only
def test_scaled_rates_with_a_cut_state_equal_one_process(runs):
    scaled = OPTIMIZERS["scaled"]["model__optim"] | {"name": "distributed_fused_adam"}
    compare(runs, "scaledzero1 zero1", 3, {}, {"model__optim": scaled} | UNTIED)


@full_only
@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("zero1", 4), ("full", 3), ("hybrid", 4)])
def test_average_equals_one_process(runs, layout, ranks):
    compare(runs, f"ema {layout}", ranks, LAYOUTS[layout], EMA, kinds=("model", "optimizer", "ema"))


@full_only
@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 4), ("zero1", 2), ("full", 4)])
def test_growing_batch_equals_one_process(runs, layout, ranks):
    compare(runs, f"ramp {layout}", ranks, LAYOUTS[layout], RAMP_UP, 5)


@full_only
@pytest.mark.parametrize(
    ("saved", "ranks", "resumed", "others"),
    [
        ("full", 2, "ddp", 1),
        ("full", 2, "full", 3),
        ("full", 2, "full", 4),
        ("full", 2, "hybrid", 4),
        ("hybrid", 4, "zero1", 2),
        ("zero1", 2, "ddp", 1),
        ("zero1", 2, "full", 3),
        ("ddp", 2, "full", 4),
        ("ddp", 3, "ddp", 1),
        ("ddp", 1, "full", 2),
        ("grad", 3, "ddp", 2),
    ],
)
def test_resumed_by_another_number_of_ranks(runs, saved, ranks, resumed, others):
    changes = EMA | UNTIED
    first = LAYOUTS[saved] if ranks > 1 else {}
    start = step(runs.run(f"saved-{saved}-{ranks}", ranks, **changes, **first), 3)
    then = LAYOUTS[resumed] if others > 1 else {}
    directory = runs.run(
        f"{saved}-{ranks}-to-{resumed}-{others}",
        others,
        exp_manager__resume_from_checkpoint=str(start),
        **changes,
        **then,
        **SIX,
    )
    unbroken = runs.run("alone-six-ema", **changes, **SIX)
    for kind in ("model", "optimizer", "ema"):
        assert difference(step(unbroken, 6), step(directory, 6), kind) <= LIMIT, kind
    assert samples_by_step(unbroken)[3:] == samples_by_step(directory)


@full_only
@pytest.mark.parametrize("layout", ["ddp", "full"])
def test_saved_beside_training_is_what_is_saved_at_once(runs, layout):
    each = {"save_top_k": -1, "every_n_train_steps": 1}
    at_once, beside = (
        runs.run(
            f"save-{layout}-{beside}",
            2,
            **LAYOUTS[layout],
            **EMA,
            exp_manager__checkpoint_callback_params=each | {"async_save": beside},
        )
        for beside in (False, True)
    )
    for number in (1, 2, 3):
        manifests = [json.loads((step(run, number) / "manifest.json").read_text()) for run in (at_once, beside)]
        tensors = [{n: f for n, f in m["files"].items() if n.endswith(".safetensors")} for m in manifests]
        assert tensors[0] == tensors[1]
        assert len(tensors[0]) == 6, "two ranks write weights, state and average each"


@full_only
@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("zero1", 3), ("full", 2), ("hybrid", 4)])
@pytest.mark.parametrize(("precision", "limit"), [("32", 1e-4), ("bf16", 2e-2)])
def test_narrow_precisions_are_close_to_one_process(runs, precision, limit, layout, ranks):
    changes = NO_BIAS | {"trainer__precision": precision}
    alone = runs.run(f"{precision}-alone", **changes)
    together = runs.run(f"{precision}-{layout}", ranks, **changes, **LAYOUTS[layout])
    assert difference(step(alone, 3), step(together, 3), "model") <= limit
    for mine, expected in zip(figures(together), figures(alone), strict=True):
        assert mine == pytest.approx(expected, rel=limit)
