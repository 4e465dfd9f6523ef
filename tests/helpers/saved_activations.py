"""Measure what a model saves for its backward pass on CUDA, without a GPU and without computing anything.

Eager models run with fake tensors under saved-tensor hooks. Compiled layers are traced up to the partitioner of
torch.compile, whose choice is read. Both are patched to use Triton, so that the operations are those of a GPU;
attention is PyTorch's flash kernel where a GPU would use cuDNN's, which saves the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from config_helpers import load
from resolved import gpu_target
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stoker.kernels import cross_entropy, dropout, gated_activation, masked_softmax, norm_residual
from stoker.kernels.attention import recompute_scores
from stoker.kernels.attention.backends import registry, unfused
from stoker.kernels.attention.flash import ops
from stoker.kernels.lora import lora_gated_mlp, lora_linear
from stoker.kernels.moe import expert_mlps, grouped_matmul, permute
from stoker.models.assemble import assemble
from stoker.models.build import TORCH_DTYPES
from stoker.models.config.peft import peft_slice
from stoker.models.dispatch.attention_choices import plan_attentions
from stoker.models.fp8 import apply_fp8
from stoker.models.layers import fused_linear
from stoker.models.layers.context import LayerContext, Memory
from stoker.models.parallel.collectives import TensorParallel
from stoker.models.parallel.stages import StageInput
from stoker.models.peft.apply import apply_peft
from stoker.models.recompute.apply_recompute import apply_recompute
from stoker.models.tensor_parallel import apply_tensor_parallel
from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.plan.hardware import parse_gpu
from stoker.trainer.plan.run_inputs import RunInputs, collect_inputs

_BY_TRITON = (
    cross_entropy, norm_residual, gated_activation, lora_gated_mlp, lora_linear, masked_softmax, unfused,
    recompute_scores, expert_mlps, grouped_matmul, permute, fused_linear,
)  # fmt: skip


@contextlib.contextmanager
def simulate_cuda(monkeypatch: Any) -> Iterator[None]:
    """Make operations take their GPU code paths."""
    with monkeypatch.context() as patch:
        for module in _BY_TRITON:
            patch.setattr(module, "triton_runs_on", lambda tensor: True)
        for module in (permute, expert_mlps):
            patch.setattr(module, "use_triton", lambda tensor: True)
        patch.setattr(ops, "_check_triton_serves", lambda q: None)
        patch.setattr(dropout, "triton_runs_on", lambda tensor: True)
        patch.setattr(dropout, "launch_dropout", lambda values, *_, dtype: torch.empty_like(values, dtype=dtype))
        yield


def plan_inputs(overrides: list[str], *, compiled: bool, ranks: int = 1) -> RunInputs:
    """Return the plan's inputs for a run on H100s without cuDNN."""
    root = load(*overrides, f"model.compile={compiled}").root
    target = gpu_target(root, parse_gpu("h100"))
    target = replace(target, software=replace(target.software, cudnn=None, torch=(2, 11)))
    return collect_inputs(resolve_run(root, world_size=ranks, capability=target.capability), target)


def model_of(facts: RunInputs) -> Any:
    """Return the uninitialized model on the CPU in training mode, with the attention backends of the plan."""
    stacks = facts.stacks
    decisions = {stack.name: stack.attention for stack in stacks}
    if stacks[-1].cross_attention is not None:
        decisions["cross"] = stacks[-1].cross_attention
    call = stacks[0].attention.call
    common: Any = {
        "device": "cuda", "capability": call.capability, "dtype": call.dtype, "batch": call.batch,
        "deterministic": call.deterministic,
    }  # fmt: skip
    named = {planned.name: planned for planned in plan_attentions(facts.family, facts.batch_spec, common)}
    functions: Any = {
        name: {"training": registry.get_attention_function(decision)}
        for name, decision in decisions.items()
        if name in named
    }
    labels = {named[name].label("training"): decision for name, decision in decisions.items()}
    model = assemble(facts.family, facts.batch_spec, labels, functions)
    peft = peft_slice(facts.model_config.peft)
    if peft is not None:
        with torch.device("meta"):
            apply_peft(model, facts.family, peft)
    ranks = None
    if facts.tensor_parallel:  # fake collectives need no process group
        ranks = TensorParallel(0, facts.mesh.tensor, "none", sequence=facts.mesh.sequence)
        apply_tensor_parallel(model, facts.run.with_vocabulary(facts.vocab_size), ranks)
    apply_fp8(model.stacks, facts.family.stacks, ranks)
    model = model.to(TORCH_DTYPES[facts.precision.weights])
    for part, stack in zip(stacks, model.stacks, strict=True):
        names = (
            ["training"] if not part.name else [f"{part.name} training", *(["cross training"] if part.cross else [])]
        )
        apply_recompute(stack, part.stack, labels, *names, offloads=True)
    return model.to_empty(device="cpu").train()


