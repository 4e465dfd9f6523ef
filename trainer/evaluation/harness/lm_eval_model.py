"""Model type `stoker` for the lm-evaluation-harness, registered by the entry point `lm_eval.models`.

    lm-eval run --model stoker --model_args checkpoint=DIR --tasks NAME

Text is tokenized as by the harness's model type `hf`, so a converted model gets the same scores as in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from tqdm import tqdm

from ...data.tasks.chat_files import get_chat_template
from ...data.tasks.chat_template import ChatTemplate, RendererProcess
from ...data.tokenizers.tokenizer import Tokenizer
from ...utils import environment
from ...utils.errors import UserError
from .loglikelihood import LoglikelihoodScorer, Request, Score, rolling_windows

_DEVICES = ("auto", "cpu", "cuda", "mps")
_MAX_NEW_TOKENS = 256
_GENERATE_BATCH_SIZE = 32
_GENERATION_KEYS = {"do_sample", "temperature", "top_k", "top_p", "until", "max_gen_toks"}


class StokerLM(TemplateLM):
    """A GPT or T5 checkpoint as a model of the lm-evaluation-harness.

    Args:
        checkpoint: a run directory, its checkpoints directory or one step of it.
        device: `auto`, `cpu`, `cuda` or `mps`.
        batch_size: requests per batch, a number or `auto` for a fixed number of tokens per batch.
        max_length: context length; None for the sample length of training.
        seed: random seed for sampling.
        base: path of the base weights of an adapter, if they have moved.
        ema: use the moving average of the weights.
        max_batch_size: passed by the harness; ignored.

    Raises:
        UserError: there is no such checkpoint, its model cannot generate text, or an argument is invalid.
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
        from ...conversion.load_model import load_model

        self._batch_size = _batch_size(batch_size)
        name = device.removesuffix(":0")
        if name not in _DEVICES:
            raise UserError(f"lm-eval: device={device} must be one of {', '.join(_DEVICES)}")
        self._restored = restored = load_model(
            Path(checkpoint), name, None if base is None else Path(base), ema=_parse_bool("ema", ema)
        )
        if isinstance(restored.model, BERT):
            raise UserError("lm-eval: a BERT predicts masked tokens and cannot generate text; use a GPT or a T5")
        self.backend = "seq2seq" if isinstance(restored.model, T5) else "causal"
        self._device = restored.device
        self._tokenizer: Tokenizer = restored.tokenizer
        self._start = [] if self.backend == "seq2seq" else restored.prompt_prefix
        self._seed = seed
        self._renderer: RendererProcess | None = None
        self.max_length = restored.context_length if max_length is None else max_length
        if not 1 <= self.max_length <= restored.context_length:
            raise UserError(
                f"lm-eval: max_length={max_length} must be from 1 to {restored.context_length:,}, the length of "
                "the samples "
                f"of {restored.path}"
            )
        self._scorer = LoglikelihoodScorer(
            restored.model,
            restored.tokenizer,
            restored.precision,
            restored.device,
            longest=self.max_length,
            batch_size=self._batch_size,
        )

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in the harness's request cache."""
        return str(self._restored.path)

    @property
    def eot_token_id(self) -> int:
        """Token id of eos; 0 if the tokenizer has none."""
        return 0 if self._tokenizer.eos_id is None else self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without context: the last start token, else bos, else eos."""
        if self._start:
            return self._start[-1]
        bos = self._tokenizer.special.bos
        return self.eot_token_id if bos is None else bos

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the chat template, which the harness stores with the results; None if none is used.

        Raises:
            UserError: a template is requested by name: a checkpoint has one unnamed template.
        """
        if isinstance(chat_template, str) and chat_template:
            raise UserError(f"lm-eval: a checkpoint has one chat template; select it without a name ({chat_template})")
        return self._chat.source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation up to the start of the assistant's answer.

        Raises:
            UserError: the template fails, or the task prefills the answer (`gen_prefix`).
        """
        if not add_generation_prompt:
            raise UserError("lm-eval: tasks with a gen_prefix are not supported")
        if self._renderer is None:
            self._renderer = self._chat.start_renderer()
        return self._renderer.render_prompt(chat_history)

    @cached_property
    def _chat(self) -> ChatTemplate:
        return get_chat_template(self._tokenizer)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokenize a text.

        Args:
            add_special_tokens: add special tokens: for a GPT the start tokens, unless the text begins with them; for a
                T5 the final eos. None means True.
        """
        tokens = [int(token) for token in self._tokenizer.encode(string)]
        if add_special_tokens is False:
            return tokens
        if self.backend == "seq2seq":
            return [*tokens, self.eot_token_id]
        return tokens if self._start and tokens[: len(self._start)] == self._start else [*self._start, *tokens]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in windows if it is longer than the context."""
        if self.backend == "seq2seq":
            raise UserError("lm-eval: a T5 has no unconditional log-likelihood; choose another task")
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
        """Generate a continuation of each context, up to the first stop string in `until`.

        Raises:
            UserError: `generation_kwargs` that are unknown, or leave no room for the context.
        """
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(_arguments(request)[1], sort_keys=True), []).append(number)
        written = [""] * len(requests)
        with _bar(len(requests), "Generating", disable_tqdm) as bar:
            for numbers in groups.values():
                contexts, kwargs = zip(*(_arguments(requests[number]) for number in numbers), strict=True)
                texts = self._generate(contexts, kwargs[0], [self._seed + number for number in numbers])
                for number, text in zip(numbers, texts, strict=True):
                    written[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                bar.update(len(numbers))
        return written

    def get_model_info(self) -> dict[str, Any]:
        """Return the information that the harness stores with the results."""
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

    def _score(self, requests: Sequence[Request], description: str, disable_tqdm: bool) -> list[Score]:
        with _bar(len(requests), description, disable_tqdm) as bar:
            return self._scorer.score(requests, bar.update)

    def _generate(self, contexts: Sequence[str], kwargs: dict[str, Any], seeds: Sequence[int]) -> list[str]:
        from ...generation.text_generator import generate_batch

        wanted: dict[str, Any] = dict(normalize_gen_kwargs(kwargs, _MAX_NEW_TOKENS))
        if unknown := set(wanted) - _GENERATION_KEYS:
            raise UserError(
                f"lm-eval: generation_kwargs {', '.join(sorted(unknown))} are not supported; supported are "
                f"{', '.join(sorted(_GENERATION_KEYS))}"
            )
        new_tokens = wanted["max_gen_toks"]
        room = self.max_length if self.backend == "seq2seq" else self.max_length - new_tokens
        if room < 1:
            raise UserError(
                f"lm-eval: max_gen_toks ({new_tokens:,}) must be less than the context length {self.max_length:,}; "
                "lower it in the task's generation_kwargs"
            )
        outputs = generate_batch(
            self._restored,
            [self.tok_encode(context)[-room:] for context in contexts],
            max_new_tokens=new_tokens,
            temperature=wanted.get("temperature", 0.0) if wanted["do_sample"] else 0.0,
            top_k=wanted.get("top_k"),
            top_p=wanted.get("top_p"),
            seeds=seeds,
            stop=handle_stop_sequences(wanted["until"], None),
            batch_size=self._batch_size or _GENERATE_BATCH_SIZE,
        )
        return [output.text for output in outputs]


register_model("stoker")(StokerLM)


def _bar(total: int, description: str, disable: bool) -> tqdm[NoReturn]:
    return tqdm(total=total, desc=description, disable=disable or None)  # None: only on a terminal


def _arguments(request: Instance) -> tuple[Any, ...]:
    return request.args


def _parse_bool(name: str, given: bool | str) -> bool:
    """Parse a boolean of the harness's `--model_args`.

    Raises:
        UserError: the value is neither true nor false.
    """
    text = str(given).lower()
    if text not in ("true", "false"):
        raise UserError(f"lm-eval: {name}={given} must be true or false")
    return text == "true"


def _batch_size(given: int | str) -> int | None:
    """Parse a batch size; None for `auto`.

    Raises:
        UserError: the value is neither a positive number nor `auto`.
    """
    if str(given).partition(":")[0] == "auto":
        return None
    if not str(given).isdecimal() or int(given) < 1:
        raise UserError(f"lm-eval: batch_size={given} must be a number of at least 1, or auto")
    return int(given)
