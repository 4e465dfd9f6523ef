"""Expert load (tokens per expert) over the steps of a run: `expert_load.json` in the run directory, and a heat map.

    expert_load.json
        layers   names of the MoE layers, first to last
        experts  number of experts of each layer
        stride   log steps summed in one row
        rows     for steps `first_step` to `step`: tokens routed to each expert, per layer

The file size is bounded: when there are too many rows, adjacent rows are summed and the stride doubles.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from ...models.config.key_block import ConfigBlock
from ..utils.durable_files import atomic_write
from ..utils.safetensors_io import DamagedFileError, read_json

MAX_ROWS = 256
MAX_COUNTS = 1 << 18
"""Most counts in a file: about 2 MB."""

Counts = Annotated[tuple[Annotated[tuple[int, ...], Field(strict=False)], ...], Field(strict=False)]


class LoadRow(ConfigBlock):
    """Expert load summed over steps `first_step` to `step`, counted from 1.

    `reports` is the number of regular log steps in it; `tokens` holds the tokens of each expert, per layer.
    """

    first_step: int = Field(ge=1)
    step: int = Field(ge=1)
    reports: int = Field(ge=0)
    tokens: Counts

    def merge(self, later: LoadRow) -> LoadRow:
        """Return the sum of this row and the one after it."""
        pairs = zip(self.tokens, later.tokens, strict=True)
        return LoadRow(
            first_step=self.first_step,
            step=later.step,
            reports=self.reports + later.reports,
            tokens=tuple(tuple(a + b for a, b in zip(mine, theirs, strict=True)) for mine, theirs in pairs),
        )


class LoadDocument(ConfigBlock):
    """Schema of `expert_load.json`."""

    format: Literal[1] = 1
    layers: Annotated[tuple[str, ...], Field(strict=False)]
    experts: Annotated[tuple[int, ...], Field(strict=False)]
    stride: int = Field(1, ge=1)
    rows: Annotated[tuple[LoadRow, ...], Field(strict=False)] = ()


class ExpertLoadHistory:
    """Accumulate the expert load and write it to `expert_load.json` and a PNG.

    Args:
        path: the JSON file; the PNG is written beside it.
        experts: number of experts by layer name.
        resumed_at: the step the run resumes from, keeping the file's rows up to it; 0 starts empty.
    """

    def __init__(self, path: Path, experts: Mapping[str, int], *, resumed_at: int = 0) -> None:
        self._path = path
        self._layers = tuple(experts)
        self._experts = tuple(experts.values())
        self._max_rows = max(8, min(MAX_ROWS, MAX_COUNTS // max(1, sum(self._experts))))
        self._stride = 1
        self._rows: list[LoadRow] = []
        self._last_step = resumed_at
        self._drawn_step: int | None = None
        known = _read(path) if resumed_at else None
        if known is not None and (known.layers, known.experts) == (self._layers, self._experts):
            self._stride = known.stride
            self._rows = [row for row in known.rows if row.step <= resumed_at]

    @property
    def document(self) -> LoadDocument:
        """Current content of the file, as plain data."""
        return LoadDocument(layers=self._layers, experts=self._experts, stride=self._stride, rows=tuple(self._rows))

    def add(self, step: int, tokens: Sequence[Sequence[float]], *, regular: bool) -> None:
        """Add the load since the last call.

        Args:
            step: the last step it covers.
            tokens: tokens of each expert, per layer.
            regular: an uninterrupted run logs at this step too; only such log steps count towards the stride, so that
                a resumed run has the same rows.
        """
        counts = tuple(tuple(map(round, layer)) for layer in tokens)
        row = LoadRow(first_step=self._last_step + 1, step=step, reports=int(regular), tokens=counts)
        if self._rows and self._rows[-1].reports < self._stride:
            row = self._rows.pop().merge(row)
        self._rows.append(row)
        self._last_step = step
        if len(self._rows) > self._max_rows:
            first, second = self._rows[::2], self._rows[1::2]
            self._rows = [a.merge(b) for a, b in zip(first, second, strict=False)] + first[len(second) :]
            self._stride *= 2

    def write(self) -> None:
        """Write the JSON file.

        Raises:
            OSError: the file cannot be written.
        """
        text = json.dumps(self.document.model_dump(), separators=(",", ":"))
        atomic_write(self._path, text.encode() + b"\n")

    def write_png(self) -> None:
        """Write the heat map, unless it is up to date; requires `has_matplotlib()`.

        Raises:
            OSError: the file cannot be written.
        """
        if self._rows and self._drawn_step != self._last_step:
            self._drawn_step = self._last_step
            atomic_write(self._path.with_suffix(".png"), render_heatmap(self.document))


def has_matplotlib() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def coefficient_of_variation(tokens: np.ndarray) -> float:
    """Return the coefficient of variation of the tokens per expert: standard deviation over mean."""
    return float(tokens.std() / tokens.mean()) if tokens.sum() else 0.0


def render_heatmap(document: LoadDocument) -> bytes:
    """Return a PNG: load CV of each layer above, load of each expert below, both over steps."""
    from matplotlib.figure import Figure

    rows = document.rows
    layers = [np.array([row.tokens[n] for row in rows], dtype=float) for n in range(len(document.layers))]
    ends = np.array([rows[0].first_step - 1, *(row.step for row in rows)], dtype=float)
    middles = (ends[1:] + ends[:-1]) / 2
    height = min(24.0, max(3.0, 0.08 * sum(document.experts)))
    figure = Figure(figsize=(9, 2 + height), layout="constrained", dpi=120)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.6, height])

    curves = np.array([[coefficient_of_variation(row) for row in layer] for layer in layers])
    for curve in curves:
        above.plot(middles, curve, color="0.75", linewidth=0.8)
    above.plot(middles, curves.mean(axis=0), color="black", linewidth=1.5)
    above.set_ylabel("load CV\n(black: mean)")
    above.set_ylim(bottom=0)

    shares = [layer / np.maximum(layer.mean(axis=1, keepdims=True), 1e-9) for layer in layers]
    image: Any = below.pcolormesh(
        ends,
        np.arange(sum(document.experts) + 1),
        np.concatenate(shares, axis=1).T,
        cmap="RdBu_r",
        vmin=0.0,
        vmax=2.0,
        rasterized=True,
    )
    starts = np.cumsum([0, *document.experts])
    for start in starts[1:-1]:
        below.axhline(start, color="black", linewidth=0.8)
    every = -(-len(layers) // 32)
    below.set_yticks(((starts[1:] + starts[:-1]) / 2)[::every], [_short(name) for name in document.layers[::every]])
    below.invert_yaxis()
    below.set_xlabel("step")
    figure.colorbar(image, ax=below, extend="max", label="tokens of an expert / mean of its layer")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _short(layer: str) -> str:
    """Shorten a layer name: `decoder.layers.3.mlp` to `decoder 3`."""
    return layer.removesuffix(".mlp").replace(".layers.", " ")


def _read(path: Path) -> LoadDocument | None:
    """Read a file; None if it is missing or invalid, as a statistics file is no reason to stop a run."""
    try:
        document = LoadDocument.model_validate(read_json(path))
    except (DamagedFileError, ValidationError):
        return None
    return document if all(_fits(row, document.experts) for row in document.rows) else None


def _fits(row: LoadRow, experts: tuple[int, ...]) -> bool:
    return tuple(map(len, row.tokens)) == experts
