"""Activations in host memory: the same gradients, in the order that is promised, and nothing is left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from deferred_copies import DeferredCopies, install
from tiers import extra, full_only, looped
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.build import build_model, copy_engine_factory
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.gpt import GPTKeys
from stoker.models.config.t5 import T5Keys
from stoker.models.layer import Layer
from stoker.models.layers.context import LayerContext
from stoker.models.memory import host_copies
from stoker.models.memory.host_copies import HostMemoryError, PinnedMemoryPool
from stoker.models.memory.offload_activations import ActivationOffload
from stoker.trainer.utils.host_memory import is_out_of_memory

LAYERS, TOKENS, VOCAB = 5, 16, 50
STACK: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "ffn_dropout": 0.1, "init_method_std": 0.3,
    "position_embedding_type": "rope", "activation": "swiglu", "normalization": "rmsnorm",
}  # fmt: skip
LEAST = 1024
"""Bytes of the smallest tensor that is offloaded here: the vectors of the norms stay."""


def mlp_norm_recompute(layer: nn.Module) -> bool:
    assert isinstance(layer, Layer)
    return layer.mlp_norm.recompute


def model_of(*, t5: bool = False, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    stack = STACK | changes
    compiled = {"compile": stack.pop("compile", None)}
    if t5:
        relative = {"position_embedding_type": "relative"}
        both = dict.fromkeys(("encoder", "decoder"), stack | relative)
        keys: Any = T5Keys.model_validate({**both, **compiled, "seq_length": TOKENS})
        form = BatchSpec(seq_length=TOKENS, decoder_seq_length=TOKENS)
    else:
        keys = GPTKeys.model_validate({**stack, **compiled, "encoder_seq_length": TOKENS})
        form = BatchSpec(seq_length=TOKENS)
    facts: Any = {"vocab_size": VOCAB, "device": "cpu", "flags": AttentionFlags(), "micro_batch_size": 2}
    return build_model(keys, dtype=dtype, batch_spec=form, **facts)


def offloaded(model: Any, layers: int = 3, least_size: int = LEAST) -> DeferredCopies:
    """Offload the first layers of each stack."""
    copies = DeferredCopies()
    for stack in model.stacks:
        stack.activation_offload = ActivationOffload(copies, layers, least_size=least_size)
    return copies


def sent_by(model: Any) -> list[int]:
    """Bytes that the last forward of each stack has sent to the host."""
    return [stack.activation_offload.sent_bytes for stack in model.stacks if stack.activation_offload is not None]


def loss_of(model: Any, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(0, VOCAB, (2, TOKENS), generator=generator) for _ in range(3)]
    torch.manual_seed(seed)
    count = 3 if len(model.stacks) > 1 else 2
    return model.loss(*texts[:count], denominator=32.0)


def gradients(model: Any, losses: Callable[[], Iterable[Tensor]]) -> list[Tensor]:
    model.zero_grad()
    for loss in losses():
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_equal(ones: list[Tensor], others: list[Tensor]) -> None:
    assert len(ones) == len(others) > 0
    assert all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize(
    ("t5", "changes"),
    [
        (False, {}),
        (False, {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.1, "moe_layer_recompute": True}),
        (True, {}),
        *extra(
            (False, {"transformer_block_type": "post_ln", "normalization": "layernorm"}),
            (False, {"transformer_block_type": "normformer", "qk_layernorm": True, "headscale": True}),
            (False, {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.1}),
        ),
    ],
    ids=["gpt", "moe_recompute", "t5", *extra("post_ln", "normformer", "moe")],
)
def test_gradients_are_bit_equal(t5: bool, changes: dict[str, Any]) -> None:
    model = model_of(t5=t5, **changes)
    expected = gradients(model, lambda: [loss_of(model)])
    for layers in (1, LAYERS - 2, LAYERS - 1):
        copies = offloaded(model, layers)
        assert_equal(gradients(model, lambda: [loss_of(model)]), expected)
        assert [name for name, _ in copies.events].count("fetch") >= 5 * layers
        copies.check_all_freed()


def full(method: str, layers: int) -> dict[str, Any]:
    names = ("granularity", "method", "num_layers")
    return {
        f"activations_checkpoint_{name}": value for name, value in zip(names, ("full", method, layers), strict=True)
    }


@pytest.mark.parametrize(
    ("changes", "inputs"),
    [
        (full("uniform", 1), 3),
        (full("uniform", 2), 2),  # of layers 0 and 1, of layers 2 and 3
        (full("block", 3), 3),
        ({"activations_checkpoint_modules": ["norm", "mlp_activation", "core_attention"]}, None),
        ({"activations_checkpoint_granularity": "selective", "attention_backend": "unfused"}, None),
    ],
    ids=["uniform_1", "uniform_2", "block_3", "cheap", "selective"],
)
@pytest.mark.parametrize("compiled", [False, *extra(True)])
def test_of_what_is_recomputed_the_inputs_are_offloaded(
    changes: dict[str, Any], inputs: int | None, compiled: bool
) -> None:
    """Of whole layers nothing but these, (2, 16, 32) in fp32; with parts, less than without."""
    if compiled:
        changes = changes | {"compile": True, "hidden_dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0}
    model = model_of(**changes)
    expected = gradients(model, lambda: [loss_of(model)])
    copies = offloaded(model)
    assert_equal(gradients(model, lambda: [loss_of(model)]), expected)
    copies.check_all_freed()
    sizes = [size for name, size in copies.events if name == "send"]
    if inputs is not None:
        generator = (
            torch.get_rng_state().nbytes
        )  # the compiler keeps the state of the CPU's generator with a checkpoint
        assert [size for size in sizes if not (compiled and size == generator)] == inputs * [2 * TOKENS * 32 * 4]
        return
    plain = model_of(**{name: value for name, value in changes.items() if "checkpoint" not in name})
    every = offloaded(plain)
    loss_of(plain).backward()
    assert sum(sizes) < sum(size for name, size in every.events if name == "send")


@full_only
@pytest.mark.parametrize("t5", [False, True])
def test_gradients_of_compiled_layers_are_bit_equal(t5: bool) -> None:
    """Compiled layers save by `save_for_backward`, which the hooks see; and a hook makes no new compilation."""
    model = model_of(t5=t5, compile=True, hidden_dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0)
    expected = gradients(model, lambda: [loss_of(model)])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for layers in (1, LAYERS - 1):
            copies = offloaded(model, layers)
            assert_equal(gradients(model, lambda: [loss_of(model)]), expected)
            assert [name for name, _ in copies.events].count("fetch") >= 5 * layers
            copies.check_all_freed()


def test_order_is_that_of_transformer_engine() -> None:
    """Layer i has left before layer i + L - N runs, and comes back when the backward reaches layer i + L - N - 1."""
    layers = 2
    model = model_of()
    copies = offloaded(model, layers)
    told: list[tuple[str, int, list[str]]] = []

    def tell(what: str, number: int) -> None:
        told.append((what, number, [name for name, _ in copies.events]))
        copies.events.clear()

    for number, layer in enumerate(model.stacks[0].layers):
        layer.register_forward_pre_hook(lambda *_, number=number: tell("forward", number))
        layer.register_full_backward_pre_hook(lambda *_, number=number: tell("backward", number))
    loss_of(model).backward()
    tell("end", 0)
    before = {(what, number): events for what, number, events in told}
    sends = before["forward", 1]
    assert len(sends) >= 5
    assert set(sends) == {"send"}
    assert before["forward", 2] == ["send"] * len(sends)
    assert before["forward", 3] == ["wait"] * len(sends)  # L - N = 3: layer 0 leaves, then layer 1
    assert before["forward", 4] == ["wait"] * len(sends)
    assert before["backward", 4] == []
    # the hook on what layer 3 gave runs before the one of the module
    assert before["backward", 3] == ["fetch"] * len(sends)
    assert before["backward", 2] == ["fetch"] * len(sends)
    assert before["backward", 1] == []
    assert before["backward", 0] == ["wait"] * len(sends)
    assert before["end", 0] == ["wait"] * len(sends)


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_device_holds_as_many_layers_as_promised(layers: int) -> None:
    """In the forward those of L - N layers; in the backward the same, but two where only one would be."""
    model = model_of()
    copies = offloaded(model, layers)
    most: dict[str, int] = {"forward": 0, "backward": 0}
    sizes: list[int] = []

    def measure(what: str) -> None:
        most[what] = max(most[what], copies.held)
        sizes.append(copies.held)

    for layer in model.stacks[0].layers:
        layer.register_forward_hook(lambda *_: measure("forward"))
        layer.register_full_backward_pre_hook(lambda *_: measure("backward"))
    loss = loss_of(model)
    one_layer = sizes[0]
    assert not copies.held  # all have left before the last layer
    loss.backward()
    assert most["forward"] == min(layers, LAYERS - layers) * one_layer
    assert most["backward"] <= max(2, LAYERS - layers) * one_layer
    copies.check_all_freed()


def test_what_is_saved_twice_is_copied_once_and_parameters_stay() -> None:
    """The bytes that are sent are those of the storages that the first layers save, but for weights and small ones."""
    model = model_of(hidden_dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0)
    (stack,) = model.stacks
    stays = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: list[dict[int, int]] = []
    saves = [0]
    kept: list[Tensor] = []  # so that no address is used twice

    def count(tensor: Tensor) -> Tensor:
        address, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if size >= LEAST and address not in stays:
            storages[-1][address] = size
            saves[0] += 1
        kept.append(tensor)
        return tensor

    assert stack.rotary is not None
    turn = stack.rotary(TOKENS)
    stays |= {part.untyped_storage().data_ptr() for part in turn if part is not None}
    hidden = torch.randn(2, TOKENS, 32, requires_grad=True)
    for layer in stack.layers:
        storages.append({})
        with saved_tensors_hooks(count, lambda tensor: tensor):
            hidden, _ = layer(hidden, LayerContext("training", turn))
        kept.append(hidden)
    copies = offloaded(model, 2)
    loss_of(model).backward()
    sent = sum(size for name, size in copies.events if name == "send")
    assert sent == sum(sum(found.values()) for found in storages[:2])
    assert saves[0] > sum(map(len, storages))  # something is saved twice
    assert stack.activation_offload is not None
    assert stack.activation_offload.sent_bytes == sent


def test_what_all_layers_share_stays() -> None:
    """The encoder's output is read by each layer of the decoder, the last of which keeps it on the device."""
    model = model_of(t5=True)
    addresses: list[int] = []
    sources: list[int] = []

    def output_is_there(module: object, arguments: object, output: torch.Tensor) -> None:
        addresses.append(output.data_ptr())
        sources.clear()  # it may lie where something lay that has left

    model.encoder.register_forward_hook(output_is_there)
    copies = offloaded(model, LAYERS - 1, least_size=0)
    send = copies.copy_to_host
    copies.copy_to_host = lambda memory, host: (sources.append(memory.data_ptr()), send(memory, host))[1]
    loss = loss_of(model)
    assert addresses
    assert addresses[0] not in sources
    loss.backward()


