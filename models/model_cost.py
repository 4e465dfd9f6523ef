"""Parameters, FLOPs and saved activations of a whole model: sums over its parts, without building it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from .bert import bert_outer_weights, embedding_norm_saved_bytes, transform_saved_bytes
from .config.batch_shape import BatchSpec
from .config.bert import BertSlice
from .config.dense_stack import AttentionSlice
from .config.families import FamilyKeys, FamilySlice, family_slice, sequence_length_of
from .config.stack import StackSlice
from .config.t5 import T5Slice
from .dispatch.core_attention import attended_pairs
from .gpt import gpt_outer_weights
from .layer_cost import layer_weights
from .layers.attention_bias import position_bias_parameters
from .layers.cost import StackInputs, Weights
from .parallel.linear import embedding_traffic
from .parallel.stages import PipelineSplit, Stage
from .parallel.traffic import Collective, CommunicationAxis
from .parallel.vocabulary_loss import vocabulary_loss_traffic
from .stack import count_stack, layer_kinds
from .t5 import t5_outer_weights


def stacks_with_cross_attention(model: FamilySlice) -> tuple[tuple[StackSlice, AttentionSlice | None], ...]:
    """Return each stack with the cross-attention of its layers, None in a stack without it."""
    if isinstance(model, T5Slice):
        return (model.encoder.stack, None), (model.decoder.stack, model.cross_attention)
    return ((model.stack, None),)


def outer_weights(model: FamilySlice) -> Weights:
    """Return the weights outside of the stacks."""
    match model:
        case T5Slice():
            return t5_outer_weights(model)
        case BertSlice():
            return bert_outer_weights(model)
        case _:
            return gpt_outer_weights(model)


def stack_part(stack: StackSlice, stages: Sequence[Stage]) -> StackSlice:
    """Return the part of a stack that these stages of it have."""
    num_layers, moe = sum(len(stage.layers) for stage in stages), stack.moe
    if moe is not None:
        moe = replace(moe, layers=tuple(moe.layers[number] for stage in stages for number in stage.layers))
    fp8 = stack.fp8
    if fp8 is not None:
        fp8 = replace(fp8, layers=tuple(fp8.layers[number] for stage in stages for number in stage.layers))
    begins, ends = any(stage.begins for stage in stages), any(stage.ends for stage in stages)
    recompute = stack.recompute and replace(stack.recompute, layers=min(stack.recompute.layers, num_layers))
    return replace(stack, num_layers=num_layers, moe=moe, recompute=recompute, begins=begins, ends=ends, fp8=fp8)


def stage_slice(model: FamilySlice, stages: Sequence[Stage]) -> FamilySlice:
    """Return the part of a model that a rank with these pipeline stages has."""
    parts = [
        stack_part(stack, [stage for stage in stages if stage.stack == index])
        for index, stack in enumerate(model.stacks)
    ]
    if not isinstance(model, T5Slice):
        return replace(model, stack=parts[0])
    encoder, decoder = replace(model.encoder, stack=parts[0]), replace(model.decoder, stack=parts[1])
    return replace(model, encoder=encoder, decoder=decoder)


def shared_weights(
    model: FamilySlice, split: PipelineSplit
) -> Iterator[tuple[CommunicationAxis, int, tuple[int, ...]]]:
    """Yield the weights that several ranks of a pipeline have: axis, elements, and these ranks.

    They are the token embedding, of which a tied head is another copy, and position biases, which all layers of a stack
    share (`models.pipeline_parallel`).
    """
    stages, stacks = split.stages(*(stack.num_layers for stack in model.stacks)), model.stacks
    table = model.padded_vocab_size * stacks[0].hidden_size
    shared = isinstance(model, T5Slice) and model.shared_embeddings
    last = [stage for stage in stages if stage.last and model.tied]
    first = [stage for stage in stages if stage.begins and (shared or stage.stack == len(stacks) - 1)]
    holders = {"embeddings": [(table, first + last)], "position biases": list[tuple[int, list[Stage]]]()}
    for index, (stack, cross) in enumerate(stacks_with_cross_attention(model)):
        biases = sum(position_bias_parameters(each) for each in (stack.attention, cross) if each is not None)
        holders["position biases"].append((biases, [s for s in stages if s.stack == index and s.layers]))
    for axis, weights in holders.items():
        for elements, owners in weights:
            ranks = tuple(sorted({split.rank_of(stage) for stage in owners}))
            if elements and len(ranks) > 1:
                yield cast(CommunicationAxis, axis), elements, ranks


def count_parameters(
    keys: FamilyKeys, vocab_size: int, batch_spec: BatchSpec | None = None, *, active: bool = False
) -> int:
    """Count the parameters of a model, including the padding rows of its vocabulary.

    Args:
        keys: configuration of the model.
        vocab_size: vocabulary size of the tokenizer.
        batch_spec: shape of the samples, which determines the rows of learned position embeddings; None: from the keys
            alone.
        active: count the active parameters per token: only `topk` experts of a layer.
    """
    form = batch_spec or BatchSpec(seq_length=sequence_length_of(keys))
    return count_slice_parameters(family_slice(keys, vocab_size=vocab_size, batch_spec=form), active=active)


def count_slice_parameters(model: FamilySlice, *, active: bool = False, expert_ranks: int = 1) -> int:
    """Count the parameters of a model, or of the part of a tensor-parallel rank, with the experts of one of
    `expert_ranks`; `active` as in `count_parameters`.
    """
    options: Any = {"active": active, "expert_ranks": expert_ranks}
    stacks = sum(count_stack(stack, cross, **options) for stack, cross in stacks_with_cross_attention(model))
    return outer_weights(model).numel + stacks


def count_experts(model: FamilySlice, *, expert_ranks: int = 1) -> int:
    """Count the parameters of the experts of one of `expert_ranks`."""
    return sum(
        layer_kinds(stack)[True]
        * sum(
            m.numel
            for m in layer_weights(stack, has_experts=True, expert_ranks=expert_ranks).matrices
            if m.inputs == "expert rows"
        )
        for stack in model.stacks
        if stack.moe is not None
    )


def training_flops_per_sample(keys: FamilyKeys, vocab_size: int, form: BatchSpec, *, frozen: bool = False) -> float:
    """Return forward and backward FLOPs of a sample: 6 per token and active weight of a matmul, plus attention.

    Attention costs 12 D per layer, head and attended query-key pair, QK^T and PV (PaLM, arXiv 2204.02311, appendix B);
    a causal mask leaves half of the pairs. T5's cross-attention projects every encoder token to keys and values once in
    each decoder layer. Of experts the top-k count, times a capacity factor below 1. Recomputation does not count, nor
    does padding of experts to their capacity.

    Args:
        keys: model configuration.
        vocab_size: padded vocabulary size V.
        form: sample lengths.
        frozen: weights are frozen, which saves 2 of the 6; added PEFT parameters do not count.
    """
    model = replace(family_slice(keys, vocab_size=1, batch_spec=form), padded_vocab_size=vocab_size)
    lengths = (form.seq_length, form.decoder_seq_length)
    weights, attention = 0, 0.0
    for (stack, cross), length in zip(stacks_with_cross_attention(model), lengths, strict=False):
        moe, encoder_length = stack.moe, form.seq_length if cross else 0
        routed = moe.topk * min(1.0, moe.capacity_factor or 1.0) if moe else 0.0
        for has_experts, number in layer_kinds(stack).items():
            layer = layer_weights(stack, cross, has_experts=has_experts)
            experts = round(routed * layer.multiplied("expert rows"))
            weights += number * (layer.multiplied("tokens") + experts) * length
            weights += number * layer.multiplied("encoder tokens") * encoder_length
        each = 12.0 * stack.num_layers * stack.attention.heads * stack.attention.head_dim
        attention += each * attended_pairs(stack.attention, length, length)
        if cross is not None:
            attention += each * attended_pairs(cross, length, encoder_length)
    output_length = form.decoder_seq_length or form.seq_length
    weights += outer_weights(model).multiplied("tokens") * output_length
    return (4.0 if frozen else 6.0) * weights + attention


def embedding_saved_bytes(model: FamilySlice, inputs: StackInputs) -> int:
    """Return the bytes saved by the embeddings of a stack: in BERT by their norm."""
    return embedding_norm_saved_bytes(model, inputs) if isinstance(model, BertSlice) else 0


def head_saved_bytes(model: FamilySlice, inputs: StackInputs) -> int:
    """Return the bytes saved between the last stack and the head."""
    return transform_saved_bytes(model, inputs) if isinstance(model, BertSlice) else 0


def embedding_grad_is_sum(model: FamilySlice) -> bool:
    """Return True if the embedding's gradient is a sum of two: of embedding and tied head, or of both T5 stacks."""
    of_head = model.tied and model.stacks[-1].begins and model.stacks[-1].ends
    return of_head or (isinstance(model, T5Slice) and model.shared_embeddings and all(s.begins for s in model.stacks))


