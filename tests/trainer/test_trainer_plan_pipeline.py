"""Plans of pipelines: what each rank holds and sends, beside models built as its stages, and how it is reported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from config_helpers import load
from gpt_builder import build_model
from saved_activations import plan_inputs, saved_stage
from tiers import cases, looped

from stoker.models.build import num_parameters
from stoker.models.model_cost import head_saved_bytes
from stoker.models.parallel.pipeline import PipelineParallel
from stoker.models.parallel.schedule import StageTimes
from stoker.models.peft.apply import trainable_parameters
from stoker.trainer.cli.main import main
from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.plan.hardware import parse_gpu
from stoker.trainer.plan.layers import layers_in_order
from stoker.trainer.plan.run_inputs import pipeline_ranks
from stoker.trainer.plan.run_plan import Plan, gpu_target, make_plan
from stoker.trainer.plan.timeline import StageMemory
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, EXIT_OK, UserError

SMALL = [
    "data=mock", "trainer.precision=bf16", "model.hidden_size=256", "model.num_attention_heads=8",
    "model.ffn_hidden_size=704", "model.encoder_seq_length=136", "model.num_layers=4", "model.micro_batch_size=3",
    "model.global_batch_size=24", "model.override_vocab_size=64", "model.hidden_dropout=0", "model.attention_dropout=0",
]  # fmt: skip
LLAMA = ["model=llama_1b", *SMALL, "model.num_query_groups=2"]
TIED = ["model.share_embeddings_and_output_weights=True"]
RELATIVE = ["model.position_embedding_type=relative"]
MOE = [*LLAMA, "model.num_moe_experts=4", "model.moe_layer_freq=[0,1,0,1]"]
BERT = ["model=bert_base", *SMALL]
T5 = [
    "model=t5_v1_1_base", "trainer.precision=bf16", "data=mock", "model.seq_length=152", "model.data.seq_length_dec=72",
    "model.micro_batch_size=3", "model.global_batch_size=24", "model.override_vocab_size=128",
    *(
        f"model.{part}.{key}"
        for part in ("encoder", "decoder")
        for key in ("hidden_size=256", "num_attention_heads=8", "kv_channels=40", "ffn_hidden_size=704", "num_layers=2")
    ),
]  # fmt: skip
TIED_T5 = [*T5, "model.share_decoder_tokens_head_embeddings=True"]
NAMES = "model.peft.selective_tuning.tunable_base_param_names"
FULL = [f"model.activations_checkpoint_{key}" for key in ("granularity=full", "method=uniform", "num_layers=1")]


def pipelined(ranks: int, chunks: int | None = None, split: int = 0, devices: int | None = None) -> list[str]:
    keys = [f"trainer.devices={devices or ranks}", f"model.pipeline_model_parallel_size={ranks}"]
    keys += [f"model.virtual_pipeline_model_parallel_size={chunks}"] if chunks else []
    return keys + ([f"model.pipeline_model_parallel_split_rank={split}"] if split else [])


def planned(*overrides: str, gpu: str = "h100") -> Plan:
    root = load(*overrides).root
    run = resolve_run(root, world_size=root.trainer.devices * root.trainer.num_nodes, capability=(9, 0))  # pyrefly: ignore[bad-argument-type]
    return make_plan(run, gpu_target(run, parse_gpu(gpu)))


MODELS = {
    "gpt": [*LLAMA, *pipelined(4)],
    "gpt, tied": [*LLAMA, *TIED, *pipelined(2)],
    "gpt, interleaved": [*LLAMA, *TIED, *pipelined(2, 2)],
    "gpt, position bias": ["model=gpt3_1b", *SMALL, *RELATIVE, *pipelined(2, 2)],
    "experts": [*MOE, *pipelined(4)],
    "bert": [*BERT, *pipelined(2)],
    "t5": [*T5, *pipelined(4, split=2)],
    "t5, tied": [*TIED_T5, *pipelined(3, split=1)],
    "t5, tied, two ranks": [*TIED_T5, *pipelined(2, split=1)],
}


@looped("name", MODELS)
def test_every_rank_has_the_planned_parameters(name: str) -> None:
    plan = planned(*MODELS[name])
    run, split = plan.inputs.run, plan.inputs.run.pipeline
    assert split is not None
    assert run.mesh.pipeline == len(plan.ranks) == split.ranks
    for rank, part in enumerate(plan.ranks):
        model = build_model(
            run.model,
            vocab_size=plan.inputs.vocab_size,
            device="meta",
            micro_batch_size=1,
            batch_spec=run.batch_spec,
            pipeline_parallel=PipelineParallel(rank, split),
            kinds=("training", "evaluation"),
        )
        assert part.inputs.counts.total == num_parameters(model), rank
    copies = sum(elements * (len(holders) - 1) for _, elements, holders in plan.inputs.shared_weights)
    assert sum(part.inputs.counts.total for part in plan.ranks) == plan.num_parameters + copies


SEQUENCE = ["model.tensor_model_parallel_size=2", "model.sequence_parallel=True"]
HELD = {
    "gpt": [*LLAMA, *pipelined(2)],
    "gpt, interleaved": [*LLAMA, *pipelined(2, 2)],
    "gpt, sequence parallel": [*LLAMA, *SEQUENCE, *pipelined(2, devices=4)],
    "gpt3, layers again": ["model=gpt3_1b", *SMALL, *FULL, *pipelined(4)],
    "autocast": [*LLAMA, "trainer.precision=bf16-mixed", *pipelined(2)],
    "experts": [*MOE, *pipelined(4)],
    "bert": [*BERT, "model.share_embeddings_and_output_weights=False", *pipelined(2)],
    "t5": [*T5, *pipelined(4, split=2)],
}


@pytest.mark.parametrize("name", cases(list(HELD), fast=2))
def test_a_micro_batch_in_flight_holds_the_planned_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = 4 if "parallel" in name else next(int(k[-1]) for k in HELD[name] if "pipeline_model_parallel_size" in k)
    whole = plan_inputs(HELD[name], compiled=False, ranks=ranks)
    for rank in pipeline_ranks(whole):
        layers = layers_in_order(rank)
        for number, stack in enumerate(rank.stacks):
            own = StageMemory(rank, number, layers)
            casts = sum(
                part.num_bytes for layer in layers if layer.stack is stack for part in layer.memory.saved
                if part.part == "weights"
            )  # fmt: skip
            expected = own.saved - casts - own.loss_kept
            expected += head_saved_bytes(rank.family, stack) if own.stage.last else 0
            assert expected == pytest.approx(saved_stage(whole, rank, number, monkeypatch), rel=0.03), own.stage


def stage_times(*overrides: str) -> tuple[StageTimes, ...]:
    time = planned("experiment=llama_1b_bench", *pipelined(4), *overrides).time
    assert time is not None
    return time.stages


def test_passes_take_the_time_of_their_own_products() -> None:
    """The backward pass has two products for each of the forward pass, of frozen weights one; attention 2.5."""
    whole, lora = stage_times(), stage_times("peft=lora")
    assert 2 < whole[1].backward / whole[1].forward < 2.2
    assert 1.2 < lora[1].backward / lora[1].forward < 1.5
    # the gradients of the loss are computed with it
    assert whole[3].forward > 1.4 * whole[1].forward
    assert whole[3].backward == pytest.approx(whole[1].backward, rel=0.01)
    # a pass back through one of the six layers of the first stage, and all of the second
    few = stage_times("peft=lora", "model.peft.lora_tuning.layer_selection=[6,12,18,24]")
    assert few[0].backward < 0.25 * few[1].backward
    assert few[0].forward == pytest.approx(few[1].forward, rel=0.05)


def test_the_command_line_prints_and_draws_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing, given = tmp_path / "step.svg", [*LLAMA, *pipelined(2), "--device", "h100"]
    assert main(["plan", *given, "--json", "--timeline", str(drawing)]) == EXIT_OK
    ranks = json.loads(capsys.readouterr().out)["pipeline"]["ranks"]
    assert [each["layers"] for each in ranks] == ["0-1", "2-3"]
    assert [each["in_flight"] for each in ranks] == [2, 1]
    assert ElementTree.fromstring(drawing.read_text()).tag.endswith("svg")

    assert main(["plan", *LLAMA, "--device", "h100", "--timeline", str(drawing)]) == EXIT_BAD_INPUT
    assert "set model.pipeline_model_parallel_size" in capsys.readouterr().err


UNTIED = ["model.share_embeddings_and_output_weights=False"]


@looped(
    ("given", "names", "idle"),
    [
        ([*LLAMA, *pipelined(2)], "layers.3", 0),
        ([*LLAMA, *pipelined(2)], "layers.0, layers.3", None),
        ([*LLAMA, *pipelined(2, 2)], "layers.0, layers.2", 1),
        ([*LLAMA, *UNTIED, *pipelined(2)], "token_embedding", 1),
        ([*LLAMA, *TIED, *pipelined(2)], "token_embedding", None),
        ([*LLAMA, *TIED, *pipelined(4)], "token_embedding", 1),
        (["model=gpt3_1b", *SMALL, *RELATIVE, *pipelined(4)], "score_positions", None),
        ([*BERT, *pipelined(2)], "head_bias", 0),
        ([*T5, *pipelined(4, split=2)], "encoder.layers", 2),
        ([*T5, *pipelined(2, split=1)], "encoder.layers, decoder.final_norm", None),
    ],
)
def test_a_rank_that_selective_leaves_nothing_to_train_is_refused(
    given: list[str], names: str, idle: int | None
) -> None:
    """Beside models built as the stages of each rank, of which tied embeddings and position biases are in several."""
    given = [*given, "model.peft.peft_scheme=selective", f"{NAMES}=[{names}]", "model.restore_from_path=x"]
    root = load(*given).root
    run = resolve_run(root, world_size=root.trainer.devices, capability=(9, 0))  # pyrefly: ignore[bad-argument-type]
    assert run.pipeline is not None
    found = [
        rank
        for rank in range(run.pipeline.ranks)
        if not trainable_parameters(
            build_model(
                run.model,
                vocab_size=64,
                device="meta",
                micro_batch_size=1,
                batch_spec=run.batch_spec,
                peft=run.peft,
                pipeline_parallel=PipelineParallel(rank, run.pipeline),
                kinds=("training", "evaluation"),
            )
        )
    ]
    assert found[:1] == ([] if idle is None else [idle])
    if idle is None:
        planned(*given)
        return
    with pytest.raises(UserError, match=rf"\({re.escape(names)}\) leaves rank {idle} of .* nothing to train"):
        planned(*given)
