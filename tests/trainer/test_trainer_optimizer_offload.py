"""Optimizer state in host memory: the same bits as on the device, through buckets whose copies are never too early."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from config_helpers import load
from optimizer_cases import OPTIMIZER_FACTORIES, WideNet, backward
from resolved import check_memory
from stream_copies import StreamCopies
from tiers import cases, extra, full_only, looped
from tiny_run import final_hashes, tiny_config

from stoker.models.model_cost import count_parameters
from stoker.trainer.optim import base_optimizer, optimizer_factory, pinned_memory
from stoker.trainer.optim.adamw import AdamW
from stoker.trainer.optim.ema import EMA
from stoker.trainer.optim.sgd import SGD
from stoker.trainer.optim.state_buckets import NUM_SLOTS, BucketPlan, StateShape, plan_buckets
from stoker.trainer.plan import memory_check as memory
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import UserError

BUCKET = 16 * 1024
"""Bytes: 1,024 elements with main weights and two moments, of which the largest parameter here has 6,000."""


def model_of(dtype):
    torch.manual_seed(0)
    return WideNet().to(dtype)


def settings(dtype):
    return {"clip_norm": 0.3, "main_weights": dtype == torch.bfloat16}


def on_host(kind, model, dtype, **more):
    copies = StreamCopies()
    return OPTIMIZER_FACTORIES[kind](
        model.named_parameters(), host=copies, bucket_bytes=BUCKET, **settings(dtype), **more
    ), copies


def host_of(optimizer):
    assert optimizer.host_state is not None
    return optimizer.host_state


def state(optimizer):
    return {name: piece.local.clone() for name, piece in optimizer.local_shards().items()}


def check_equal(model, optimizer, other, other_optimizer):
    for (name, mine), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, expected), name
    mine, expected = state(optimizer), state(other_optimizer)
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(mine[name], tensor), name
        assert mine[name].dtype == tensor.dtype
    assert optimizer.step_count == other_optimizer.step_count


def train(model, optimizer, steps, *, accumulated=1):
    for step in steps:
        optimizer.set_lr(1e-2 / (step + 1))
        for number in range(accumulated):
            backward(model, 10 * step + number)
            if accumulated > 1:
                optimizer.accumulate()
        if step == 2:  # left out by all
            weight = model.wide.weight
            for gradient in (weight.grad, optimizer.gradients.sums.get(weight)):
                if gradient is not None:
                    gradient[3, 3] = float("nan")
        optimizer.step()


# ---------------------------------------------------------------- equality


@pytest.mark.parametrize("kind", cases(OPTIMIZER_FACTORIES, fast=2))
@pytest.mark.parametrize(
    ("dtype", "accumulated"),
    [
        *((dtype, 1) for dtype in (torch.float32, torch.bfloat16, torch.float64)),
        (torch.bfloat16, 3),
        *extra(*((dtype, 3) for dtype in (torch.float32, torch.float64))),
    ],
)
def test_five_steps_are_bit_equal_to_those_without(kind, dtype, accumulated):
    plain, model = model_of(dtype), model_of(dtype)
    expected = OPTIMIZER_FACTORIES[kind](plain.named_parameters(), **settings(dtype))
    optimizer, copies = on_host(kind, model, dtype)
    train(plain, expected, range(5), accumulated=accumulated)
    train(model, optimizer, range(5), accumulated=accumulated)
    assert expected.step_count == 4
    assert optimizer.grad_norm is not None
    assert expected.grad_norm is not None
    assert torch.equal(optimizer.grad_norm, expected.grad_norm)
    check_equal(model, optimizer, plain, expected)
    assert not copies.under_way
    assert len(host_of(optimizer).plan.buckets) > NUM_SLOTS + 1


def test_pure_bf16_has_its_state_on_the_host_too():
    plain, model = model_of(torch.bfloat16), model_of(torch.bfloat16)
    expected = AdamW(plain.named_parameters(), lr=1e-2)
    optimizer = AdamW(model.named_parameters(), lr=1e-2, host=StreamCopies(), bucket_bytes=BUCKET)
    train(plain, expected, range(3))
    train(model, optimizer, range(3))
    check_equal(model, optimizer, plain, expected)
    gaps = 2 * 256 * len(list(model.parameters()))
    assert 0 <= host_of(optimizer).plan.host_bytes - 4 * sum(p.numel() for p in model.parameters()) < gaps


def test_without_state_nothing_moves():
    model, plain = model_of(torch.float32), model_of(torch.float32)
    copies = StreamCopies()
    optimizer = SGD(model.named_parameters(), lr=1e-2, host=copies)
    expected = SGD(plain.named_parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    train(plain, expected, range(2))
    check_equal(model, optimizer, plain, expected)
    assert host_of(optimizer).plan.host_bytes == host_of(optimizer).plan.moved_bytes == 0
    assert not copies.events


@pytest.mark.parametrize("kind", OPTIMIZER_FACTORIES)
def test_frozen_parameters_and_gradients_that_are_no_rows_in_memory(kind):
    """A gradient whose memory is ordered by columns, cut into buckets of rows."""
    models = [model_of(torch.float32) for _ in range(2)]
    optimizers = []
    for number, model in enumerate(models):
        model.norm.weight.requires_grad_(False)
        host = {"host": StreamCopies(), "bucket_bytes": BUCKET} if number else {}
        optimizers.append(OPTIMIZER_FACTORIES[kind](model.named_parameters(), **host))
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, step)
            weight = model.table_embedding.weight
            assert weight.grad is not None
            weight.grad = weight.grad.t().contiguous().t()
            optimizer.step()
    check_equal(models[1], optimizers[1], models[0], optimizers[0])


# ---------------------------------------------------------------- buckets


def plan_of(kind, dtype=torch.bfloat16) -> BucketPlan:
    optimizer, _ = on_host(kind, model_of(dtype), dtype)
    return host_of(optimizer).plan


@looped("kind", OPTIMIZER_FACTORIES)
@looped("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_of_the_state_moves_once(kind, dtype):
    plan = plan_of(kind, dtype)
    moved = torch.zeros(plan.host_bytes, dtype=torch.int8)
    for bucket in plan.buckets:
        here = torch.zeros(bucket.size, dtype=torch.int8)
        for host, device, size in bucket.transfers:
            moved[host : host + size] += 1
            here[device : device + size] += 1
        assert here.max() <= 1
        for stretch in bucket.slices:
            for key, place in stretch.state.items():  # the copy brings the very bytes of the stretch
                assert here[place.start : place.start + place.size].all()
                home = plan.host_locations[bucket.group][stretch.index][key]
                first = home.start + (stretch.element_range[0] if stretch.element_range else 0) * place.dtype.itemsize
                copy = next(c for c in bucket.transfers if c.device_offset <= place.start < c.device_offset + c.size)
                assert copy.host_offset + place.start - copy.device_offset == first
    assert moved.max() == 1
    for homes in plan.host_locations:
        for home in homes:
            for place in home.values():
                assert moved[place.start : place.start + place.size].all()
    assert plan.moved_bytes == moved.sum()


@pytest.mark.parametrize("kind", OPTIMIZER_FACTORIES)
def test_only_what_must_be_whole_is_larger_than_a_bucket(kind):
    plan = plan_of(kind)
    cut = [bucket for bucket in plan.buckets if bucket.slices[0].element_range]
    assert bool(cut) == (kind in ("adamw", "sgd", "muon"))
    for bucket in plan.buckets:
        assert bucket.size <= BUCKET + 3 * 256 or (len(bucket.slices) == 1 and not bucket.slices[0].element_range)
    if kind in ("adamw", "sgd"):
        assert max(plan.slot_bytes) <= BUCKET + 3 * 256
    for bucket in cut:
        assert bucket.slices[0].element_range is not None
        first, last = bucket.slices[0].element_range
        assert first % 1024 == 0  # vector instructions find the elements they had
        assert last - first <= BUCKET // sum(place.dtype.itemsize for place in bucket.slices[0].state.values())


def test_neighbours_share_a_bucket_up_to_its_limit():
    def shape(size):
        return StateShape({"main": ((size // 4,), torch.float32)}, size)

    sizes = [512, 512, 256, 4096, 256, 0, 768]
    plan = plan_buckets([[shape(size) for size in sizes], [shape(256)]], 1024)
    assert [[s.index for s in bucket.slices] for bucket in plan.buckets] == [[0, 1], [2], [3], [4, 5, 6], [0]]
    assert [bucket.group for bucket in plan.buckets] == [0, 0, 0, 0, 1]
    assert [bucket.size for bucket in plan.buckets] == [1024, 256, 4096, 1024, 256]
    assert [len(bucket.transfers) for bucket in plan.buckets] == [1] * 5  # neighbours move together
    assert plan.slot_bytes == (1024, 256, 4096)
    assert plan.host_bytes == plan.moved_bytes == 1024 + 256 + 4096 + 1024 + 256


def test_ranks_with_fewer_rows_have_the_same_buckets():
    """They must agree on what they send each other during an update."""

    def plan(rows):
        shapes = [StateShape({"v": ((rows, 8), torch.float32)}, max_shard_bytes=7 * 8 * 4) for _ in range(5)]
        return plan_buckets([shapes], 512)

    whole, none = plan(7), plan(0)
    assert [[s.index for s in b.slices] for b in whole.buckets] == [[s.index for s in b.slices] for b in none.buckets]
    assert none.moved_bytes == 0


# ---------------------------------------------------------------- order


def test_a_bucket_comes_while_one_is_updated_and_one_leaves():
    optimizer, copies = on_host("sgd", model_of(torch.float32), torch.float32)
    moves = []
    host = host_of(optimizer)
    run = host.run

    def watched(update):
        def told(bucket, states):
            copies.events.append(("update", len(moves)))
            moves.append(bucket)
            update(bucket, states)

        run(told)

    host.run = watched
    model = optimizer.param_groups[0]["params"]
    for parameter in [*model, *optimizer.param_groups[1]["params"]]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    events, count = copies.events, len(moves)
    at = {event: place for place, event in enumerate(events)}
    assert count > NUM_SLOTS + 1
    assert all(len(bucket.transfers) == 1 for bucket in moves)  # so that numbers of copies are those of buckets
    for number in range(count):
        assert at["fetch", number] < at["fetched", number] < at["update", number] < at["send", number]
        if number + 1 < count:  # the next one is on its way before this one is updated
            assert at["fetch", number + 1] < at["update", number]
        if number >= NUM_SLOTS:  # a slot is filled again when it is empty, and not before that is needed
            assert at["sent", number - NUM_SLOTS] < at["fetch", number]
            assert at["sent", number - NUM_SLOTS] > at["update", number - 2]
    assert all(("sent", number) in at for number in range(count))
    assert [name for name, _ in events[-NUM_SLOTS:]] == ["sent"] * NUM_SLOTS
    assert all(at["update", a] < at["update", b] for a, b in pairwise(range(count)))


@pytest.mark.parametrize("kind", OPTIMIZER_FACTORIES)
def test_memory_is_what_the_plan_says(kind):
    dtype = torch.bfloat16
    model = model_of(dtype)
    optimizer, copies = on_host(kind, model, dtype)
    plan = host_of(optimizer).plan
    train(model, optimizer, range(2))
    assert copies.host_sizes == [plan.host_bytes]  # once
    assert copies.reserved == 2 * sum(plan.slot_bytes)  # in each step, so that the activations have it otherwise
    home = host_of(optimizer).memory
    for name, piece in optimizer.local_shards().items():  # what a checkpoint reads is what the updates write
        assert piece.local.untyped_storage().data_ptr() == home.data_ptr(), name
    assert not optimizer.state  # which Lightning would move to the device


# ---------------------------------------------------------------- average, checkpoints, runs


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_the_average_follows_main_weights_on_the_host(cpu_offload):
    def averages(host):
        model = model_of(torch.bfloat16)
        optimizer = AdamW(model.named_parameters(), lr=1e-2, main_weights=True, **host)
        main = {
            name.removesuffix(".main"): piece.local
            for name, piece in optimizer.local_shards().items()
            if name.endswith(".main")
        }
        waits = []
        average = EMA(
            dict(model.named_parameters()),
            main_weights=main,
            decay=0.9,
            cpu_offload=cpu_offload,
            wait_for_copies=lambda: waits.append(1),
        )
        for step in range(1, 4):
            backward(model, step)
            optimizer.step()
            assert optimizer.grad_norm is not None
            average.update(step, optimizer.grad_norm)
        assert len(waits) == 3 * cpu_offload
        return {name: piece.local for name, piece in average.local_shards().items()}

    found, expected = averages({"host": StreamCopies(), "bucket_bytes": BUCKET}), averages({})
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_average_on_the_device_starts_there():
    weights = {"w": torch.zeros(3, device="meta", dtype=torch.bfloat16)}
    average = EMA(weights, main_weights={"w": torch.zeros(3)}, decay=0.9)
    assert average.local_shards()["w"].local.device.type == "meta"


KINDS = {
    "adamw": {"name": "adamw"},
    "sgd": {"name": "sgd", "momentum": 0.9},
    "adafactor": {"name": "adafactor", "beta1": 0.9},
    "muon": {"name": "muon"},
}


def pretend(monkeypatch):
    """A link to a pretended device wherever the key asks for one."""

    def copies(keys, device):
        return StreamCopies() if keys.cpu_offloading_optimizer else None

    monkeypatch.setattr(optimizer_factory, "host_copy_engine", copies)
    monkeypatch.setattr(base_optimizer, "plan_buckets", lambda states, _: plan_buckets(states, BUCKET))


def trained(directory: Path, on: bool, steps=8, **changes):
    settings = {"trainer__accelerator": "auto", "model__cpu_offloading_optimizer": on, "trainer__precision": "bf16"}
    run_training(tiny_config(directory, **settings, trainer__max_steps=steps, **changes))
    return final_hashes(directory, steps)


@full_only
@pytest.mark.parametrize("kind", ["adamw", *extra("muon", "sgd", "adafactor")])
def test_runs_on_and_off_go_on_from_each_other(tmp_path, monkeypatch, kind):
    """Clipped, accumulated, with an average: every checkpoint the same file, whoever writes it and goes on from it."""
    pretend(monkeypatch)
    optim = {**KINDS[kind], "lr": 1e-2, "sched": {"max_steps": 100, "warmup_steps": 2}}
    changes = {"model__optim": optim, "exp_manager__ema": {"enable": True, "decay": 0.9}}
    expected = trained(tmp_path / "off", False, **changes)
    assert trained(tmp_path / "on", True, **changes) == expected
    for first in (True, False):
        directory = tmp_path / f"{first}"
        trained(directory, first, steps=4, **changes)
        assert trained(directory, not first, **changes) == expected


def test_a_checkpoint_beside_training_is_a_copy(tmp_path, monkeypatch):
    pretend(monkeypatch)
    for beside in (False, True):
        params = {"every_n_train_steps": 2, "save_top_k": -1, "async_save": beside}
        trained(tmp_path / ("beside" if beside else "at once"), True, exp_manager__checkpoint_callback_params=params)
    for step in (2, 4, 6):
        assert final_hashes(tmp_path / "beside", step) == final_hashes(tmp_path / "at once", step)


def test_a_run_says_what_it_moves(tmp_path, monkeypatch, capsys):
    trained(tmp_path / "cpu", True, steps=1)
    assert "warning: `model.cpu_offloading_optimizer` (True) has no effect on cpu" in capsys.readouterr().out
    pretend(monkeypatch)
    trained(tmp_path / "pretended", True, steps=1)
    out = " ".join(capsys.readouterr().out.split())
    assert "optimizer state in host memory, 0.00 GiB: each step moves 0.00 GiB to the device" in out
    assert "no effect" not in out


# ---------------------------------------------------------------- keys

ON = "model.cpu_offloading_optimizer=True"
GPU = "trainer.accelerator=gpu"


@looped(
    ("overrides", "says"),
    [
        ([ON, GPU], None),
        ([ON], None),  # auto: the run tells when it knows
        ([ON, GPU, "model.optim.name=sgd"], None),  # bf16 has main weights
        ([ON, GPU, "model.optim.name=sgd", "+model.optim.momentum=0.9", "trainer.precision=32"], None),
        ([ON, GPU, "model.optim.name=adafactor", "+model.optim.beta1=0.9", "trainer.precision=bf16-mixed"], None),
        ([ON, "trainer.accelerator=cpu"], "no effect with `accelerator` .cpu."),
        ([ON, "trainer.accelerator=mps"], "no effect with `accelerator` .mps."),
        ([ON, GPU, "model.optim.name=sgd", "trainer.precision=32"], "saves no memory.*momentum.*sgd has no state"),
        ([ON, GPU, "model.optim.name=sgd", "model.megatron_amp_O2=False"], "saves no memory.*momentum"),
        ([ON, GPU, "model.optim.name=adafactor", "trainer.precision=bf16-true"], "saves no memory.*beta1.*vectors"),
        (["model.cpu_offloading_optimizer=False", "trainer.accelerator=cpu"], None),
    ],
)
def test_rules(overrides, says):
    found = [f for f in load(*overrides).findings if "model.cpu_offloading_optimizer" in f.keys]
    assert [finding.level for finding in found] == ["warning"] * (says is not None)
    if says is not None:
        assert re.search(says, found[0].message)
        assert found[0].fix == "~model.cpu_offloading_optimizer"


class Card:
    """A CUDA device of so many bytes, of which only the size is asked for."""

    def __init__(self, size):
        self.total_memory = size


@pytest.mark.parametrize(
    ("precision", "optim", "device_bytes", "host_bytes"),
    [
        ("bf16", {"name": "adamw"}, 4, 12),
        ("bf16", {"name": "sgd"}, 4, 4),
        ("32", {"name": "adamw"}, 8, 8),
        ("bf16-true", {"name": "muon"}, 4, None),
    ],
)
def test_the_state_counts_on_the_host_before_a_run(tmp_path, monkeypatch, precision, optim, device_bytes, host_bytes):
    cuda = torch.device("cuda")
    big = {"model__num_layers": 60, "model__override_vocab_size": 256, "model__hidden_dropout": 0.0}
    keys = {"trainer__accelerator": "gpu", "trainer__precision": precision, "model__optim": optim}
    root = tiny_config(tmp_path, **big, **keys, model__cpu_offloading_optimizer=True).root
    count = count_parameters(root.model, 256)
    host = optimizer_factory.min_state_elements(root.model, 256) * 2 if host_bytes is None else count * host_bytes
    room = {"card": count * device_bytes + 10**6, "host": host + 10**5}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Card(room["card"]))
    monkeypatch.setattr(memory, "host_memory", lambda: room["host"])
    monkeypatch.setattr(memory, "_mask_bytes", lambda *_: 0)
    check_memory(root, cuda)
    room["card"] = count * device_bytes - 1
    with pytest.raises(UserError, match="parameters with their gradients"):
        check_memory(root, cuda)
    room |= {"card": count * device_bytes + 10**6, "host": host - 1}
    with pytest.raises(UserError, match="state and main weights in host memory") as error:
        check_memory(root, cuda)
    assert "`cpu_offloading_optimizer` (True)" in error.value.lines[1]
    room["host"] = host + 10**5
    params = {"async_save": True}
    beside = tiny_config(
        tmp_path, **big, **keys, model__cpu_offloading_optimizer=True, exp_manager__checkpoint_callback_params=params
    )
    with pytest.raises(UserError, match="state and main weights in host memory"):
        check_memory(beside.root, cuda)
    room["card"] = count * (device_bytes + 4)
    off = tiny_config(tmp_path, **big, **keys).root
    if optim["name"] == "adamw":
        with pytest.raises(UserError, match="parameters with their gradients"):
            check_memory(off, cuda)


def test_memory_that_cannot_be_pinned_is_told(monkeypatch):
    monkeypatch.setattr(pinned_memory, "_register", lambda memory, device: 2)
    copies = object.__new__(pinned_memory.PinnedStateCopyEngine)
    copies.device = torch.device("cuda", 0)
    with pytest.raises(UserError, match=r"`model\.cpu_offloading_optimizer` \(True\).*CUDA error 2.*=False"):
        copies.allocate_host(64)
    assert copies.allocate_host(0).numel() == 0
    with pytest.raises(UserError, match=r"cannot allocate 1,048,576\.0 GiB of host memory; use .*_optimizer=False"):
        copies.allocate_host(2**50)


def test_memory_is_unpinned_before_it_is_given_back(monkeypatch):
    calls = []
    monkeypatch.setattr(pinned_memory, "_register", lambda memory, device: calls.append(memory.data_ptr()) or 0)
    monkeypatch.setattr(pinned_memory, "_unregister", lambda memory, device: calls.append((memory.data_ptr(), device)))
    copies = object.__new__(pinned_memory.PinnedStateCopyEngine)
    copies.device = torch.device("cuda", 0)
    memory = copies.allocate_host(4096)
    assert copies.host_bytes == 4096
    at = memory.data_ptr()
    del memory
    assert calls == [at]
    del copies
    assert calls == [at, (at, torch.device("cuda", 0))]
