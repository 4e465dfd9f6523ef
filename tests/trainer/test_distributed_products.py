"""Random products of the axes train as one process does: in fp64 to 1e-12, with dropout and uneven targets.

Models and layouts are drawn independently, with a fixed seed, and kept where the rules accept them together.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from distributed_runs import EXACT, DistributedRuns
from test_distributed_parity import EMA, LAYOUTS, NO_BIAS, OPTIMIZERS, T5, check_equal
from tiers import TIER, full_only
from tiny_run import tiny_config

from stoker.trainer.config.captured_layers import captures_layers, layer_capture_reason
from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.config.rules.all_rules import run_rules
from stoker.trainer.config.rules.rule_context import RuleContext
from stoker.trainer.core.run_checks import choose_attention
from stoker.trainer.utils.errors import UserError

NUMBER = 0 if TIER == "fast" else 60
KINDS = ("gpt", "moe", "t5", "bert", "lora", "moe")
FULL_RECOMPUTE = {
    "model__activations_checkpoint_granularity": "full",
    "model__activations_checkpoint_method": "uniform",
    "model__activations_checkpoint_num_layers": 1,
}
RECOMPUTES: list[dict[str, Any]] = [
    {},
    {},
    FULL_RECOMPUTE,
    {"model__activations_checkpoint_granularity": "selective"},
    {"model__activations_checkpoint_modules": ["norm", "mlp_activation"]},
]


class Product(NamedTuple):
    """A model, a layout, and the ranks of it."""

    kind: str
    model: dict[str, Any]
    layout: dict[str, Any]
    ranks: int

    @property
    def name(self) -> str:
        """Name for its test: the model's kind, and the values of the layout."""
        values = "-".join(str(value) for value in self.layout.values() if value is not True)
        return f"{self.kind}-{values}".replace(" ", "").replace("[", "").replace("]", "")


def draw_model(kind: str, rng: Random) -> dict[str, Any]:
    """Draw a model of any family with dropout, and its optimizer."""
    layers = rng.choice([2, 3, 4, 6])
    if kind == "t5":
        encoder = T5["model"]["encoder"] | {"num_attention_heads": 4, "num_layers": layers}
        decoder = T5["model"]["decoder"] | {"num_layers": rng.choice([1, 2, 6])}
        return {"model": T5["model"] | {"encoder": encoder, "decoder": decoder}}
    model: dict[str, Any] = {
        "num_layers": layers,
        "num_attention_heads": 4,
        "position_embedding_type": rng.choice(
            ["rope", "learned_absolute", "alibi", "kerple", "relative", "sandwich", "none"]
        ),
        "num_query_groups": rng.choice([None, 1, 2]),
        "activation": rng.choice(["gelu", "fast-swiglu"]),
        "transformer_block_type": rng.choice(["pre_ln", "pre_ln", "post_ln", "normformer"]),
        "qk_layernorm": rng.random() < 0.3,
        "ffn_dropout": 0.1,
    }
    if kind == "bert":
        model["family"] = "bert"
    else:
        model["share_embeddings_and_output_weights"] = rng.random() < 0.5
    if kind == "moe":
        model |= {
            "num_moe_experts": 8,
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 1.0,
            "moe_z_loss_coeff": 0.1,
            "moe_dropout": rng.choice([0.0, 0.1]),
            "moe_input_jitter_eps": rng.choice([None, 0.1]),
            "moe_expert_capacity_factor": rng.choice([None, 0.8]),
            "moe_token_drop_policy": rng.choice(["probs", "position"]),
            "moe_shared_expert_intermediate_size": rng.choice([None, 32]),
        }
    changes = NO_BIAS | {f"model__{name}": value for name, value in model.items()} | rng.choice(RECOMPUTES)
    if kind == "lora":
        lora = {"adapter_dim": 4, "target_modules": ["all"], "adapter_dropout": rng.choice([0.0, 0.1])}
        return changes | {"model__peft__peft_scheme": "lora", "model__peft__lora_tuning": lora}
    if rng.random() < 0.3:
        changes |= rng.choice([OPTIMIZERS["adafactor"], OPTIMIZERS["muon"], EMA])
    return changes


