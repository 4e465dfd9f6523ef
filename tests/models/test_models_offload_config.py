"""The keys of offloading: what they mean, what they have against each other, and what is checked before a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from config_helpers import load, problems
from deferred_copies import DeferredCopies
from resolved import batch_spec, check_memory, uses_cuda_graph
from test_models_offload import LAYERS, STACK, model_of
from tiers import looped
from tiny_run import tiny_config
from torch import nn

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.build import build_model, enable_offloading
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.families import family_slice
from stoker.models.config.gpt import GPTKeys
from stoker.models.config.key_block import Finding
from stoker.models.config.memory import OffloadSlice, offload_slice
from stoker.models.config.memory_rules import offload_rules
from stoker.models.config.stack import StackKeys
from stoker.models.config.t5 import T5Keys
from stoker.models.memory.offload_weights import WeightOffload, find_weight_offloads
from stoker.models.recompute.analysis import recomputed_for_offload
from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.core.run_summary import describe_offload, describe_offload_traffic
from stoker.trainer.plan import memory_check, state_memory
from stoker.trainer.utils.errors import UserError

ON = {"num_layers": 6, "cpu_offloading": True}
CUDA = torch.device("cuda", 0)


CHUNKS_OF_4: dict[str, Any] = {
    "activations_checkpoint_granularity": "full",
    "activations_checkpoint_method": "uniform",
    "activations_checkpoint_num_layers": 4,
}


BLOCK_OF_2 = CHUNKS_OF_4 | {"activations_checkpoint_method": "block", "activations_checkpoint_num_layers": 2}


def stack(**changes: Any) -> StackKeys:
    return StackKeys.model_validate({"num_layers": 6, **changes})


@looped(
    ("changes", "expected"),
    [
        ({}, None),
        ({"cpu_offloading_num_layers": 3}, None),
        ({"cpu_offloading": True}, OffloadSlice(layers=5, activations=True, weights=True)),
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 0}, None),
        ({"cpu_offloading": True, "num_layers": 1}, None),
        ({"cpu_offloading": True, **CHUNKS_OF_4}, OffloadSlice(layers=4, activations=True, weights=True)),
        ({"cpu_offloading": True, "num_layers": 4, **CHUNKS_OF_4}, None),
        (
            {"cpu_offloading": True, "cpu_offloading_num_layers": 2, "cpu_offloading_weights": False},
            OffloadSlice(layers=2, activations=True, weights=False),
        ),
    ],
)
def test_slice(changes: dict[str, Any], expected: OffloadSlice | None) -> None:
    assert offload_slice(stack(**changes)) == expected


@looped(
    ("changes", "level", "says", "fix"),
    [
        ({"cpu_offloading_num_layers": 6}, "error", "(6) must be less than `num_layers` (6)", "_num_layers=4, or cpu"),
        ({"cpu_offloading_num_layers": 9}, "error", "(9) must be less than `num_layers` (6)", "_num_layers=4, or cpu"),
        ({"cpu_offloading_num_layers": 5}, "warning", "(5) leaves one layer of 6", "_num_layers=4 or fewer"),
        ({}, "warning", "(null, which is 5) leaves one layer of 6", "_num_layers=4 or fewer"),
        ({"num_layers": 2}, "warning", "(null, which is 1) leaves one layer of 2", "cpu_offloading=false"),
        ({"cpu_offloading_num_layers": 0}, "info", "(0) offloads nothing", "_num_layers=4"),
        ({"num_layers": 1}, "info", "(0, all but one of `num_layers` (1)) offloads nothing", "cpu_offloading=false"),
        ({"cpu_offloading_num_layers": 4}, None, "", ""),
        (
            CHUNKS_OF_4,
            "info",
            "(null, which is 5) offloads the first 4 layers: the others are one recompute chunk",
            "_layers=4",
        ),
        (CHUNKS_OF_4 | {"cpu_offloading_num_layers": 4}, None, "", ""),
        (CHUNKS_OF_4 | {"activations_checkpoint_num_layers": 1}, None, "", ""),  # inputs are copied in no time
        (BLOCK_OF_2, "warning", "(null, which is 5) leaves one layer of 6", "_num_layers=4 or fewer"),
        (CHUNKS_OF_4 | {"num_layers": 4}, "warning", "(null, which is 3) offloads nothing: all layers", "num_layers=1"),
        ({"cpu_offloading_num_layers": 5, "cpu_offloading_activations": False}, None, "", ""),  # weights overlap
        (
            {
                "cpu_offloading_num_layers": 4,
                "cpu_offloading_activations": False,
                "cpu_offloading_weights": False,
            },
            "error",
            "needs `cpu_offloading_activations` or `cpu_offloading_weights`, which are both False",
            "cpu_offloading_activations=true",
        ),
        ({"cpu_offloading": False, "cpu_offloading_num_layers": 5}, None, "", ""),  # every file of NeMo
        ({"cpu_offloading": False, "cpu_offloading_num_layers": 3}, "info", "`cpu_offloading_num_layers` (3) has", ""),
        (
            {"cpu_offloading": False, "cpu_offloading_num_layers": 3, "cpu_offloading_weights": False},
            "info",
            "`cpu_offloading_num_layers` (3) and `cpu_offloading_weights` (False) have no effect",
            "cpu_offloading=true",
        ),
    ],
)
def test_rules(changes: dict[str, Any], level: str | None, says: str, fix: str) -> None:
    found: list[Finding] = list(offload_rules(stack(**{**ON, **changes})))
    assert [finding.level for finding in found] == ([] if level is None else [level])
    for finding in found:
        assert says in finding.message
        assert fix in finding.fix
        assert set(finding.keys) <= set(StackKeys.model_fields)


def test_number_is_not_negative() -> None:
    problem = problems("model.cpu_offloading=true", "model.cpu_offloading_num_layers=-1")
    assert set(problem) == {"model.cpu_offloading_num_layers"}


def test_lines_of_the_seed_documents_run() -> None:
    """And NeMo's default for the number of layers, which is arithmetic between keys."""
    lines = ("cpu_offloading=True", "cpu_offloading_activations=True", "cpu_offloading_weights=True")
    root = load(*(f"model.{line}" for line in lines), "model.cpu_offloading_num_layers=${sum:${.num_layers},-1}").root
    assert isinstance(root.model, GPTKeys)
    assert offload_slice(root.model) == OffloadSlice(layers=3, activations=True, weights=True)


