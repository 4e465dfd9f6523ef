"""Layers by graphs: losses and gradients of eager layers, bit for bit, with a substitute for CUDA graphs.

CUDA graphs themselves: `tests/gpu/test_models_layer_graphs_gpu.py` and `test_distributed_gpu.py` there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from recorded_graphs import Recorded, recorder
from tiers import extra
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models import stack
from stoker.models.build import LanguageModel, build_model
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.gpt import GPTKeys
from stoker.models.config.t5 import T5Keys
from stoker.models.layer_graphs import WARM_UP_MICRO_BATCHES, Capture, Graph, LayerGraphs
from stoker.models.moe.moe_layer import find_moe_layers

STACK = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 16}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "normalization": "rmsnorm"}


def fail(error: Exception) -> None:
    raise error


def capture_all(model: LanguageModel, build_capture: Callable[[], Capture]) -> list[LayerGraphs]:
    """Capture the layers of each stack, in memory of its own; return their graphs."""
    for each in model.stacks:
        each.capture_layers(build_capture, fail)
    first = [each.layers[0] for each in model.stacks]
    return [(layer.route if "route" in vars(layer) else layer.forward).args[0] for layer in first]  # pyrefly: ignore[missing-attribute]


def build(keys: GPTKeys | T5Keys, spec: BatchSpec) -> LanguageModel:
    model = build_model(
        keys, vocab_size=32, batch_spec=spec, device="cpu", dtype=torch.float64, flags=AttentionFlags(),
        micro_batch_size=2,
    )  # fmt: skip
    for layer in find_moe_layers(model).values():
        layer.loss_share.fill_(0.25)
    return model


def gpt(**keys: Any) -> LanguageModel:
    given = GPTKeys.model_validate(STACK | NO_DROPOUT | {"encoder_seq_length": 8} | keys)
    return build(given, BatchSpec(seq_length=8))


def t5(**keys: Any) -> LanguageModel:
    one = STACK | NO_DROPOUT | keys
    return build(
        T5Keys.model_validate({"encoder": one, "decoder": one, "seq_length": 8}),
        BatchSpec(seq_length=8, decoder_seq_length=6, padded=True),
    )


def gpt_batch(number: int, size: int) -> dict[str, Tensor]:
    tokens = torch.randint(32, (size, 9), generator=torch.Generator().manual_seed(number))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def t5_batch(number: int, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    read, written = (torch.randint(32, (size, length), generator=generator) for length in (8, 7))
    lengths = torch.randint(3, 9, (size, 1), generator=generator)
    return {
        "encoder_tokens": read,
        "decoder_tokens": written[:, :-1].contiguous(),
        "labels": written[:, 1:].contiguous(),
        "encoder_padding": torch.arange(8) < lengths,
    }


def run_passes(
    model: LanguageModel, passes: int, batch: Callable[[int, int], dict[str, Tensor]], sizes: tuple[int, ...] = (2,)
) -> list[Any]:
    """Return losses, and the gradients of two passes each, after which weights change; with validation in between."""
    found: list[Any] = []
    for number in range(passes):
        fields = batch(number, sizes[number % len(sizes)])
        torch.manual_seed(number)
        model.train()
        loss = model.batch_loss(fields, torch.tensor(16.0, dtype=torch.float64))
        loss.backward()
        found.append(loss.detach())
        if number % 2 == 0:
            continue
        found += [torch.zeros(()) if each.grad is None else each.grad.clone() for each in model.parameters()]
        model.zero_grad()
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(0.98)
            model.eval()
            found.append(model.batch_loss(fields, torch.tensor(16.0, dtype=torch.float64)))
    return found


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


NOISE = {"hidden_dropout": 0.1, "moe_dropout": 0.1, "moe_input_jitter_eps": 0.2, "attention_dropout": 0.1}


@pytest.mark.parametrize(
    "keys",
    [
        {"position_embedding_type": "rope"},
        *extra({"hidden_dropout": 0.1, "attention_dropout": 0.1}),
        {"position_embedding_type": "relative", "fp32_residual_connection": True},  # layers share a learned bias
        {"position_embedding_type": "relative", "transformer_block_type": "post_ln", "num_layers": 1},
        EXPERTS | {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1, "transformer_block_type": "parallel_ln"},
        EXPERTS | NOISE,
    ],
)
def test_a_gpt_has_the_losses_and_gradients_of_eager_layers(keys: dict[str, Any]) -> None:
    ours, theirs, captured = gpt(**keys), gpt(**keys), list[Recorded]()
    capture_all(ours, lambda: recorder(captured))
    assert_equal(run_passes(ours, 8, gpt_batch), run_passes(theirs, 8, gpt_batch))
    assert [each.replays for each in captured] == [8 - WARM_UP_MICRO_BATCHES] * 2 * keys.get("num_layers", 3)


@pytest.mark.parametrize("keys", [*extra({}), {"position_embedding_type": "relative", "hidden_dropout": 0.1}])
def test_a_t5_has_the_losses_and_gradients_of_eager_layers(keys: dict[str, Any]) -> None:
    """The output of the encoder is an input of all layers of the decoder, which has a gradient."""
    ours, theirs, captured = t5(**keys), t5(**keys), list[Recorded]()
    encoder, decoder = capture_all(ours, lambda: recorder(captured))
    assert_equal(run_passes(ours, 8, t5_batch), run_passes(theirs, 8, t5_batch))
    assert [each.replays for each in captured] == [8 - WARM_UP_MICRO_BATCHES] * 2 * 6
    for graphs, shared in ((encoder, 0), (decoder, 1)):
        ((parts,),) = graphs._captured.values()
        buffers = {id(each): each for part in parts for each in part.buffers}.values()
        assert sum(each.gradient is not None for each in buffers) == shared + ("position_embedding_type" in keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"moe_aux_loss_coeff": 0.1, "moe_router_force_load_balancing": True},
        {"moe_layer_freq": 2, "moe_expert_capacity_factor": 1.0},  # a layer without experts, as a whole
        {"moe_shared_expert_intermediate_size": 8, **NOISE},
        *extra({"transformer_block_type": "post_ln"}),
    ],
)
def test_layers_up_to_their_experts(monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]) -> None:
    """As where ranks share the experts."""
    monkeypatch.setattr(stack, "_has_fixed_shapes", lambda layer: layer not in experts)
    ours, theirs, captured = gpt(**EXPERTS, **keys), gpt(**EXPERTS, **keys), list[Recorded]()
    experts = [ours.get_submodule(name.removesuffix(".mlp")) for name in find_moe_layers(ours)]
    capture_all(ours, lambda: recorder(captured))
    assert_equal(run_passes(ours, 8, gpt_batch), run_passes(theirs, 8, gpt_batch))
    assert [each.replays for each in captured] == [8 - WARM_UP_MICRO_BATCHES] * 2 * 3


@pytest.mark.parametrize("keys", [{}, {"position_embedding_type": "relative"}])
def test_layers_that_need_no_backward_pass_have_none(keys: dict[str, Any]) -> None:
    """As with adapters of the later layers alone."""
    ours, theirs, captured = gpt(**keys), gpt(**keys), list[Recorded]()
    for model in (ours, theirs):
        model.requires_grad_(False)
        model.stacks[0].layers[1].requires_grad_(True)
    capture_all(ours, lambda: recorder(captured))
    assert_equal(run_passes(ours, 8, gpt_batch), run_passes(theirs, 8, gpt_batch))
    assert [each.replays for each in captured] == [8 - WARM_UP_MICRO_BATCHES] * 5  # three forward, two backward


def test_each_shape_is_captured_after_its_own_warm_up() -> None:
    ours, theirs, captured = gpt(), gpt(), list[Recorded]()
    capture_all(ours, lambda: recorder(captured))
    sizes = 2, 2, 3, 3, 3, 2  # also both in one step
    assert_equal(run_passes(ours, 24, gpt_batch, sizes), run_passes(theirs, 24, gpt_batch, sizes))
    assert len(captured) == 2 * 2 * 3


def test_inputs_in_common_are_copied_once_and_results_not_at_all() -> None:
    model = gpt(position_embedding_type="rope", hidden_dropout=0.1)
    (graphs,) = capture_all(model, lambda: recorder([]))
    run_passes(model, WARM_UP_MICRO_BATCHES + 1, gpt_batch)
    (((first, second, third),),) = graphs._captured.values()
    # residual stream; cosines, sines; keys of the dropouts; places of tokens, which are also those of the stream
    assert len(first.buffers) == 5
    same = [
        one is another is a_third
        for one, another, a_third in zip(*(each.buffers for each in (first, second, third)), strict=True)
    ]
    assert same == [False, True, True, False, True]
    for before, after in ((first, second), (second, third)):
        assert after.buffers[0].tensor.data_ptr() == before.results[0].data_ptr()


def test_a_failure_is_told_once_and_layers_stay_eager() -> None:
    def capture(run: Callable[[], list[Tensor]]) -> tuple[Graph, list[Tensor]]:
        raise torch.OutOfMemoryError("tried to allocate")

    told: list[str] = []
    ours, theirs, strict = gpt(), gpt(), gpt()
    ours.stacks[0].capture_layers(lambda: capture, lambda error: told.append(str(error)))
    assert_equal(run_passes(ours, 8, gpt_batch), run_passes(theirs, 8, gpt_batch))
    assert told == ["tried to allocate"]
    capture_all(strict, lambda: capture)
    with pytest.raises(torch.OutOfMemoryError):
        run_passes(strict, 8, gpt_batch)


def test_release_keeps_no_memory() -> None:
    model = gpt()
    (graphs,) = capture_all(model, lambda: recorder([]))
    run_passes(model, WARM_UP_MICRO_BATCHES + 1, gpt_batch)
    assert graphs._memory
    model.stacks[0].release_graphs()
    assert not graphs._memory
    assert not graphs._captured


def test_passes_that_graphs_do_not_support_are_errors() -> None:
    model = gpt()
    capture_all(model, lambda: recorder([]))
    run_passes(model, WARM_UP_MICRO_BATCHES + 1, gpt_batch)
    model.train()
    first = model.batch_loss(gpt_batch(1, 2), 16.0)
    model.batch_loss(gpt_batch(2, 2), 16.0).backward()
    with pytest.raises(RuntimeError, match="ran again before"):
        first.backward()
    model.stacks[0].layers[1].register_forward_pre_hook(lambda _, given: (given[0] * 2, *given[1:]))
    with pytest.raises(RuntimeError, match="was replaced"):
        model.batch_loss(gpt_batch(3, 2), 16.0)


def test_passes_in_flight_have_graphs_in_turn() -> None:
    """Two forward passes before the first backward pass, as on a rank of a pipeline; only an idle stage captures."""
    in_flight: list[Tensor] = []

    def build_capture() -> Capture:
        capture = recorder(captured)

        def capture_when_idle(run: Callable[[], list[Tensor]]) -> tuple[Graph, list[Tensor]]:
            assert not in_flight
            return capture(run)

        return capture_when_idle

    captured: list[Recorded] = []
    ours, theirs = gpt(hidden_dropout=0.1), gpt(hidden_dropout=0.1)
    ours.stacks[0].capture_layers(build_capture, fail, {range(3): 2})
    found: list[list[Tensor]] = []
    for model in (ours, theirs):
        model.train()
        torch.manual_seed(0)
        for step in range(3):
            for number in range(5):
                in_flight.append(model.batch_loss(gpt_batch(5 * step + number, 2), torch.tensor(16.0)))
                if number:
                    in_flight.pop(0).backward()
            in_flight.pop().backward()
        found.append([each.grad for each in model.parameters() if each.grad is not None])
    assert_equal(*found)
    assert [each.replays for each in captured] == [5] * 12


class Casts(TorchDispatchMode):
    """Counts casts to bfloat16."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16
        return func(*args, **(kwargs or {}))