def draw_layout(kind: str, rng: Random) -> tuple[dict[str, Any], int]:
    """Draw the axes of up to 8 ranks, of which several are shared in at least one way."""
    tensor, context, data = rng.choice([1, 2, 2, 4]), rng.choice([1, 2, 2, 4]), rng.choice([1, 2, 2, 4])
    pipeline = rng.choice([1, 2, 2, 3, 4])
    keys: dict[str, Any] = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    if pipeline > 1 and kind == "t5":
        keys["pipeline_model_parallel_split_rank"] = rng.randrange(1, pipeline)
    elif pipeline > 1:
        uneven = {"num_layers_in_first_pipeline_stage": 1}
        counted = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
        keys |= rng.choice([{}, {}, {"virtual_pipeline_model_parallel_size": 2}, uneven, counted])
    if tensor > 1:
        keys["sequence_parallel"] = rng.random() < 0.7
    if context > 1:
        keys |= {"context_parallel_size": context, "cp_comm_type": rng.choice(["p2p", "all_gather", "a2a", "a2a+p2p"])}
        if keys["cp_comm_type"] == "a2a+p2p":
            keys["hierarchical_context_parallel_sizes"] = [2, context // 2]
    if kind == "moe":
        keys["expert_model_parallel_size"] = rng.choice([1, 2, 4, 8])
        keys["moe_token_dispatcher_type"] = rng.choice(["alltoall", "allgather"])
    of_data = rng.choice(list(LAYOUTS.values())) if data * context > 1 else {}
    return {f"model__{name}": value for name, value in keys.items()} | of_data, tensor * context * data * pipeline


def is_accepted(product: Product) -> bool:
    """Return True if the rules accept a product, and a backend can compute its attention."""
    try:
        changes = EXACT | merged(product) | {"trainer__devices": product.ranks}
        config = tiny_config(Path("unused"), **changes)
        given = frozenset(path.replace("__", ".") for path in changes)
        if any(found.level == "error" for found in run_rules(RuleContext(config.root, given, given, {}))):
            return False
        choose_attention(resolve_run(config.root, world_size=product.ranks), torch.device("cpu"))
    except (ValueError, UserError):
        return False
    return True


def can_capture(product: Product) -> bool:
    """Return True if the layers can be captured one by one, without copy engines."""
    model = tiny_config(Path("unused"), **(EXACT | merged(product) | {"trainer__devices": product.ranks})).root.model
    gathers = model.fsdp and model.fsdp_sharding_strategy != "grad"
    return captures_layers(model, product.ranks) and layer_capture_reason(model) is None and not gathers


def merged(product: Product) -> dict[str, Any]:
    """Return the changes of model and layout together; a T5's are one block."""
    if "model" not in product.model:
        return product.model | product.layout
    block, rest = dict(product.model["model"]), {}
    for path, value in product.layout.items():
        if path.startswith("model__optim__"):
            block["optim"] = block["optim"] | {path.removeprefix("model__optim__"): value}
        elif path.startswith("model__"):
            block[path.removeprefix("model__")] = value
    return {**product.model, "model": block, **rest}


def products() -> list[Product]:
    """Draw as many products as `NUMBER`, of all kinds in turn."""
    rng, found = Random(28), []
    while len(found) < NUMBER:
        kind = KINDS[len(found) % len(KINDS)]
        layout, ranks = draw_layout(kind, rng)
        product = Product(kind, draw_model(kind, rng), layout, ranks)
        if 2 <= ranks <= 8 and is_accepted(product):
            found.append(product)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


@full_only  # in the fast tier a checkpoint of four ranks resumes on one with equal weights (test_distributed_resume.py)
@pytest.mark.parametrize("product", products(), ids=lambda product: product.name)
def test_products_equal_one_process(runs, product):
    """Layers that can be captured run by a substitute for CUDA graphs."""
    number = zlib.crc32(repr(product).encode())
    captured = {"captured": True} if can_capture(product) else {}
    alone = runs.run(f"alone-{zlib.crc32(repr(product.model).encode())}", **product.model)
    together = runs.run(f"together-{number}", product.ranks, **merged(product), **captured)
    trained = "adapter" if product.kind == "lora" else "model"
    averaged = ("ema",) if "exp_manager__ema" in product.model else ()
    check_equal(together, alone, kinds=(trained, "optimizer", *averaged))