def test_t5_offloads_each_stack_by_itself() -> None:
    keys = T5Keys.model_validate(
        {
            "encoder": {"num_layers": 4, "cpu_offloading": True, "cpu_offloading_num_layers": 2},
            "decoder": {"num_layers": 6},
        }
    )
    described = family_slice(keys, vocab_size=50, batch_spec=BatchSpec(seq_length=8, decoder_seq_length=8))
    encoder = OffloadSlice(layers=2, activations=True, weights=True)
    assert [part.offload for part in described.stacks] == [encoder, None]


def test_layers_that_are_offloaded_make_cheap_parts_again() -> None:
    keys: dict[str, Any] = {"num_layers": 6, "cpu_offloading": True, "cpu_offloading_num_layers": 4}
    cheap = {"norm", "mlp_activation", "core_attention"}

    def parts(*, offloads: bool = True, **changes: Any) -> list[set[str]]:
        model = GPTKeys.model_validate(keys | changes)
        part = family_slice(model, vocab_size=50, batch_spec=BatchSpec(seq_length=8)).stacks[0]
        return [set(part.recomputed_modules(layer, offloading=offloads)) for layer in range(6)]

    assert parts() == [cheap] * 4 + [set()] * 2
    assert parts(offloads=False) == [set()] * 6
    assert parts(cpu_offloading_activations=False) == [set()] * 6
    assert parts(transformer_block_type="post_ln") == [cheap - {"norm"}] * 4 + [set()] * 2
    assert parts(num_moe_experts=4, moe_layer_freq=[0, 1] * 3) == [cheap, cheap - {"mlp_activation"}] * 2 + [set()] * 2
    assert parts(activations_checkpoint_modules=["norm"]) == [cheap] * 4 + [{"norm"}] * 2
    block: dict[str, Any] = {"activations_checkpoint_granularity": "full", "activations_checkpoint_method": "block"}
    assert parts(**block, activations_checkpoint_num_layers=2) == [set()] * 2 + [cheap] * 2 + [set()] * 2


