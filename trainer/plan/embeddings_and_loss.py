"""What lies before and after the stacks: embeddings, final norms, and the loss, which makes its gradients at once."""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.cross_entropy import default_chunk_tokens, sums_in_matmul
from ...models.config.bert_slice import BertSlice
from ...models.config.t5_slice import T5Slice
from .inputs import RunFacts, StackFacts
from .layer_memory import norm_extra, norm_keeps_input


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMemory:
    """The output projection with its cross-entropy; see `kernels.cross_entropy`.

    Attributes:
        forward: bytes there are at most while it runs: chunks of logits, the gradient of the head, that of its input.
        kept: bytes it leaves for the backward pass: both gradients.
        backward: bytes there are at most when the backward pass scales them, on a GPU where they are.
        parameters: of the head, which have their gradient from then on.
    """

    forward: int
    kept: int
    backward: int
    parameters: int


def loss_memory(facts: RunFacts) -> LossMemory:
    """What the loss of a micro batch needs."""
    widths, vocab = facts.widths, facts.family.padded_vocab_size
    hidden = facts.stacks[-1].stack.hidden_size
    tokens, e = facts.out_tokens, widths.compute
    cuda = facts.target.device == "cuda"
    chunk = min(default_chunk_tokens(vocab, cuda=cuda), tokens)
    logits, rows = chunk * vocab * e, vocab * hidden
    wide = widths.stream if widths.casts_weights else 0  # of which the operation reads a narrow copy
    read, read_gradient = tokens * hidden * (e + wide), tokens * hidden * e
    frozen = facts.keys.peft.is_on  # the head has no gradient
    product, sums = (0, 0) if frozen else (rows * e, rows * max(4, e))
    if chunk == tokens:
        running = logits + product
    else:
        chunks = -(-tokens // chunk)
        last = (tokens - (chunks - 1) * chunk) * vocab * e
        after_first = logits if chunks > 2 else last
        # the logits of the chunk before are given back when their successors are there
        if sums_in_matmul(vocab, hidden, width=e, cuda=cuda):
            beside = last  # there is no product but the sums, which are rounded in the end
        elif e < 4:
            beside = logits  # each product is narrow, the first one too
        else:
            beside = after_first  # the first product is the sums, and the gradient in the end
        running = max(logits + after_first + sums, beside + sums + product)
    cast = rows * e if widths.casts_weights else 0
    kept = read_gradient + product
    scaled = kept * (1 if cuda and e < 8 else 2) + (rows * widths.weights if widths.casts_weights and not frozen else 0)
    return LossMemory(
        forward=read + read_gradient + running + cast,
        kept=kept,
        backward=scaled,
        parameters=0 if frozen else rows,
    )


def table_is_read_twice(facts: RunFacts) -> bool:
    """Whether the gradient of the table of embeddings has two parts that are added: of the head, or of both stacks."""
    family = facts.family
    return family.tied or (isinstance(family, T5Slice) and family.shared_embeddings)


def decoder_table_waits(facts: RunFacts) -> bool:
    """Whether the gradient of the decoder's embeddings is a table of its own while the encoder runs its backward."""
    family = facts.family
    return isinstance(family, T5Slice) and family.shared_embeddings and not family.tied


def embedding_kept(facts: RunFacts, stack: StackFacts) -> int:
    """Bytes of what the embeddings of a stack keep: masks of dropout, for BERT the input of a norm."""
    family = facts.family
    if isinstance(family, T5Slice):
        dropout = (family.decoder if stack.name == "decoder" else family.encoder).embedding_dropout
    else:
        dropout = family.embedding_dropout
    wide = stack.tokens * stack.stack.hidden_size
    kept = wide if dropout else 0
    if isinstance(family, BertSlice) and family.embedding_norm:
        kept += wide * stack.widths.stream + norm_extra(stack, wide)
    return kept


def final_norm_kept(stack: StackFacts) -> int:
    """Bytes that the norm after a stack keeps: its input, as written also copies in fp32."""
    if stack.stack.block == "post_ln":
        return 0
    wide = stack.tokens * stack.stack.hidden_size
    if stack.compiled:
        return wide * stack.widths.stream
    return (wide * stack.widths.stream if norm_keeps_input(stack) else 0) + norm_extra(stack, wide)


def memory_kept(facts: RunFacts) -> int:
    """Bytes of the encoder's output, which every layer of the decoder reads."""
    if len(facts.stacks) < 2:
        return 0
    encoder = facts.stacks[0]
    wide = encoder.tokens * encoder.stack.hidden_size
    return wide * (encoder.widths.stream + (encoder.widths.compute if encoder.widths.casts_weights else 0))


def transform_kept(facts: RunFacts) -> int:
    """Bytes that BERT's transform before the head keeps: its input, GELU's, and that of its norm."""
    family = facts.family
    if not isinstance(family, BertSlice) or not family.mlm_transform:
        return 0
    stack = facts.stacks[0]
    wide = stack.tokens * stack.stack.hidden_size
    return 3 * wide * stack.widths.compute
