"""Training-step benchmark of T5: `experiment=t5_bench` (v1.1 base) and its peers; see `rounds.py` for the method.

    python scripts/bench/t5_step.py [--shape short long] [--rounds 3] [--only stoker nano_t5 ...] [--seconds 500]
        [--results FILE.jsonl]

`short`: 512 tokens for the encoder and 114 for the decoder, micro batch 64; `long`: 2048 and 512, micro batch 16.
Tokens are counted for encoder and decoder together. No padding, no dropout, AdamW, clipping to 1.0. `t5_peers.py` says
where the peers come from.
"""

from __future__ import annotations

from rounds import Length, Row, result, run_benchmark, stoker_result, time_windows
from t5_peers import PEERS, Shape

SHAPES = {"short": Shape(512, 114, 64), "long": Shape(2048, 512, 16)}
LENGTH = Length(warm_up=10, windows=4, window=5)
STOKER: dict[str, tuple[str, list[str]]] = {
    "stoker": ("stoker: `stoker train experiment=t5_bench`", []),
    "stoker_no_graph": ("stoker, `model.enable_cuda_graph=False`", ["model.enable_cuda_graph=False"]),
}
TITLES = {name: title for name, (title, _) in {**STOKER, **PEERS}.items()}


def measure(name: str, case: str) -> Row:
    """Run one contender in this process."""
    shape = SHAPES[case]
    if name in STOKER:
        return stoker_result(name, [*shape.overrides, *STOKER[name][1]], LENGTH, shape.tokens)
    return result(name, time_windows(PEERS[name][1](shape), LENGTH), shape.tokens)


if __name__ == "__main__":
    run_benchmark(__file__, __doc__, TITLES, measure, lambda case: [f"t5_{case}"], option="--shape", cases=list(SHAPES))
