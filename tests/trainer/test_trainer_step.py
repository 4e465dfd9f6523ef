"""One training step: exact under any micro batching, seeded by step and micro batch, fed by position."""

import weakref

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from gpt_builder import build_gpt
from tiers import extra, looped
from uneven_samples import UnevenSamples

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.build import DTYPE_NAMES
from stoker.models.config.gpt import GPTKeys
from stoker.trainer.config.run_precision import RunPrecision, resolve_precision
from stoker.trainer.data.batch_sampler import BatchSchedule, RankBatchSampler
from stoker.trainer.data.dataloader import GlobalBatch, PrefetchingDataLoader
from stoker.trainer.data.datasets.samples import MockSamples
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.lightning.lightning_module import LanguageModule, micro_batch_seed
from stoker.trainer.lightning.lightning_trainer import fit
from stoker.trainer.optim.adamw import AdamW

CPU = torch.device("cpu")
KEYS = GPTKeys.model_validate(
    {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 2,
        "encoder_seq_length": 16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
)


def module_of(
    micro_batch_size, *, dtype=torch.float64, keys=KEYS, global_batch=12, samples=None, graph_capture=None, **plan
):
    model = build_gpt(
        keys, vocab_size=100, device=CPU, dtype=dtype, flags=AttentionFlags(), micro_batch_size=micro_batch_size
    )
    precision = RunPrecision("test", DTYPE_NAMES[dtype], **plan)
    return LanguageModule(
        model,
        AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, clip_norm=0.1, main_weights=precision.main_weights),
        lambda step: 1e-2 / (step + 1),
        PrefetchingDataLoader(
            samples or UnevenSamples(), RankBatchSampler(BatchSchedule(global_batch), micro_batch_size), CPU
        ),
        precision,
        seed=1,
        graph_capture=graph_capture,
    )


def trained(micro_batch_size, steps=3, callback=None, **options):
    module = module_of(micro_batch_size, **options)
    fit(module, callback or Silent(), steps, CPU, DistributedContext())
    module.dataloader.close()
    return module


def test_captured_graphs_are_freed_when_training_ends():
    """The process group is destroyed next: NCCL waits in that for graphs that hold its communicators."""
    captured = []

    def capture(run):
        def micro_batch(fields, denominator):
            return run(fields, denominator)

        captured.append(weakref.ref(micro_batch))
        return micro_batch

    module = trained(4, graph_capture=capture)
    assert captured[0]() is None
    assert module.step == 3
    with pytest.raises(RuntimeError, match="of a callback"):
        trained(4, graph_capture=capture, callback=Failing())
    assert captured[1]() is None


class Silent(pl.Callback):
    pass


