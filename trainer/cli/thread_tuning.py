"""How fast a configuration trains on this machine, and with how many threads: a few real steps, timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...models.build import LanguageModel
from ..config.schema.root import RootBlock
from ..core.factory import build_model, build_optimizer
from ..data.build_datasets import Data
from ..data.dataloader import GlobalBatch, fields_of
from ..device.precision import plan_precision

_WARM_STEPS = 3
_FEWEST_STEPS = 3
_WORTH_MORE_THREADS = 0.9
_HOPELESS = 5.0
"""A first step this much slower (threads that wait for each other on a busy machine) needs no second one."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What was measured.

    Attributes:
        step_seconds: time of a step with `threads`.
        threads: the number of CPU threads to train with.
        tried: threads to seconds per step, of all that were tried; empty on other devices than a CPU.
    """

    step_seconds: float
    threads: int
    tried: dict[int, float]


def measure_pace(root: RootBlock, data: Data, device: torch.device, seconds: float) -> tuple[Pace, LanguageModel]:
    """Train a throw-away copy of the model for about `seconds`; compilation comes on top.

    On a CPU the number of threads of this process is left at what was found best.

    Returns:
        The pace, and the model, which has been trained a little.
    """
    model, step = _trainable(root, data, device)
    if device.type == "cpu":
        return best_threads(step, seconds), model
    for _ in range(_WARM_STEPS):
        step()
    return Pace(time_of(step, seconds), torch.get_num_threads(), {}), model


def best_threads(step: Callable[[], None], seconds: float) -> Pace:
    """Find how many CPU threads do a step fastest, from one up to torch's own choice, and go on with so many.

    A small model on a busy machine, or on one with many cores, trains faster with few threads. More are taken only
    where they save at least a tenth of the time, and twice as many are tried only after that.
    """
    candidates = [torch.get_num_threads()]
    while candidates[0] > 1:
        candidates.insert(0, candidates[0] // 2)
    best = 1
    tried: dict[int, float] = {}
    for threads in candidates:
        torch.set_num_threads(threads)
        warm = min(time_of(step, 0.0, fewest=1) for _ in range(_WARM_STEPS if threads == 1 else 1))
        hopeless = threads > 1 and warm > _HOPELESS * tried[best]
        tried[threads] = warm if hopeless else time_of(step, seconds / len(candidates))
        if threads > 1 and tried[threads] > _WORTH_MORE_THREADS * tried[best]:
            break
        best = threads
    torch.set_num_threads(best)
    return Pace(tried[best], best, tried)


def time_of(step: Callable[[], None], seconds: float, fewest: int = _FEWEST_STEPS) -> float:
    """Median time of a step in seconds, over at least `fewest` steps and `seconds`."""
    times: list[float] = []
    start = last = time.perf_counter()
    while len(times) < fewest or last - start < seconds:
        step()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return statistics.median(times)


def _trainable(root: RootBlock, data: Data, device: torch.device) -> tuple[LanguageModel, Callable[[], None]]:
    """A model, and a function that does one optimizer step on it as training does, and waits for it."""
    keys = root.model
    precision = plan_precision(root.trainer, keys.megatron_amp_O2, device)
    model = build_model(root, data, precision, device)
    optimizer = build_optimizer(root, model, precision)
    model.train()

    def step() -> None:
        fields = fields_of(data.train.batch(0, keys.global_batch_size))
        numbers = tuple(range(keys.global_batch_size // keys.micro_batch_size))
        batch = GlobalBatch.of(numbers, fields).to(device)
        for _, fields in batch.micro_batches():
            with precision.context(device):
                loss = model.batch_loss(fields, batch.targets)
            loss.backward()
            if keys.global_batch_size > keys.micro_batch_size:
                optimizer.accumulate()
        optimizer.step()
        # The host must not run ahead of the device, or the clock would count steps that are not done.
        _wait(device)

    return model, step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
