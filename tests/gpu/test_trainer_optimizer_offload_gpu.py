"""Optimizer state in pinned host memory on a CUDA device: the same bits, the planned memory, copies that overlap."""

from __future__ import annotations

import gc

import pytest
import torch
from optimizer_cases import OPTIMIZER_FACTORIES
from tiny_run import final_hashes, tiny_config
from torch import nn

from stoker.trainer.optim.adamw import AdamW
from stoker.trainer.optim.pinned_memory import PinnedStateCopyEngine
from stoker.trainer.optim.state_buckets import BUCKET_BYTES
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import UserError

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

GIB = 2**30
DEVICE = torch.device("cuda", 0)


class Weights(nn.Module):
    """Names and shapes of a model; its gradients are drawn."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(8 * width + 3, width)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(width, 4 * width), nn.LayerNorm(width)]) for _ in range(layers)
        )
        self.head = nn.Linear(width, 100, bias=False)


def weights(width=256, layers=3, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return Weights(width, layers).to(DEVICE, dtype)


def draw_gradients(model, step, *, bad=False):
    generator = torch.Generator(DEVICE).manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).normal_(generator=generator)
    if bad:
        model.head.weight.grad[0, 0] = float("nan")


def in_gib():
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() / GIB


@pytest.mark.parametrize("kind", OPTIMIZER_FACTORIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket", [200_000, BUCKET_BYTES])
def test_five_steps_are_bit_equal_to_those_without(kind, dtype, bucket):
    plain, model = weights(dtype=dtype), weights(dtype=dtype)
    arguments = {"clip_norm": 0.5, "main_weights": dtype == torch.bfloat16}
    expected = OPTIMIZER_FACTORIES[kind](plain.named_parameters(), **arguments)
    host = {"host": PinnedStateCopyEngine(DEVICE), "bucket_bytes": bucket}
    optimizer = OPTIMIZER_FACTORIES[kind](model.named_parameters(), **arguments, **host)
    for step in range(5):
        for each, one in ((plain, expected), (model, optimizer)):
            draw_gradients(each, step, bad=step == 2)
            one.step()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
    found = optimizer.local_shards()
    for name, piece in expected.local_shards().items():
        assert torch.equal(found[name].local.cpu(), piece.local.cpu()), name
        if name.endswith(".main") and dtype == torch.bfloat16:
            assert found[name].local.is_pinned()
    assert optimizer.step_count == expected.step_count == 4


def test_what_is_pinned_is_given_back():
    optimizer = AdamW(weights().named_parameters(), lr=1e-3, host=PinnedStateCopyEngine(DEVICE))
    assert optimizer.host_state is not None
    memory = optimizer.host_state.memory
    assert memory.is_pinned()
    del optimizer
    gc.collect()
    assert not memory.is_pinned()


def test_the_peak_is_lower_by_the_planned_bytes():
    """Weights and gradients, and the slots: nothing else is on the device, in the step or beside it."""
    draw_gradients(small := weights(64, 1), 0)
    AdamW(small.named_parameters(), lr=1e-3, main_weights=True).step()  # compiles
    before = in_gib()
    peaks, held, plan = {}, {}, None
    for on in (False, True):
        model = weights(2048, 12)
        optimizer = AdamW(
            model.named_parameters(),
            lr=1e-3,
            main_weights=True,
            clip_norm=1.0,
            host=PinnedStateCopyEngine(DEVICE) if on else None,
        )
        held[on] = in_gib() - before
        draw_gradients(model, 0)
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        peaks[on] = torch.cuda.max_memory_allocated() / GIB - before
        numbers = sum(parameter.numel() for parameter in model.parameters())
        plan = optimizer.host_state.plan if optimizer.host_state is not None else None
        del model, optimizer
    assert plan is not None
    assert plan.host_bytes == pytest.approx(12 * numbers, rel=1e-3)
    assert held[False] - held[True] == pytest.approx(plan.host_bytes / GIB, rel=0.01)
    assert peaks[False] - peaks[True] == pytest.approx((plan.host_bytes - sum(plan.slot_bytes)) / GIB, rel=0.02)
    assert sum(plan.slot_bytes) <= 3 * BUCKET_BYTES
    assert in_gib() == pytest.approx(before, abs=0.01)


def test_copies_overlap():
    """Both directions of the host link at once, and the update under them."""
    model = weights(2048, 12)
    optimizer = AdamW(model.named_parameters(), lr=1e-3, main_weights=True, host=PinnedStateCopyEngine(DEVICE))
    host = optimizer.host_state
    assert host is not None
    memory = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=DEVICE)

    def milliseconds(work):
        times = []
        for _ in range(4):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return min(times[1:])

    def one_after_the_other():
        for copy in (copy for bucket in host.plan.buckets for copy in bucket.transfers):
            theirs, mine = host.memory[copy.host_offset : copy.host_offset + copy.size], memory[: copy.size]
            mine.copy_(theirs, non_blocking=True)
            theirs.copy_(mine, non_blocking=True)

    alone = milliseconds(one_after_the_other)
    draw_gradients(model, 0)
    gradients = [parameter.grad for parameter in model.parameters()]

    def step():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    together = milliseconds(step)
    print(f"copies {alone:.1f} ms one after the other; the whole step {together:.1f} ms")
    assert together < 0.85 * alone


LARGE = {
    "trainer__accelerator": "gpu",
    "trainer__precision": "bf16",
    "trainer__max_steps": 3,
    "trainer__limit_val_batches": 0,
    "exp_manager__create_checkpoint_callback": False,
    "model__num_layers": 8,
    "model__hidden_size": 2048,
    "model__ffn_hidden_size": 8192,
    "model__num_attention_heads": 16,
    "model__encoder_seq_length": 128,
    "model__global_batch_size": 2,  # one micro batch: several would have fp32 sums of gradients
}


def test_a_model_trains_that_does_not_fit_without(tmp_path):
    """0.4 G parameters: 16 bytes each without, 4 with; 3 GiB are there."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 3 * GIB) / total)
    try:
        with pytest.raises(UserError, match="out of memory"):
            run_training(tiny_config(tmp_path / "off", **LARGE))
        gc.collect()
        torch.cuda.empty_cache()
        result = run_training(tiny_config(tmp_path / "on", **LARGE, model__cpu_offloading_optimizer=True))
        assert result.step == 3
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


