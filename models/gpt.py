"""GPT: decoder-only language model of embeddings, a causal stack and an output head."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.attention.dispatch import BackendSelection
from .config.batch_shape import BatchSpec
from .config.gpt import GPTSlice
from .dispatch.attention_calls import CallKind, decision_for
from .language_model import BaseLanguageModel, TokenEmbedding
from .layers.attention import Backends
from .layers.compiling import eager_layers
from .layers.cost import Weights
from .layers.position_embeddings import build_position_table
from .lm_head import add_position_embeddings, head_weights
from .moe.moe_layer import find_moe_layers
from .moe.token_mask import mask_up_to_last_label
from .parallel.context import labels_of_all, local_position_ids, whole_sequences
from .parallel.context_attention import pack_documents
from .parallel.stages import StageInput
from .peft.ptuning import PromptEncoder
from .stack import build_stack


class GPT(BaseLanguageModel):
    """Decoder-only language model.

    Args:
        gpt: slice of the model.
        batch_spec: shape of the samples of training and evaluation.
        decisions: chosen attention backend and reason for each kind of call.
        backends: attention function for each kind of call.

    Attributes:
        position_embedding: learned position embedding, or None.
        head: bias-free output projection; None ties it to `token_embedding`.
        max_positions: maximal sequence length, None for no limit.
        dropout: dropout of the embeddings, in training.
        embedding_scale: factor of the embeddings.
        prompt: p-tuning prompt encoder; None without.
    """

    def __init__(
        self, gpt: GPTSlice, batch_spec: BatchSpec, decisions: Mapping[str, BackendSelection], backends: Backends
    ) -> None:
        super().__init__(gpt, batch_spec, decisions)
        hidden_size = gpt.stack.hidden_size
        self.token_embedding = TokenEmbedding(gpt.padded_vocab_size, hidden_size)
        self.position_embedding = build_position_table(gpt)
        self.decoder = build_stack(gpt.stack, backends)
        self.head = None if gpt.tied else nn.Linear(hidden_size, gpt.padded_vocab_size, bias=False)
        self.head_bias = None
        self.max_positions = gpt.max_positions
        self.dropout = gpt.embedding_dropout
        self.embedding_scale = gpt.embedding_scale
        self.logits_softcap = gpt.logits_softcap
        self.prompt: PromptEncoder | None = None
        self._has_experts = bool(find_moe_layers(self.decoder))

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the logits of every next token.

        Args:
            tokens: (batch, tokens) int64.
            documents: document id of each token, non-decreasing in each row, int32 (batch, tokens). Required in
                training and evaluation by a model that `needs_documents`; None: each row is one document.

        Returns:
            (batch, tokens, padded_vocab_size) in the dtype of the model; -inf for the vocabulary padding.
        """
        return self.compute_logits(self.hidden_states(tokens, documents))

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        denominator: Tensor | float,
        documents: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the cross-entropies of all labels divided by `denominator`.

        Args:
            tokens: (batch, tokens) int64.
            labels: (batch, tokens) int64, the next token of each; -100 is ignored.
            denominator: usually the number of labels in the global batch, so that micro batch losses add up.
            documents: as in `forward`.
            padding: bool (batch, tokens), False for padding at the end of rows, which is not routed to experts; None
                without padding or without experts.

        Returns:
            A scalar in fp32 (fp64 for an fp64 model).
        """
        return self._loss(self.hidden_states(tokens, documents, self._routed(labels, padding)), labels, denominator)

    def batch_loss(self, batch: Mapping[str, Tensor], denominator: Tensor | float) -> Tensor:
        """Return the loss of a batch, a mapping of the tensor arguments of `loss`."""
        return self.loss(batch["tokens"], batch["labels"], denominator, batch.get("documents"), batch.get("padding"))

    def run_stage(self, at: StageInput, batch: Mapping[str, Tensor], denominator: Tensor | float) -> tuple[Tensor, ...]:
        """Return the output of a pipeline stage, the input of the next one, or (loss,) of the last stage.

        Args:
            at: the stage, and what it receives.
            batch: as in `batch_loss`.
            denominator: as in `loss`.
        """
        routed = self._routed(batch["labels"], batch.get("padding"))
        hidden = self.hidden_states(batch["tokens"], batch.get("documents"), routed, at)
        return (self._loss(hidden, batch["labels"], denominator) if at.stage.last else hidden,)

    def hidden_states(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        routed: Tensor | None = None,
        at: StageInput | None = None,
    ) -> Tensor:
        """Return the output of the final norm, (batch, tokens, hidden_size), or of a pipeline stage.

        Args:
            tokens: as in `forward`.
            documents: as in `forward`.
            routed: bool (batch, tokens of whole sequences), True for tokens that are routed to experts; None: all, as
                in generation.
            at: the pipeline stage to run in training or evaluation, and what it receives; None: all.
        """
        shard, length = self.decoder.shard, tokens.shape[1]
        kind = self._kind_of_call(length if shard is None else shard.whole_length(length), documents)
        decision = decision_for(self.attention_decisions, kind)
        if kind != "generation":
            positions, packed = None, None
            documents = whole_sequences(documents, shard)
            if documents is not None and self.batch_spec.reset_position_ids:
                positions = local_position_ids(documents, shard)
            hidden, dropout = self.decoder.begin(lambda: self._embed(tokens, positions), tokens, self.dropout, at)
            if documents is not None and self.batch_spec.packed:
                dtype, mask = self.decoder.compute_dtype(hidden), decision.needs_mask
                packed = pack_documents(documents, shard, dtype=dtype, causal=True, with_mask=mask)
            if self.prompt is not None:
                routed = self.prompt.extend_routing_mask(routed)
            hidden = self.decoder(
                hidden,
                kind,
                positions=positions,
                packed=packed,
                routed=routed,
                dropout=dropout,
                at=at,
                shape=tokens.shape,
            )
            return hidden if self.prompt is None else hidden[:, len(self.prompt) :]
        if length == 1:  # Backends need not support one token: pad by another, which a causal model does not attend to.
            tokens = F.pad(tokens, (0, 1))
        with eager_layers(self.compiled):
            first = 0 if self.prompt is None else len(self.prompt)
            return self.decoder(self._embed(tokens), kind)[:, first : first + length]

    def _routed(self, labels: Tensor, padding: Tensor | None) -> Tensor | None:
        """Return the mask of the tokens of whole sequences that are routed to experts, None for all; evaluation windows
        and batches may be partial.
        """
        if self.training or not self._has_experts:
            return whole_sequences(padding, self.decoder.shard)
        return mask_up_to_last_label(labels_of_all(labels, self.decoder.shard))

    def _kind_of_call(self, length: int, documents: Tensor | None) -> CallKind:
        """Return the kind of call: training and evaluation have a fixed sequence length, anything else is generation.

        In a model that `needs_documents`, a call without them in eval mode is generation, whatever its length.
        """
        seq_length = self.batch_spec.seq_length
        if documents is not None and not self.needs_documents:
            raise ValueError(
                "`documents` must be None: the model was built without reset_position_ids and reset_attention_mask."
            )
        if self.training and documents is None and self.needs_documents:
            raise ValueError(
                "`documents` is required in training: the model was built with reset_position_ids or "
                "reset_attention_mask."
            )
        if self.training:
            if length != seq_length:
                raise ValueError(
                    f"`tokens` ({length} per sample) must have the sequence length that the model was built for "
                    f"({seq_length}); pad the sample, set encoder_seq_length={length}, or call eval()."
                )
            return "training"
        if length == seq_length and (documents is not None or not self.needs_documents):
            return "evaluation"
        if documents is not None:
            raise ValueError(
                f"`documents` must come with samples of {seq_length} tokens, the sequence length that the model "
                f"was built for, not {length}."
            )
        if length < 1 or (self.max_positions is not None and length > self.max_positions):
            raise ValueError(
                f"`tokens` ({length} per sample) must be from 1 to {self.max_positions} tokens long; "
                "truncate the sequence, or build the model with a larger max_position_embeddings."
            )
        return "generation"

    def _embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        hidden = self.token_embedding(tokens)
        if self.prompt is not None:
            hidden = self.prompt(hidden)
        hidden = add_position_embeddings(hidden, self.position_embedding, positions, self.decoder.shard)
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        return hidden


# ---------------------------------------------------------------- cost


def gpt_outer_weights(model: GPTSlice) -> Weights:
    """Return the weights of embeddings and head, as far as the part of a model has them."""
    stack, vocab = model.stack, model.padded_vocab_size
    # the head, if it is tied, is the token embedding
    tables = (model.learned_positions or 0) + (0 if model.tied and stack.ends else vocab) if stack.begins else 0
    head = head_weights(vocab, stack.hidden_size) if stack.ends else Weights()
    return head + Weights(others=tables * stack.hidden_size)
