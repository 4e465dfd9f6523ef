"""Training steps in fp8 beside bf16 and torchtitan's fp8; see `rounds.py` for the method.

    python scripts/bench/fp8_step.py [--model gpt moe] [--rounds 3] [--only stoker torchtitan_fp8 ...] [--seconds 500]
        [--results FILE.jsonl]

`gpt` is `experiment=llama_1b_bench`, `moe` is `experiment=moe_bench`. torchtitan (`parallel_peers.py`) has linears of
torchao with tensorwise scales, compiled layers and pure bf16 weights and moments; stoker keeps both in fp32 unless the
name says pure. Heads are in bf16 in all.
"""

from __future__ import annotations

import statistics

from parallel import CASES
from parallel_peers import run_peer
from rounds import Length, Row, machine, run_benchmark, stoker_result

FP8 = ["model.fp8=true"]
PURE = ["trainer.precision=bf16-true"]
RUNS = {
    "stoker": ("stoker, fp8 tensorwise", FP8),
    "rowwise": ("stoker, fp8 rowwise", [*FP8, "model.fp8_recipe=rowwise"]),
    "pure": ("stoker, fp8 tensorwise, pure bf16 weights", [*FP8, *PURE]),
    "bf16": ("stoker, bf16", []),
    "pure_bf16": ("stoker, pure bf16", PURE),
}
PEERS = {"torchtitan_fp8": "torchtitan, fp8 tensorwise, pure bf16 weights"}
TITLES = {name: title for name, (title, _) in RUNS.items()} | PEERS
MODELS = {"gpt": CASES["fsdp"], "moe": CASES["moe"]}
LENGTH = Length(warm_up=10, windows=4, window=10)


def measure(name: str, model: str) -> Row:
    """Run one contender on one GPU, in this process."""
    case = MODELS[model]
    tokens = case.tokens_per_step(1)
    if name in RUNS:
        return stoker_result(name, [f"experiment={case.work.experiment}", *RUNS[name][1]], LENGTH, tokens)
    found = run_peer(name, case, 1)
    speed = tokens / statistics.median(found["seconds"])
    return {"peer": name, **found, "tokens_per_second": speed, **machine()}


def contenders(model: str) -> list[str]:
    """Return who runs a model: torchtitan's linears in fp8 are no experts."""
    return [name for name in TITLES if model == "gpt" or name not in PEERS]


if __name__ == "__main__":
    run_benchmark(
        __file__,
        __doc__,
        TITLES,
        measure,
        lambda model: [f"fp8_step_{model}"],
        option="--model",
        cases=list(MODELS),
        chosen=contenders,
    )