def test_no_copies_without_a_backward() -> None:
    model = model_of()
    copies = offloaded(model)
    with torch.no_grad():
        loss_of(model)
    model.eval()
    loss_of(model)
    assert not copies.events
    model.train()
    loss = loss_of(model)  # its graph dies unused
    assert copies.given
    del loss
    gc.collect()
    copies.check_all_freed()


def test_several_forwards_before_their_backwards_and_a_graph_that_is_kept() -> None:
    model = model_of()
    expected = gradients(model, lambda: [loss_of(model, 1), loss_of(model, 2)])
    copies = offloaded(model)
    assert_equal(gradients(model, lambda: [loss_of(model, 1), loss_of(model, 2)]), expected)

    def both() -> list[Tensor]:
        first, second = loss_of(model, 1), loss_of(model, 2)
        return [first, second]

    assert_equal(gradients(model, both), expected)
    twice = loss_of(model, 3)
    model.zero_grad()
    twice.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    twice.backward()
    assert_equal([parameter.grad for parameter in model.parameters()], once)
    del twice
    copies.check_all_freed()


def test_host_buffers_are_kept_between_steps() -> None:
    model = model_of()
    copies = offloaded(model)
    gradients(model, lambda: [loss_of(model)])
    size = copies.pool.size
    assert size >= sum(bytes_ for name, bytes_ in copies.events if name == "send")
    for seed in range(3):
        gradients(model, lambda seed=seed: [loss_of(model, seed)])
    assert copies.pool.size == size


