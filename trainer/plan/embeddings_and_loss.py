"""Memory of embeddings, final norms and the loss, whose forward pass also computes its gradients."""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.cross_entropy import can_accumulate_in_gemm, default_chunk_tokens
from ...models.config.bert import BertSlice
from ...models.config.t5 import T5Slice
from .inputs import RunInputs, StackInputs
from .layer_memory import norm_saved_bytes, norm_saves_input


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMemory:
    """Memory of the output projection fused with cross-entropy; see `kernels.cross_entropy`.

    Attributes:
        forward: peak bytes of the forward pass: chunks of logits, gradients of the head's weight and of its input.
        saved: bytes saved for the backward pass: both gradients.
        backward: peak bytes of the backward pass, which scales the gradients (in place on a GPU).
        num_parameters: number of parameters of the head, whose gradient exists from then on.
    """

    forward: int
    saved: int
    backward: int
    num_parameters: int


def loss_memory(facts: RunInputs) -> LossMemory:
    """Return the memory of the loss of one micro batch."""
    widths, vocab = facts.widths, facts.family.padded_vocab_size
    hidden = facts.stacks[-1].stack.hidden_size
    tokens, e = facts.output_tokens, widths.compute
    cuda = facts.target.device == "cuda"
    chunk = min(default_chunk_tokens(vocab, cuda=cuda), tokens)
    logits, weights = chunk * vocab * e, vocab * hidden
    uncast_input = (
        widths.residual if widths.casts_weights else 0
    )  # under autocast the fp32 input exists beside its copy
    inputs, input_gradient = tokens * hidden * (e + uncast_input), tokens * hidden * e
    frozen = facts.model_config.peft.is_on  # the head has no gradient
    # gradient of the weight of one chunk in the compute dtype, and its sum over chunks in at least fp32
    product, accumulator = (0, 0) if frozen else (weights * e, weights * max(4, e))
    if chunk == tokens:
        peak = logits + product
    else:
        chunks = -(-tokens // chunk)
        last = (tokens - (chunks - 1) * chunk) * vocab * e
        after_first = logits if chunks > 2 else last
        # the logits of a chunk are freed once those of the next one exist
        if can_accumulate_in_gemm(vocab, hidden, width=e, cuda=cuda):
            live_logits = last  # the matmul accumulates into the sum, which is rounded in the end: no other product
        elif e < 4:
            live_logits = logits  # every product has the compute dtype, the first one too
        else:
            live_logits = after_first  # the first product becomes the sum, and in the end the gradient
        peak = max(logits + after_first + accumulator, live_logits + accumulator + product)
    cast_weight = weights * e if widths.casts_weights else 0
    kept = input_gradient + product
    cast_gradient = weights * widths.weights if widths.casts_weights and not frozen else 0
    return LossMemory(
        forward=inputs + input_gradient + peak + cast_weight,
        saved=kept,
        backward=kept * (1 if cuda and e < 8 else 2) + cast_gradient,
        num_parameters=0 if frozen else weights,
    )


def embedding_grad_is_sum(facts: RunInputs) -> bool:
    """True if the embedding's gradient is a sum of two: of embedding and tied head, or of both stacks of a T5."""
    family = facts.family
    return family.tied or (isinstance(family, T5Slice) and family.shared_embeddings)


def decoder_embedding_grad_is_separate(facts: RunInputs) -> bool:
    """True if the gradient of the decoder's embedding is a separate tensor during the encoder's backward pass."""
    family = facts.family
    return isinstance(family, T5Slice) and family.shared_embeddings and not family.tied


def embedding_saved_bytes(facts: RunInputs, stack: StackInputs) -> int:
    """Bytes saved by the embeddings of a stack: dropout masks, for BERT also by the norm."""
    family = facts.family
    if isinstance(family, T5Slice):
        dropout = (family.decoder if stack.name == "decoder" else family.encoder).embedding_dropout
    else:
        dropout = family.embedding_dropout
    elements = stack.tokens * stack.stack.hidden_size
    kept = elements if dropout else 0
    if isinstance(family, BertSlice) and family.embedding_norm:
        kept += elements * stack.widths.residual + norm_saved_bytes(stack, elements)
    return kept


def final_norm_saved_bytes(stack: StackInputs) -> int:
    """Bytes saved by the final norm of a stack: its input, in eager mode also fp32 copies."""
    if stack.stack.block == "post_ln":
        return 0
    elements = stack.tokens * stack.stack.hidden_size
    if stack.compiled:
        return elements * stack.widths.residual
    return (elements * stack.widths.residual if norm_saves_input(stack) else 0) + norm_saved_bytes(stack, elements)


def encoder_output_bytes(facts: RunInputs) -> int:
    """Bytes of the encoder's output, which every decoder layer reads."""
    if len(facts.stacks) < 2:
        return 0
    encoder = facts.stacks[0]
    elements = encoder.tokens * encoder.stack.hidden_size
    return elements * (encoder.widths.residual + (encoder.widths.compute if encoder.widths.casts_weights else 0))


def mlm_transform_saved_bytes(facts: RunInputs) -> int:
    """Bytes saved by BERT's MLM transform before the head: inputs of its linear layer, GELU and norm."""
    family = facts.family
    if not isinstance(family, BertSlice) or not family.mlm_transform:
        return 0
    stack = facts.stacks[0]
    elements = stack.tokens * stack.stack.hidden_size
    return 3 * elements * stack.widths.compute