def decoder_embedding_grad_is_separate(model: FamilySlice) -> bool:
    """Return True if the decoder's embedding has a separate gradient during the encoder's backward pass."""
    return isinstance(model, T5Slice) and model.shared_embeddings and not model.tied


def outer_traffic(
    model: FamilySlice, stacks: Sequence[StackInputs], form: BatchSpec, *, cuda: bool
) -> tuple[Collective, ...]:
    """Return the traffic outside of the stacks in a micro batch: of samples, embeddings and loss.

    Args:
        model: the part of a tensor-parallel rank.
        stacks: its stacks.
        form: shape of the samples.
        cuda: the loss runs on a GPU.
    """
    samples = _sample_traffic(stacks, form) if stacks[0].mesh.context > 1 else ()
    if stacks[0].mesh.tensor == 1:
        return samples
    last, widths = stacks[-1], stacks[0].widths
    hidden, vocab = last.stack.hidden_size, model.padded_vocab_size
    embedded = (embedding_traffic(stack.outer_elements * widths.weights) for stack in stacks if stack.stack.begins)
    loss: tuple[Collective, ...] = ()
    if last.computes_loss:
        loss = vocabulary_loss_traffic(last.tokens, vocab, hidden, widths.compute, last.mesh.tensor, cuda=cuda)
    return (*samples, *(each for found in embedded for each in found), *loss)


