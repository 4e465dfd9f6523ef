"""Offloading on a CUDA device: the same bits, no wait of the host, memory that is really free, copies beside work."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_metrics import logged
from tiny_run import final_hashes, tiny_config

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models import build
from stoker.models.build import build_model
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.families import family_slice
from stoker.models.config.gpt import GPTKeys
from stoker.models.config.t5 import T5Keys
from stoker.models.memory.host_copies import CudaCopyEngine
from stoker.models.memory.offload_activations import ActivationOffload
from stoker.models.memory.offload_weights import WeightOffload, find_weight_offloads
from stoker.trainer.train import run_training

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

LAYERS, TOKENS, VOCAB, SAMPLES = 6, 1024, 512, 4
ROUNDING = LAYERS << 20
"""The allocator does not cut less than a MiB from the end of a block: each layer's weights may come back with one."""
STACK: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": 1024, "ffn_hidden_size": 2816, "num_attention_heads": 8,
    "num_query_groups": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0, "position_embedding_type": "rope",
    "activation": "swiglu", "normalization": "rmsnorm", "bias": False,
}  # fmt: skip


def model_of(*, t5: bool = False, **changes: Any) -> tuple[Any, Any]:
    """A model on the GPU, and its slice."""
    stack = STACK | changes
    more = {"compile": stack.pop("compile", None)}
    if t5:
        both = dict.fromkeys(("encoder", "decoder"), stack | {"position_embedding_type": "relative"})
        keys: Any = T5Keys.model_validate({**both, **more, "seq_length": TOKENS})
        form = BatchSpec(seq_length=TOKENS, decoder_seq_length=TOKENS)
    else:
        keys = GPTKeys.model_validate({**stack, **more, "encoder_seq_length": TOKENS})
        form = BatchSpec(seq_length=TOKENS)
    flags = AttentionFlags(allow_nondeterministic=False)
    facts: Any = {"device": "cuda", "dtype": torch.bfloat16, "flags": flags, "micro_batch_size": SAMPLES}
    return build_model(keys, vocab_size=VOCAB, batch_spec=form, **facts), family_slice(
        keys, vocab_size=VOCAB, batch_spec=form
    )


