"""Base class of GPT, T5 and BERT: output projection, loss, and the settings that plans of parallelism change."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..kernels.attention.dispatch import BackendSelection
from ..kernels.embedding import embedding
from .config.batch_shape import BatchSpec
from .config.families import FamilySlice
from .lm_head import OwnFunctions, token_logits, token_loss
from .parallel.collectives import TensorParallel
from .parallel.pipeline import RankStages
from .stack import Stack


class TokenEmbedding(nn.Embedding):
    """Embedding of tokens with `kernels.embedding`, whose gradient is faster on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings (..., embedding_dim) of tokens (...)."""
        return embedding(input, self.weight)


class BaseLanguageModel(nn.Module):
    """Model that returns logits, or the loss without materializing all logits.

    A subclass sets `token_embedding`, its stacks, `head`, and `head_bias`.

    Args:
        model: slice of the model.
        batch_spec: shape of the samples of training and evaluation.
        decisions: chosen attention backend and reason for each kind of call, of a T5 for each attention and kind of
            call (`encoder training`, `cross generation`).

    Attributes:
        vocab_size: vocabulary size without padding.
        label_smoothing: label smoothing factor, in training.
    """

    compiled: bool = False
    """The layers are compiled with torch.compile, for training and evaluation."""
    compile_reason: str = ""
    """Reason for compiling or not, for the log."""
    tensor_parallel: TensorParallel | None = None
    """The ranks that share each layer and the vocabulary; None for one."""
    own_functions: OwnFunctions = OwnFunctions()
    """Loss and metrics of the user's own."""
    pipeline: RankStages | None = None
    """Pipeline stages of this rank; None: all of the model."""
    logits_softcap: float = 0.0
    """Bound of the logits, cap * tanh(logit / cap); 0 for none."""

    token_embedding: nn.Embedding
    head: nn.Linear | None
    head_bias: nn.Parameter | None

    def __init__(self, model: FamilySlice, batch_spec: BatchSpec, decisions: Mapping[str, BackendSelection]) -> None:
        super().__init__()
        self.vocab_size = model.vocab_size
        self.batch_spec = batch_spec
        self.label_smoothing = model.label_smoothing
        self.attention_decisions = dict(decisions)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacks, in forward order."""
        return tuple(module for module in self.children() if isinstance(module, Stack))

    @property
    def output_embedding(self) -> nn.Embedding:
        """Token embedding that a tied output projection shares."""
        return self.token_embedding

    @property
    def output_weight(self) -> Tensor:
        """Weight of the output projection, (padded_vocab_size, hidden_size)."""
        return self.output_embedding.weight if self.head is None else self.head.weight

    @property
    def needs_documents(self) -> bool:
        """True if training and evaluation require document ids."""
        return self.batch_spec.packed or self.batch_spec.reset_position_ids

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the input of the output projection, (..., padded_vocab_size)."""
        return token_logits(
            hidden,
            self.output_weight,
            self.head_bias,
            vocab_size=self.vocab_size,
            softcap=self.logits_softcap,
            ranks=self.tensor_parallel,
        )

    def _loss(self, hidden: Tensor, labels: Tensor, denominator: Tensor | float) -> Tensor:
        return token_loss(
            hidden,
            self.output_weight,
            labels,
            vocab_size=self.vocab_size,
            bias=self.head_bias,
            label_smoothing=self.label_smoothing if self.training else 0.0,
            denominator=denominator,
            softcap=self.logits_softcap,
            ranks=self.tensor_parallel,
            own=self.own_functions,
            training=self.training,
        )
