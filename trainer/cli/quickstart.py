"""`stoker quickstart`: train a small GPT on this machine within a time budget, and evaluate it against baselines.

It runs `stoker train experiment=quickstart` with `max_steps` chosen so that the cosine schedule ends in time, and
shortened with the schedule if the machine becomes slower.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..utils import environment
from ..utils.durable_files import atomic_write
from ..utils.errors import EXIT_OK
from ..utils.text import format_days, pluralize
from .common_arguments import number_type, parse_float
from .generate import replace_control_characters

if TYPE_CHECKING:
    import torch

    from ..config.run_config import RunConfig
    from ..config.schema.root import RootBlock
    from ..train import TrainingResult
    from .thread_tuning import StepTiming

_NUM_VALIDATIONS = 4
_MEASURING_FRACTION = 0.05
"""Fraction of the time budget for measuring the step time."""
_HELD_OUT_BYTES = 1 << 17
"""Bytes of the final evaluation on a CPU; a GPU evaluates on all."""
_MIN_SECONDS, _MAX_SECONDS = 5.0, 24 * 3600.0
_PROMPT = "import "

_seconds = number_type(
    parse_float,
    lambda value: _MIN_SECONDS <= value <= _MAX_SECONDS,
    f"a number of seconds from {_MIN_SECONDS:g} to {_MAX_SECONDS:g}",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stoker quickstart`."""
    parser.add_argument(
        "--seconds", metavar="S", type=_seconds, default=60.0, help="approximate training time (default: %(default)g)"
    )
    parser.add_argument("--dir", metavar="DIR", help="run directory (default: runs/quickstart/TIME)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides of the configuration (`experiment=quickstart`)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure the step time, train, evaluate, sample, and print a report."""
    overrides = [*_directory_overrides(args.dir), *args.overrides]
    # Before torch is imported, so that a mistyped override or path fails within a second.
    experiment = "quickstart"
    config = _load(experiment, overrides)
    from .early_checks import check_run_start

    check_run_start(config)
    environment.prepare_process(config.root.env_vars)

    import torch

    from ..config.resolved_run import resolve_run
    from ..data.build_datasets import build_data
    from ..device.choose_device import choose_device, compute_capability
    from ..train import run_training
    from .thread_tuning import measure_step_time

    if torch.cuda.is_available() and config.origins["trainer.accelerator"].kind != "override":
        experiment = "quickstart_gpu"
        config = _load(experiment, overrides)
    device = choose_device(config.root.trainer)
    run = resolve_run(config.root, capability=compute_capability(device))
    _print_findings(config)
    print(
        f"stoker quickstart: train a small GPT for about {args.seconds:g} s on "
        f"{_describe_data(config)}, then compare it with two baselines. Nothing is downloaded."
    )
    pace, model = measure_step_time(run, build_data(run.data), device, args.seconds * _MEASURING_FRACTION)
    print("attention backends for training, in order of preference:")
    print(model.attention_decisions["training"].table())
    del model
    chosen = config.origins["trainer.max_steps"].kind == "override"
    config = _load(experiment, [*overrides, *_length_overrides(config, pace, args.seconds)])
    print(f"speed {_describe_pace(pace)}: {pluralize(config.root.trainer.max_steps, 'step')} in that time\n")

    # On a machine that becomes slower, fewer steps, unless the user has chosen their number.
    result = run_training(config, seconds=None if chosen else args.seconds * (1 - _MEASURING_FRACTION))
    if result.exit_code != EXIT_OK:
        return result.exit_code
    comparison = _compare(result, device)
    _write(result, pace, comparison)
    print(_report(config.root, result, comparison, _sample(result, device)))
    return EXIT_OK


@dataclass(frozen=True, slots=True)
class Comparison:
    """Bits per byte of the trained model and of two baselines on the same `bytes` held-out bytes."""

    bytes: int
    model: float
    xz: float
    unigram: float


def _compare(result: TrainingResult, device: torch.device) -> Comparison | None:
    """Evaluate model and baselines on the validation text; None without one (mock data)."""
    from ..data.datasets.samples import EvaluationWindows
    from ..evaluation.baselines import unigram_bits_per_byte, xz_bits_per_byte
    from ..evaluation.held_out_loss import evaluate, loss_function

    data = result.data
    samples = data.validation
    if data.corpus is None or not isinstance(samples, EvaluationWindows):
        return None
    size = result.run.model.micro_batch_size
    batches = -(-samples.samples // size)
    if device.type == "cpu":
        batches = min(batches, -(-_HELD_OUT_BYTES // (samples.sequence_length * size)))
    result.model.eval()
    evaluation = evaluate(
        loss_function(result.model, result.run.precision, device),
        samples,
        token_bytes=data.token_byte_counts,
        batch_size=size,
        limit_batches=batches,
        device=device,
    )
    held_out = data.tokenizer.decode_bytes(samples.first_labels(batches * size))
    assert evaluation.bits_per_byte is not None
    assert len(held_out) == evaluation.bytes
    return Comparison(
        bytes=evaluation.bytes,
        model=evaluation.bits_per_byte,
        xz=xz_bits_per_byte(held_out),
        unigram=unigram_bits_per_byte(data.corpus.text("train"), held_out),
    )


def _sample(result: TrainingResult, device: torch.device) -> str:
    from ..generation.sampling import SamplingParams
    from ..generation.text_generator import Generator, StoppingCriteria

    tokenizer = result.data.tokenizer
    precision, length = result.run.precision, result.run.data.task.length
    generator = Generator(result.model.eval(), tokenizer, precision, device, length)
    start = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    prompt = [*start, *tokenizer.encode(_PROMPT).tolist()]
    stream = generator.stream([prompt], StoppingCriteria(300), SamplingParams(temperature=0.7), [result.run.data.seed])
    return replace_control_characters(_PROMPT + "".join(text for _, text in stream))


def _report(root: RootBlock, result: TrainingResult, comparison: Comparison | None, sample: str) -> str:
    directory = _short(result.directory)
    lines = ["", "a sample:", *(f"  | {line}" for line in sample.splitlines()), ""]
    if comparison is not None:
        lines += [
            f"bits per byte on {comparison.bytes:,} held-out bytes:",
            f"  {comparison.model:6.3f}  this model after {pluralize(result.step, 'step')}",
            f"  {comparison.xz:6.3f}  xz -9e of these bytes",
            f"  {comparison.unigram:6.3f}  byte frequencies of the training text (unigram)",
        ]
        if comparison.model >= comparison.unigram:
            lines.append("the model is no better than byte frequencies: give it more time, --seconds 300")
        lines.append("")
    # `stoker` is not on the PATH after `python -m stoker` in an environment that is not activated.
    command = "stoker" if shutil.which("stoker") else f"{shlex.quote(sys.executable)} -m stoker"
    quoted, text = shlex.quote(directory), shlex.quote(argparse.__file__)
    lines += [
        f"run directory {directory}: checkpoints/, metrics.jsonl, run.log, quickstart.json"
        + (", report.html" if root.exp_manager.create_report else "")
        + (", tensorboard/" if root.exp_manager.create_tensorboard_logger else ""),
        "",
        "next:",
        f"  {command} generate --checkpoint {quoted} --prompt 'def main('",
        f"  {command} evaluate --checkpoint {quoted} --split {'validation' if result.data.test is None else 'test'}",
        f"  {command} quickstart --seconds 600",
        f"  {command} train data=text model.data.path={text} trainer.max_steps=200  # or any text file or folder",
        f"  {command} config model=gpt_125m",
    ]
    return "\n".join(lines)


def _write(result: TrainingResult, pace: StepTiming, comparison: Comparison | None) -> None:
    document = {
        "steps": result.step,
        "stopped_by": result.stop_reason,
        "step_seconds": pace.step_seconds,
        "threads": pace.threads,
        "data": result.data.fingerprint,
        "bits_per_byte": asdict(comparison) if comparison else None,
    }
    atomic_write(result.directory / "quickstart.json", (json.dumps(document, indent=2) + "\n").encode())


def _load(experiment: str, overrides: Sequence[str]) -> RunConfig:
    from ..config.load import load_run_config

    chosen = any(re.match(r"\+{0,2}experiment=", word) for word in overrides)
    return load_run_config(overrides=[*([] if chosen else [f"experiment={experiment}"]), *overrides])


def _directory_overrides(path: str | None) -> list[str]:
    if path is None:
        return []
    # In Hydra's quoted strings backslashes are special only before a quote, where they must be doubled.
    quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), path)
    return [f"exp_manager.explicit_log_dir='{quoted}'"]


def _length_overrides(config: RunConfig, pace: StepTiming, seconds: float) -> list[str]:
    """Return overrides with which the run ends within `seconds`, measuring and validation included.

    A validation step counts as a third of a training step (forward only). Overrides of the user are kept.
    """
    limit = config.root.trainer.limit_val_batches
    validation_steps = _NUM_VALIDATIONS * (limit if isinstance(limit, int) else 0) / 3
    steps = max(_NUM_VALIDATIONS, round(seconds * (1 - _MEASURING_FRACTION) / pace.step_seconds - validation_steps))
    # A time limit ends the run on a machine that stalls; a slower one shortens it (`callbacks/step_limit.py`).
    latest = round(2 * seconds) + 30
    values = {
        "trainer.max_steps": steps,
        "trainer.val_check_interval": -(-steps // _NUM_VALIDATIONS),
        "trainer.log_every_n_steps": -(-steps // 20),
        "trainer.max_time": f"'{format_days(latest)}'",
    }
    typed = {path for path, origin in config.origins.items() if origin.kind == "override"}
    return [f"{path}={value}" for path, value in values.items() if path not in typed]


def _describe_pace(pace: StepTiming) -> str:
    text = f"{pace.step_seconds * 1e3:.1f} ms per step"
    if not pace.seconds_by_threads:
        return text
    others = ", ".join(f"{n}: {s * 1e3:.1f} ms" for n, s in pace.seconds_by_threads.items() if n != pace.threads)
    return f"{text} with {pluralize(pace.threads, 'thread')}" + (f" ({others})" if others else "")


def _describe_data(config: RunConfig) -> str:
    data = config.root.model.data
    match data.data_impl:
        case "pystd":
            return "the source code of this Python's standard library"
        case "text":
            return f"the text in {data.path}"
        case "mock":
            return "random tokens"
        case other:
            return f"the tokens of {other}"


def _print_findings(config: RunConfig) -> None:
    from ..config.render import finding_lines

    for line in finding_lines(config.findings):
        print(line)


def _short(path: Path) -> str:
    """Return the path relative to the current directory if it is below it."""
    cwd = Path.cwd()
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)
