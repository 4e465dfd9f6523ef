"""The tables of scripts/bench/attention.py, as markdown."""

from __future__ import annotations

import statistics
from typing import Any

Row = dict[str, Any]
SECTIONS = {
    "plain": "Attention without bias",
    "distance": "`distance_bias` with gradient",
    "lse_first": "LSE-first attention",
    "softmax": "Scaled masked softmax",
    "host": "LSE-first attention over keys in host memory",
    "memory": "`distance_bias` with gradient, one sequence: peak memory",
    "short": "Attention without bias, short sequences",
}


def ratio(row: Row, ours: str, peer: str, what: str) -> float | None:
    """How many times as fast as `peer` we are: the median over the rounds."""
    mine, theirs = (row["ms"].get(name, {}).get(what) for name in (ours, peer))
    if not mine or not theirs:
        return None
    return statistics.median(b / a for a, b in zip(mine, theirs, strict=False))  # slow ones had fewer rounds


def _reason(text: str) -> str:
    """Why a contender did not run, in a few words."""
    return "needs more shared memory than there is" if "out of resource" in text else text[:70]


def _cell(row: Row, name: str, what: str, factor: float) -> str:
    """TFLOP/s of a contender, or a dash."""
    times = row["ms"].get(name, {}).get(what)
    return f"{factor * row['forward_flops'] / statistics.median(times) / 1e9:.0f}" if times else "-"


def attention_table(rows: list[Row]) -> list[str]:
    names = list(dict.fromkeys(n for row in rows for n in [*row["ms"], *row["refused"]]))
    peers = [name for name in names if name != "ours"]
    lines = ["TFLOP/s forward / backward / both; in brackets our speed over that peer's, peak MiB of a step last.", ""]
    lines += ["| shape | ours | " + " | ".join(peers) + " |", "|---" * (len(peers) + 2) + "|"]
    kinds = (("forward", 1.0), ("backward", 2.5), ("both", 3.5))
    for row in rows:
        cells = []
        for name in ["ours", *peers]:
            if name in row["refused"]:
                cells.append(_reason(row["refused"][name]))
                continue
            text = "/".join(_cell(row, name, what, factor) for what, factor in kinds)
            if name != "ours":
                found = [ratio(row, "ours", name, what) for what, _ in kinds]
                text += " (" + "/".join("-" if r is None else f"{r:.2f}" for r in found) + ")"
            cells.append(text + (f" {row['peak_mib'][name]:.0f}" if name in row["peak_mib"] else ""))
        note = "" if row.get("bitwise", True) else ", NOT bitwise repeatable"
        lines.append(f"| {row['shape']}{note} | " + " | ".join(cells) + " |")
    return lines


def lse_table(rows: list[Row]) -> list[str]:
    lines = ["", "| shape | stage 1 / our forward, time | LSE-first / our forward, time |", "|---|---|---|"]
    for row in rows:
        parts = [ratio(row, name, "ours", "forward") for name in ("lse_first stage 1", "lse_first")]
        lines.append(f"| {row['shape']} | " + " | ".join("-" if p is None else f"{1 / p:.2f}" for p in parts) + " |")
    return lines


def host_table(rows: list[Row]) -> list[str]:
    lines = [
        "| keys | ms from the host | ms on the device | ms of the copy alone | peak MiB from the host |",
        "|---" * 5,
    ]
    lines[1] += "|"
    for row in rows:
        times = [
            statistics.median(row["ms"][n]["forward"]) for n in ("from the host", "on the device", "the copy alone")
        ]
        cells = [f"{t:.1f}" for t in times] + [f"{row['peak_mib']['from the host']:.0f}"]
        lines.append(f"| {row['shape']} | " + " | ".join(cells) + " |")
    return lines


def softmax_table(rows: list[Row]) -> list[str]:
    """Bandwidth over that of a copy of `x`: bytes that have to be read and written, by time."""
    names = ("ours", "torch", "torch.compile")
    lines = [
        "Bytes to be read (not what is hidden) and written, by time, over those of a copy; forward / backward.",
        "",
        "| rows of | " + " | ".join(names) + " | error |",
    ]
    lines.append("|---" * 5 + "|")
    for row in rows:
        cells = []
        for name in names:
            times, copied = row["ms"].get(name), statistics.median(row["ms"]["copy"]["forward"])
            if times is None:
                cells.append(row["refused"].get(name, "-"))
            else:
                parts = [row["moved"][w] * copied / statistics.median(times[w]) for w in ("forward", "backward")]
                cells.append(" / ".join(f"{part:.2f}" for part in parts))
        lines.append(f"| {row['shape']} | " + " | ".join(cells) + f" | {row['largest_relative_error']:.1e} |")
    return lines


def report(rows: list[Row]) -> str:
    """Every section that has rows, as markdown."""
    lines = []
    for section, title in SECTIONS.items():
        some = [row for row in rows if row["section"] == section]
        if not some:
            continue
        last = some[-1]
        lines += [
            f"### {title}", "", f"{last['device']}; torch {last['torch']}, cuDNN {last['cudnn']}, triton "
            f"{last['triton']}; {last['date']}; {last['rounds']} rounds.", "",
        ]  # fmt: skip
        tables = {"host": host_table, "softmax": softmax_table}
        lines += tables.get(section, attention_table)(some)
        lines += lse_table(some) if section == "lse_first" else []
        lines.append("")
    return "\n".join(lines)