SMALL = {
    "trainer__precision": "bf16",
    "model__hidden_size": 128,
    "model__ffn_hidden_size": 256,
    "model__encoder_seq_length": 128,
    "model__attention_backend": "triton",  # its backward is deterministic
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("accumulated", [2, 6])
def test_runs_on_and_off_end_alike_and_go_on_from_each_other(tmp_path, graph, accumulated):
    changes = {
        "trainer__accelerator": "gpu",
        **SMALL,
        "model__enable_cuda_graph": graph,
        "model__global_batch_size": accumulated,
        "exp_manager__ema": {"enable": True, "decay": 0.9},
    }

    def trained(name, on, steps=8):
        run_training(
            tiny_config(tmp_path / name, **changes, model__cpu_offloading_optimizer=on, trainer__max_steps=steps)
        )
        return final_hashes(tmp_path / name, steps)

    expected = trained("off", False)
    assert trained("on", True) == expected
    for first in (True, False):
        trained(f"{first}", first, steps=4)
        assert trained(f"{first}", not first) == expected


@pytest.mark.parametrize("optim", [{"name": "adamw"}, {"name": "adafactor", "beta1": 0.9}, {"name": "muon"}])
def test_a_step_never_waits_for_the_device(tmp_path, steps_without_sync, optim):
    optim = {**optim, "lr": 1e-2, "sched": {"max_steps": 100, "warmup_steps": 2}}
    settings = {"trainer__accelerator": "gpu", "trainer__precision": "bf16", "model__cpu_offloading_optimizer": True}
    run_training(tiny_config(tmp_path, **settings, model__optim=optim, exp_manager__ema={"enable": True}))
    assert steps_without_sync == [3, 4, 5, 6, 7, 8]