def test_each_stack_says_what_it_makes_again() -> None:
    """Of scores, only where an attention of the stack itself keeps some."""
    on = {"num_layers": 4, "cpu_offloading": True}
    keys = T5Keys.model_validate({"encoder": on, "decoder": on, "seq_length": 8})
    described = family_slice(keys, vocab_size=50, batch_spec=BatchSpec(seq_length=8, decoder_seq_length=8))
    call = SimpleNamespace(device="cuda", dtype="bf16")
    kept, fused = (SimpleNamespace(saves_scores=keeps, call=call) for keeps in (True, False))
    decisions: Any = {"encoder training": kept, "decoder training": fused, "cross training": fused}
    cheap = {"norm", "mlp_activation"}
    assert recomputed_for_offload(described, decisions, None, compiled=True) == (cheap | {"core_attention"}, cheap)


def rules_of_a_run(*overrides: str) -> list[str]:
    return [finding.message for finding in load("model.cpu_offloading=true", *overrides).findings]


def test_a_gpu_is_needed() -> None:
    few = "model.cpu_offloading_num_layers=2"
    told = "\n".join(rules_of_a_run(few, "trainer.accelerator=cpu"))
    assert "cpu_offloading" in told
    assert "no effect with `accelerator` (cpu)" in told
    assert "no effect" not in "\n".join(rules_of_a_run(few, "trainer.accelerator=gpu"))


def test_what_a_run_says_in_the_end() -> None:
    keys = GPTKeys.model_validate({**STACK, "encoder_seq_length": 16, "cpu_offloading": True})
    model: Any = model_of()
    assert list(describe_offload_traffic(model)) == []
    copies = DeferredCopies()
    enable_offloading(model, family_slice(keys, vocab_size=50, batch_spec=BatchSpec(seq_length=16)), lambda: copies)
    copies.pool.size = 3 << 30
    (part,) = model.stacks
    assert part.activation_offload is not None
    assert part.weight_offload is not None
    part.activation_offload.sent_bytes, part.weight_offload.sent_bytes = 1 << 30, 1 << 29
    (line,) = describe_offload_traffic(model)
    assert "moved 1.50 GiB to host memory and back per micro batch, and used 3.00 GiB" in line


FULL = ("granularity=full", "method=uniform", "num_layers=2")


@pytest.mark.parametrize(
    ("model", "at", "recomputed", "says"),
    [
        (
            "gpt_tiny",
            "",
            FULL,
            "`activations_checkpoint_granularity`, which Megatron does not allow: the input of each ch",
        ),
        (
            "gpt_tiny",
            "",
            ("modules=[norm]",),
            "`activations_checkpoint_modules`, which Megatron does not allow: the remaining",
        ),
        ("t5_tiny", "encoder.", ("modules=[norm]",), "`activations_checkpoint_modules`, which Megatron does not allow"),
    ],
)
def test_recomputation_may_stay(model: str, at: str, recomputed: tuple[str, ...], says: str) -> None:
    """Nothing goes to the host where nothing is offloaded."""
    lines = [f"model.{at}activations_checkpoint_{line}" for line in recomputed]
    on = [f"model.{at}cpu_offloading=true", f"model.{at}num_layers=4", f"model.{at}cpu_offloading_num_layers=2"]
    given = (f"model={model}", "data=mock", *on, *lines)
    found = load(*given, "trainer.accelerator=gpu").findings
    (finding,) = (finding for finding in found if "is combined with" in finding.message)
    assert f"is combined with {says}" in finding.message
    assert finding.level == "info"
    assert finding.keys[0] == f"model.{at}cpu_offloading"
    for without in (
        load(*given, "trainer.accelerator=cpu"),
        load(*given, "trainer.accelerator=gpu", f"model.{at}cpu_offloading_activations=false"),
        load(*given, "trainer.accelerator=gpu", f"model.{at}cpu_offloading_num_layers=0"),
    ):
        assert not any("is combined with" in finding.message for finding in without.findings)


