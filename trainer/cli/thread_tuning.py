"""Measure the step time of a configuration on this machine, and tune the number of CPU threads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...models.build import LanguageModel
from ..config.resolved_run import ResolvedRun
from ..core.run_checks import choose_attention
from ..core.training_state import build_model, build_optimizer
from ..data.build_datasets import Data
from ..data.dataloader import GlobalBatch
from ..data.datasets.samples import batch_tensors
from ..device.precision import autocast_context
from ..plan.memory_check import check_memory

_WARM_UP_STEPS = 3
_MIN_STEPS = 3
_MAX_TIME_RATIO = 0.9
_TOO_SLOW = 5.0
"""Slowdown of the first step beyond which a number of threads is not measured further (oversubscribed machines)."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Measured step time and number of threads.

    Attributes:
        step_seconds: step time with `threads`.
        threads: the number of CPU threads to train with.
        seconds_by_threads: seconds per step by number of threads, of all that were tried; empty on other devices than
            a CPU.
    """

    step_seconds: float
    threads: int
    seconds_by_threads: dict[int, float]


def measure_step_time(
    run: ResolvedRun, data: Data, device: torch.device, seconds: float
) -> tuple[StepTiming, LanguageModel]:
    """Train a throw-away model for about `seconds`, not counting compilation.

    On a CPU this sets the number of threads of the process to the fastest.

    Returns:
        The measurement, and the model, trained for a few steps.
    """
    model, step = _build_step(run, data, device)
    if device.type == "cpu":
        return tune_num_threads(step, seconds), model
    for _ in range(_WARM_UP_STEPS):
        step()
    return StepTiming(median_step_time(step, seconds), torch.get_num_threads(), {}), model


def tune_num_threads(step: Callable[[], None], seconds: float) -> StepTiming:
    """Find and set the fastest number of CPU threads, from one up to torch's default.

    A small model trains faster with few threads on a busy machine or one with many cores. The number is doubled as long
    as that saves at least a tenth of the time.
    """
    candidates = [torch.get_num_threads()]
    while candidates[0] > 1:
        candidates.insert(0, candidates[0] // 2)
    best = 1
    tried: dict[int, float] = {}
    for threads in candidates:
        torch.set_num_threads(threads)
        warm = min(median_step_time(step, 0.0, min_steps=1) for _ in range(_WARM_UP_STEPS if threads == 1 else 1))
        too_slow = threads > 1 and warm > _TOO_SLOW * tried[best]
        tried[threads] = warm if too_slow else median_step_time(step, seconds / len(candidates))
        if threads > 1 and tried[threads] > _MAX_TIME_RATIO * tried[best]:
            break
        best = threads
    torch.set_num_threads(best)
    return StepTiming(tried[best], best, tried)


def median_step_time(step: Callable[[], None], seconds: float, min_steps: int = _MIN_STEPS) -> float:
    """Return the median step time in seconds, over at least `min_steps` steps and `seconds`."""
    times: list[float] = []
    start = last = time.perf_counter()
    while len(times) < min_steps or last - start < seconds:
        step()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return statistics.median(times)


def _build_step(run: ResolvedRun, data: Data, device: torch.device) -> tuple[LanguageModel, Callable[[], None]]:
    """Return a model, and a function that runs one synchronized optimizer step on it as training does."""
    keys, model_plan = run.model, choose_attention(run, device)
    check_memory(run, device, model_plan)
    model = build_model(run, data.vocab_size, device, model_plan)
    optimizer = build_optimizer(run, model)
    model.train()

    def step() -> None:
        fields = batch_tensors(data.train.batch(0, keys.global_batch_size))
        numbers = tuple(range(keys.global_batch_size // keys.micro_batch_size))
        batch = GlobalBatch.from_fields(numbers, fields).to(device)
        for _, fields in batch.micro_batches():
            with autocast_context(run.precision, device):
                loss = model.batch_loss(fields, batch.num_targets)
            loss.backward()
            if keys.global_batch_size > keys.micro_batch_size:
                optimizer.accumulate()
        optimizer.step()
        # Synchronize, or the host clock would count steps that are only launched.
        _synchronize(device)

    return model, step


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
