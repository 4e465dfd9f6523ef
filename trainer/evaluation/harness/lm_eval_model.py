"""stoker's models for the lm-evaluation-harness: the model type `stoker`, found by its entry point `lm_eval.models`.

    lm-eval run --model stoker --model_args checkpoint=DIR --tasks NAME

Texts become tokens as with the harness's own type `hf`: a text is encoded as transformers encodes it, so a converted
model gets the scores that it has there.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs  # pyright: ignore[reportMissingImports]
from tqdm import tqdm

from ...data.tasks.chat_files import chat_of
from ...data.tasks.chat_template import ChatTemplate, Renderer
from ...data.tokenizers.tokenizer import Tokenizer
from ...utils import environment
from ...utils.errors import UserError
from .loglikelihood import Request, Score, Scorer, rolling_windows

_DEVICES = ("auto", "cpu", "cuda", "mps")
_MAX_NEW_TOKENS = 256
_TEXTS_AT_ONCE = 32
_GENERATION_KEYS = {"do_sample", "temperature", "top_k", "top_p", "until", "max_gen_toks"}


class StokerLM(TemplateLM):
    """A GPT or a T5 of a stoker checkpoint.

    Args:
        checkpoint: a run directory, its checkpoints directory or one step in it.
        device: `auto`, `cpu`, `cuda` or `mps`.
        batch_size: requests at once, a number or `auto`: as many as fit into a fixed number of tokens.
        max_length: tokens that are read at once; the length of the model's samples without it.
        seed: of texts that are sampled.
        base: where the frozen weights of an adapter are, if they have moved.
        ema: take the moving average of the weights that were trained.
        max_batch_size: the harness hands it on; nothing here needs it.

    Raises:
        UserError: there is no such checkpoint, or its model writes no text; or a value is none of those above.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        device: str = "auto",
        batch_size: int | str = "auto",
        max_length: int | None = None,
        seed: int = 0,
        base: str | Path | None = None,
        ema: bool | str = False,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        environment.prepare_process()
        from ....models.bert import BERT
        from ....models.t5 import T5
        from ...conversion.load_model import restore

        self._batch_size = _batch_size(batch_size)
        name = device.removesuffix(":0")
        if name not in _DEVICES:
            raise UserError(f"lm-eval: device={device} must be one of {', '.join(_DEVICES)}")
        self._restored = restored = restore(
            Path(checkpoint), name, None if base is None else Path(base), average=_yes_or_no("ema", ema)
        )
        if isinstance(restored.model, BERT):
            raise UserError("lm-eval: a BERT fills in hidden tokens and writes no text; use a GPT or a T5")
        self.backend = "seq2seq" if isinstance(restored.model, T5) else "causal"
        self._device = restored.device
        self._tokenizer: Tokenizer = restored.tokenizer
        self._start = [] if self.backend == "seq2seq" else restored.text_start
        self._seed = seed
        self._renderer: Renderer | None = None
        self.max_length = restored.context if max_length is None else max_length
        if not 1 <= self.max_length <= restored.context:
            raise UserError(
                f"lm-eval: max_length={max_length} must be from 1 to {restored.context:,}, the length of the samples "
                f"of {restored.path}"
            )
        self._scorer = Scorer(
            restored.model,
            restored.tokenizer,
            restored.precision,
            restored.device,
            longest=self.max_length,
            batch_size=self._batch_size,
        )

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's cache of requests."""
        return str(self._restored.path)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document; 0 where the vocabulary has none."""
        return 0 if self._tokenizer.eos_id is None else self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What comes before a text that has no context: what begins every text, or a bos, or the eos before it."""
        if self._start:
            return self._start[-1]
        special = getattr(self._tokenizer, "special", None)
        bos = None if special is None else special.bos
        return self.eot_token_id if bos is None else bos

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template that the harness notes beside results; None where none is asked for.

        Raises:
            UserError: one is asked for by name: a checkpoint has one, without a name.
        """
        if isinstance(chat_template, str) and chat_template:
            raise UserError(f"lm-eval: a checkpoint has one chat template; ask for it without a name ({chat_template})")
        return self._chat.source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, up to where the assistant's answer begins.

        Raises:
            UserError: the template fails on it, or the task begins the answer itself (`gen_prefix`).
        """
        if not add_generation_prompt:
            raise UserError("lm-eval: a task with a gen_prefix begins the assistant's answer, which is not done here")
        if self._renderer is None:
            self._renderer = self._chat.renderer()
            weakref.finalize(self, self._renderer.close)
        return self._renderer.prompt(chat_history)

    @cached_property
    def _chat(self) -> ChatTemplate:
        return chat_of(self._tokenizer)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens of a text.

        Args:
            string: the text.
            add_special_tokens: put around it what the tokenizer puts around texts: before that of a GPT, unless the
                text begins with it already; behind what a T5 reads. None is True.
            kwargs: none that matter here.
        """
        tokens = [int(token) for token in self._tokenizer.encode(string)]
        if add_special_tokens is False:
            return tokens
        if self.backend == "seq2seq":
            return [*tokens, self.eot_token_id]
        return tokens if self._start and tokens[: len(self._start)] == self._start else [*self._start, *tokens]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, in windows where it is longer than the model reads."""
        if self.backend == "seq2seq":
            raise UserError("lm-eval: a T5 answers texts, it gives none on its own a probability; choose another task")
        windows, owners = [], []
        for number, request in enumerate(requests):
            (text,) = _arguments(request)
            some = list(rolling_windows(self.tok_encode(text), self.prefix_token_id, self.max_length))
            windows += some
            owners += [number] * len(some)
        totals = [0.0] * len(requests)
        for number, score in zip(owners, self._score(windows, "Scoring texts", disable_tqdm), strict=True):
            totals[number] += score.log_probability
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to the first of the strings in `until`.

        Raises:
            UserError: `generation_kwargs` that are not known, or leave no room for a context.
        """
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(json.dumps(_arguments(request)[1], sort_keys=True), []).append(number)
        written = [""] * len(requests)
        with tqdm(total=len(requests), desc="Generating", disable=disable_tqdm) as bar:
            for numbers in alike.values():
                contexts, asked = zip(*(_arguments(requests[number]) for number in numbers), strict=True)
                texts = self._generate(contexts, asked[0], [self._seed + number for number in numbers])
                for number, text in zip(numbers, texts, strict=True):
                    written[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                bar.update(len(numbers))
        return written

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside the results."""
        restored = self._restored
        return {
            "model_num_parameters": sum(parameter.numel() for parameter in restored.model.parameters()),
            "model_dtype": restored.precision.name,
            "model_checkpoint": str(restored.path),
            "model_step": restored.state.step,
        }

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        wanted = [Request(context, continuation) for _, context, continuation in requests]
        scores = self._score(wanted, "Scoring continuations", disable_tqdm)
        for (texts, *_), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, tuple(score))
        return [(score.log_probability, score.is_greedy) for score in scores]

    def _score(self, requests: Sequence[Request], about: str, is_quiet: bool) -> list[Score]:
        with tqdm(total=len(requests), desc=about, disable=is_quiet) as bar:
            return self._scorer.score(requests, bar.update)

    def _generate(self, contexts: Sequence[str], asked: dict[str, Any], seeds: Sequence[int]) -> list[str]:
        from ...generation.text_generator import generate_batch

        wanted: dict[str, Any] = dict(normalize_gen_kwargs(asked, _MAX_NEW_TOKENS))
        if unknown := set(wanted) - _GENERATION_KEYS:
            raise UserError(
                f"lm-eval: generation_kwargs {', '.join(sorted(unknown))} are not known here; known are "
                f"{', '.join(sorted(_GENERATION_KEYS))}"
            )
        new_tokens = wanted["max_gen_toks"]
        room = self.max_length if self.backend == "seq2seq" else self.max_length - new_tokens
        if room < 1:
            raise UserError(
                f"lm-eval: max_gen_toks ({new_tokens:,}) must be less than the {self.max_length:,} tokens that the "
                "model reads; lower it in the task's generation_kwargs"
            )
        written = generate_batch(
            self._restored,
            [self.tok_encode(context)[-room:] for context in contexts],
            max_new_tokens=new_tokens,
            temperature=wanted.get("temperature", 0.0) if wanted["do_sample"] else 0.0,
            top_k=wanted.get("top_k"),
            top_p=wanted.get("top_p"),
            seeds=seeds,
            stop=handle_stop_sequences(wanted["until"], None),
            batch_size=self._batch_size or _TEXTS_AT_ONCE,
        )
        return [one.text for one in written]


register_model("stoker")(StokerLM)


def _arguments(request: Instance) -> tuple[Any, ...]:
    return request.args


def _yes_or_no(name: str, given: bool | str) -> bool:
    """A value of the harness's `--model_args`.

    Raises:
        UserError: it is neither true nor false.
    """
    said = str(given).lower()
    if said not in ("true", "false"):
        raise UserError(f"lm-eval: {name}={given} must be true or false")
    return said == "true"


def _batch_size(given: int | str) -> int | None:
    """A number, or None for `auto`.

    Raises:
        UserError: it is neither.
    """
    if str(given).partition(":")[0] == "auto":
        return None
    if not str(given).isdecimal() or int(given) < 1:
        raise UserError(f"lm-eval: batch_size={given} must be a number of at least 1, or auto")
    return int(given)