def test_weights_are_not_cut_by_fsdp() -> None:
    two = ("trainer.accelerator=gpu", "trainer.devices=2", "model.global_batch_size=32")
    fsdp = ("model.cpu_offloading=true", "model.fsdp=true", *two)
    (problem,) = problems(*fsdp).values()
    assert problem.key == "model.cpu_offloading_weights"
    load(*fsdp, "model.cpu_offloading_weights=false")
    load("model.cpu_offloading=true", *two)  # whole on each rank


def test_recordings_do_not_offload() -> None:
    more = ("model.cpu_offloading=true", "trainer.accelerator=gpu")
    (problem,) = problems(*more, "model.enable_cuda_graph=true").values()
    assert problem.key == "model.cpu_offloading"
    assert uses_cuda_graph(load("model.enable_cuda_graph=null").root, CUDA, 1)
    assert not uses_cuda_graph(load(*more, "model.enable_cuda_graph=null").root, CUDA, 1)


def test_slices_become_parts_of_the_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = GPTKeys.model_validate({**STACK, "encoder_seq_length": 16, "cpu_offloading": True})
    described = family_slice(keys, vocab_size=50, batch_spec=BatchSpec(seq_length=16))
    model = model_of()
    (part,) = model.stacks
    assert part.activation_offload is None  # nothing on a CPU
    made: list[DeferredCopies] = []
    enable_offloading(model, described, lambda: (made.append(DeferredCopies()), made[-1])[1])
    assert len(made) == 2  # weights do not queue behind activations
    assert part.activation_offload is not None
    assert part.activation_offload.num_layers == LAYERS - 1
    assert part.weight_offload is not None


def test_weights_that_are_cut_are_refused() -> None:
    class Cut(nn.Parameter):
        pass

    layer = nn.Linear(4, 4)
    layer.weight = Cut(layer.weight.data)
    with pytest.raises(ValueError, match="`cpu_offloading_weights` \\(True\\) is not supported with sharded weights"):
        WeightOffload(DeferredCopies(), [layer], 1)


# ---------------------------------------------------------------- before a run


def config(**changes: Any) -> RunConfig:
    return tiny_config(Path("unused"), **{"model__num_layers": 4, "trainer__limit_val_batches": 0, **changes})


def test_what_a_run_says() -> None:
    root = config(model__cpu_offloading=True, trainer__accelerator="auto").root
    assert isinstance(root.model, GPTKeys)
    model: Any = model_of()
    run = resolve_run(root)
    told = list(describe_offload(run, model, torch.device("cpu")))
    assert told == [
        "warning: `model.cpu_offloading` (True) has no effect on cpu, which uses host memory (~model.cpu_offloading)"
    ]
    enable_offloading(model, run.family, DeferredCopies)
    (line,) = describe_offload(run, model, CUDA)
    assert line.startswith("CPU offloading of the first 3 layers: activations and weights (")
    assert line.endswith("; recomputed instead of offloaded: core attention, mlp activation, norm")
    assert list(describe_offload(resolve_run(config().root), model, CUDA)) == []