class Saved:
    """Saved storages, each counted once, except parameters, buffers, and tensors with the shape of one.

    Args:
        model: whose parameters and buffers are ignored.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        own = (*model.parameters(), *model.buffers())
        shapes = [tuple(tensor.shape) for tensor in own]
        shapes += [(shape[0] * shape[1], shape[2]) for shape in shapes if len(shape) == 3]  # of all experts together
        self._shapes = {*shapes, *((*shape[:-2], *shape[-2:][::-1]) for shape in shapes)}
        self._sizes: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def pack(self, tensor: Tensor) -> Tensor:
        """Pack hook of `saved_tensors_hooks`."""
        if tuple(tensor.shape) not in self._shapes:
            self._alive.append(tensor)  # so that its address is not reused
            self._sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self._sizes.values())


def saved_eager(facts: RunInputs, monkeypatch: Any) -> int:
    """Bytes saved by the forward pass of the whole eager model, without the loss."""
    model = model_of(facts)
    saved = Saved(model)
    form, batch = facts.batch_spec, facts.stacks[0].batch
    with simulate_cuda(monkeypatch), FakeTensorMode(allow_non_fake_inputs=True):
        lengths = (form.seq_length, *([form.decoder_seq_length] if form.decoder_seq_length else []))
        tokens = [torch.zeros(batch, length, dtype=torch.int64) for length in lengths]
        precision = facts.precision
        autocast = precision.autocast and TORCH_DTYPES[precision.autocast]
        cast = torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None)
        with cast, saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            model.hidden_states(*tokens)
    return saved.total


def saved_stage(whole: RunInputs, rank: RunInputs, number: int, monkeypatch: Any) -> int:
    """Bytes held between forward and backward pass of a stage of an eager pipeline rank, without the loss: what is
    saved, and the stage's input and output.
    """
    stage, model = rank.stages[number], model_of(whole)
    monkeypatch.setattr(model, "_loss", lambda hidden, *_: hidden)
    saved, form = Saved(model), whole.batch_spec
    names = ("encoder_tokens", "decoder_tokens") if form.decoder_seq_length else ("tokens",)
    lengths = (form.seq_length, form.decoder_seq_length)
    dtype = TORCH_DTYPES[whole.precision.weights]
    with simulate_cuda(monkeypatch), FakeTensorMode(allow_non_fake_inputs=True):
        batch = {
            name: torch.zeros(whole.stacks[0].batch, length, dtype=torch.int64)
            for name, length in zip(names, lengths, strict=False)
        }
        batch["labels"] = torch.zeros_like(batch[names[-1]])
        inputs = rank.stacks[number]
        hidden = inputs.stack.hidden_size
        stream = (inputs.batch, inputs.length, hidden)
        if inputs.residual_tokens < inputs.tokens:
            stream = (1, inputs.residual_tokens, hidden)
        shapes = [] if stage.begins else [stream]
        shapes += [(inputs.batch, inputs.encoder_length, hidden)] if inputs.cross is not None else []
        received = tuple(torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes)
        autocast = whole.precision.autocast and TORCH_DTYPES[whole.precision.autocast]
        cast = torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None)
        with cast, saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            output = model.run_stage(StageInput(stage, received), batch, 1.0)
        for tensor in (*received, *(() if stage.last else output)):
            saved.pack(tensor)
    return saved.total


class _PartitionedError(Exception):
    """Stops compilation after the partitioner."""


def saved_compiled(facts: RunInputs, monkeypatch: Any, *, stack: int = 0) -> int:
    """Bytes saved by the last layer of a stack if compiled, including its input."""
    return saved_and_sent_compiled(facts, monkeypatch, stack=stack)[0]


def saved_and_sent_compiled(
    facts: RunInputs, monkeypatch: Any, *, stack: int = 0
) -> tuple[int, dict[tuple[str, str], int]]:
    """Bytes saved by the last layer of a stack if compiled, and those of its collectives by (pass, operation)."""
    inductor: Any = import_module("torch._inductor.compile_fx")

    partition, graphs = inductor.min_cut_rematerialization_partition, []

    def record(*arguments: Any, **options: Any) -> Any:
        forward, backward = partition(*arguments, **options)
        graphs.append((forward, options["num_fwd_outputs"], backward))
        raise _PartitionedError

    model, inputs = model_of(facts), facts.stacks[stack]
    module = model.stacks[stack]
    width, dtype = inputs.stack.hidden_size, TORCH_DTYPES[facts.precision.weights]
    shards = inputs.residual_tokens < inputs.tokens
    shape = (1, inputs.residual_tokens) if shards else (inputs.batch, inputs.length)
    wide = torch.promote_types(dtype, torch.float32) if module.fp32_residual else dtype
    hidden = torch.zeros(*shape, width, dtype=wide, requires_grad=True)
    if module.tensor_parallel is not None:
        module.tensor_parallel.shards_tokens = shards
    rotary = None if module.rotary is None else module.rotary(inputs.length)
    positions = module.score_positions
    terms = None if positions is None else positions(inputs.length, inputs.length)
    memory = None
    if inputs.cross is not None:
        memory = Memory(torch.zeros(inputs.batch, inputs.encoder_length, width, dtype=dtype, requires_grad=True))
    batch = inputs.batch if shards else None
    _, drawn = module.drop_embeddings(hidden, 0.0)
    drops = None if drawn is None else drawn.of_layer(inputs.stack.num_layers - 1, drawn.tokens)
    layer = module.layers[-1]
    context = LayerContext("training", rotary, terms, memory=memory, batch=batch, dropout=drops)

    def run(hidden: Tensor) -> Any:
        precision = facts.precision
        autocast = precision.autocast and TORCH_DTYPES[precision.autocast]
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            return layer(hidden, context)

    torch._dynamo.reset()
    with simulate_cuda(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(inductor, "min_cut_rematerialization_partition", record)
        try:
            torch.compile(run, dynamic=False, fullgraph=True)(hidden)
        except Exception:
            if not graphs:
                raise
    forward, outputs, backward = graphs[0]
    saved = next(iter(forward.graph.find_nodes(op="output"))).args[0][outputs:]
    storages: dict[int, int] = {}
    for node in saved:
        value = node.meta["val"] if hasattr(node, "meta") else None
        is_input = node.op == "placeholder"
        if isinstance(value, Tensor) and _is_activation(value, inputs.residual_tokens, inputs.encoder_tokens, is_input):
            storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
    sent = {**_sent(forward, "forward"), **_sent(backward, "backward")}
    return sum(size for size in storages.values() if isinstance(size, int)), sent  # RNG states have no size


def _sent(graph: Any, name: str) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for node in graph.graph.nodes:
        kind = getattr(node.target, "_opname", "").replace("all_gather_in_backward", "all_gather_into_tensor")
        if kind in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
            value = (node if kind == "all_gather_into_tensor" else node.args[0]).meta["val"]
            found[name, kind] = found.get((name, kind), 0) + value.numel() * value.element_size()
    return found


def _is_activation(value: Tensor, tokens: int, memory_tokens: int, is_input: bool) -> bool:
    """Of the graph's inputs count only the layer's input, not weights, rotary tables and the encoder's output."""
    if not is_input:
        return memory_tokens == 0 or tuple(value.shape) != (memory_tokens, value.shape[-1])
    return value.ndim == 3 and value.shape[0] * value.shape[1] == tokens and value.is_floating_point()