def test_frozen_layers_save_nothing_and_the_rest_is_right() -> None:
    model = model_of()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.2" in name or "layers.4" in name
    expected = gradients(model, lambda: [loss_of(model)])
    copies = offloaded(model)
    assert_equal(gradients(model, lambda: [loss_of(model)]), expected)
    assert copies.events
    copies.check_all_freed()


def test_a_chunk_of_layers_is_offloaded_as_one() -> None:
    """Layers that run together, as those that are recomputed together: their group is that of the first."""
    parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
    first = torch.randn(16, 64)

    def run(offload: ActivationOffload | None, size: int) -> Tensor:
        hidden = first.clone().requires_grad_()
        run = offload.begin_forward(len(parts), ()) if offload else None
        for start in range(0, len(parts), size):
            numbers = range(start, min(start + size, len(parts)))
            if run is None:
                for number in numbers:
                    hidden = parts[number](hidden).relu()
                continue
            with run.offload_saved_tensors(numbers, [parts[number] for number in numbers]):
                for number in numbers:
                    hidden = parts[number](hidden).relu()
            run.post_forward(numbers, hidden)
        return hidden.square().sum()

    expected = gradients(parts, lambda: [run(None, 1)])
    for size in (1, 2, 4, 6):
        for layers in range(1, 6):
            copies = DeferredCopies()
            offload = ActivationOffload(copies, layers, least_size=1)
            assert_equal(gradients(parts, lambda offload=offload, size=size: [run(offload, size)]), expected)
            assert copies.events
            copies.check_all_freed()
            if size == 1:  # what a layer gives is saved by it and by the next: one copy, which stays for the last
                names = [name for name, _ in copies.events]
                assert names.count("send") == 1 + layers
                assert names.count("fetch") == layers


