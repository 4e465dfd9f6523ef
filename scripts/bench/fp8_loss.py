"""Training loss of a 125 M model in fp8 and fp16 beside bf16: same initial weights, same samples, 2,000 steps each.

    python scripts/bench/fp8_loss.py [--steps 2000] [--seeds 1 2 3] [--only bf16 tensorwise ...] [--seconds 570]
        [--results docs/results/fp8_loss.jsonl]

The text is the Python code that is installed beside the running Python, tokenized by a BPE trained on it, so that no
network is needed. The gap of a run is that of its mean loss over the last tenth of the steps, relative to bf16's of the
same seed, over the same samples. One pair of runs says little: rounding of any kind moves a run to another course, so
gaps are means over seeds, with the smallest and the largest. `bf16 other kernels` is bf16 with another attention
backend: how far runs drift apart by rounding alone. A run of the same steps and seed that is in the results file is not
run again; rows hold the mean loss of each hundredth of the steps. Runs through TransformerEngine fail where it is not
installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from rounds import append_row, machine, print_tables, read_rows

MODEL = [
    *("model=gpt_125m", "data=mmap", "trainer=gpu", "model.encoder_seq_length=1024"),
    *("model.micro_batch_size=16", "model.global_batch_size=16", "model.optim.lr=3e-4"),
    *("model.optim.sched.warmup_steps=200", "trainer.limit_val_batches=0", "trainer.log_every_n_steps=1"),
    *("exp_manager.create_checkpoint_callback=false", "exp_manager.create_report=false"),
    *("exp_manager.create_tensorboard_logger=false", "trainer.enable_progress_bar=false"),
]
FP8 = ["trainer.precision=bf16", "model.fp8=true"]
RUNS = {
    "bf16": ["trainer.precision=bf16"],
    "tensorwise": [*FP8, "model.fp8_recipe=tensorwise"],
    "rowwise": [*FP8, "model.fp8_recipe=rowwise"],
    "blockwise": [*FP8, "model.fp8_recipe=blockwise"],
    "delayed": [*FP8, "model.fp8_recipe=delayed", "model.transformer_engine=true"],
    "tensorwise TE": [*FP8, "model.fp8_recipe=tensorwise", "model.transformer_engine=true"],
    "blockwise TE": [*FP8, "model.fp8_recipe=blockwise", "model.transformer_engine=true"],
    "fp16": ["trainer.precision=16", "model.native_amp_init_scale=65536"],
    "bf16 other kernels": ["trainer.precision=bf16", "model.attention_backend=triton"],
    "tensorwise e4m3": [*FP8, "model.fp8_recipe=tensorwise", "model.fp8_e4m3=true"],
}
LAST = 0.1
"""Part of the steps whose mean losses are compared."""


VOCABULARY, TEXT_BYTES = 16384, 200_000_000


def prepare(directory: Path) -> list[str]:
    """Tokenize the installed Python code; return the keys that read it."""
    text, size = directory / "code.jsonl", 0
    with text.open("w") as file:
        for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
            code = path.read_text(errors="replace")
            size += len(code)
            if size > TEXT_BYTES:
                break
            file.write(json.dumps({"text": code}) + "\n")
    prefix = directory / "code"
    command = [sys.executable, "-m", "stoker", "preprocess", str(text), "--output-prefix", str(prefix)]
    subprocess.run([*command, "--train-tokenizer", str(VOCABULARY)], check=True, capture_output=True)
    return [
        *(f"model.data.data_prefix={prefix}", "model.tokenizer.library=huggingface"),
        f"model.tokenizer.type={prefix}-tokenizer.json",
    ]


def train(name: str, seed: int, steps: int, overrides: list[str], until: float) -> dict[str, Any]:
    """Train in a process of its own; return its losses, or why it failed."""
    with tempfile.TemporaryDirectory() as directory:
        more = [f"trainer.max_steps={steps}", f"model.optim.sched.max_steps={steps}", f"model.seed={seed}"]
        command = [sys.executable, "-m", "stoker", "train", *MODEL, *RUNS[name], *more, *overrides]
        command.append(f"exp_manager.explicit_log_dir={directory}/run")
        started, row = time.monotonic(), {"run": name, "seed": seed, "steps": steps}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=max(1.0, until - started), check=False
            )
        except subprocess.TimeoutExpired:
            return row | {"refused": "not done in time"}
        if done.returncode:
            reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
            return row | {"refused": " / ".join(reason)[:300]}
        lines = [json.loads(line) for line in (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()]
        log = (Path(directory) / "run" / "run.log").read_text()
    device = log.partition("device ")[2].partition(",")[0].splitlines()[0]
    losses = [line["loss"] for line in lines if "loss" in line]
    size = max(1, len(losses) // 100)
    means = [round(statistics.mean(losses[first : first + size]), 5) for first in range(0, len(losses), size)]
    skipped = max((line.get("skipped_steps", 0) for line in lines), default=0)
    row |= machine() | {"device": device, "losses": means, "skipped_steps": skipped}
    return row | {"seconds": round(time.monotonic() - started, 1)}


def last_loss(row: dict[str, Any]) -> float:
    """Return the mean loss of the last part of a run."""
    return statistics.mean(row["losses"][-round(LAST * len(row["losses"])) :])


def main() -> None:
    """Run what is missing in the results file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seconds", type=float, default=570.0, help="start no run that would be cut off")
    parser.add_argument("--results", type=Path, default=Path("docs/results/fp8_loss.jsonl"))
    parser.add_argument("overrides", nargs="*", help="further keys, as for a trial on a CPU")
    args = parser.parse_args()
    path, until = args.results, time.monotonic() + args.seconds
    done = {(row["run"], row["seed"]) for row in read_rows(path) if row["steps"] == args.steps and "losses" in row}
    with tempfile.TemporaryDirectory() as directory:
        missing = [(name, seed) for seed in args.seeds for name in args.only if (name, seed) not in done]
        keys = prepare(Path(directory)) if missing else []
        for name, seed in missing:
            if time.monotonic() > until:
                break
            row = train(name, seed, args.steps, [*keys, *args.overrides], until)
            append_row(path, row)
            print(f"{name}, seed {seed}: {row.get('refused', 'done')}", file=sys.stderr, flush=True)
    print_tables(["fp8_loss"], path)


if __name__ == "__main__":
    main()
