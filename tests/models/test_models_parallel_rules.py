"""Rules of model parallelism: what is wrong is named with its values, and every cure is accepted."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel_models import keys_of
from tiers import examples

from stoker.models.config.key_block import Finding
from stoker.models.parallel.layout import ParallelLayout
from stoker.models.parallel.rules import SplitModel, parallel_rules, world_rules

MESH = {
    "model.tensor_model_parallel_size": "tensor",
    "model.context_parallel_size": "context",
    "model.expert_model_parallel_size": "expert",
    "model.sequence_parallel": "sequence",
}
MOE: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2}


def split(changes: dict[str, Any] | None = None, *, length: int = 16, micro: int = 2, comm: str = "p2p", **mesh: Any):
    changes = {"override_vocab_size": 90, **(changes or {})}
    family = changes.get("family", "gpt")
    if family == "t5":
        del changes["override_vocab_size"]
        lengths = {"model.seq_length": length, "model.data.seq_length_dec": length // 2}
    else:
        lengths = {"model.encoder_seq_length": length}
    keys = keys_of(changes)
    return SplitModel(keys=keys, mesh=ParallelLayout(**mesh), lengths=lengths, micro_batch=micro, comm_type=comm)


def obeyed(model: SplitModel, cure: str) -> SplitModel:
    """Return the model with a cure `path=value path=value`."""
    for path, value in re.findall(r"([\w.]+)=([\w.]+)", cure):
        if path in MESH:
            model = replace(model, mesh=replace(model.mesh, **{MESH[path]: eval(value)}))
        elif path in model.lengths:
            model = replace(model, lengths={**model.lengths, path: int(value)})
        elif path == "model.micro_batch_size":
            model = replace(model, micro_batch=int(value))
        elif path == "model.cp_comm_type":
            model = replace(model, comm_type=value)
        else:
            *blocks, name = path.split(".")[1:]
            changed = {name: int(value)}
            if blocks:
                changed = {blocks[0]: getattr(model.keys, blocks[0]).model_copy(update=changed)}
            model = replace(model, keys=model.keys.model_copy(update=changed))
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            split({"num_attention_heads": 6, "kv_channels": 8}, tensor=4),
            "`tensor_model_parallel_size` (4) must divide `num_attention_heads` (6)",
        ),
        (
            split({"num_attention_heads": 12, "num_query_groups": 6, "kv_channels": 8}, tensor=4),
            "(4) must divide `num_query_groups` (6) or be a multiple of it",
        ),
        (split({"ffn_hidden_size": 50}, tensor=4), "(4) must divide `ffn_hidden_size` (50)"),
        (
            split({"make_vocab_size_divisible_by": 1}, tensor=4),
            "(4) must divide the vocabulary of 90, padded to `make_vocab_size_divisible_by` (1)",
        ),
        (
            split({"family": "t5", "num_attention_heads": 3, "kv_channels": 8}, tensor=2),
            "must divide `num_attention_heads` (3)",
        ),
        (split(sequence=True), "`sequence_parallel` (True) has no effect with `tensor_model_parallel_size` (1)"),
        (
            split(length=18, micro=1, tensor=4, sequence=True),
            "must divide the 18 tokens of a micro batch: `micro_batch_size` (1) of `encoder_seq_length` (18)",
        ),
        (split(length=20, context=4), "twice `context_parallel_size` (4) must divide `encoder_seq_length` (20)"),
        (
            split({"family": "bert"}, length=18, context=4),
            "`context_parallel_size` (4) must divide `encoder_seq_length` (18)",
        ),
        (
            split({"family": "t5"}, length=24, context=8),
            "twice `context_parallel_size` (8) must divide `seq_length_dec` (12)",
        ),
        (
            split({"num_query_groups": 2}, context=4, comm="a2a"),
            "`context_parallel_size` (4) must divide `num_query_groups` (2)",
        ),
        (
            split(tensor=2, context=4, comm="a2a"),
            "must divide `num_attention_heads` (2, the share of a tensor-parallel rank of 4)",
        ),
        (split(comm="a2a"), "`cp_comm_type` (a2a) has no effect"),
        (split(expert=2, data=2), "(2) needs a model with experts"),
        (split(MOE, expert=3, data=3), "(3) must divide `num_moe_experts` (4)"),
        (split(MOE, expert=4, data=2), "(4) must divide the 2 ranks"),
        (split(MOE, tensor=2), "`num_moe_experts` (4) with `tensor_model_parallel_size` (2) needs `sequence_parallel`"),
    ],
)
def test_what_cannot_be_split_is_named_and_every_cure_is_accepted(model: SplitModel, message: str) -> None:
    found = list(parallel_rules(model))
    finding = next(each for each in found if message in each.message)
    assert finding.fix
    assert all(key.startswith(("model.", "trainer.")) for key in finding.keys)
    for cure in finding.fix.split(", or "):
        assert message not in str(list(parallel_rules(obeyed(model, cure)))), cure


@pytest.mark.parametrize(
    "model",
    [
        split(),
        split(tensor=4, sequence=True, context=2, data=2),
        split({"num_query_groups": 1}, tensor=4),
        split({"family": "t5"}, tensor=2, sequence=True, context=2),
        split(MOE, tensor=2, sequence=True, expert=4, data=2),
        split({"num_query_groups": 2}, tensor=2, context=1, comm="p2p"),
        split(context=4, comm="a2a"),
    ],
)
def test_what_can_be_split_is_accepted(model: SplitModel) -> None:
    assert list(parallel_rules(model)) == []


def obeyed_world(cure: str, mesh: ParallelLayout, devices: int) -> tuple[ParallelLayout, int]:
    for path, value in re.findall(r"([\w.]+)=(\d+)", cure):
        if path == "trainer.devices":
            devices = int(value)
        else:
            axis = path.removeprefix("model.").removesuffix("_parallel_size").removesuffix("_model")
            change: dict[str, Any] = {axis: int(value)}
            mesh = replace(mesh, **change)
    return mesh, devices


@given(
    st.builds(ParallelLayout, tensor=st.integers(1, 8), context=st.integers(1, 4), pipeline=st.integers(1, 3)),
    st.integers(1, 8),
    st.integers(1, 4),
)
@examples(100)
def test_processes_make_up_whole_replicas_with_tensor_ranks_in_one_node(
    mesh: ParallelLayout, devices: int, nodes: int
) -> None:
    found = list(world_rules(mesh, devices, nodes))
    # a rank and the one that shares its layers are on one node, and every rank belongs to a whole replica
    whole = devices * nodes % mesh.model_ranks == 0
    starts = range(0, devices * nodes, mesh.tensor)
    together = all(start // devices == (start + mesh.tensor - 1) // devices for start in starts)
    assert (not found) == (whole and (together or nodes == 1))
    for cure in found[0].fix.split(", or ") if found else ():
        changed, enough = obeyed_world(cure, mesh, devices)
        again: list[Finding] = list(world_rules(changed, enough, nodes))
        assert again == [], (cure, again)
