"""Texts that a model writes: batches of prompts of any lengths, piece by piece or whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType

import torch

from ...models.bert import BERT
from ...models.build import LanguageModel, stacks_of
from ...models.incremental_decoding import Decoder, GPTDecoder, T5Decoder, cache_bytes, longest_read
from ...models.moe.find_moe_layers import moe_layers
from ...models.t5 import T5
from ..conversion.load_model import Restored
from ..data.tokenizers.tokenizer import Tokenizer
from ..device.precision import PrecisionPlan
from ..plan.memory_check import host_memory
from ..utils.errors import UserError
from .beam_search import BeamSearch, search_texts
from .decode_loop import TokenLoop
from .sampling import Sampling, TextStream

GREEDY = Sampling()
DEFAULT_BATCH = 32


@dataclass(frozen=True, slots=True)
class Written:
    """What a model has written.

    Attributes:
        tokens: without the end token; those of a stop string are among them.
        text: up to the first stop string, without it.
        ended: by an end token or a stop string, not for its length.
    """

    tokens: list[int]
    text: str
    ended: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """Where texts end.

    Attributes:
        most: tokens that are written, at most.
        stop: texts before which one ends.
        ends: tokens that end one; None: the tokenizer's eos.
    """

    most: int
    stop: Sequence[str] = ()
    ends: Collection[int] | None = None


class Generator:
    """Writes texts with a model.

    A prompt is token ids: what a GPT goes on with, or what a T5 reads (with its end token) and answers.

    Args:
        model: a GPT or a T5, in evaluation mode, built for calls of generation.
        tokenizer: its own.
        precision: arithmetic of the model.
        device: where it is.
        context: tokens that a GPT was trained to see; a text that grows beyond goes on from its last half.
        names: what is written for tokens that have no text, such as sentinels.

    Raises:
        UserError: the model writes no text.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        precision: PrecisionPlan,
        device: torch.device,
        context: int,
        names: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        if isinstance(model, BERT):
            raise UserError("a BERT fills in hidden tokens and writes no text; use a GPT or a T5")
        self._model = model
        self._tokenizer = tokenizer
        self._precision = precision
        self._device = device
        self._longest = longest_read(model)
        self._context = context if self._longest is None else min(context, self._longest)
        self._names = names

    @classmethod
    def of(cls, restored: Restored, names: Mapping[int, str] = MappingProxyType({})) -> Generator:
        """A generator of what a checkpoint holds."""
        return cls(restored.model, restored.tokenizer, restored.precision, restored.device, restored.context, names)

    @property
    def context(self) -> int | None:
        """Tokens of a text that a GPT sees at most; None of a T5, which refuses what is too long."""
        return None if isinstance(self._model, T5) else self._context

    def compile(self) -> None:
        """Compile the steps: a minute at first, and steps of a small batch are then about twice as fast."""
        stacks_of(self._model)[-1].compile_steps()

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Limits,
        sampling: Sampling = GREEDY,
        seeds: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, str]]:
        """One batch, piece by piece.

        Yields:
            The number of a prompt and more of its text, whenever there is some.

        Raises:
            UserError: a prompt that cannot be read, or a model that has diverged.
        """
        rows = [self._row(limits) for _ in prompts]
        read = [self._readable(prompt) for prompt in prompts]
        loop = self._loop(len(read), read, limits, sampling)
        for number, piece in self._pieces(loop, read, rows, seeds or [0] * len(rows)):
            if piece:
                yield number, piece

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Limits,
        sampling: Sampling = GREEDY,
        seeds: Sequence[int] | None = None,
        batch_size: int = DEFAULT_BATCH,
    ) -> list[Written]:
        """The text of each prompt: what `stream` gives for it alone, up to rounding.

        Args:
            prompts: token ids.
            limits: where texts end.
            sampling: how tokens are chosen.
            seeds: of each prompt; None: 0 for all.
            batch_size: prompts at once; those of like length are taken together.

        Raises:
            UserError: as `stream`.
        """
        if not prompts:
            return []
        read = [self._readable(prompt) for prompt in prompts]
        seeds = seeds or [0] * len(read)
        loop = self._loop(min(batch_size, len(read)), read, limits, sampling)
        rows = [self._row(limits) for _ in read]
        order = sorted(range(len(read)), key=lambda number: -len(read[number]))
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            pieces = self._pieces(loop, [read[n] for n in batch], [rows[n] for n in batch], [seeds[n] for n in batch])
            for _ in pieces:
                pass
        return [row.written() for row in rows]

    def search(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Limits,
        search: BeamSearch,
        batch_size: int = DEFAULT_BATCH,
    ) -> list[Written]:
        """The best text of each prompt, by beam search; arguments as of `write`.

        A stop string cuts what was found: the search does not know of it. A text ends where it fills the context.
        """
        read = [self._readable(prompt) for prompt in prompts]
        found: dict[int, Written] = {}
        longest = [self._room(limits, len(prompt)) for prompt in read]
        order = sorted(range(len(read)), key=lambda number: (longest[number], -len(read[number])))
        for batch in _batches(order, longest, max(1, batch_size // search.beams)):
            texts, most = [read[number] for number in batch], longest[batch[0]]
            with self._within():
                decoder = self._decoder(len(texts) * search.beams, max(map(len, texts)), most, search.beams)
            results = search_texts(
                decoder, texts, search, most=most, ends=self._ends(limits), device=self._device, within=self._within,
                start=self._start,
            )  # fmt: skip
            for number, result in zip(batch, results, strict=True):
                row = self._row(limits)
                for token in result[0].tokens:
                    row.take(token)
                    if row.done:
                        break
                row.finish(ended=row.done or result[0].ended)
                found[number] = row.written()
        return [found[number] for number in range(len(read))]

    # ---------------------------------------------------------------- parts

    @property
    def _start(self) -> int | None:
        """What a T5's answer begins with."""
        return self._tokenizer.pad_id if isinstance(self._model, T5) else None

    def _ends(self, limits: Limits) -> Collection[int]:
        return _ends_of(self._tokenizer, limits)

    def _within(self) -> AbstractContextManager[object]:
        return self._precision.context(self._device)

    def _readable(self, prompt: Sequence[int]) -> list[int]:
        """A prompt as the model reads it: of a GPT the last tokens that it can see.

        Raises:
            ValueError: it is empty.
            UserError: it is longer than a T5 reads.
        """
        if not prompt:
            raise ValueError("`prompts` must hold at least one token each")
        if not isinstance(self._model, T5):
            return list(prompt[-self._context :])
        if self._longest is not None and len(prompt) > self._longest:
            raise UserError(
                f"the prompt has {len(prompt):,} tokens with its end, and this T5 reads at most {self._longest:,} "
                "(`model.max_position_embeddings`); shorten it"
            )
        return list(prompt)

    def _most(self, limits: Limits) -> int:
        """Tokens that are written at most: a T5 has no more positions than it was built with."""
        positions = self._model.max_positions[1] if isinstance(self._model, T5) else None
        return limits.most if positions is None else min(limits.most, positions)

    def _room(self, limits: Limits, read: int) -> int:
        """Tokens that can follow so many before a GPT's context is full; its last token needs no place there."""
        most = self._most(limits)
        return most if isinstance(self._model, T5) else min(most, self._context - read + 1)

    def _decoder(self, rows: int, longest: int, most: int, per_memory: int = 1) -> Decoder:
        """Room for texts that begin with so many tokens, and for those that are written."""
        assert not isinstance(self._model, BERT)
        of_t5 = isinstance(self._model, T5)
        slots = most if of_t5 else min(self._context, longest + most)
        need = cache_bytes(self._model, rows, slots, longest if of_t5 else 0, per_memory)
        there = self._free_memory()
        if there is not None and need > there:
            raise UserError(
                f"keys and values of {rows:,} texts of up to {slots:,} tokens need {need / 2**30:,.1f} GiB, of "
                f"{there / 2**30:,.1f} GiB there are; write fewer texts at once, or shorter ones"
            )
        if isinstance(self._model, T5):
            return T5Decoder(self._model, rows, slots, longest, per_memory)
        return GPTDecoder(self._model, rows, slots)

    def _free_memory(self) -> int | None:
        """Bytes that may be had on the device, None where unknown."""
        if self._device.type != "cuda":
            return host_memory()
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + unused

    def _row(self, limits: Limits) -> _Row:
        return _Row(self._tokenizer, limits, self._names, answer=isinstance(self._model, T5))

    def _loop(self, rows: int, read: Sequence[Sequence[int]], limits: Limits, sampling: Sampling) -> TokenLoop:
        longest = max(map(len, read))
        most = self._most(limits)
        with self._within():
            decoder = self._decoder(rows, longest, most)
        return TokenLoop(
            decoder,
            sampling,
            most,
            vocabulary=len(self._model.output_weight),
            device=self._device,
            within=self._within,
            start=self._start,
            recorded=self._device.type == "cuda" and not _waits_for_experts(self._model),
        )

    def _pieces(
        self, loop: TokenLoop, prompts: Sequence[Sequence[int]], rows: Sequence[_Row], seeds: Sequence[int]
    ) -> Iterator[tuple[int, str]]:
        """Run a batch until all its texts have ended."""
        going = set(range(len(rows)))
        for tokens in loop.run(prompts, seeds):
            for number in sorted(going):
                yield number, rows[number].take(tokens[number])
                if rows[number].done:
                    loop.end(number)
                    going.discard(number)
            if not going:
                break
        for number, row in enumerate(rows):
            yield number, row.finish(ended=number not in going)


class _Row:
    """A text that grows.

    Args:
        tokenizer: of the model.
        limits: where it ends.
        names: of tokens that have no text.
        answer: the text stands by itself: a space that the tokenizer puts before every text is none of it.
    """

    def __init__(self, tokenizer: Tokenizer, limits: Limits, names: Mapping[int, str], *, answer: bool) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self._space_first = False
        self._stream = TextStream(tokenizer, limits.stop, names)
        self._ends = _ends_of(tokenizer, limits)
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._ended = False
        self.done = False

    def take(self, token: int) -> str:
        """What one more token adds to the text."""
        if token in self._ends:
            self.done = True
            return ""
        if self._answer and not self._tokens:
            spaced = self._tokenizer.decode_bytes([token]).startswith(b" ")
            self._space_first = spaced and not self._tokenizer.decode([token]).startswith(" ")
        self._tokens.append(token)
        piece = self._stream.feed(token)
        self.done = self._stream.stopped
        return self._add(piece)

    def finish(self, *, ended: bool) -> str:
        """The rest of the text."""
        self._ended = ended
        return self._add("" if self._stream.stopped else self._stream.close())

    def _add(self, piece: str) -> str:
        if piece and self._space_first:
            piece, self._space_first = piece.removeprefix(" "), False
        self._text.append(piece)
        return piece

    def written(self) -> Written:
        return Written(self._tokens, "".join(self._text), self._ended)


def _batches(order: Sequence[int], kinds: Sequence[int], size: int) -> Iterator[list[int]]:
    """Numbers in their order, so many at most at once, all of one kind."""
    for _, same in groupby(order, key=lambda number: kinds[number]):
        numbers = list(same)
        for first in range(0, len(numbers), size):
            yield numbers[first : first + size]


def _ends_of(tokenizer: Tokenizer, limits: Limits) -> Collection[int]:
    if limits.ends is not None:
        return limits.ends
    return () if tokenizer.eos_id is None else (tokenizer.eos_id,)


def _waits_for_experts(model: LanguageModel) -> bool:
    """Whether a step waits for the device: experts that run one after the other read on the host who has how many."""
    return any(
        moe.experts.implementation == "sequential" or moe.experts.up.dtype == torch.float64
        for moe in moe_layers(model).values()
    )


def generate_batch(
    restored: Restored,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seeds: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    stop_ids: Collection[int] | None = None,
    batch_size: int = DEFAULT_BATCH,
) -> list[Written]:
    """What the model of a checkpoint writes, see `Generator.write`.

    Args:
        restored: the checkpoint.
        prompts: token ids, as they are: what a GPT goes on with, or what a T5 reads, with its end token.
        max_new_tokens: of each text.
        temperature: see `Sampling`, as for top_k and top_p.
        top_k: see there.
        top_p: see there.
        seeds: of the random numbers of each prompt; None: 0 for all.
        stop: texts before which one ends.
        stop_ids: tokens that end one; None: the tokenizer's eos.
        batch_size: prompts at once.

    Raises:
        UserError: a prompt that cannot be read, or a model that writes no text.
    """
    limits = Limits(max_new_tokens, stop, stop_ids)
    sampling = Sampling(temperature, top_k, top_p)
    return Generator.of(restored).write(prompts, limits, sampling, seeds, batch_size)
