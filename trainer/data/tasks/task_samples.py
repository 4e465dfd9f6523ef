"""Build the samples of a task from windows of text, documents or pairs."""

from __future__ import annotations

import numpy as np

from ...config.resolved_run import DataSpec
from ...config.schema.trainer_and_data import TokenizerBlock
from ...utils.errors import UserError
from ..datasets.document_chunks import CorruptedChunks, Documents
from ..datasets.document_ids import DocumentIdSamples
from ..datasets.pair_samples import Pairs, PairSamples
from ..datasets.samples import AnySamples, EodMaskedSamples, MockSamples, Samples
from ..datasets.seq2seq import MockPairs, PairShape, SplitWindows
from ..tokenizers.tokenizer import Tokenizer
from .masked_lm import MaskedWindows, MaskTokens
from .noise_spans import SpanLengthDistribution, token_word_edges
from .prefix_lm import PrefixSplitter
from .sentinels import find_mask_token_id, sentinel_ids, with_sentinels
from .span_corruption import CorruptedWindows, NgramSpanConfig, SpanCorruptor

_EVALUATION_SEED = 0
"""Evaluation uses the same random draws in all runs, so that they can be compared."""


def tokenizer_for_task(spec: DataSpec, tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with the sentinels that the task needs.

    Raises:
        UserError: it has no EOS token, which the task needs.
    """
    task, count = spec.task, spec.tokenizer.num_sentinel_tokens
    if task.name in ("gpt", "sft"):
        return tokenizer
    has_mask_token = task.name == "bert" and find_mask_token_id(tokenizer, _mask_name(spec.tokenizer)) is not None
    extended = tokenizer if has_mask_token and count is None else with_sentinels(tokenizer, count)
    if extended.eos_id is None:
        raise UserError(
            f"`model.data.dataset_type` ({task.name}) needs a tokenizer with an EOS token; set "
            "`model.tokenizer.special_tokens.eos_token`"
        )
    return extended


def _mask_name(keys: TokenizerBlock) -> str | None:
    """Return the configured mask token; the byte-level tokenizer ignores it, since it has its own special tokens."""
    return None if keys.library == "byte-level" else keys.special_tokens.mask_token


class SampleFactory:
    """Build the samples of a task.

    Args:
        tokenizer: output of `tokenizer_for_task`.
    """

    def __init__(self, spec: DataSpec, tokenizer: Tokenizer) -> None:
        self.task = task = spec.task
        self._keys = spec.keys
        self._mask_token = _mask_name(spec.tokenizer)
        self._seed = spec.seed
        self._tokenizer = tokenizer
        self.shape = PairShape(task.length, task.decoder_length, tokenizer.pad_id)

    @property
    def uses_documents(self) -> bool:
        """True if samples are made of single documents, not of windows across them."""
        return self.task.name == "t5" and self._keys.respect_document_boundaries

    def from_windows(self, windows: Samples, *, training: bool) -> AnySamples:
        """Build samples from windows of `task.window` tokens.

        Raises:
            UserError: the tokenizer lacks a token that the task needs.
        """
        seed = self._seed if training else _EVALUATION_SEED
        match self.task.name:
            case "gpt":
                if self._keys.eod_mask_loss:
                    windows = EodMaskedSamples(windows, self._eos("eod_mask_loss"))
                # The model needs document indices to keep documents apart.
                resets = [key for key in ("reset_position_ids", "reset_attention_mask") if getattr(self._keys, key)]
                return DocumentIdSamples(windows, self._eos(resets[0])) if resets else windows
            case "sft" if self._keys.data_impl == "mock":
                return windows
            case "t5":
                corruptor = self._corruptor()
                if corruptor.ngrams is None:
                    return CorruptedWindows(windows, corruptor, self.shape, seed)
                return SplitWindows(windows, corruptor.pair, self.shape, seed)
            case "t5_prefix_lm":
                cut = PrefixSplitter(self.shape.encoder_length, self.shape.decoder_length)
                return SplitWindows(windows, cut.pair, self.shape, seed)
            case "bert":
                assert self.task.corruption is not None
                return MaskedWindows(
                    windows,
                    self.task.corruption.noise_density,
                    self._ngrams(),
                    self._mask_tokens(),
                    seed,
                    with_document_ids=self._keys.reset_attention_mask or self._keys.reset_position_ids,
                )
            case "sft" | "seq2seq":
                raise UserError(
                    f"`model.data.dataset_type` ({self.task.name}) needs pairs; `model.data.data_impl` "
                    f"({self._keys.data_impl}) has none"
                )

    def from_documents(self, documents: Documents, *, training: bool, rng_stream: int = 0) -> PairSamples | None:
        """Build samples from documents; None if all are too short. `rng_stream` is that of a dataset in a blend."""
        chunks = CorruptedChunks(documents, self._corruptor(), self.task.window, self._keys.short_seq_prob)
        return self.from_pairs(chunks, training=training, rng_stream=rng_stream)

    def from_pairs(self, pairs: Pairs, *, training: bool, rng_stream: int = 0) -> PairSamples | None:
        """Build samples from pairs; None if there are none."""
        if not len(pairs):
            return None
        seed = self._seed if training else None
        return PairSamples(pairs, self.shape, seed, pack_rows=self.task.packed, rng_stream=rng_stream)

    def mock(self, vocab_size: int, samples: int, rng_stream: int) -> AnySamples:
        """Build random samples; `rng_stream` is the random stream of the split (0 train, 1 validation, 2 test)."""
        if self.task.is_encoder_decoder:
            return MockPairs(vocab_size, self.shape, self._seed, samples, rng_stream)
        windows = MockSamples(vocab_size, self.task.window, self._seed, samples, rng_stream)
        return self.from_windows(windows, training=rng_stream == 0)

    def _corruptor(self) -> SpanCorruptor:
        assert self.task.corruption is not None
        assert self._tokenizer.eos_id is not None
        return SpanCorruptor(
            self.task.corruption,
            self._ngrams(),
            sentinel_ids(self._tokenizer),
            self._tokenizer.eos_id,
            self.task.window,
            self.shape.decoder_length,
        )

    def _ngrams(self) -> NgramSpanConfig | None:
        keys = self._keys
        if keys.geometric_dist is None:
            return None
        assert self.task.corruption is not None
        if keys.geometric_dist:
            lengths = SpanLengthDistribution.geometric(keys.max_ngram_size, self.task.corruption.mean_span_length)
        else:
            lengths = SpanLengthDistribution.harmonic(keys.max_ngram_size, longer_first=keys.favor_longer_ngrams)
        if not keys.whole_word_masking:
            return NgramSpanConfig(lengths, None)
        tokenizer = self._tokenizer
        token_bytes = [tokenizer.decode_bytes([id_]) for id_ in range(tokenizer.vocab_size)]
        return NgramSpanConfig(lengths, token_word_edges(token_bytes))

    def _mask_tokens(self) -> MaskTokens:
        tokenizer = self._tokenizer
        mask_token_id = find_mask_token_id(tokenizer, self._mask_token)
        assert tokenizer.eos_id is not None
        if mask_token_id is None and self._mask_token is not None:
            raise UserError(
                f"`model.tokenizer.special_tokens.mask_token` ({self._mask_token}) is not a token of the tokenizer"
            )
        if mask_token_id is None:
            raise UserError(
                "`model.data.dataset_type` (bert) needs a mask token: [MASK], <mask> or a sentinel; set "
                "`model.tokenizer.num_sentinel_tokens=1`"
            )
        with_text = np.flatnonzero(tokenizer.token_byte_counts() > 0)
        replacements = with_text if len(with_text) else np.arange(tokenizer.vocab_size)
        special = [mask_token_id, tokenizer.eos_id, tokenizer.pad_id, *sentinel_ids(tokenizer)]
        return MaskTokens(mask_token_id, tokenizer.eos_id, tokenizer.pad_id, np.setdiff1d(replacements, special))

    def _eos(self, key: str) -> int:
        if self._tokenizer.eos_id is None:
            raise UserError(
                f"`model.data.{key}` (true) needs a tokenizer with an end-of-document token; the "
                f"{self._tokenizer.kind} tokenizer has none; set the key to false"
            )
        return self._tokenizer.eos_id
