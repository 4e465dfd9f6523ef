"""Runs whose samples hold several documents: kept apart in training, validation, evaluation and on several ranks."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from config_helpers import load, problems
from distributed_runs import DistributedRuns, difference, records
from fork_server import ForkServer
from gpt_builder import build_gpt
from resolved import build_data, check_memory
from run_metrics import logged
from tiers import extra, full_only
from tiny_run import assert_resume_is_exact, tiny_config

from stoker.kernels.attention.flags import AttentionFlags
from stoker.kernels.attention.packed_sequences import PackedSequences
from stoker.models.config.gpt import GPTKeys
from stoker.trainer.cli import evaluate
from stoker.trainer.cli.thread_tuning import measure_step_time
from stoker.trainer.config.parameter_layout import plan_layout
from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.core import run_checks
from stoker.trainer.data.batch_sampler import BatchSchedule, RankBatchSampler
from stoker.trainer.data.dataloader import PrefetchingDataLoader
from stoker.trainer.data.datasets.document_ids import DocumentIdSamples, document_ids
from stoker.trainer.data.datasets.samples import MockSamples
from stoker.trainer.distributed.fsdp import ShardedDataParallel
from stoker.trainer.distributed.process_group import init_distributed, shutdown_distributed
from stoker.trainer.plan import memory_check
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import UserError
from stoker.trainer.utils.local_shard import local_tensor

CPU = torch.device("cpu")
DATA = "model.data."
BOTH = {"reset_position_ids": True, "reset_attention_mask": True}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"text {number}, " * (1 + number % 3))
    return folder


def data_of(texts: Path, **keys: bool) -> dict[str, Any]:
    return {"data_impl": "text", "path": str(texts), "splits_string": "8,1,1", **keys}


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    capsys.readouterr()
    assert evaluate.run(parser.parse_args([*arguments, "--json", "--device", "cpu"])) == 0
    return json.loads(capsys.readouterr().out)


# ---------------------------------------------------------------- runs


def test_a_run_trains_validates_and_is_evaluated_packed(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    real = PackedSequences.from_documents
    monkeypatch.setattr(
        PackedSequences, "from_documents", lambda numbers, **how: seen.append(numbers) or real(numbers, **how)
    )
    planned: list[bool] = []
    plan = run_checks.plan_model

    def spy(model, form, *context, **facts):
        planned.append(form.packed)
        return plan(model, form, *context, **facts)

    monkeypatch.setattr(run_checks, "plan_model", spy)
    settings = {"trainer__log_every_n_steps": 1, "trainer__limit_val_batches": 1.0}
    packed = run_training(tiny_config(tmp_path / "packed", model__data=data_of(texts, **BOTH), **settings))
    said = capsys.readouterr().out
    assert "training unfused (packed), evaluation sdpa_flash (packed), generation sdpa_flash (reasons" in said
    assert "one mask of" in (packed.directory / "run.log").read_text()
    plain = run_training(tiny_config(tmp_path / "plain", model__data=data_of(texts), **settings))
    assert "(packed)" not in capsys.readouterr().out
    assert planned == [True, False], "what cannot run is found before anything is written"
    assert logged(packed.directory, "loss") != pytest.approx(logged(plain.directory, "loss"), rel=1e-4)
    assert any(numbers.max() > 0 for numbers in seen)
    assert packed.validation is not None

    # the figure of the run is that of the command, and not that of a model that sees over the ends
    assert packed.data.validation is not None
    own = evaluated(capsys, "--checkpoint", str(packed.directory))
    assert own["tokens"] == packed.validation.tokens
    assert own["loss"] == pytest.approx(packed.validation.loss, rel=1e-6)
    document = json.loads((packed.directory / "checkpoints" / "step-8" / "config.json").read_text())
    assert document["model"]["data"]["reset_attention_mask"] is True
    seen.clear()
    assert evaluated(capsys, "--checkpoint", str(packed.directory), "--data-path", str(texts))["loss"] > 0
    assert any(numbers.max() > 0 for numbers in seen)


def test_keys_act_each_on_its_own(tmp_path: Path, texts: Path) -> None:
    found: list[list[float]] = []
    for number, keys in enumerate(({}, {"reset_position_ids": True}, {"reset_attention_mask": True}, BOTH)):
        config = tiny_config(tmp_path / str(number), trainer__max_steps=3, model__data=data_of(texts, **keys))
        found.append(logged(run_training(config).directory, "loss") + logged(tmp_path / str(number), "val_loss"))
    assert len({json.dumps(figures) for figures in found}) == 4


def test_resume_is_exact_with_dropout(tmp_path: Path, texts: Path) -> None:
    settings = {"model__data": data_of(texts, **BOTH), "trainer__val_check_interval": 2}
    assert_resume_is_exact(tmp_path, 4, **settings)


@full_only
def test_two_ranks_with_cut_weights_equal_one(tmp_path: Path, texts: Path, forks: ForkServer) -> None:
    runs = DistributedRuns(tmp_path, forks)
    settings = {"model__data": data_of(texts, **BOTH), "model__position_embedding_type": "rope"}
    alone = runs.run("alone", **settings)
    together = runs.run("full", 2, model__fsdp=True, **settings)
    for kind in ("model", "optimizer"):
        ours, expected = (directory / "checkpoints" / "step-3" for directory in (together, alone))
        assert difference(expected, ours, kind) <= 1e-12
    assert records(together)[0]["validation"] == pytest.approx(records(alone)[0]["validation"], rel=1e-12)


@full_only
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo hides it, not "error"
def test_layers_under_fsdp_are_one_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled below the hooks that gather the weights, with equal numbers, whatever the documents."""
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiles = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: compiles(function, backend=count, **how))
    tokens = torch.randint(3, 50, (4, 16), generator=torch.Generator().manual_seed(0))
    documents = (tokens % 7 == 0).int().cumsum(1, dtype=torch.int32)
    sizes = {"num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4}
    off = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    keys = GPTKeys.model_validate({**sizes, **off, "encoder_seq_length": 16, "position_embedding_type": "rope"})
    full = plan_layout(2, optimizer="adamw", fsdp=True, strategy="full", shard_size=None)
    assert full is not None
    found: list[list[torch.Tensor]] = []
    store = dist.FileStore(str(tmp_path / "store"), 1)
    init_distributed(0, 1, 0, store=store, timeout=600)
    try:
        torch.compiler.reset()
        alone = ShardedDataParallel(replace(full, shards=1), CPU, None)
        for sharding in (None, alone):
            model = build_gpt(
                keys.model_copy(update={"compile": sharding is not None}),
                vocab_size=50,
                device="cpu",
                dtype=torch.float64,
                flags=AttentionFlags(),
                micro_batch_size=4,
                reset_position_ids=True,
                reset_attention_mask=True,
                sharding=sharding,
            )
            for numbers in (documents, torch.zeros_like(documents)):
                model.loss(tokens, tokens, 9.0, numbers).backward()
            found.append([local_tensor(p.grad) for p in model.parameters() if p.grad is not None])
    finally:
        shutdown_distributed()
        torch.compiler.reset()
    assert len(graphs) == 2, "one for all layers, one for the final norm"
    for ours, expected in zip(*found, strict=True):
        assert (ours - expected).abs().max() <= 1e-12


def test_pace_is_measured_packed(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    seen: list[tuple[int, ...]] = []
    real = PackedSequences.from_documents
    monkeypatch.setattr(
        PackedSequences, "from_documents", lambda numbers, **how: seen.append(numbers.shape) or real(numbers, **how)
    )
    root = tiny_config(tmp_path, model__data=data_of(texts, **BOTH)).root
    measure_step_time(resolve_run(root), build_data(root), CPU, 0.01)
    assert set(seen) == {(2, 16)}


# ---------------------------------------------------------------- the feed


@pytest.mark.parametrize("num_workers", [0, *extra(1)])
def test_the_feed_carries_documents_with_their_tokens(num_workers: int) -> None:
    samples = DocumentIdSamples(MockSamples(9, 8, seed=3, samples=1000), 1)
    feed = PrefetchingDataLoader(samples, RankBatchSampler(BatchSchedule(6), 2), CPU, num_workers)
    batch = next(iter(feed))
    feed.close()
    parts = list(batch.micro_batches())
    assert [part.number for part in parts] == [0, 1, 2]
    for part in parts:
        assert part.fields["documents"].dtype == torch.int32
        assert torch.equal(part.fields["documents"], document_ids(part.fields["tokens"], 1))
    assert len(batch.tensors) == 4
    feed = PrefetchingDataLoader(samples.source, RankBatchSampler(BatchSchedule(6), 2), CPU)
    batch = next(iter(feed))
    feed.close()
    assert [set(part.fields) for part in batch.micro_batches()] == [{"tokens", "labels"}] * 3
    assert len(batch.tensors) == 3


# ---------------------------------------------------------------- memory and rules


def test_the_bound_counts_the_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One mask for all layers, in the dtype of the arithmetic."""

    def fits(available: int, precision: str, **keys: bool) -> bool:
        data = {"data_impl": "mock", **keys}
        root = tiny_config(tmp_path, trainer__precision=precision, model__data=data, **sizes).root
        monkeypatch.setattr(memory_check, "host_memory", lambda: available)
        try:
            check_memory(root, CPU)
        except UserError as error:
            refusals.append(error.lines)
            return False
        return True

    refusals: list[list[str]] = []

    sizes = {"model__encoder_seq_length": 4096, "model__micro_batch_size": 4, "model__position_embedding_type": "rope"}
    for precision, width in (("32", 4), ("bf16", 2), ("bf16-mixed", 2)):
        mask = 4 * 4096 * 4096 * width
        # the rest is less than half of it
        assert fits(mask // 2, precision)
        assert fits(mask // 2, precision, reset_position_ids=True)
        assert not fits(mask, precision, reset_attention_mask=True)
        assert fits(mask + mask // 2, precision, reset_attention_mask=True)
    for first, second in refusals:
        assert "the mask of `data.reset_attention_mask` need" in first
        assert "`micro_batch_size` (4), `encoder_seq_length` (4096)" in second


@pytest.mark.parametrize("key", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_a_tokenizer_without_an_end_is_refused(key: str) -> None:
    found = problems("tokenizer=char", f"{DATA}{key}=true")
    assert "needs an end-of-document token" in found[f"{DATA}{key}"].rule


@pytest.mark.parametrize(
    ("overrides", "level", "key", "says"),
    [
        (["model.position_embedding_type=none", f"{DATA}reset_position_ids=true"], "warning", "reset_position_ids",
         "no effect"),
        (["model.position_embedding_type=rope", f"{DATA}reset_position_ids=true", f"{DATA}reset_attention_mask=true"],
         "info", "reset_position_ids", "nothing but rounding"),
        (["data=mock", f"{DATA}reset_attention_mask=true"], "warning", "reset_attention_mask", "timing only"),
        (["data=mock", f"{DATA}reset_position_ids=true"], "warning", "reset_position_ids", "timing only"),
    ],
)  # fmt: skip
def test_what_is_told(overrides: list[str], level: str, key: str, says: str) -> None:
    (finding,) = load(*overrides).findings
    assert (finding.level, finding.keys[0]) == (level, DATA + key)
    assert says in finding.message


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{DATA}reset_position_ids=true"],
        [f"{DATA}reset_attention_mask=true"],
        [f"{DATA}reset_position_ids=true", f"{DATA}reset_attention_mask=true"],
        ["model.position_embedding_type=rope", f"{DATA}reset_position_ids=true"],
        ["model.position_embedding_type=none", f"{DATA}reset_attention_mask=true"],
    ],
)
def test_what_acts_is_not_warned_of(overrides: list[str]) -> None:
    assert not load("model.position_embedding_type=learned_absolute", *overrides).findings
