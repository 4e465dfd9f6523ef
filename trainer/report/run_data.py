"""Read a run directory, of this or an older version, finished, running or killed: what its files hold, if valid."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..loggers.pipeline_timeline import TIMELINE_NAME
from ..loggers.run_events import read_events
from ..utils.errors import UserError
from ..utils.owned_files import open_owned, read_owned_text
from .curves import Curve
from .public_text import PublicText

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

CONFIG_FILE, METRICS_FILE = "config.resolved.json", "metrics.jsonl"
RECORD_FILE = "report.json"
"""Data that the page shows and no other file of the run holds: plan, attention, origins, sample."""
_MAX_METRICS = 400
_MAX_WARNINGS = 200


@dataclass(slots=True)
class RunData:
    """Contents of the files of a run directory; empty where a file is missing or damaged.

    Attributes:
        document: the configuration.
        environment: environment.json.
        record: report.json.
        events: the events by time.
        curves: metrics by name.
        times: times of the first and the last metrics of each start, in seconds since the epoch.
        warnings: from run.log, each once.
        expert_load: expert_load.json.
        timeline: the drawn step of a pipeline, SVG.
        running: a process trains in the directory.
        public: makes texts of the run fit to be shown.
    """

    directory: Path
    document: dict[str, Any]
    environment: dict[str, Any]
    record: dict[str, Any]
    events: list[dict[str, Any]]
    running: bool
    curves: dict[str, Curve] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    expert_load: dict[str, Any] = field(default_factory=dict)
    timeline: str = ""
    public: PublicText = field(default_factory=PublicText)

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.public(str(self.document.get("name") or self.directory.name), 120)

    @property
    def last_step(self) -> int:
        """The last step with metrics; 0 without any."""
        return max((curve.steps[-1] for curve in self.curves.values() if curve.steps), default=0)

    def value(self, path: str) -> Any:
        """Return the value of a key of the configuration, or None."""
        node: Any = self.document
        for part in path.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    def outcome(self) -> str:
        """Return how the run ended, or that it is running."""
        last: dict[str, Any] = {}
        is_refused = False
        for event in self.events:
            if event["event"] == "start" or (event["event"] == "refused" and not last):
                is_refused, last = False, event
            elif event["event"] == "refused":  # with what the agents write of it, until the next start
                is_refused = True
            elif event["event"] in ("end", "stop", "error", "failure") and not is_refused:
                last = event
        step = f" after step {last['step']:,}" if isinstance(last.get("step"), int) else ""
        match last.get("event"):
            case "end" if last.get("exit_code") == 0:
                return f"finished{step}"
            case "stop":
                return self.public(f"stopped by {last.get('reason')}{step}")
            case "error" | "failure" | "end" | "refused":
                reason = last.get("reason") or f"exit code {last.get('exit_code')}"
                return self.public(f"failed{step}: {reason}")
        if failure := self.record.get("failure"):
            return self.public(f"failed: {failure}")
        if self.running:
            return f"running, step {self.last_step:,}"
        return f"ended without a record of how, at step {self.last_step:,} or later"

    def seconds(self) -> float:
        """Return the time from the start to the last sign of life of each start, added up."""
        starts = [event["time"] for event in self.events if event["event"] == "start"] or self.times[:1]
        signs = sorted([*self.times, *(event["time"] for event in self.events)])
        total = 0.0
        for start, end in zip(starts, [*starts[1:], math.inf], strict=False):
            total += max((sign for sign in signs if start <= sign < end), default=start) - start
        return total


def is_run_directory(path: Path) -> bool:
    """Return True for the directory of a run that has started."""
    return path.is_dir() and any((path / name).is_file() for name in (CONFIG_FILE, METRICS_FILE))


def read_run(directory: Path) -> RunData:
    """Read a run directory.

    Raises:
        UserError: it is none.
    """
    if not is_run_directory(directory):
        what = f"it holds neither {CONFIG_FILE} nor {METRICS_FILE}" if directory.is_dir() else "there is no such folder"
        raise UserError(f"{directory} is not the directory of a run: {what}")
    run = RunData(
        directory=directory.resolve(),
        document=_read_json(directory, CONFIG_FILE),
        environment=_read_json(directory, "environment.json"),
        record=_read_json(directory, RECORD_FILE),
        events=[event for event in read_events(directory) if isinstance(event.get("event"), str) and _is_time(event)],
        running=_is_locked(directory),
        expert_load=_read_json(directory, "expert_load.json"),
        timeline=_read_text(directory, TIMELINE_NAME),
    )
    run.public = PublicText(_hosts(run), _folders(run))
    _read_metrics(run)
    _read_warnings(run)
    return run


def _read_metrics(run: RunData) -> None:
    for row in _lines(run.directory, METRICS_FILE):
        with suppress(ValueError, RecursionError, OverflowError):
            values = json.loads(row)
            if not isinstance(values, dict) or not isinstance(step := values.pop("step", None), int):
                continue
            run.times += [values["time"]] if _is_time(values) else []
            values.pop("time", None)
            for name, value in values.items():
                is_known = name in run.curves or len(run.curves) < _MAX_METRICS
                if is_known and (value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))):
                    run.curves.setdefault(name, Curve()).add(step, value)


def _is_time(row: Mapping[str, Any]) -> bool:
    moment = row.get("time")
    return isinstance(moment, (int, float)) and 0 <= moment < 1 << 40


def _read_warnings(run: RunData) -> None:
    found: dict[str, None] = {}
    for line in _lines(run.directory, "run.log"):
        text = line.rstrip("\n")[20:]  # after the time
        if text.startswith("warning: ") and len(found) < _MAX_WARNINGS:
            found.setdefault(run.public(text.removeprefix("warning: ")))
    run.warnings = list(found)


def _hosts(run: RunData) -> Iterator[str]:
    processes = run.environment.get("processes")
    for holder in [*(processes if isinstance(processes, list) else []), *run.events]:
        if isinstance(holder, dict):
            hosts = holder.get("hosts")
            yield from (str(name) for name in [holder.get("host"), *(hosts if isinstance(hosts, list) else [])] if name)


def _folders(run: RunData) -> Iterator[Path]:
    project = run.environment.get("project")
    keys = ("exp_manager.explicit_log_dir", "exp_manager.exp_dir", "model.data.path")
    texts = [project.get("directory") if isinstance(project, dict) else None, *map(run.value, keys)]
    texts += [os.path.expanduser("~"), os.getcwd()]
    found = [run.directory, *(Path(text) for text in texts if isinstance(text, str))]
    yield from (path for path in found if path.is_absolute())


def _lines(directory: Path, name: str) -> Iterator[str]:
    """Yield the lines of a file, none if it is missing, a link or not readable."""
    with suppress(OSError, UserError):
        file = open_owned(directory, name, os.O_RDONLY)
        with os.fdopen(file, encoding="utf-8", errors="replace") as lines:
            yield from lines


def _read_text(directory: Path, name: str) -> str:
    with suppress(OSError, UserError):
        return read_owned_text(directory, name)
    return ""


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        document = json.loads(_read_text(directory, name) or "{}")
        return document if isinstance(document, dict) else {}
    return {}


def _is_locked(directory: Path) -> bool:
    """Return True if another process trains in a run directory."""
    if fcntl is None:
        return False
    with suppress(OSError, UserError):
        file = open_owned(directory, "run.lock", os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
    return False
