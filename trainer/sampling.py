"""Sampling from a language model: temperature, top-k, nucleus (top-p), and text as it appears."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from .data.tokenizers import Tokenizer


def next_token_distribution(
    logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The distribution the next token is drawn from.

    Temperature comes first, then top-k (Fan et al. 2018), then top-p (nucleus sampling, Holtzman et al. 2020) on what
    top-k left, renormalised: the order most libraries use. Equal logits are ranked by token id, so exactly k tokens
    are left.

    Args:
        logits: [vocabulary], any float dtype; masked tokens are -inf.
        temperature: divides the logits; 0 leaves only the most probable token.
        top_k: keep this many tokens; None keeps all.
        top_p: keep the fewest most probable tokens whose probabilities sum to at least this; None keeps all.

    Returns:
        Probabilities, float64 [vocabulary], on the CPU.

    Raises:
        ValueError: an argument out of range, or no finite logit.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(
            f"`temperature` ({temperature}) must be a finite number of at least 0; use 0 for greedy choice"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"`top_k` ({top_k}) must be at least 1; use None to keep all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"`top_p` ({top_p}) must be above 0 and at most 1; use None to keep all tokens")
    scores, order = torch.sort(logits.detach().to("cpu", torch.float64), descending=True, stable=True)
    if not torch.isfinite(scores[0]):
        raise ValueError(f"the largest logit ({scores[0].item()}) must be finite; the model has diverged")
    keep = torch.ones_like(scores, dtype=torch.bool)
    if temperature == 0:
        keep[1:] = False
    elif top_k is not None:
        keep[top_k:] = False
    # Subtracting the largest first keeps a tiny temperature from overflowing to inf - inf.
    scores = (scores - scores[0]) / (temperature or 1.0)
    probabilities = torch.softmax(scores.masked_fill(~keep, float("-inf")), 0)
    if top_p is not None and top_p < 1:
        # A token stays while those before it do not reach p; the first always does.
        reached = torch.cumsum(probabilities, 0) >= top_p
        probabilities[1:].masked_fill_(reached[:-1], 0.0)
        probabilities /= probabilities.sum()
    return torch.zeros_like(probabilities).scatter_(0, order, probabilities)


@torch.inference_mode()
def sample(
    model: Callable[[Tensor], Tensor],
    tokens: Sequence[int],
    *,
    context: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Collection[int] = (),
    device: torch.device | str = "cpu",
) -> Iterator[int]:
    """Draw tokens one after the other; the result depends on the arguments alone, not on torch's global generator.

    Args:
        model: token ids, int64 [1, s] with s <= context, to logits [1, s, vocabulary], without dropout.
        tokens: the prompt, at least one token; the model sees its last `context` tokens.
        context: most tokens the model can attend to.
        max_new_tokens: stop after this many.
        temperature: see `next_token_distribution`, as for top_k and top_p.
        top_k: see there.
        top_p: see there.
        seed: seeds a generator of this call's own.
        stop: token ids that end the text; they are not yielded.
        device: where the model is.

    Yields:
        Token ids.

    Raises:
        ValueError: the prompt is empty, or an argument out of range.
    """
    if not tokens:
        raise ValueError("`tokens` must hold at least one token to start from")
    generator = torch.Generator().manual_seed(seed)
    seen = list(tokens)[-context:]
    for _ in range(max_new_tokens):
        logits = model(torch.tensor([seen], dtype=torch.int64, device=device))[0, -1]
        probabilities = next_token_distribution(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        token = int(torch.multinomial(probabilities, 1, generator=generator))
        if token in stop:
            return
        yield token
        seen = [*seen, token][-context:]


class TextStream:
    """Tokens in, printable text out as soon as it is certain.

    A character whose bytes are not all there yet is held back, and so is text that may turn out to begin a stop string.

    Args:
        tokenizer: turns ids into bytes.
        stop: strings that end the text, which does not include them.
        names: what is written for tokens that have no text, such as sentinels.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), names: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        self._tokenizer = tokenizer
        self._names = names
        self._stop = [string for string in stop if string]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that is certain after one more token; sets `stopped` when a stop string has appeared."""
        if token in self._names:
            return self._advance(self._decoder.decode(b"", final=True) + self._names[token])
        return self._advance(self._decoder.decode(self._tokenizer.decode_bytes([token])))

    def close(self) -> str:
        """The text that was held back, once no more tokens come."""
        text = self._advance(self._decoder.decode(b"", final=True))
        if self.stopped:
            return text
        rest, self._held = self._held, ""
        return text + rest

    def _advance(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        ends = [position for string in self._stop if (position := text.find(string)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)]
        held = max((_overlap(text, string) for string in self._stop), default=0)
        certain = len(text) - held
        self._held = text[certain:]
        return text[:certain]


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string` without completing it."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if string.startswith(text[-n:])), 0)


def generate_text(
    model: Callable[[Tensor], Tensor],
    tokenizer: Tokenizer,
    prompt: str,
    *,
    context: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    device: torch.device | str = "cpu",
    start: Sequence[int] | None = None,
    names: Mapping[int, str] = MappingProxyType({}),
) -> Iterator[str]:
    """Continue a prompt, piece by piece; the prompt itself is not part of the result.

    Without a prompt the text starts like a document: after the eos token, or after a line break where there is none.
    `start`, where given, are the tokens it starts from instead; `names` is what `TextStream` takes.
    It ends at the first stop string, at an eos token, or after `max_new_tokens`.

    Raises:
        UserError: the tokenizer does not know a character of the prompt.
        ValueError: an argument out of range.
    """
    text = TextStream(tokenizer, stop, names)
    ends = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    for token in sample(
        model,
        prompt_tokens(tokenizer, prompt) if start is None else start,
        context=context,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=ends,
        device=device,
    ):
        yield text.feed(token)
        if text.stopped:
            return
    yield text.close()


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The tokens a text starts from: those of the prompt, after eos where the vocabulary has it."""
    start = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    if prompt:
        return start + [int(token) for token in tokenizer.encode(prompt)]
    if start:
        return start
    line_break = tokenizer.encode("\n") if "\n" in tokenizer.decode(range(tokenizer.vocab_size)) else [0]
    return [int(token) for token in line_break]
