"""BERT: embeddings, a bidirectional stack, and a masked language modeling head (arXiv 1810.04805)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.attention.dispatch import BackendSelection
from .config.batch_shape import BatchSpec
from .config.bert import BertSlice
from .dispatch.attention_calls import CallKind, decision_for
from .language_model import BaseLanguageModel, TokenEmbedding
from .layers.attention import Backends
from .layers.compiling import eager_layers
from .layers.cost import Matrix, StackInputs, Weights
from .layers.norm import build_norm, norm_parameters, norm_saved_bytes
from .layers.position_embeddings import build_position_table
from .lm_head import add_position_embeddings, head_weights
from .moe.moe_layer import find_moe_layers
from .moe.token_mask import mask_rows_with_label
from .parallel.context import labels_of_all, local_position_ids, whole_sequences
from .parallel.context_attention import pack_documents
from .parallel.stages import StageInput
from .stack import build_stack


class BERT(BaseLanguageModel):
    """Encoder-only masked language model.

    Args:
        bert: slice of the model.
        batch_spec: shape of the samples of training and evaluation.
        decisions: chosen attention backend and reason for each kind of call.
        backends: attention function for each kind of call.

    Attributes:
        position_embedding: learned position embedding, or None.
        token_type_embedding: (token types, hidden_size), or None.
        embedding_norm: norm of the sum of the embeddings, or None.
        transform: linear layer before the head, followed by GELU and `transform_norm`; or None.
        head: bias-free output projection; None ties it to `token_embedding`.
        max_positions: maximal sequence length, None for no limit.
        dropout: dropout of the embeddings, in training.
    """

    def __init__(
        self, bert: BertSlice, batch_spec: BatchSpec, decisions: Mapping[str, BackendSelection], backends: Backends
    ) -> None:
        super().__init__(bert, batch_spec, decisions)
        stack, hidden_size, vocab = bert.stack, bert.stack.hidden_size, bert.padded_vocab_size
        self.token_embedding = TokenEmbedding(vocab, hidden_size)
        self.position_embedding = build_position_table(bert)
        self.token_type_embedding = nn.Embedding(bert.token_types, hidden_size) if bert.token_types else None
        self.embedding_norm = build_norm(stack.norm, hidden_size) if bert.embedding_norm else None
        self.encoder = build_stack(stack, backends)
        self.transform = nn.Linear(hidden_size, hidden_size) if bert.mlm_transform else None
        self.transform_norm = build_norm(stack.norm, hidden_size) if bert.mlm_transform else None
        self.head = None if bert.tied else nn.Linear(hidden_size, vocab, bias=False)
        self.head_bias = nn.Parameter(torch.zeros(vocab)) if bert.head_bias else None
        self.max_positions = bert.max_positions
        self.dropout = bert.embedding_dropout
        self._has_experts = bool(find_moe_layers(self.encoder))

    def forward(
        self,
        tokens: Tensor,
        *,
        token_types: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of every token.

        Args:
            tokens: (batch, tokens) int64.
            token_types: int64 (batch, tokens); None: 0 everywhere.
            padding: bool (batch, tokens), True for real tokens; None: all are real.
            documents: document id of each token, non-decreasing in each row, int32 (batch, tokens). Required in
                training and evaluation by a model built for packed samples or restarting positions; None: each row is
                one document.

        Returns:
            (batch, tokens, padded_vocab_size) in the dtype of the model; -inf for the vocabulary padding.
        """
        hidden = self.hidden_states(tokens, token_types=token_types, padding=padding, documents=documents)
        return self.compute_logits(hidden)

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        denominator: Tensor | float,
        *,
        token_types: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the cross-entropies of all labels divided by `denominator`.

        Args:
            labels: (batch, tokens) int64, the original token at each masked position; -100 is ignored.
            denominator: usually the number of labels in the global batch, so that micro batch losses add up.

        Other arguments as in `forward`.

        Returns:
            A scalar in fp32 (fp64 for an fp64 model).
        """
        routed = self._routed(labels, padding)
        hidden = self.hidden_states(
            tokens, token_types=token_types, padding=padding, documents=documents, routed=routed
        )
        return self._loss(hidden, labels, denominator)

    def batch_loss(self, batch: Mapping[str, Tensor], denominator: Tensor | float) -> Tensor:
        """Return the loss of a batch, a mapping of the tensor arguments of `loss`."""
        return self.loss(**batch, denominator=denominator)

    def run_stage(self, at: StageInput, batch: Mapping[str, Tensor], denominator: Tensor | float) -> tuple[Tensor, ...]:
        """Return the output of a pipeline stage, the input of the next one, or (loss,) of the last stage.

        Args:
            at: the stage, and what it receives.
            batch: as in `batch_loss`.
            denominator: as in `loss`.
        """
        inputs = {name: field for name, field in batch.items() if name != "labels"}
        routed = self._routed(batch["labels"], batch.get("padding"))
        hidden = self.hidden_states(**inputs, routed=routed, at=at)
        return (self._loss(hidden, batch["labels"], denominator) if at.stage.last else hidden,)

    def _routed(self, labels: Tensor, padding: Tensor | None) -> Tensor | None:
        """Return the mask of the tokens of whole sequences that are routed to experts, None for those of `padding`;
        evaluation windows and batches may be partial.
        """
        if self.training or not self._has_experts:
            return None
        labelled = labels_of_all(labels, self.encoder.shard)
        return mask_rows_with_label(labelled.shape[1], labelled, whole_sequences(padding, self.encoder.shard))

    def hidden_states(
        self,
        tokens: Tensor,
        *,
        token_types: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        routed: Tensor | None = None,
        at: StageInput | None = None,
    ) -> Tensor:
        """Return the input of the output projection, (batch, tokens, hidden_size), or the output of a pipeline stage.

        Args:
            routed: bool (batch, tokens of whole sequences), True for tokens that are routed to experts; None: those of
                `padding`.
            at: the pipeline stage to run in training or evaluation, and what it receives; None: all.

        Other arguments as in `forward`.
        """
        shard, length = self.encoder.shard, tokens.shape[1]
        kind = self._kind_of_call(length if shard is None else shard.whole_length(length), padding, documents)
        decision = decision_for(self.attention_decisions, kind)
        if kind == "generation" and length == 1:  # Backends need not support one token: add one of padding.
            real = torch.ones_like(tokens, dtype=torch.bool) if padding is None else padding
            tokens, padding, routed = F.pad(tokens, (0, 1)), F.pad(real, (0, 1), value=False), None
            token_types = None if token_types is None else F.pad(token_types, (0, 1))
        positions, packed = None, None
        documents, padding = whole_sequences(documents, shard), whole_sequences(padding, shard)
        if documents is not None and self.batch_spec.reset_position_ids:
            positions = local_position_ids(documents, shard)
        hidden, dropout = self.encoder.begin(
            lambda: self._embed(tokens, token_types, positions), tokens, self.dropout, at
        )
        if documents is not None and self.batch_spec.packed:
            dtype, mask = self.encoder.compute_dtype(hidden), decision.needs_mask
            packed = pack_documents(documents, shard, dtype=dtype, causal=False, with_mask=mask)
        with eager_layers(self.compiled and kind == "generation"):
            hidden = self.encoder(
                hidden,
                kind,
                positions=positions,
                packed=packed,
                padding=padding,
                routed=routed,
                dropout=dropout,
                at=at,
                shape=tokens.shape,
            )
        if at is not None and not at.stage.ends:
            return hidden
        hidden = hidden[:, :length]
        if self.transform is not None and self.transform_norm is not None:
            hidden = self.transform_norm(F.gelu(self.transform(hidden)))
        return hidden

    def _embed(self, tokens: Tensor, token_types: Tensor | None, positions: Tensor | None) -> Tensor:
        hidden = self.token_embedding(tokens)
        hidden = add_position_embeddings(hidden, self.position_embedding, positions, self.encoder.shard)
        if self.token_type_embedding is not None:
            types = self.token_type_embedding
            hidden = hidden + (types.weight[0] if token_types is None else types(token_types))
        if self.embedding_norm is not None:
            hidden = self.embedding_norm(hidden)
        return hidden

    def _kind_of_call(self, length: int, padding: Tensor | None, documents: Tensor | None) -> CallKind:
        """Return the kind of call: training and evaluation have fixed sample shapes, anything else is generation."""
        form, packed = self.batch_spec, documents is not None
        built_packed = self.needs_documents
        if packed and not built_packed:
            raise ValueError("`documents` must be None: the model was not built for packed samples.")
        if packed and padding is not None:
            raise ValueError("`padding` must be None with `documents`: padding is a document of its own.")
        if length == form.seq_length and packed == built_packed and (padding is None or form.padded):
            return "training" if self.training else "evaluation"
        if self.training or packed:
            raise ValueError(
                f"`tokens` ({length} per sample{', packed' * packed}{', padded' * (padding is not None)}) must have "
                f"the shape that the model was built for: {form.seq_length}{', packed' * built_packed}"
                f"{', padded' * form.padded}."
            )
        if length < 1 or (self.max_positions is not None and length > self.max_positions):
            raise ValueError(
                f"`tokens` ({length} per sample) must be from 1 to {self.max_positions} tokens long; truncate the "
                "sequence, or build the model with a larger max_position_embeddings."
            )
        return "generation"


# ---------------------------------------------------------------- cost


def bert_outer_weights(model: BertSlice) -> Weights:
    """Return the weights of embeddings, MLM transform and head, as far as the part of a model has them."""
    vocab, hidden, stack = model.padded_vocab_size, model.stack.hidden_size, model.stack
    norm, found = norm_parameters(stack.norm, hidden), Weights()
    if stack.begins:
        tables = (0 if model.tied and stack.ends else vocab) + (model.learned_positions or 0) + model.token_types
        found += Weights(others=tables * hidden + norm * model.embedding_norm)
    if stack.ends:
        transform = Weights((Matrix("transform", hidden**2),), hidden + norm) if model.mlm_transform else Weights()
        found += head_weights(vocab, hidden) + transform + Weights(others=vocab * model.head_bias)
    return found


def embedding_norm_saved_bytes(model: BertSlice, inputs: StackInputs) -> int:
    """Return the bytes saved by the norm of the embeddings."""
    if not model.embedding_norm or not inputs.stack.begins:
        return 0
    elements, s = inputs.outer_elements, inputs.widths.residual
    return elements * s + norm_saved_bytes(model.stack.norm, elements, s)


def transform_saved_bytes(model: BertSlice, inputs: StackInputs) -> int:
    """Return the bytes saved by the MLM transform: inputs of its linear layer, GELU and norm."""
    return 3 * inputs.outer_elements * inputs.widths.compute if model.mlm_transform else 0
