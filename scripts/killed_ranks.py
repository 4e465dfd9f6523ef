"""Ranks that die or hang while they communicate, in every layout: found in time, named in a line, and no bit lost.

    python scripts/killed_ranks.py --kills 10 --report killed_ranks.json

For each layout two ranks, on two GPUs with NCCL or else on gloo, train a small GPT. At random instants a rank is
killed, once one is stopped (SIGSTOP), and `trainer.max_restarts` starts them again. The report has the seconds until
the failure is in events.jsonl and until the first new step, what the run wrote beside its own lines, and whether the
final weights are those of a run without failures. Another run has no restarts: it must end with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from unattended import Nodes, difference

EXPERTS = {"model.num_moe_experts": 4, "model.moe_router_topk": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"model.optim.name": "distributed_fused_adam"},
    "fsdp": {"model.fsdp": True},
    "sequence": {"model.tensor_model_parallel_size": 2, "model.sequence_parallel": True},
    "context": {"model.context_parallel_size": 2},
    "pipeline": {"model.pipeline_model_parallel_size": 2},
    "expert": {**EXPERTS, "model.expert_model_parallel_size": 2},
}
STEP_TIMEOUT, PROCESS_TIMEOUT = 8.0, 60.0
KILL_LIMIT = 8.0 + 2.0
"""Seconds to find a killed rank: the grace of the launcher (docs/distributed.md), and slack."""
STOP_LIMIT = STEP_TIMEOUT + 3.0 + 8.0 + 2.0
"""Seconds to find a stopped one: the time-out, the others' stack traces, the grace, and slack."""
KEYS = {
    "trainer.devices": 2,
    "trainer.max_restarts": 9,
    "trainer.step_timeout": STEP_TIMEOUT,
    "trainer.process_timeout": PROCESS_TIMEOUT,
    "trainer.deterministic": True,
    "exp_manager.create_report": False,
    "exp_manager.checkpoint_callback_params.every_n_train_steps": 10,
    "model.compile": False,
    "model.num_layers": 2,
    "model.hidden_size": 64,
    "model.ffn_hidden_size": 128,
    "model.num_attention_heads": 4,
    "model.encoder_seq_length": 64,
    "model.micro_batch_size": 1,
    "model.global_batch_size": 8,
}
ON_GPUS = {
    "trainer.accelerator": "gpu",
    "trainer.precision": "bf16-mixed",
    "model.global_batch_size": 32,
    "model.hidden_size": 256,
    "model.ffn_hidden_size": 512,
    "model.encoder_seq_length": 256,
}
ENDING = {
    signal.SIGKILL: {"trainer.max_restarts": 0},
    signal.SIGSTOP: {"trainer.max_restarts": 0, "trainer.step_timeout": "null", "trainer.process_timeout": 10},
}
"""Keys of runs without restarts; a stopped rank is then found by the collectives alone."""
NAMED = r"rank {rank} \({place}process {process}\) {words} after step [\d,]+(; the run was ended)?"
WORDS = {
    signal.SIGKILL: r"was killed by SIGKILL",
    signal.SIGSTOP: r"was stopped \(SIGSTOP\) and did not respond",
}
OWN_LINES = r"rank \d|restarting from the newest checkpoint|stopped by SIGTERM|note: |warning: "


def named(line: str, rank: int, process: int, act: signal.Signals) -> bool:
    """Return True if a line tells what happened to which rank."""
    return re.fullmatch(NAMED.format(rank=rank, place="(.*, )?", process=process, words=WORDS[act]), line) is not None


def fail(nodes: Nodes, chance: random.Random, act: signal.Signals) -> dict[str, Any]:
    """Send a signal to a rank at a random instant, and wait for the first new step; return the figures."""
    time.sleep(chance.uniform(0.1, 2.0))
    rank, process = chance.choice(sorted(nodes.ranks().items()))
    starts, failures, seen, at = len(nodes.events("start")), len(nodes.events("failure")), nodes.step(), time.time()
    os.kill(process, act)
    nodes.until(lambda: len(nodes.events("failure")) > failures, 90)
    failure = nodes.events("failure")[-1]
    nodes.until(lambda: len(nodes.events("start")) > starts, 90)
    nodes.until(lambda: nodes.step() > max(seen, failure["step"]), 90)
    problems = [] if named(failure["reason"], rank, process, act) else [failure["reason"]]
    found = failure["time"] - at
    if found > (KILL_LIMIT if act == signal.SIGKILL else STOP_LIMIT):
        problems.append(f"rank {rank} was missed after {found:.1f} s")
    return {"found": round(found, 2), "new step": round(time.time() - at, 1), "problems": problems}