def loss_of(model: Any, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    count = 3 if len(model.stacks) > 1 else 2
    texts = [torch.randint(0, VOCAB, (SAMPLES, TOKENS), device="cuda") for _ in range(count)]
    return model.loss(*texts, denominator=float(SAMPLES * TOKENS))


def steps(model: Any, count: int = 3) -> list[torch.Tensor]:
    """Losses and weights of some steps, each of two micro batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: list[torch.Tensor] = []
    for step in range(count):
        for number in range(2):
            loss = loss_of(model, 2 * step + number)
            loss.backward()
            seen.append(loss.detach())
        for part in find_weight_offloads(model):
            part.to_device()
        optimizer.step()
        optimizer.zero_grad()
    return seen + [parameter.detach().clone() for parameter in model.parameters()]


def offloads_of(model: Any) -> list[ActivationOffload]:
    found = [stack.activation_offload for stack in model.stacks]
    return [offload for offload in found if offload is not None]


def peak(run: Callable[[], object]) -> int:
    """Most bytes allocated at once; what was there before is not counted."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    gc.collect()  # what other tests left would go at some time within this one
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("compile_layers", [False, True])
@pytest.mark.parametrize(
    ("t5", "changes"),
    [
        (False, {}),
        (False, {"activations_checkpoint_modules": ["norm", "mlp_activation"]}),
        (
            False,
            {
                "activations_checkpoint_granularity": "full",
                "activations_checkpoint_method": "uniform",
                "activations_checkpoint_num_layers": 2,
            },
        ),
        (False, {"num_moe_experts": 4, "ffn_hidden_size": 512, "moe_aux_loss_coeff": 0.01}),
        (True, {}),
    ],
    ids=["gpt", "cheap_recompute", "chunks", "moe", "t5"],
)
def test_steps_are_bit_equal(t5: bool, changes: dict[str, Any], compile_layers: bool) -> None:
    """As those of the same layers without a copy: once compiled, what they make again rounds where it is fused."""

    def plain(keys: dict[str, Any]) -> Any:
        model, _ = model_of(t5=t5, compile=compile_layers, **(keys if compile_layers else changes))
        for stack in model.stacks:
            stack.activation_offload = stack.weight_offload = None
        return model

    for layers in (LAYERS // 2, LAYERS - 1):
        keys = changes | {"cpu_offloading": True, "cpu_offloading_num_layers": layers}
        expected = steps(plain(keys))
        if not all(map(torch.equal, expected, steps(plain(keys)))):
            pytest.skip("this model does not give the same bits twice on this device")
        model, _ = model_of(t5=t5, compile=compile_layers, **keys)
        assert len(offloads_of(model)) == len(find_weight_offloads(model)) == len(model.stacks)
        found = steps(model)
        assert all(map(torch.equal, expected, found))
        assert all(part.sent_bytes > 0 for part in offloads_of(model))


@pytest.mark.parametrize("compile_layers", [False, True])
@pytest.mark.parametrize("layers", [2, LAYERS - 1])
def test_memory_falls_by_what_is_sent(layers: int, compile_layers: bool) -> None:
    """At the end of a forward no activation of an offloaded layer is left; a backward has those of a few layers."""
    plain, _ = model_of(compile=compile_layers)
    keys = {"cpu_offloading": True, "cpu_offloading_num_layers": layers, "cpu_offloading_weights": False}
    ours, _ = model_of(compile=compile_layers, **keys)
    kept: list[int] = []
    peaks: list[int] = []
    for model in (plain, ours):
        loss_of(model, 0).backward()  # compiles, pins
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = loss_of(model, 1)
        kept.append(torch.cuda.memory_allocated() - before)
        del loss
        peaks.append(peak(lambda model=model: loss_of(model, 1).backward()))
    sent = offloads_of(ours)[0].sent_bytes
    assert kept[0] - kept[1] >= 0.99 * sent
    # With 2 of 6 the peak comes late, when the gradients of two layers are there already. Of N = L - 1 two layers come
    # together, and the gradients of all weights are there by then.
    weights = sum(weight.nbytes for weight in ours.decoder.layers[0].parameters())
    assert peaks[0] - peaks[1] >= sent - (2.2 * weights if layers == 2 else 2.2 * sent / layers)


def test_weights_are_off_the_device_when_the_backward_begins() -> None:
    model, _ = model_of()
    loss_of(model, 0).backward()
    model.zero_grad()
    torch.cuda.synchronize()
    there = torch.cuda.memory_allocated()
    loss = loss_of(model, 1)
    kept = torch.cuda.memory_allocated() - there
    del loss
    copies = CudaCopyEngine(torch.device("cuda"))
    (stack,) = model.stacks
    stack.weight_offload = WeightOffload(copies, list(stack.layers), LAYERS - 1)
    loss = loss_of(model, 1)
    expected = there + kept - stack.weight_offload.sent_bytes
    assert torch.cuda.memory_allocated() == pytest.approx(expected, abs=ROUNDING)
    loss.backward()
    model.zero_grad()
    del loss
    assert torch.cuda.memory_allocated() == pytest.approx(there, abs=ROUNDING)


def test_memory_does_not_grow_from_step_to_step() -> None:
    model, _ = model_of(cpu_offloading=True, cpu_offloading_num_layers=4)
    steps(model, 2)
    torch.cuda.synchronize()
    copies: Any = offloads_of(model)[0].copies
    before = torch.cuda.memory_allocated(), copies.host_bytes
    steps(model, 3)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before[0] + ROUNDING
    assert copies.host_bytes == before[1]


def test_copies_run_under_the_work() -> None:
    """Of the time that copies take, or the model's kernels from the first copy to the last, most has both.

    Copying what a layer of this width saves takes longer than computing the layer. The GPU is held up first until the
    host has submitted everything, whose pace would count otherwise: of a slow one the kernels lie far apart.
    Nothing else may use the GPU meanwhile, which would take turns with this process.
    """
    model, _ = model_of(cpu_offloading=True, cpu_offloading_num_layers=3)
    steps(model, 2)
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        torch.cuda._sleep(10**9)  # cycles: half a second
        loss_of(model, 9).backward()
        torch.cuda.synchronize()
    copies: list[tuple[float, float]] = []
    kernels: list[tuple[float, float]] = []
    for event in profile.events() or []:
        if event.device_type.name == "CUDA":
            is_copy = "Memcpy DtoH" in event.name or "Memcpy HtoD" in event.name
            (copies if is_copy else kernels).append((event.time_range.start, event.time_range.end))
    assert len(copies) >= 3 * 5 * 2
    covered = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in copies
        for other_start, other_end in kernels
    )
    begin, finish = min(start for start, _ in copies), max(end for _, end in copies)
    worked = sum(max(0.0, min(end, finish) - max(start, begin)) for start, end in kernels)
    assert covered > 0.5 * min(worked, sum(end - start for start, end in copies))


# ---------------------------------------------------------------- whole runs


RUN: dict[str, Any] = {
    "trainer__accelerator": "gpu",
    "trainer__precision": "bf16",
    "model__num_layers": 4,
    "model__hidden_size": 128,
    "model__ffn_hidden_size": 256,
    "model__encoder_seq_length": 128,
    "model__num_attention_heads": 4,
    "model__hidden_dropout": 0.0,
    "model__attention_dropout": 0.0,
    "model__enable_cuda_graph": False,
}
OFFLOADED = {"model__cpu_offloading": True, "model__cpu_offloading_num_layers": 2}


@pytest.fixture
def _small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (ActivationOffload, WeightOffload):
        monkeypatch.setitem(part.__init__.__kwdefaults__ or {}, "least_size", 1024)


@pytest.mark.usefixtures("_small_tensors_too")
@pytest.mark.parametrize("more", [{}, {"exp_manager__ema": {"enable": True, "decay": 0.5}}], ids=["plain", "ema"])
def test_a_run_is_the_same_with_and_without(tmp_path: Path, more: dict[str, Any]) -> None:
    """Several micro batches, validations and checkpoints; it goes on from one without offloading."""
    more = more | {"model__activations_checkpoint_modules": ["norm", "mlp_activation"]}  # as offloaded layers have it
    plain = run_training(tiny_config(tmp_path / "plain", **RUN, **more))
    ours = run_training(tiny_config(tmp_path / "ours", **RUN, **OFFLOADED, **more))
    assert logged(plain.directory, "loss") == logged(ours.directory, "loss")
    assert final_hashes(plain.directory, 8) == final_hashes(ours.directory, 8)
    longer = {"trainer__max_steps": 12}
    on = run_training(tiny_config(tmp_path / "plain", **RUN, **OFFLOADED, **more, **longer))
    off = run_training(tiny_config(tmp_path / "ours", **RUN, **more, **longer))
    assert final_hashes(on.directory, 12) == final_hashes(off.directory, 12)


@pytest.mark.usefixtures("_small_tensors_too")
def test_a_step_never_waits_for_the_device(tmp_path: Path, steps_without_sync: list[int]) -> None:
    run_training(tiny_config(tmp_path, **RUN, **OFFLOADED))
    assert steps_without_sync == [3, 4, 5, 6, 7, 8]


def test_offload_is_built_for_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    copies_of = build.copy_engine_factory
    monkeypatch.setattr(build, "copy_engine_factory", lambda device: (made.append(device), copies_of(device))[1])
    keys = GPTKeys.model_validate({**STACK, "encoder_seq_length": TOKENS, "cpu_offloading": True})
    facts: Any = {"device": "cuda", "dtype": torch.bfloat16, "flags": AttentionFlags(), "micro_batch_size": 1}
    form = BatchSpec(seq_length=TOKENS)
    answering = build_model(keys, vocab_size=VOCAB, batch_spec=form, kinds=("evaluation", "generation"), **facts)
    assert not made
    assert not find_weight_offloads(answering)
    assert find_weight_offloads(build_model(keys, vocab_size=VOCAB, batch_spec=form, **facts))
    assert [device.type for device in made] == ["cuda"]
