"""Measured timeline of a pipeline: the passes of one step, drawn in the run directory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ...models.parallel.schedule import PipelineEvent
from ..distributed.pipeline import Pipeline
from ..distributed.process_group import DistributedContext
from ..loggers.pipeline_timeline import TIMELINE_NAME, draw_timeline, write_timeline
from ..utils.async_host_copy import DeviceTimestamp
from .profiler import Profiler

_STEP = 3
"""Step of the process that is drawn: later than those that compile and warm up."""


class PipelineTimer(Profiler):
    """Measure the passes of a step on all stages of a pipeline, and draw them; a collective of its ranks.

    Args:
        pipeline: the stages of this rank.
        ranks: ranks of the pipeline.
        device: device of this rank.
        directory: run directory, on the rank that draws; None on others.
        log: logs a line.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        ranks: DistributedContext,
        device: torch.device,
        directory: Path | None,
        log: Callable[[str], None],
    ) -> None:
        self._pipeline = pipeline
        self._ranks = ranks
        self._device = device
        self._directory = directory
        self._log = log
        self._begin: DeviceTimestamp | None = None

    def on_step_start(self, step: int) -> None:
        """Start the clocks of all ranks together."""
        if step == _STEP:
            before = time.perf_counter()
            self._ranks.barrier()
            self._begin = DeviceTimestamp(self._device, 0.0)
            self._pipeline.passes = []
            self.overhead_seconds += time.perf_counter() - before

    def on_step_end(self, step: int) -> None:
        """Gather the passes and draw them."""
        passes, begin = self._pipeline.passes, self._begin
        if passes is None or begin is None:
            return
        self._pipeline.passes = None
        before = time.perf_counter()
        rows = [
            (each.stage, each.micro_batch, each.kind, each.start.seconds_since(begin), each.end.seconds_since(begin))
            for each in passes
        ]
        events = [
            PipelineEvent(*row) for text in self._ranks.all_gather_text(json.dumps(rows)) for row in json.loads(text)
        ]
        self.overhead_seconds += time.perf_counter() - before
        if self._directory is not None:
            path = self._directory / TIMELINE_NAME
            write_timeline(path, draw_timeline(events, self._ranks.world_size, f"measured step {step} of this process"))
            self._log(f"timeline of step {step} of this process: {path}")