@looped(("size", "layers"), [(2, 6), (3, 6), (3, 7), (4, 7), (2, 3), (1, 7)])
def test_chunks_are_fetched_before_the_backward_reads_them(size: int, layers: int) -> None:
    """When the backward reaches a chunk, what was saved by the one before it is on its way."""
    parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
    copies = DeferredCopies()
    run = ActivationOffload(copies, layers, least_size=1).begin_forward(len(parts), ())
    hidden = torch.randn(16, 64, requires_grad=True)
    for start in range(0, len(parts), size):
        numbers = range(start, min(start + size, len(parts)))
        with run.offload_saved_tensors(numbers, [parts[number] for number in numbers]):
            for number in numbers:
                hidden = parts[number](hidden).relu()
        # before the engine's own: what that fetches for this chunk itself comes too late
        hidden.register_hook(lambda _, start=start: copies.events.append(("backward", start)))
        run.post_forward(numbers, hidden)
    del run
    copies.events.clear()
    hidden.sum().backward()
    reached = [number for name, number in copies.events if name == "backward"]
    assert reached == sorted(range(0, len(parts), size), reverse=True)
    names = [name for name, _ in copies.events]
    last_reached = len(names) - names[::-1].index("backward")
    assert "fetch" in names[:last_reached]
    assert "fetch" not in names[last_reached:]  # nothing is asked for that was not ordered
    copies.check_all_freed()


