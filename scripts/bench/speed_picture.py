"""Draw docs/speed.svg: training throughput of stoker relative to the fastest peer of each table in docs/results.

    python scripts/bench/speed_picture.py [--out docs/speed.svg]

Rows of one benchmark with the newest date and device are compared by the median of their rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
BARS = (
    ("GPT 1.2 B, sequence 4096", "training_step.jsonl", None),
    ("MoE 1.5 B, 8 experts top-2", "moe_step.jsonl", None),
    ("T5 base, 512 / 114 tokens", "t5_step.jsonl", "short"),
    ("T5 base, 2048 / 512 tokens", "t5_step.jsonl", "long"),
)
"""Title, file of results, and shape."""


def speed_up(file: str, shape: str | None) -> tuple[float, str]:
    """Return tokens per second over those of the fastest peer, and the device and date of the run."""
    rows = [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]
    rows = [row for row in rows if row.get("shape") == shape and row.get("tokens_per_second")]
    newest = max(row["date"] for row in rows if row["peer"] == "stoker")
    rates: dict[str, list[float]] = {}
    for row in rows:
        if row["date"] == newest:
            rates.setdefault(row["peer"], []).append(row["tokens_per_second"])
    medians = {peer: statistics.median(values) for peer, values in rates.items()}
    peers = [rate for peer, rate in medians.items() if not peer.startswith("stoker")]
    device = next(row["device"] for row in rows if row["date"] == newest)
    return medians["stoker"] / max(peers), f"{device}, {newest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS.parent / "speed.svg")
    arguments = parser.parse_args()
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "stoker"  # the same file for the same figures
    from matplotlib import pyplot as plt

    figure: Any
    axes: Any
    figure, axes = plt.subplots(figsize=(7.5, 2.6))
    for place, (title, file, shape) in enumerate(reversed(BARS)):
        ratio, run = speed_up(file, shape)
        axes.barh(place, ratio, color="#4477aa")
        axes.text(ratio + 0.03, place, f"{ratio:.2f}x  ({run})", va="center", fontsize=8)
        axes.text(0.03, place, title, va="center", fontsize=8, color="white")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.text(1.0, len(BARS) - 0.42, "fastest peer", ha="center", fontsize=8)
    axes.set_yticks([])
    axes.set_xlim(0, 6)
    axes.set_xlabel("training throughput, tokens per second relative to the fastest peer of the same run")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(arguments.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
