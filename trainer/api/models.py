"""Trained models: load, generate, evaluate, convert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..utils.errors import UserError

if TYPE_CHECKING:
    from ..conversion.load_model import LoadedModel
    from ..evaluation.held_out_loss import EvaluationResult

Prompt = str | Sequence[Mapping[str, Any]]


def load(
    model: str | Path,
    *,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    base: str | Path | None = None,
    ema: bool = False,
) -> LoadedModel:
    """Load a trained model for generation and evaluation.

    Args:
        model: a run directory, its checkpoints directory or one checkpoint; a Hugging Face folder; or the id of a model
            on the Hugging Face hub, `org/name` or `org/name@revision`.
        device: `auto` is a CUDA GPU if there is one, else the CPU.
        base: path of the base weights of an adapter, if they have moved.
        ema: use the moving average of the weights.

    Returns:
        The loaded model: `model` (a `torch.nn.Module` in evaluation mode), `tokenizer`, `config`, `device`.

    Raises:
        UserError: there is no usable model, no such device, or not enough memory.
    """
    from ..conversion.convert import is_hub_id
    from ..conversion.load_model import load_model

    path = Path(model)
    if not path.exists() and is_hub_id(str(model)):
        from ..conversion.hub import download

        path = download(str(model))
    return load_model(path, device, None if base is None else Path(base), ema=ema)


def generate(
    model: LoadedModel | str | Path,
    prompts: Sequence[Prompt] | str,
    *,
    max_new_tokens: int = 256,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    chat: bool = False,
    batch_size: int = 32,
) -> list[str]:
    """Generate a text for each prompt, without the prompt.

    Args:
        model: from `load`, or what it takes.
        prompts: texts that a GPT continues or encoder inputs of a T5; with `chat` messages of a user, or lists of
            messages with `role` and `content`.
        max_new_tokens: longest text, in tokens.
        temperature: of sampling; 0 is greedy; None is 0.8.
        top_k: sample from the K most probable tokens.
        top_p: nucleus sampling, the fewest tokens whose probabilities sum to P.
        repetition_penalty: above 1 makes tokens that already occur less probable.
        num_beams: beam search with so many beams, which does not sample; 1: no search.
        length_penalty: of beam search; above 0 favours long texts.
        seed: of sampling.
        stop: texts to stop before.
        chat: apply the chat template of the model.
        batch_size: prompts per batch.

    Raises:
        UserError: the model cannot generate, or a prompt or an option is not valid.
    """
    from ..generation.beam_search import BeamSearchConfig
    from ..generation.prompts import build_generator, encode_prompts, stop_strings
    from ..generation.sampling import SamplingParams
    from ..generation.text_generator import StoppingCriteria

    counts = {"max_new_tokens": max_new_tokens, "num_beams": num_beams, "batch_size": batch_size}
    problems = [
        f"`{name}` ({count}) must be a whole number of at least 1"
        for name, count in counts.items()
        if not isinstance(count, int) or count < 1
    ]
    if not isinstance(temperature, int | float | None):
        problems.append(f"`temperature` ({temperature!r}) must be a number")
    if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        problems.append(f"`seed` ({seed}) must be a whole number from 0 to 2**63 - 1")
    if isinstance(stop, str):
        problems.append(f"`stop` ({stop!r}) must be a list of texts; use stop=[{stop!r}]")
    if num_beams != 1 and (temperature is not None or (top_k, top_p, repetition_penalty) != (None, None, 1.0)):
        problems.append("beam search does not sample: leave out temperature, top_k, top_p and repetition_penalty")
    if temperature == 0 and (top_k is not None or top_p is not None):
        problems.append("`temperature` (0) is greedy, so top_k and top_p have no effect; leave one of them out")
    if problems:
        raise UserError(problems)
    try:
        sampling = SamplingParams(0.8 if temperature is None else temperature, top_k, top_p, repetition_penalty)
        search = BeamSearchConfig(num_beams, length_penalty) if num_beams > 1 else None
    except (TypeError, ValueError) as error:
        raise UserError(f"generate: {error}") from None
    given: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
    if not all(isinstance(prompt, str) or (chat and isinstance(prompt, Sequence)) for prompt in given):
        raise UserError("`prompts` must be texts, or with chat=True lists of messages")
    restored = _loaded(model)
    generator = build_generator(restored)
    tokens = encode_prompts(restored, given, chat=chat)
    limits = StoppingCriteria(max_new_tokens, stop_strings(restored, stop, chat=chat))
    if search is not None:
        outputs = generator.beam_search(tokens, limits, search, batch_size * num_beams)
    else:
        outputs = generator.generate(tokens, limits, sampling, [seed] * len(tokens), batch_size)
    return [output.text for output in outputs]


def evaluate(
    model: LoadedModel | str | Path,
    *,
    split: Literal["validation", "test"] = "validation",
    data_path: str | Path | None = None,
    limit_batches: int | None = None,
    batch_size: int | None = None,
) -> EvaluationResult:
    """Return the held-out loss of a trained model: `loss` in nats per token, `perplexity`, `bits_per_byte`,
    and `metrics`, those of `trainer.validation_metrics` that are registered.

    Args:
        model: from `load`, or what it takes.
        split: split of the data it was trained on.
        data_path: a text file or folder to evaluate on instead.
        limit_batches: evaluate the first batches only, which are a fair sample; None: all.
        batch_size: samples per batch; None: the micro batch size of the run.

    Raises:
        UserError: the data cannot be read, are not those of the run, or the split is empty.
    """
    from ..evaluation.held_out_data import held_out_data, held_out_loss

    if split not in ("validation", "test"):
        raise UserError(f"`split` ({split}) must be validation or test")
    restored = _loaded(model)
    held_out = held_out_data(restored, split, None if data_path is None else Path(data_path))
    return held_out_loss(restored, held_out, batch_size, limit_batches)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: Literal["hf", "stoker"] | None = None,
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] | None = None,
    tokenizer: str | None = None,
    model_type: str | None = None,
    merge: bool = False,
    base: str | Path | None = None,
    ema: bool = False,
    ignored_fields: Sequence[str] = (),
    overwrite: bool = False,
) -> Path:
    """Convert a Hugging Face model to a checkpoint, or a checkpoint to a Hugging Face folder; bit for bit.

    Args:
        source: a Hugging Face folder or hub id, a GGUF file, or a run directory or checkpoint.
        target: the output folder.
        to: format of the output; None: the one that the source is not.
        dtype: of the weights; None: unchanged.
        tokenizer: folder with the tokenizer files, or `byte-level`; None: that of the source.
        model_type: architecture of a Hugging Face output, such as `llama`; None: the first that supports the model.
        merge: merge an adapter into its base weights.
        base: path of the base weights of an adapter, if they have moved.
        ema: use the moving average of the weights.
        ignored_fields: fields of config.json to ignore because they do not affect results.
        overwrite: replace the output of an earlier conversion.

    Returns:
        The output folder.

    Raises:
        UserError: the source cannot be converted, with every reason; or the target cannot be written.
    """
    from ..conversion.convert import convert as convert_model

    for name, value, known in (("to", to, ("hf", "stoker")), ("dtype", dtype, ("fp64", "fp32", "bf16", "fp16"))):
        if value is not None and value not in known:
            raise UserError(f"`{name}` ({value}) must be one of {', '.join(known)}, or None")
    convert_model(
        source,
        Path(target),
        to=to,
        dtype=dtype,
        tokenizer=tokenizer,
        model_type=model_type,
        merge=merge,
        base=None if base is None else Path(base),
        ema=ema,
        ignored_fields=ignored_fields,
        overwrite=overwrite,
    )
    return Path(target)


def _loaded(model: LoadedModel | str | Path) -> LoadedModel:
    from ..conversion.load_model import LoadedModel

    if isinstance(model, str | Path):
        return load(model)
    if not isinstance(model, LoadedModel):
        raise TypeError(
            f"`model` ({type(model).__name__}) must come from stoker.load, or be a path or hub id; of a finished run "
            "take its directory"
        )
    return model
