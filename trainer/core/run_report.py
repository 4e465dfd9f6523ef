"""Record of a run for its report: facts and plan at the start, measured memory and a sample at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch

from ...models.build import LanguageModel
from ...models.t5 import T5
from ..config.captured_layers import captures_layers
from ..config.dotted_paths import leaves
from ..config.interpolation import has_interpolation
from ..config.render import finding_lines
from ..config.run_config import DEFAULT_ORIGIN, RunConfig
from ..config.schema.key_index import format_value, schema_keys
from ..data.build_datasets import Data
from ..data.datasets.samples import batch_tensors
from ..data.tasks.sentinels import sentinel_ids, sentinel_name
from ..generation.sampling import SamplingParams
from ..generation.text_generator import Generator, StoppingCriteria
from ..plan.report import memory_categories
from ..plan.run_plan import Plan
from ..utils.redaction import redact, redact_value
from .run_context import RunContext

_OTHER_GROUPS = tuple(f"model.{group}." for group in ("data", "optim", "tokenizer", "peft"))
"""Keys of `model` that files of other groups give."""
_GPT_PROMPT, _T5_PROMPT = 32, 256
"""Most tokens of a prompt."""
_SAMPLE_SECONDS = 3.0


def describe_start(run: RunContext, model: LanguageModel) -> dict[str, Any]:
    """Return what is known when training starts."""
    config, plan, gpu = run.config, run.plan, run.plan.inputs.target.gpu
    peak = gpu.peak if gpu is not None else None
    source = (
        f"the dense bf16 peak of {gpu.name}, {peak / 1e12:g} TFLOP/s by NVIDIA's data sheet" if gpu and peak else ""
    )
    return {
        "facts": dict(_facts(run, model)),
        "mfu_peak": source,
        "keys": list(_keys(config)),
        "preset": config.preset.name,
        "differences": list(_differences(config)),
        "findings": list(map(redact, finding_lines(config.findings))),
        "plan": _plan(plan),
        "attention": [
            {
                "kind": kind,
                "call": str(choice.call),
                "backend": choice.backend,
                "notes": choice.notes,
                "rows": [[row.backend, row.family, row.accepted, row.reason] for row in choice.rows],
            }
            for kind, choice in model.attention_decisions.items()
        ],
    }


def describe_end(run: RunContext, model: LanguageModel, step: int) -> dict[str, Any]:
    """Return what is known after training: measured memory, and a sample."""
    fields: dict[str, Any] = {}
    if run.device.type == "cuda":
        fields["measured"] = {
            "allocated": torch.cuda.max_memory_allocated(run.device),
            "reserved": torch.cuda.max_memory_reserved(run.device),
            "planned": run.plan.ranks[0].allocated,
        }
    tokens = run.resolved.exp_manager.report_sample_tokens
    if tokens and run.ranks.world_size == 1 and run.resolved.model.family != "bert" and run.stop.signal is None:
        fields["sample"] = _sample(run, model, step, tokens)
    return fields


def _facts(run: RunContext, model: LanguageModel) -> Iterator[tuple[str, str]]:
    plan, keys, mesh = run.plan, run.resolved.model, run.resolved.mesh
    active = plan.num_active_parameters
    some = f", {active:,} active for each token" if active < plan.num_parameters else ""
    yield "Model", f"{keys.family}, {plan.num_parameters:,} parameters{some}"
    yield "Data", run.data.description
    yield "Precision", run.resolved.precision.name
    layout = run.resolved.layout
    if mesh.world_size > 1:
        axes = f"{mesh.world_size} ranks: {mesh.description}"
        yield "Layout", axes + (f"; {layout.name}: {layout.description}" if layout else "")
    yield "Layers", f"{'compiled' if model.compiled else 'not compiled'}: {model.compile_reason}"
    if run.uses_cuda_graph:
        by_layer = captures_layers(run.resolved.model, run.resolved.mesh.world_size)
        yield "CUDA graphs", "each layer runs as two" if by_layer else "micro batches run as one"


def _keys(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (path, value, origin) of the values that are not the default."""
    defaults = schema_keys(config.root.model.family)
    for path, value in leaves(config.document):
        origin, key = config.origins.get(path, DEFAULT_ORIGIN), defaults.get(path)
        if origin.kind != "default" and not (key and key.default == value):
            where = f"{redact(origin.text)} (command line)" if origin.kind == "override" else redact(origin.text)
            yield path, redact_value(path, format_value(value)), where


def _differences(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (path, value of the preset, value) of keys that differ from it, or that only the command line sets."""
    preset, defaults = config.preset.values, schema_keys(config.root.model.family)
    absent = object()
    for path, value in leaves(config.document):
        is_own = path.startswith("model.") and not path.startswith(_OTHER_GROUPS)
        given = preset.get(path, absent)
        if given is absent and is_own and config.origins.get(path, DEFAULT_ORIGIN).kind == "override":
            given = defaults[path].default if path in defaults else absent
        if given is not absent and given != value and not has_interpolation(given):
            yield path, redact_value(path, format_value(given)), redact_value(path, format_value(value))


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "peak_at": plan.peak_at,
        "parts": {name: int(size) for name, size in memory_categories(plan) if size > 0},
        "allocated": int(plan.allocated),
        "reserved": int(plan.reserved) if plan.inputs.target.device == "cuda" else None,
        "available": plan.available,
    }


def _sample(run: RunContext, model: LanguageModel, step: int, tokens: int) -> dict[str, Any]:
    """Let the model continue the start of a sample of the data; a T5 gets what its encoder would."""
    tokenizer, was_training, is_t5 = run.data.tokenizer, model.training, isinstance(model, T5)
    names = {int(token): sentinel_name(n) for n, token in enumerate(sentinel_ids(tokenizer))} if is_t5 else {}
    prompt = _prompt(run.data, is_t5=is_t5)
    length = run.resolved.data.task.length
    model.eval()
    try:
        generator = Generator(model, tokenizer, run.resolved.precision, run.device, length, names)
        sampling, pieces = SamplingParams(temperature=0.7), []
        begin = time.monotonic()
        stream = generator.stream([prompt], StoppingCriteria(tokens), sampling, [run.resolved.data.seed])
        for _, piece in stream:
            pieces.append(piece)
            if time.monotonic() - begin > _SAMPLE_SECONDS:
                break
    finally:
        model.train(was_training)
    read = [name or tokenizer.decode(list(tokens)) for name, tokens in groupby(prompt, names.get)]
    return {"step": step, "prompt": "".join(read), "text": "".join(pieces)}


def _prompt(data: Data, *, is_t5: bool) -> list[int]:
    tensors = batch_tensors((data.validation or data.train).batch(0, 1))
    row = tensors["encoder_tokens" if is_t5 else "tokens"][0]
    if "encoder_padding" in tensors:
        row = row[tensors["encoder_padding"][0]]
    return row[: _T5_PROMPT if is_t5 else _GPT_PROMPT].tolist()
