"""Text generation: streamed, batched and by beam search, for prompts of any length."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType

import torch

from ...models.bert import BERT
from ...models.build import LanguageModel
from ...models.incremental_decoding import Decoder, GPTDecoder, T5Decoder, kv_cache_bytes, max_input_length
from ...models.moe.moe_layer import find_moe_layers
from ...models.t5 import T5
from ..config.run_precision import RunPrecision
from ..conversion.load_model import LoadedModel
from ..data.tokenizers.tokenizer import Tokenizer
from ..device.precision import autocast_context
from ..utils.errors import UserError
from ..utils.host_memory import host_memory
from ..utils.progress import Progress
from .beam_search import BeamSearchConfig, run_beam_search
from .decode_loop import DecodeLoop
from .sampling import SamplingParams, TextStreamer

GREEDY = SamplingParams()
DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """Output of the generator for one prompt.

    Attributes:
        tokens: generated token ids without the eos token, including those of a stop string.
        text: generated text up to the first stop string, without it.
        is_finished: ended by an eos token or stop string, not by the length limit.
    """

    tokens: list[int]
    text: str
    is_finished: bool


@dataclass(frozen=True, slots=True)
class StoppingCriteria:
    """Stopping criteria.

    Attributes:
        stop_strings: stop strings; the text ends before them.
        eos_ids: eos token ids; None uses the tokenizer's eos.
    """

    max_new_tokens: int
    stop_strings: Sequence[str] = ()
    eos_ids: Collection[int] | None = None

    def end_ids(self, tokenizer: Tokenizer) -> Collection[int]:
        """Return the ids that end a sequence."""
        if self.eos_ids is not None:
            return self.eos_ids
        return () if tokenizer.eos_id is None else (tokenizer.eos_id,)


class Generator:
    """Generate text with a GPT or T5.

    A prompt is a sequence of token ids: the prefix that a GPT continues, or the encoder input of a T5 (with eos).

    Args:
        model: a GPT or T5 in evaluation mode, built for generation.
        context: context length of a GPT; a longer sequence is truncated to its last half and continued.
        token_names: text for tokens without one, such as sentinels.

    Raises:
        UserError: the model cannot generate text.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        precision: RunPrecision,
        device: torch.device,
        context: int,
        token_names: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        if isinstance(model, BERT):
            raise UserError("a BERT predicts masked tokens and cannot generate text; use a GPT or a T5")
        self._model = model
        self._tokenizer = tokenizer
        self._precision = precision
        self._device = device
        self._longest = max_input_length(model)
        self._context = context if self._longest is None else min(context, self._longest)
        self._names = token_names

    @classmethod
    def from_restored(cls, restored: LoadedModel, token_names: Mapping[int, str] = MappingProxyType({})) -> Generator:
        """Create a generator from a restored checkpoint."""
        return cls(
            restored.model,
            restored.tokenizer,
            restored.precision,
            restored.device,
            restored.context_length,
            token_names,
        )

    @property
    def context(self) -> int | None:
        """Maximum context length of a GPT; None for a T5, which rejects prompts that are too long."""
        return None if isinstance(self._model, T5) else self._context

    def compile(self) -> None:
        """Compile the decoding step: takes a minute, then steps of small batches are about twice as fast."""
        self._model.stacks[-1].compile_decode_step()

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        limits: StoppingCriteria,
        sampling: SamplingParams = GREEDY,
        seeds: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, str]]:
        """Generate one batch and stream the text.

        Yields:
            (index of the prompt, next part of its text), as it becomes available.

        Raises:
            UserError: an invalid prompt, or non-finite logits.
        """
        rows = [self._row(limits, prompt) for prompt in prompts]
        read = [self._truncated(prompt) for prompt in prompts]
        loop = self._loop(len(read), read, limits, sampling)
        for number, piece in self._pieces(loop, read, rows, seeds or [0] * len(rows)):
            if piece:
                yield number, piece

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        limits: StoppingCriteria,
        sampling: SamplingParams = GREEDY,
        seeds: Sequence[int] | None = None,
        batch_size: int = DEFAULT_BATCH_SIZE,
    ) -> list[GenerationOutput]:
        """Generate a text for each prompt; equal up to rounding to `stream` of that prompt alone.

        Args:
            seeds: random seed per prompt; None uses 0 for all.
            batch_size: prompts per batch; prompts of similar length are batched together.

        Raises:
            UserError: as `stream`.
        """
        if not prompts:
            return []
        read = [self._truncated(prompt) for prompt in prompts]
        seeds = seeds or [0] * len(read)
        loop = self._loop(min(batch_size, len(read)), read, limits, sampling)
        rows = [self._row(limits, prompt) for prompt in read]
        order = sorted(range(len(read)), key=lambda number: -len(read[number]))
        with Progress("generating", len(read), "texts") as progress:
            for first in range(0, len(order), batch_size):
                batch = order[first : first + batch_size]
                texts = [read[n] for n in batch]
                for _ in self._pieces(loop, texts, [rows[n] for n in batch], [seeds[n] for n in batch]):
                    pass
                progress.advance(len(batch))
        return [row.output() for row in rows]

    def beam_search(
        self,
        prompts: Sequence[Sequence[int]],
        limits: StoppingCriteria,
        search: BeamSearchConfig,
        batch_size: int = DEFAULT_BATCH_SIZE,
    ) -> list[GenerationOutput]:
        """Generate a text for each prompt by beam search; arguments as in `generate`.

        Stop strings truncate the result; the search itself ignores them. A sequence ends when it fills the context.
        """
        read = [self._truncated(prompt) for prompt in prompts]
        found: dict[int, GenerationOutput] = {}
        longest = [self._room(limits, len(prompt)) for prompt in read]
        order = sorted(range(len(read)), key=lambda number: (longest[number], -len(read[number])))
        with Progress("generating", len(read), "texts") as progress:
            for batch in _batches(order, longest, max(1, batch_size // search.beams)):
                texts, most = [read[number] for number in batch], longest[batch[0]]
                with self._within():
                    decoder = self._decoder(len(texts) * search.beams, max(map(len, texts)), most, search.beams)
                results = run_beam_search(
                    decoder, texts, search, max_new_tokens=most, eos_ids=limits.end_ids(self._tokenizer),
                    device=self._device, autocast=self._within, decoder_start_id=self._start,
                )  # fmt: skip
                for number, result in zip(batch, results, strict=True):
                    row = self._row(limits, read[number])
                    for token in result[0].tokens:
                        row.take(token)
                        if row.done:
                            break
                    row.finish(ended=row.done or result[0].ended_by_eos)
                    found[number] = row.output()
                progress.advance(len(batch))
        return [found[number] for number in range(len(read))]

    # ---------------------------------------------------------------- helpers

    @property
    def _start(self) -> int | None:
        """Decoder start token of a T5; None for GPT."""
        return self._tokenizer.pad_id if isinstance(self._model, T5) else None

    def _within(self) -> AbstractContextManager[object]:
        return autocast_context(self._precision, self._device)

    def _truncated(self, prompt: Sequence[int]) -> list[int]:
        """Return the prompt, for a GPT truncated on the left to the context length.

        Raises:
            ValueError: the prompt is empty.
            UserError: the prompt is longer than the maximum encoder length of a T5.
        """
        if not prompt:
            raise ValueError("`prompts` must hold at least one token each")
        if not isinstance(self._model, T5):
            return list(prompt[-self._context :])
        if self._longest is not None and len(prompt) > self._longest:
            raise UserError(
                f"the prompt has {len(prompt):,} tokens including eos, and this T5 supports at most {self._longest:,} "
                "(`model.max_position_embeddings`); shorten it"
            )
        return list(prompt)

    def _max_new_tokens(self, limits: StoppingCriteria) -> int:
        """Return the maximum number of new tokens; for a T5 limited by its decoder positions."""
        positions = self._model.max_positions[1] if isinstance(self._model, T5) else None
        return limits.max_new_tokens if positions is None else min(limits.max_new_tokens, positions)

    def _room(self, limits: StoppingCriteria, prompt_length: int) -> int:
        """Return the new tokens that fit after `prompt_length` ones; the last token of a GPT needs no cache slot."""
        most = self._max_new_tokens(limits)
        return most if isinstance(self._model, T5) else min(most, self._context - prompt_length + 1)

    def _decoder(self, rows: int, longest: int, most: int, per_memory: int = 1) -> Decoder:
        """Allocate a decoder with a KV cache for prompts of up to `longest` tokens and `most` new ones."""
        assert not isinstance(self._model, BERT)
        is_t5 = isinstance(self._model, T5)
        slots = most if is_t5 else min(self._context, longest + most)
        need = kv_cache_bytes(self._model, rows, slots, longest if is_t5 else 0, per_memory)
        free = self._free_memory()
        if free is not None and need > free:
            raise UserError(
                f"the KV cache of {rows:,} sequences of up to {slots:,} tokens needs {need / 2**30:,.1f} GiB, but "
                f"{free / 2**30:,.1f} GiB are free; use a smaller batch, or fewer tokens"
            )
        if isinstance(self._model, T5):
            return T5Decoder(self._model, rows, slots, longest, per_memory)
        return GPTDecoder(self._model, rows, slots)

    def _free_memory(self) -> int | None:
        """Return the free memory of the device in bytes, None if unknown."""
        if self._device.type != "cuda":
            return host_memory()
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + unused

    def _row(self, limits: StoppingCriteria, prompt: Sequence[int]) -> _Row:
        return _Row(self._tokenizer, limits, self._names, prompt, answer=isinstance(self._model, T5))

    def _loop(
        self, rows: int, read: Sequence[Sequence[int]], limits: StoppingCriteria, sampling: SamplingParams
    ) -> DecodeLoop:
        longest = max(map(len, read))
        most, ranks = self._max_new_tokens(limits), self._model.tensor_parallel
        alone = ranks is None and self._model.stacks[-1].relay is None
        with self._within():
            decoder = self._decoder(rows, longest, most)
        return DecodeLoop(
            decoder,
            sampling,
            most,
            vocab_size=len(self._model.output_weight) * (1 if ranks is None else ranks.size),
            device=self._device,
            autocast=self._within,
            decoder_start_id=self._start,
            cuda_graph=self._device.type == "cuda" and alone and not _synchronizes(self._model),
        )

    def _pieces(
        self, loop: DecodeLoop, prompts: Sequence[Sequence[int]], rows: Sequence[_Row], seeds: Sequence[int]
    ) -> Iterator[tuple[int, str]]:
        """Run a batch until all its sequences have ended; yield (row, text part)."""
        running = set(range(len(rows)))
        for tokens in loop.generate(prompts, seeds):
            for number in sorted(running):
                yield number, rows[number].take(tokens[number])
                if rows[number].done:
                    loop.finish_row(number)
                    running.discard(number)
            if not running:
                break
        for number, row in enumerate(rows):
            yield number, row.finish(ended=number not in running)


class _Row:
    """Text of one sequence during generation.

    Args:
        names: text for tokens without one.
        prompt: the tokens that the text continues.
        answer: the text is not a continuation, so the space that the tokenizer puts before every text is dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: StoppingCriteria,
        names: Mapping[int, str],
        prompt: Sequence[int],
        *,
        answer: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self._space_first = False
        self._stream = TextStreamer(tokenizer, limits.stop_strings, names, () if answer else prompt)
        self._ends = limits.end_ids(tokenizer)
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._ended = False
        self.done = False

    def take(self, token: int) -> str:
        """Add a token; return the text it adds."""
        if token in self._ends:
            self.done = True
            return ""
        if self._answer and not self._tokens:
            spaced = self._tokenizer.decode_bytes([token]).startswith(b" ")
            self._space_first = spaced and not self._tokenizer.decode([token]).startswith(" ")
        self._tokens.append(token)
        piece = self._stream.put(token)
        self.done = self._stream.stopped
        return self._add(piece)

    def finish(self, *, ended: bool) -> str:
        """End the sequence; return the rest of its text."""
        self._ended = ended
        return self._add("" if self._stream.stopped else self._stream.close())

    def _add(self, piece: str) -> str:
        if piece and self._space_first:
            piece, self._space_first = piece.removeprefix(" "), False
        self._text.append(piece)
        return piece

    def output(self) -> GenerationOutput:
        return GenerationOutput(self._tokens, "".join(self._text), self._ended)


def _batches(order: Sequence[int], kinds: Sequence[int], size: int) -> Iterator[list[int]]:
    """Split `order` into batches of at most `size` indices of equal `kinds`, keeping the order."""
    for _, same in groupby(order, key=lambda number: kinds[number]):
        numbers = list(same)
        for first in range(0, len(numbers), size):
            yield numbers[first : first + size]


def _synchronizes(model: LanguageModel) -> bool:
    """Return True if a step synchronizes with the device: sequential experts read their token counts on the host."""
    return any(
        moe.experts.implementation == "sequential" or moe.experts.up.dtype == torch.float64
        for moe in find_moe_layers(model).values()
    )


def generate_batch(
    restored: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seeds: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    stop_ids: Collection[int] | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
) -> list[GenerationOutput]:
    """Generate texts with a restored checkpoint, see `Generator.generate`.

    Args:
        prompts: token ids: prefixes for a GPT, encoder inputs with eos for a T5.
        max_new_tokens: maximum number of new tokens per prompt.
        temperature, top_k, top_p: see `SamplingParams`.
        seeds: random seed per prompt; None uses 0 for all.
        stop: stop strings.
        stop_ids: eos token ids; None uses the tokenizer's eos.

    Raises:
        UserError: an invalid prompt, or a model that cannot generate text.
    """
    limits = StoppingCriteria(max_new_tokens, stop, stop_ids)
    sampling = SamplingParams(temperature, top_k, top_p)
    return Generator.from_restored(restored).generate(prompts, limits, sampling, seeds, batch_size)