class Live(TorchDispatchMode):
    """Track the bytes of live tensors created inside, including fake tensors.

    Attributes:
        peak: maximum so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {StorageWeakRef(leaf.untyped_storage()) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if StorageWeakRef(storage) not in inputs:
                    self._storages[StorageWeakRef(storage)] = storage.nbytes()
        self._storages = {ref: size for ref, size in self._storages.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._storages.values()))
        return result


def backward_peak_bytes(facts: RunInputs, monkeypatch: Any) -> int:
    """Peak bytes in the backward pass of the whole eager model, gradients included.

    Memory that GPU operations allocate and free internally is not counted.
    """
    model, live = model_of(facts), Live()
    form, batch = facts.batch_spec, facts.stacks[0].batch
    with simulate_cuda(monkeypatch), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for module in model.modules():  # otherwise each use of a weight would count as a new tensor
            for name, weight in list(module._parameters.items()):
                fake = None if weight is None else mode.from_tensor(weight.detach())
                module._parameters[name] = None if fake is None else torch.nn.Parameter(fake)
            for name, buffer in list(module._buffers.items()):
                module._buffers[name] = None if buffer is None else mode.from_tensor(buffer)
        lengths = (form.seq_length, *([form.decoder_seq_length] if form.decoder_seq_length else []))
        tokens = [torch.zeros(batch, length, dtype=torch.int64) for length in lengths]
        with live:
            loss = model.loss(*tokens, torch.zeros_like(tokens[-1]), 1.0)
            live.peak = 0
            loss.backward()
    return live.peak


def loss_peak_bytes(tokens: int, vocab: int, hidden: int, dtype: torch.dtype, monkeypatch: Any) -> int:
    """Peak bytes that the loss allocates on a GPU, besides its inputs."""
    chunk = cross_entropy.default_chunk_tokens(vocab, cuda=True)

    def losses(logits: Tensor, labels: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return torch.empty(len(logits), dtype=torch.float32), logits

    live = Live()
    with simulate_cuda(monkeypatch), monkeypatch.context() as patch, FakeTensorMode():
        patch.setattr(cross_entropy, "triton_loss_and_gradient_", losses)
        patch.setattr(cross_entropy, "_addmm_fp32_", lambda *_: None)  # does not support fake tensors in torch 2.11
        rows, weight = (torch.empty(shape, dtype=dtype) for shape in ((tokens, hidden), (vocab, hidden)))
        labels = torch.empty(tokens, dtype=torch.int64)
        with live:
            cross_entropy.run_chunks(
                rows, weight, labels, None, chunk_tokens=chunk, frozen=False, valid_vocab=vocab, ignore_index=-100,
                with_gradient=True, smoothing=0.0, softcap=0.0, z_loss=0.0, denominator=None,
            )  # fmt: skip
    return live.peak