def least_need(monkeypatch: pytest.MonkeyPatch, root: Any, *, of_host: bool) -> int:
    """Bytes that a card, or the host, must have for the check to pass."""
    low, high = 0, 1 << 40
    monkeypatch.setattr(memory_check, "_mask_bytes", lambda *_: 0)
    while high - low > 1:
        middle = (low + high) // 2
        card, host = (1 << 50, middle) if of_host else (middle, 1 << 50)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _, card=card: SimpleNamespace(total_memory=card)
        )
        monkeypatch.setattr(memory_check, "host_memory", lambda host=host: host)
        try:
            check_memory(root, CUDA)
            high = middle
        except UserError:
            low = middle
    return high


def test_bounds_know_what_is_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of layers, fp32: 4 layers of 8 samples, 16 tokens, 32 numbers; two of them on the host."""
    monkeypatch.setattr(state_memory, "min_state_elements", lambda *_: 0)
    many = {"model__micro_batch_size": 1024, "model__global_batch_size": 1024, "trainer__precision": 32}
    inputs = 1024 * 16 * 32 * 4
    weights_stay = {"model__cpu_offloading": True, "model__cpu_offloading_weights": False}
    plain = least_need(monkeypatch, config(**many).root, of_host=False)
    two = config(**many, **weights_stay, model__cpu_offloading_num_layers=2).root
    assert plain - least_need(monkeypatch, two, of_host=False) == 2 * inputs
    assert least_need(monkeypatch, two, of_host=True) == 2 * inputs
    full: Any = {
        "model__activations_checkpoint_granularity": "full",
        "model__activations_checkpoint_method": "uniform",
        "model__activations_checkpoint_num_layers": 2,
    }
    chunks = least_need(monkeypatch, config(**many, **full).root, of_host=False)
    assert plain - chunks == 2 * inputs
    both = config(**many, **full, **weights_stay, model__cpu_offloading_num_layers=2).root
    assert chunks - least_need(monkeypatch, both, of_host=False) == inputs
    assert least_need(monkeypatch, both, of_host=True) == inputs
    away = config(**many, model__cpu_offloading=True, model__cpu_offloading_num_layers=2).root
    assert least_need(monkeypatch, away, of_host=False) < least_need(monkeypatch, two, of_host=False)


BIG: dict[str, Any] = {"hidden_size": 512, "ffn_hidden_size": 1024, "num_attention_heads": 8, "cpu_offloading": True}


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("gpt_tiny", {"activation": "swiglu"}),
        ("gpt_tiny", {"num_query_groups": 1, "ffn_hidden_size": 256}),  # the projections back are small ones
        ("gpt_tiny", {"num_moe_experts": 4, "moe_layer_freq": 2, "moe_shared_expert_intermediate_size": 1024}),
        ("t5_tiny", {}),
    ],
)
def test_weights_count_on_the_host(monkeypatch: pytest.MonkeyPatch, model: str, changes: dict[str, Any]) -> None:
    """As many bytes as the engine sends; matrices of less than 1 MiB stay."""
    keys = BIG | changes | {"num_layers": 3, "cpu_offloading_num_layers": 2, "cpu_offloading_activations": False}
    stacks = ("model.encoder", "model.decoder") if model == "t5_tiny" else ("model",)
    given = [f"{stack}.{name}={value}" for stack in stacks for name, value in keys.items()]
    root = load(f"model={model}", "data=mock", "trainer.accelerator=gpu", "trainer.precision=32", *given).root
    form = batch_spec(root)
    facts: Any = {"device": "cpu", "dtype": torch.float32, "flags": AttentionFlags(), "micro_batch_size": 1}
    built = build_model(root.model, vocab_size=50, batch_spec=form, **facts)
    enable_offloading(built, family_slice(root.model, vocab_size=50, batch_spec=form), DeferredCopies)
    sent = sum(part.sent_bytes for part in find_weight_offloads(built))
    assert sent > 0
    assert least_need(monkeypatch, root, of_host=True) == sent