@pytest.mark.parametrize("broken", ["allocate_host", "copy_to_host"])
def test_a_host_without_memory_is_one_error_and_leaves_nothing(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-made entries die in silence (an error in `__del__` is a warning, which fails here), and steps go on."""
    model = model_of()
    expected = gradients(model, lambda: [loss_of(model)])
    copies = offloaded(model)
    calls = [0]
    works = getattr(copies, broken)

    def fail(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            raise HostMemoryError("none left")
        return works(*arguments)

    monkeypatch.setattr(copies, broken, fail)
    with pytest.raises(HostMemoryError, match="none left"):
        loss_of(model)
    gc.collect()
    copies.check_all_freed()
    assert_equal(gradients(model, lambda: [loss_of(model)]), expected)
    copies.check_all_freed()


def test_memory_that_the_system_does_not_pin_names_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not look like a device that is full, for which the cures are others."""
    pool = PinnedMemoryPool(pinned=True)

    def fail(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(HostMemoryError) as error:
        pool.allocate(3 << 30)
    assert "has 0.0 GiB of host memory and cannot allocate 4.0 GiB more" in str(error.value)
    assert "cpu_offloading_num_layers" in str(error.value)
    assert not is_out_of_memory(error.value)
    assert pool.size == 0


def test_what_dies_during_its_copy_waits_for_it() -> None:
    """A graph that nobody needs any more: others get its memory and its buffer when the copy is done."""
    copies = DeferredCopies()
    run = ActivationOffload(copies, 1, least_size=1).begin_forward(3, ())
    with run.offload_saved_tensors(range(1), ()):
        result = torch.randn(64, requires_grad=True).exp()
    del run, result
    assert [name for name, _ in copies.events] == ["send", "wait"]
    copies.check_all_freed()


@looped("leaves", [False, True])
@looped("part", ["rows", "columns", "transposed", "whole_then_rows"])
def test_views_come_back_as_they_were(part: str, leaves: bool) -> None:
    """Rows of a tensor are copied alone, columns with all of it; strides stay, for compiled layers count on them."""
    base = torch.arange(512.0).view(8, 64)
    views = {"rows": base[4:], "columns": base[:, 16:48], "transposed": base.T, "whole_then_rows": base[4:]}
    view, factor = views[part], torch.ones(1, requires_grad=True)
    seen: list[tuple[int, ...]] = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, factor: Tensor) -> Tensor:
            ctx.save_for_backward(tensor)
            return tensor * factor

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
            (tensor,) = ctx.saved_tensors
            seen.append(tensor.stride())
            return None, (tensor * gradients[0]).sum()[None]

    copies = DeferredCopies()
    run = ActivationOffload(copies, 1, least_size=1).begin_forward(3, ())
    with run.offload_saved_tensors(range(1), ()):
        result = Scale.apply(base, factor).sum() * 0 if part == "whole_then_rows" else torch.zeros(())
        result = result + Scale.apply(view, factor).sum()
    if leaves:
        for number in (1, 2):
            with run.offload_saved_tensors(range(number, number + 1), ()):
                pass
    result.backward()
    assert factor.grad is not None
    assert torch.equal(factor.grad, view.sum()[None])
    assert view.stride() in seen
    names = [name for name, _ in copies.events]
    assert names.count("fetch") == names.count("send") * leaves
    assert sum(size for name, size in copies.events if name == "send") == (1024 if part == "rows" else 2048)


def test_activations_and_weights_of_a_model_share_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pool of its own would pin 1 GiB at least, twice for each stack."""
    empty = torch.empty
    monkeypatch.setattr(host_copies.torch, "empty", lambda size, *, dtype, pin_memory: empty(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    make = copy_engine_factory(torch.device("cuda", 0))
    assert make is not None
    made: list[Any] = [make() for _ in range(4)]
    buffers = [copies.allocate_host(1000) for copies in made]
    assert len({buffer.untyped_storage().data_ptr() for buffer in buffers}) == 1
    assert len({buffer.data_ptr() for buffer in buffers}) == 4
    assert [copies.host_bytes for copies in made] == [host_copies.SLAB_BYTES] * 4


@pytest.mark.parametrize(
    ("t5", "changes", "norms"),
    [
        pytest.param(False, {}, True, id="gpt"),
        pytest.param(False, {"transformer_block_type": "post_ln", "normalization": "layernorm"}, False, id="post_ln"),
        *extra(
            pytest.param(False, {"num_moe_experts": 4}, True, id="moe"),
            pytest.param(True, {}, True, id="t5"),
        ),
    ],
)
def test_what_is_cheap_is_made_again_and_not_moved(
    monkeypatch: pytest.MonkeyPatch, t5: bool, changes: dict[str, Any], norms: bool
) -> None:
    """In offloaded layers alone, and only where there is a device to offload from."""
    plain = model_of(t5=t5, **changes)
    cheap = ["mlp_activation", "core_attention", *(["norm"] if norms else [])]
    asked = model_of(t5=t5, activations_checkpoint_modules=cheap, **changes)
    on = {"cpu_offloading": True, "cpu_offloading_num_layers": 3, "cpu_offloading_weights": False}
    idle = model_of(t5=t5, **on, **changes)
    install(monkeypatch)
    ours = model_of(t5=t5, **on, **changes)
    for stack in ours.stacks:
        assert [mlp_norm_recompute(layer) for layer in stack.layers] == [norms] * 3 + [False] * (LAYERS - 3)
    assert not any(mlp_norm_recompute(layer) for stack in idle.stacks for layer in stack.layers)
    expected = gradients(plain, lambda: [loss_of(plain)])
    for model in (idle, ours):
        assert_equal(gradients(model, lambda model=model: [loss_of(model)]), expected)
    sent = sent_by(ours)
    for model, moves_as_much in ((asked, True), (plain, False)):
        offloaded(model, least_size=512)
        gradients(model, lambda model=model: [loss_of(model)])
        beside = sent_by(model)
        assert (sent == beside) == moves_as_much
        assert sum(sent) <= sum(beside)