def test_graphs_share_no_casts_of_autocast() -> None:
    """Autocast keeps casts of weights for the rest of a forward pass; those of a graph are in its memory and stream."""
    casts: list[int] = []

    def build_capture() -> Capture:
        capture = recorder([])

        def capture_and_count(run: Callable[[], list[Tensor]]) -> tuple[Graph, list[Tensor]]:
            with Casts() as mode:
                captured = capture(run)
            casts.append(mode.count)
            return captured

        return capture_and_count

    model = gpt().float()
    for layer in model.stacks[0].layers[1:]:  # all layers have the same weights
        for name, module in layer.named_modules():
            for key in module._parameters:
                module._parameters[key] = model.stacks[0].layers[0].get_submodule(name)._parameters[key]
    capture_all(model, build_capture)
    model.train()
    for number in range(WARM_UP_MICRO_BATCHES + 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.batch_loss(gpt_batch(number, 2), 16.0)
        loss.backward()
        del loss
    first, second, third = casts[:3]
    assert first == second == third > 0


@pytest.mark.parametrize(
    ("model", "autocast"),
    [
        ("gpt", True),
        ("up to the experts", True),
        *extra(("gpt", False), *product(("t5", "experts"), (False, True)), ("up to the experts", False)),
    ],
)
def test_capture_compiles_nothing(monkeypatch: pytest.MonkeyPatch, model: str, autocast: bool) -> None:
    """Compiling would launch and measure kernels within the capture."""
    compiled: list[int] = []

    def backend(module: torch.fx.GraphModule, _: object) -> Any:
        compiled.append(1)
        return module

    if model == "up to the experts":
        monkeypatch.setattr(stack, "_has_fixed_shapes", lambda layer: False)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    keys: dict[str, Any] = {"attention_backend": "unfused", "position_embedding_type": "relative"}
    ours = t5(**keys) if model == "t5" else gpt(**keys, **({} if model == "gpt" else EXPERTS))
    ours, batch, captured = ours.float().train(), t5_batch if model == "t5" else gpt_batch, list[Recorded]()
    for each in ours.stacks:
        each.compile_layers()
    capture_all(ours, lambda: recorder(captured))
    counts: list[int] = []
    for number in range(WARM_UP_MICRO_BATCHES + 3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = ours.batch_loss(batch(number, 2), torch.tensor(16.0))
        loss.backward()
        counts.append(len(compiled))
    assert len(captured) == 2 * 3 * len(ours.stacks)
    assert counts[0] == counts[-1] > 0


@pytest.mark.parametrize("whole", [True, False])
def test_only_forward_passes_run_under_autocast(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """The router computes in fp32, and so does its backward pass, which begins when autocast has ended."""
    if not whole:
        monkeypatch.setattr(stack, "_has_fixed_shapes", lambda layer: False)
    ours, theirs = gpt(**EXPERTS).float(), gpt(**EXPERTS).float()
    capture_all(ours, lambda: recorder([]))
    found: list[list[Tensor]] = []
    for model in (ours, theirs):
        model.train()
        for number in range(WARM_UP_MICRO_BATCHES + 3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model.batch_loss(gpt_batch(number, 2), torch.tensor(16.0))
            loss.backward()
        found.append([each.grad for each in model.parameters() if each.grad is not None])
    assert_equal(*found)


def test_hooks_of_parameters_run_once() -> None:
    ours, theirs = gpt(), gpt()
    for model in (ours, theirs):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 0.5 * gradient)
    capture_all(ours, lambda: recorder([]))
    assert_equal(run_passes(ours, 8, gpt_batch), run_passes(theirs, 8, gpt_batch))
