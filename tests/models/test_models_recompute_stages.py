"""Recompute in pipelines: which layers in which micro batch, bytes kept of each, and the bits of no recompute.

The stages of all ranks run here in one process, micro batch after micro batch.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from compiled_graphs import CompiledGraphs
from gpt_builder import build_model
from test_models_recompute import EXPERTS, LLAMA, STACK, TOKENS, VOCAB, assert_same, drawn, full
from tiers import cases, full_only
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stoker.models.build import LanguageModel
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.bert import BertKeys
from stoker.models.config.gpt import GPTKeys
from stoker.models.config.t5 import T5Keys
from stoker.models.gpt import GPT
from stoker.models.layer import Layer
from stoker.models.parallel.pipeline import PipelineParallel
from stoker.models.parallel.stages import PipelineSplit, StageInput

PARTIAL, FEWER = "num_micro_batches_with_partial_activation_checkpoints", "activations_checkpoint_layers_per_pipeline"
DROPOUTS = ("hidden_dropout", "attention_dropout", "ffn_dropout")


def table(
    split: PipelineSplit, rank: int, chunk: int, micro_batch: int, micro_batches: int, given: dict[str, Any], size: int
) -> int:
    """Recomputed layers of a stage of `size` layers by the table of NeMo's semantics, written another way."""
    number, partial, fewer = (given.get(key) for key in ("activations_checkpoint_num_layers", PARTIAL, FEWER))
    if number is None:
        return 0
    if given["activations_checkpoint_method"] == "uniform":
        return size
    warm_up = split.ranks - rank - 1
    order = [(0, each) for each in range(micro_batches)]
    if split.chunks > 1:
        warm_up = 2 * warm_up + (split.chunks - 1) * split.ranks
        rounds = range(0, micro_batches, split.ranks)
        order = [(c, m) for first in rounds for c in range(split.chunks) for m in range(first, first + split.ranks)]
    window = micro_batches if split.chunks == 1 and micro_batches < split.ranks else warm_up + 1
    if partial is not None and order.index((chunk, micro_batch)) % window >= partial:
        return size
    return min(size, max(0, number - math.floor(rank * (fewer or 0))))


# ---------------------------------------------------------------- models


def rank_model(family: str, keys: dict[str, Any], split: PipelineSplit, rank: int) -> LanguageModel:
    common: dict[str, Any] = STACK | {"hidden_size": 16, "ffn_hidden_size": 24} | keys
    decoder_length = 0
    if family == "t5":
        own = {name: common.pop(name, {}) for name in ("encoder", "decoder")}
        stacks = {name: common | {"position_embedding_type": "relative"} | changes for name, changes in own.items()}
        decoder_length, found = 8, T5Keys.model_validate(stacks | {"seq_length": TOKENS})
    else:
        kind = {"gpt": GPTKeys, "bert": BertKeys}[family]
        found = kind.model_validate(common | {"encoder_seq_length": TOKENS})
    return build_model(
        found,
        vocab_size=VOCAB,
        batch_spec=BatchSpec(seq_length=TOKENS, decoder_seq_length=decoder_length),
        kinds=("training", "evaluation"),
        pipeline_parallel=PipelineParallel(rank, split),
    )


def batch_of(family: str, micro_batch: int) -> dict[str, Tensor]:
    tokens, labels = drawn(2 * micro_batch), drawn(2 * micro_batch + 1)
    if family == "t5":
        return {"encoder_tokens": tokens, "decoder_tokens": labels[:, :8], "labels": tokens[:, :8]}
    return {"tokens": tokens, "labels": labels}


