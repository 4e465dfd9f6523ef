"""Markdown tables for scripts/bench/attention.py."""

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
    """Return the speed of `ours` relative to `peer`, the median over rounds; None if one was not measured."""
    our_times, peer_times = (row["ms"].get(name, {}).get(what) for name in (ours, peer))
    if not our_times or not peer_times:
        return None
    return statistics.median(b / a for a, b in zip(our_times, peer_times, strict=False))  # slow ones have fewer rounds


def _reason(text: str) -> str:
    """Return a short reason why a contender did not run."""
    return "needs more shared memory than available" if "out of resource" in text else text[:70]


def _cell(row: Row, name: str, what: str, factor: float) -> str:
    """Format the TFLOP/s of a contender, or a dash."""
    times = row["ms"].get(name, {}).get(what)
    return f"{factor * row['forward_flops'] / statistics.median(times) / 1e9:.0f}" if times else "-"


def attention_table(rows: list[Row]) -> list[str]:
    names = list(dict.fromkeys(n for row in rows for n in [*row["ms"], *row["refused"]]))
    peers = [name for name in names if name != "ours"]
    lines = [
        "TFLOP/s forward / backward / both; in brackets our speed over the peer's; last the peak MiB of a step.",
        "",
    ]
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
    """Bandwidth relative to a copy of `x`: bytes that must be read and written over time."""
    names = ("ours", "torch", "torch.compile")
    lines = [
        "Bandwidth (unmasked bytes read, bytes written) relative to that of a copy; forward / backward.",
        "",
        "| rows of | " + " | ".join(names) + " | error |",
    ]
    lines.append("|---" * 5 + "|")
    for row in rows:
        cells = []
        for name in names:
            times, copy = row["ms"].get(name), statistics.median(row["ms"]["copy"]["forward"])
            if times is None:
                cells.append(row["refused"].get(name, "-"))
            else:
                parts = [row["moved"][w] * copy / statistics.median(times[w]) for w in ("forward", "backward")]
                cells.append(" / ".join(f"{part:.2f}" for part in parts))
        lines.append(f"| {row['shape']} | " + " | ".join(cells) + f" | {row['largest_relative_error']:.1e} |")
    return lines


def report(rows: list[Row]) -> str:
    """Return the report of every section that has rows, as markdown."""
    lines = []
    for section, title in SECTIONS.items():
        selected = [row for row in rows if row["section"] == section]
        if not selected:
            continue
        last = selected[-1]
        lines += [
            f"### {title}", "", f"{last['device']}; torch {last['torch']}, cuDNN {last['cudnn']}, triton "
            f"{last['triton']}; {last['date']}; {last['rounds']} rounds.", "",
        ]  # fmt: skip
        tables = {"host": host_table, "softmax": softmax_table}
        lines += tables.get(section, attention_table)(selected)
        lines += lse_table(selected) if section == "lse_first" else []
        lines.append("")
    return "\n".join(lines)
