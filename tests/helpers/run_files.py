"""Run directories made of files, without training: with everything that must not reach a page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

HOST, FOLDER, TOKEN = "node17.corp.example", "/home/alice/my runs", "hf_" + "a" * 30
EVIL = "</script><img src=x onerror=alert(1)><!--"


def write_run(directory: Path, *, steps: int = 40, experts: int = 4, metrics: int = 0, **model: Any) -> Path:
    """Write the files of a run of `steps` steps; `metrics` is the number of metrics of its own."""
    directory.mkdir(parents=True)
    document = {
        "name": f"run {EVIL}",
        "trainer": {"max_steps": steps},
        "exp_manager": {"explicit_log_dir": f"{FOLDER}/{directory.name}", "wandb_logger_kwargs": {"entity": None}},
        "model": {"family": "gpt", "hidden_size": 8, "data": {"path": f"{FOLDER}/data.txt"}, **model},
    }
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        own = {f"own_{n}": math.sin(step * (n + 1)) for n in range(metrics)}
        loss = None if step == 7 else 1 / step + 1 / 3
        speed = {"tokens_per_second": 100.0 + step, "mfu": 0.4, "memory_gib": 1.5, "lr": 1e-3, "grad_norm": 10.0 / step}
        rows.append({"step": step, "loss": loss, **speed, **own, "time": 1000.0 + step})
    rows.append({"step": steps, "val_loss": 0.5, "time": 1000.5 + steps})
    events = [
        {"time": 1000.0, "event": "start", "step": 0, "processes": 1, "hosts": [HOST]},
        {"time": 1002.0, "event": "save", "checkpoint": "step-2", "seconds": 0.25},
        {"time": 1001.0 + steps, "event": "end", "step": steps, "exit_code": 0},
    ]
    load = {
        "layers": ["decoder.layers.0.mlp"],
        "experts": [experts],
        "rows": [
            {"first_step": n, "step": n, "tokens": [[n + k for k in range(experts)]]} for n in range(1, min(steps, 256))
        ],
    }
    record = {
        "facts": {"Model": f"gpt of {FOLDER}/x {EVIL}"},
        "mfu_peak": "the dense bf16 peak of a card",
        "keys": [["model.hidden_size", "8", f"{FOLDER}/conf/a.yaml:3"], ["name", EVIL, f"name={EVIL}"]],
        "preset": "gpt_tiny",
        "differences": [["model.hidden_size", "128", "8"]],
        "findings": [f"note: a finding of {FOLDER}/conf"],
        "plan": {
            "peak_at": "loss",
            "parts": {"weights": 2**30},
            "allocated": 2**31,
            "reserved": None,
            "available": None,
        },
        "attention": [
            {
                "kind": "training",
                "call": "cuda, bf16",
                "backend": "triton",
                "notes": ["a note"],
                "rows": [["triton", "flash", True, "chosen"], ["te_flash", "flash", False, "refused because"]],
            }
        ],
        "sample": {"step": steps, "prompt": "Once", "text": f"upon {EVIL}"},
    }
    environment = {
        "device": "cpu",
        "packages": {"torch": "9.9"},
        "processes": [{"host": HOST}],
        "project": {"directory": FOLDER},
    }
    write = {"config.resolved.json": document, "environment.json": environment, "report.json": record}
    for name, value in {**write, "expert_load.json": load}.items():
        (directory / name).write_text(json.dumps(value))
    for name, lines in {"metrics.jsonl": rows, "events.jsonl": events}.items():
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    warning = f"warning: on {HOST}: cannot read {FOLDER}/x with HF_TOKEN={TOKEN}"
    (directory / "run.log").write_text(f"2026-01-01 00:00:00 {warning}\n2026-01-01 00:00:01 {warning}\n")
    (directory / "timeline.svg").write_text(f"<svg xmlns='http://www.w3.org/2000/svg'><title>{FOLDER}</title></svg>")
    return directory