class Run:
    """Forward and backward of some micro batches through the stages of all ranks.

    Attributes:
        gradients: of each parameter, by rank and name, and the losses.
        kept: bytes kept for the backward, by stage and micro batch.
        layers: number of layers of each stage.
    """

    def __init__(self, family: str, keys: dict[str, Any], split: PipelineSplit, micro_batches: int) -> None:
        models = [rank_model(family, keys, split, rank) for rank in range(split.ranks)]
        stages = sorted((stage for model in models if model.pipeline for stage in model.pipeline.stages), key=str)
        stages.sort(key=lambda stage: stage.number)
        self.layers = [len(stage.layers) for stage in stages]
        self.kept: dict[tuple[int, int], int] = {}
        self.gradients: dict[str, Tensor] = {}
        for micro_batch in range(micro_batches):
            received = tuple[Tensor, ...]()
            for stage in stages:
                torch.manual_seed(100 + micro_batch)
                at = StageInput(stage, received, micro_batch, micro_batches)
                model = models[split.rank_of(stage)]
                with KeptBytes(model, received) as kept:
                    received = model.run_stage(at, batch_of(family, micro_batch), 24.0)
                self.kept[stage.number, micro_batch] = kept.bytes
            received[0].backward()
            self.gradients[f"loss {micro_batch}"] = received[0].detach()
        for rank, model in enumerate(models):
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name
                self.gradients[f"{rank} {name}"] = parameter.grad


class KeptBytes:
    """Counts the storages that autograd saves, each once, without those of parameters and of what a stage receives."""

    def __init__(self, model: LanguageModel, received: tuple[Tensor, ...]) -> None:
        others = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *received)}
        found: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if (place := tensor.untyped_storage().data_ptr()) not in others:
                found[place] = tensor
            return tensor

        self._found = found
        self._hooks = saved_tensors_hooks(pack, lambda tensor: tensor)

    def __enter__(self) -> KeptBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._found.values())


@cache
def plainly(family: str, moe: bool, split: PipelineSplit, layers: int, micro_batches: int) -> Run:
    return Run(family, keys_of(family, moe, layers), split, micro_batches)


def keys_of(family: str, moe: bool, layers: int, **changes: Any) -> dict[str, Any]:
    style = LLAMA | EXPERTS | {"moe_layer_freq": 1} if moe else {}
    return {"num_layers": layers, **(style if family != "bert" else {}), **changes}


@cache
def kept_with(family: str, split: PipelineSplit, layers: int, number: int) -> dict[tuple[int, int], int]:
    """Bytes kept of one micro batch if that many first layers of each stage are recomputed."""
    return Run(family, keys_of(family, False, layers, **full("block", number)), split, 1).kept


ONE = full("block", 1)
MODES: dict[str, dict[str, Any]] = {
    "block": full("block", 2),
    "uniform": full("uniform", 2),
    "one of window": ONE | {PARTIAL: 1},
    "two of window": ONE | {PARTIAL: 2},
    "none or all": full("block", 0) | {PARTIAL: 1},
    "always all": ONE | {PARTIAL: 0},
    "fewer": full("block", 3) | {FEWER: 1.5},
    "fewer in some": full("block", 2) | {FEWER: 1, PARTIAL: 1},
}
SPLITS: dict[str, tuple[PipelineSplit, int, int]] = {
    "two": (PipelineSplit(ranks=2), 6, 3),
    "four": (PipelineSplit(ranks=4, last_layers=2), 11, 5),
    "gpipe": (PipelineSplit(ranks=3), 6, 2),
    "interleaved": (PipelineSplit(ranks=2, chunks=2), 8, 4),
}
"""The pipeline, layers, and micro batches of a step."""


@pytest.mark.parametrize("mode", cases(MODES, fast=2))
@pytest.mark.parametrize("pipeline", cases(SPLITS, fast=1))
def test_bytes_kept_are_those_of_the_table_and_gradients_those_of_no_recompute(pipeline: str, mode: str) -> None:
    (split, layers, micro_batches), given = SPLITS[pipeline], MODES[mode]
    run = Run("gpt", keys_of("gpt", False, layers, **given), split, micro_batches)
    plain = plainly("gpt", False, split, layers, micro_batches)
    assert_same(run.gradients, plain.gradients)
    for (stage, micro_batch), kept in run.kept.items():
        chunk, rank = divmod(stage, split.ranks)
        size = run.layers[stage]
        number = table(split, rank, chunk, micro_batch, micro_batches, given, size)
        if mode == "uniform":
            assert kept < kept_with("gpt", split, layers, size)[stage, 0] or size < 2
        else:
            assert kept == kept_with("gpt", split, layers, number)[stage, 0], (stage, micro_batch, number)