class Failing(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        raise RuntimeError("of a callback")


@pytest.fixture(scope="module")
def one_big_batch():
    return trained(12)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
def test_accumulation_with_uneven_targets_equals_one_big_batch(micro_batch_size, one_big_batch):
    module = trained(micro_batch_size)
    for ours, expected in zip(module.model.parameters(), one_big_batch.model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    for (loss, norm), (big_loss, big_norm) in zip(module.pending_metrics, one_big_batch.pending_metrics, strict=True):
        torch.testing.assert_close(loss, big_loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(norm, big_norm, rtol=1e-12, atol=0)


def test_the_loss_is_the_mean_over_the_targets_of_the_global_batch():
    module = module_of(4)
    batch = next(iter(module.dataloader))
    module.dataloader.close()
    with torch.no_grad():
        logits = module.model(batch.fields["tokens"])[..., :100]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
    trainee = trained(4, steps=1)
    assert trainee.read_metrics()[0][0] == pytest.approx(expected.item(), rel=1e-6)
    assert batch.num_targets == sum(i % 16 + 1 for i in range(12))


def test_lightning_counts_one_step_per_global_batch_and_the_schedule_follows(one_big_batch):
    assert one_big_batch.step == 3
    assert one_big_batch.trainer.global_step == 3
    assert one_big_batch.lr == 1e-2 / 3
    assert next(one_big_batch.model.parameters()).requires_grad


def test_dropout_masks_depend_on_seed_step_and_micro_batch_only():
    seeds = {micro_batch_seed(*triple) for triple in [(1, 2, 3), (1, 3, 2), (2, 1, 3), (1, 2, 4), (-1, 2, 3)]}
    assert len(seeds) == 5
    keys = KEYS.model_copy(update={"hidden_dropout": 0.2, "attention_dropout": 0.2})
    first = trained(3, keys=keys)
    torch.manual_seed(99)
    second = trained(3, keys=keys)
    for ours, expected in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, expected)


@looped(
    ("precision", "o2", "weights", "main", "autocast"),
    [
        ("bf16", True, "bf16", True, None),
        ("bf16", False, "fp32", False, "bf16"),
        ("bf16-mixed", True, "fp32", False, "bf16"),
        ("bf16-true", True, "bf16", False, None),
        (16, True, "fp16", True, None),
        ("16", False, "fp32", False, "fp16"),
        ("16-mixed", True, "fp32", False, "fp16"),
        ("16-true", True, "fp16", False, None),
        (32, True, "fp32", False, None),
        (None, True, "fp32", False, None),
    ],
)
def test_precision_keys(precision, o2, weights, main, autocast):
    plan = resolve_precision(precision, o2, None)
    assert (plan.weights, plan.main_weights, plan.autocast) == (weights, main, autocast)


@pytest.mark.parametrize(("capability", "weights"), [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp32")])
def test_null_is_bf16_on_a_gpu_that_has_it(capability, weights):
    plan = resolve_precision(None, True, capability)
    assert (plan.weights, plan.main_weights) == (weights, weights == "bf16")


@pytest.mark.parametrize(
    "plan",
    [
        {"dtype": torch.bfloat16, "main_weights": True},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float32, "autocast": "bf16"},
    ],
    ids=["main weights", "pure", "autocast"],
)
def test_bf16_trains_close_to_fp32(plan):
    losses = [loss for loss, *_ in trained(4, steps=6, dtype=torch.float32).read_metrics()]
    ours = [loss for loss, *_ in trained(4, steps=6, **plan).read_metrics()]
    assert ours == pytest.approx(losses, rel=5e-3)
    assert ours != losses


@pytest.mark.parametrize("num_workers", [0, *extra(2)])
def test_batches_depend_on_the_position_alone(num_workers):
    samples = MockSamples(100, 8, seed=3, samples=1000)
    feed = PrefetchingDataLoader(
        samples, RankBatchSampler(BatchSchedule(4, first_step=5, consumed=20), 2), CPU, num_workers
    )
    batches = iter(feed)
    for first in (20, 24, 28, 32):
        batch = next(batches)
        assert batch.indices == (0, 1)
        np.testing.assert_array_equal(batch.fields["tokens"], samples.batch(first, 4).tokens)
    feed.close()


@pytest.mark.parametrize(("device", "waits"), [("cuda", False), ("mps", True), ("cpu", True)])
def test_only_copies_to_cuda_do_not_wait(device, waits):
    """On MPS such a copy reads memory that was given back (pytorch #189690)."""
    asked = []

    class Recorder(torch.Tensor):
        def to(self, device, *, non_blocking):  # pyrefly: ignore[bad-override]
            asked.append(non_blocking)
            return self

    GlobalBatch((0,), {"tokens": Recorder(), "labels": Recorder()}, Recorder()).to(torch.device(device))
    assert asked == [not waits] * 3


def test_an_error_in_the_data_reaches_the_step():
    class Broken:
        sequence_length, samples = 8, 10

        def batch(self, first, count):
            raise RuntimeError("no such sample")

    feed = PrefetchingDataLoader(Broken(), RankBatchSampler(BatchSchedule(4), 4), CPU)
    with pytest.raises(RuntimeError, match="no such sample"):
        next(iter(feed))
    feed.close()