def stage_traffic(stack: StackInputs) -> tuple[Collective, ...]:
    """Return what a pipeline stage sends in a micro batch: its output, and the gradient of its input.

    Both are residual streams, of decoder stages of a T5 beside the encoder's output; the first decoder stage has only
    that as its input, the last encoder stage as its output.
    """
    ends = stack.stack.begins, stack.stack.ends
    stream = stack.residual_elements * stack.widths.residual
    encoded = 0 if stack.cross is None else stack.encoder_tokens * stack.stack.hidden_size * stack.widths.residual
    received, sent = (stream * (not at_end) + encoded for at_end in ends)
    if stack.stack.ends and stack.cross is None:  # of an encoder
        sent = stack.outer_elements * stack.widths.residual
    found = [] if stack.computes_loss else [Collective("pipeline", "send", sent, "forward", overlaps=True)]
    if received:
        found.append(Collective("pipeline", "send", received, "backward", overlaps=True))
    return tuple(found)


def _sample_traffic(stacks: Sequence[StackInputs], form: BatchSpec) -> tuple[Collective, ...]:
    """Return what context-parallel ranks gather of whole samples: int32 documents, in a T5 those of the encoder for the
    decoder too, and the padding, a byte a token, of an encoder.
    """
    sizes: list[int] = []
    if form.packed or form.reset_position_ids:
        sizes += [4 * stack.batch * length for stack in stacks for length in (stack.length, stack.encoder_length)]
    if form.padded:
        sizes += [stack.batch * stack.length for stack in stacks if not stack.stack.attention.causal]
        if stacks[0].cross is not None:  # a decoder stage without the encoder
            sizes.append(stacks[0].batch * stacks[0].encoder_length)
    return tuple(Collective("context", "all-gather", size, "forward") for size in sizes if size)