def test_each_layer_that_is_recomputed_keeps_only_its_input() -> None:
    """To the byte: layers of a stage differ by nothing else, and the first one's input is what the stage receives."""
    split, layers = PipelineSplit(ranks=3), 6
    inputs = 2 * TOKENS * 16 * 4
    for stage in split.stages(layers):
        size = len(stage.layers)
        kept = [kept_with("gpt", split, layers, number)[stage.number, 0] for number in range(size + 1)]
        saved = [more - less for more, less in pairwise(kept)]
        assert len(set(saved[:-1])) == 1
        assert saved[-1] >= saved[0] > 10 * inputs
        if not (stage.begins or stage.ends):
            assert kept[size] == (size - 1) * inputs


@pytest.mark.parametrize("family", cases(["gpt", "bert", "t5"], fast=1))
def test_experts_and_other_families_are_trained_alike(family: str) -> None:
    split = PipelineSplit(ranks=2, encoder_ranks=1 if family == "t5" else 0)
    stacks: dict[str, Any] = {"decoder": {"num_layers": 3, **full("block", 2), PARTIAL: 0}} if family == "t5" else {}
    given = ONE | {PARTIAL: 1, FEWER: 1} | stacks
    moe, layers = family == "gpt", 4
    run, plain = Run(family, keys_of(family, moe, layers, **given), split, 3), plainly(family, moe, split, layers, 3)
    if family == "t5":
        plain = Run(family, keys_of(family, moe, layers, decoder={"num_layers": 3}), split, 3)
    assert_same(run.gradients, plain.gradients)
    first, last = (
        [run.kept[stage, micro_batch] < plain.kept[stage, micro_batch] for micro_batch in range(3)] for stage in (0, 1)
    )
    assert first == [True] * 3
    assert last == [family == "t5"] * 3  # one layer fewer than one, or all in T5's decoder
    assert run.kept[0, 0] > run.kept[0, 1] < run.kept[0, 2]


def test_validation_recomputes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    split = PipelineSplit(ranks=2)
    model = rank_model("gpt", keys_of("gpt", False, 2, **ONE, **{PARTIAL: 0}), split, 0).eval()
    assert model.pipeline is not None
    runs: list[Layer] = []
    run = Layer._run
    monkeypatch.setattr(Layer, "_run", lambda layer, *given: runs.append(layer) or run(layer, *given))
    at = StageInput(model.pipeline.stages[0], (), 1, 2)
    with torch.no_grad():
        assert not model.run_stage(at, batch_of("gpt", 0), 24.0)[0].requires_grad
    assert len(runs) == 1


@full_only
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo hides it, not "error"
def test_compiled_layers_have_two_variants() -> None:
    """One that saves and one that recomputes; the gradients are those of one that saves."""
    keys = keys_of("gpt", False, 4, **LLAMA, **dict.fromkeys(DROPOUTS, 0.0), attention_backend="unfused")
    found: list[tuple[int, dict[str, Tensor]]] = []
    for given in ({}, full("block", 0) | {PARTIAL: 1}):
        model, graphs = rank_model("gpt", keys | given, PipelineSplit(ranks=2), 0), CompiledGraphs()
        assert isinstance(model, GPT)
        assert model.pipeline is not None
        for layer in model.decoder.layers:
            layer.compile(fullgraph=True, dynamic=False, backend=graphs.backend)
        for micro_batch in range(4):
            at = StageInput(model.pipeline.stages[0], (), micro_batch, 4)
            model.run_stage(at, batch_of("gpt", micro_batch), 24.0)[0].square().sum().backward()
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        found.append((len(graphs.forwards), gradients))
        torch.compiler.reset()
    (one, plain), (two, ours) = found
    assert (one, two) == (1, 2)
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)