def broken_run(place: Path, name: str, keys: dict[str, Any], kills: int, ends: float) -> dict[str, Any]:
    """Let the ranks of a layout fail until a time, then train as many steps without a failure; return the report."""
    chance, runs = random.Random(name), [place / "broken" / "run", place / "peace" / "run"]
    acts = [signal.SIGKILL] * kills
    acts.insert(1, signal.SIGSTOP)
    with Nodes(place / "broken", runs[0], 0.0, 1, **keys) as nodes:
        nodes.until(lambda: nodes.step() > 0)
        failures = [fail(nodes, chance, act) for act in acts if time.monotonic() < ends]
        codes, (last,) = nodes.stop(), [event["step"] for event in nodes.events("stop")[-1:]]
        error = (place / "broken" / "node0" / "err").read_text()
    peace = {"trainer.max_steps": last, "exp_manager.checkpoint_callback_params.every_n_train_steps": 10 * last}
    with Nodes(place / "peace", runs[1], 0.0, 1, **(keys | peace)) as nodes:
        codes.append(nodes.agents[0].wait(120))
    problems = [problem for failure in failures for problem in failure["problems"]]
    problems += [] if codes == [143, 0] else [f"exit codes {codes}"]
    missing = difference(*(run / "checkpoints" / f"step-{last}" for run in runs))
    problems += [f"weights differ by {missing}"] if missing else []
    return {
        "steps": last,
        "kills": len(failures) - 1,
        "seconds until found": [failure["found"] for failure in failures],
        "seconds until the first new step": [failure["new step"] for failure in failures],
        "other lines": [line[:200] for line in error.splitlines() if not re.match(OWN_LINES, line)][:20],
        "problems": problems,
    }


def ended_run(place: Path, keys: dict[str, Any], act: signal.Signals) -> dict[str, Any]:
    """Let a rank of a run without restarts fail; return the report."""
    with Nodes(place, place / "run", 0.0, 1, **(keys | ENDING[act])) as nodes:
        nodes.until(lambda: nodes.step() > 5)
        process, at = nodes.ranks()[1], time.time()
        os.kill(process, act)
        code, seconds = nodes.agents[0].wait(90), time.time() - at
    lines = (place / "node0" / "err").read_text().splitlines()
    is_good = code == 1 and named(lines[-1], 1, process, act)
    problems = [] if is_good else [f"exit code {code}, and it said: {lines[-3:]}"]
    others = [line[:200] for line in lines if not re.match(OWN_LINES, line)][:20]
    return {"seconds": round(seconds, 1), "other lines": others, "problems": problems}


def report_of(place: Path, name: str, kind: str, kills: int, ends: float, common: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a run of a layout, in which an error of this script is a problem too."""
    keys = common | LAYOUTS[name]
    try:
        if kind == "restarts":
            report = broken_run(place, name, keys, kills, ends)
        else:
            report = ended_run(place, keys, getattr(signal, kind))
    except Exception as error:
        report = {"problems": [f"{type(error).__name__}: {str(error)[-3000:]}"]}
    print(f"{name}, {kind}: {json.dumps(report)}", flush=True)
    return report


def main() -> None:
    """Run it and print the report; exit with 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--kills", type=int, default=10, help="of each layout, beside one SIGSTOP")
    parser.add_argument("--seconds", type=float, default=1200, help="after which no rank is killed any more")
    parser.add_argument("--together", type=int, default=1, help="runs at the same time")
    parser.add_argument("--report", type=Path, help="JSON file")
    args = parser.parse_args()
    common = KEYS | (ON_GPUS if torch.cuda.device_count() > 1 else {})
    place = Path(tempfile.mkdtemp(prefix="killed-"))
    jobs = [(name, "restarts") for name in args.layouts]
    jobs += [(name, kind) for kind in ("SIGKILL", "SIGSTOP") for name in args.layouts]
    ends = time.monotonic() + args.seconds
    with ThreadPoolExecutor(args.together) as pool:
        futures = {
            f"{name}, {kind}": pool.submit(report_of, place / f"{name}-{kind}", name, kind, args.kills, ends, common)
            for name, kind in jobs
        }
    reports = {name: future.result() for name, future in futures.items()}
    if args.report:
        args.report.write_text(json.dumps(reports, indent=2) + "\n")
    failed = [name for name, report in reports.items() if report["problems"]]
    print(f"{len(jobs) - len(failed)} of {len(jobs)} runs as promised; not: {failed}; their files are in {place}")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
