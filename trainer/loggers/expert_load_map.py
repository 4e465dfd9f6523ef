"""The load of every expert over the steps of a run: `expert_load.json` in its directory, and a picture of it.

    expert_load.json
        layers   names of the layers with experts, first to last
        experts  experts of each
        stride   reports in a row
        rows     of steps `first_step` to `step`: for each layer the tokens that chose each expert

The file stays small: once there are too many rows, neighbours are added up, and every row is of twice as many steps.
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

from ...models.config.key_block import Block
from ..utils.durable_files import replace_file
from ..utils.safetensors_io import DamagedFileError, read_json

MOST_ROWS = 256
MOST_NUMBERS = 1 << 18
"""In a file: about 2 MB."""

Counts = Annotated[tuple[Annotated[tuple[int, ...], Field(strict=False)], ...], Field(strict=False)]


class LoadRow(Block):
    """The load over some steps.

    `first_step` to `step` are counted from 1; `reports` is how many regular reports have been added up; `tokens` holds
    for each layer the tokens of each expert.
    """

    first_step: int = Field(ge=1)
    step: int = Field(ge=1)
    reports: int = Field(ge=0)
    tokens: Counts

    def plus(self, later: LoadRow) -> LoadRow:
        """This row and the one after it."""
        pairs = zip(self.tokens, later.tokens, strict=True)
        return LoadRow(
            first_step=self.first_step,
            step=later.step,
            reports=self.reports + later.reports,
            tokens=tuple(tuple(a + b for a, b in zip(mine, theirs, strict=True)) for mine, theirs in pairs),
        )


class LoadDocument(Block):
    """What the file holds."""

    format: Literal[1] = 1
    layers: Annotated[tuple[str, ...], Field(strict=False)]
    experts: Annotated[tuple[int, ...], Field(strict=False)]
    stride: int = Field(1, ge=1)
    rows: Annotated[tuple[LoadRow, ...], Field(strict=False)] = ()


class LoadMap:
    """Follows the load of the experts and keeps it in files.

    Args:
        path: of the JSON file; the picture goes beside it.
        experts: name of each layer to the number of its experts.
        resumed_at: the step the run goes on from, with what the file holds of the steps before; 0 begins anew.
    """

    def __init__(self, path: Path, experts: Mapping[str, int], *, resumed_at: int = 0) -> None:
        self._path = path
        self._layers = tuple(experts)
        self._experts = tuple(experts.values())
        self._most_rows = max(8, min(MOST_ROWS, MOST_NUMBERS // max(1, sum(self._experts))))
        self._stride = 1
        self._rows: list[LoadRow] = []
        self._last = resumed_at
        self._drawn: int | None = None
        known = _read(path) if resumed_at else None
        if known is not None and (known.layers, known.experts) == (self._layers, self._experts):
            self._stride = known.stride
            self._rows = [row for row in known.rows if row.step <= resumed_at]

    @property
    def document(self) -> LoadDocument:
        """What the file would hold now."""
        return LoadDocument(layers=self._layers, experts=self._experts, stride=self._stride, rows=tuple(self._rows))

    def add(self, step: int, tokens: Sequence[Sequence[float]], *, regular: bool) -> None:
        """Take the load since the last call.

        Args:
            step: the last of its steps.
            tokens: of each expert of each layer.
            regular: an unbroken run reports at this step too; only such reports fill a row.
        """
        counts = tuple(tuple(map(round, layer)) for layer in tokens)
        row = LoadRow(first_step=self._last + 1, step=step, reports=int(regular), tokens=counts)
        if self._rows and self._rows[-1].reports < self._stride:
            row = self._rows.pop().plus(row)
        self._rows.append(row)
        self._last = step
        if len(self._rows) > self._most_rows:
            first, second = self._rows[::2], self._rows[1::2]
            self._rows = [a.plus(b) for a, b in zip(first, second, strict=False)] + first[len(second) :]
            self._stride *= 2

    def write(self) -> None:
        """Write the JSON file.

        Raises:
            OSError: it cannot be written.
        """
        text = json.dumps(self.document.model_dump(), separators=(",", ":"))
        replace_file(self._path, text.encode() + b"\n")

    def draw(self) -> None:
        """Draw the picture, unless it is there; `can_draw` must hold.

        Raises:
            OSError: it cannot be written.
        """
        if self._rows and self._drawn != self._last:
            self._drawn = self._last
            replace_file(self._path.with_suffix(".png"), picture(self.document))


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def variation(tokens: np.ndarray) -> float:
    """Coefficient of variation of the tokens of the experts: their standard deviation over their mean."""
    return float(tokens.std() / tokens.mean()) if tokens.sum() else 0.0


def picture(document: LoadDocument) -> bytes:
    """A PNG: above, the variation of the load of each layer; below, the load of each expert; both over steps."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    rows = document.rows
    layers = [np.array([row.tokens[n] for row in rows], dtype=float) for n in range(len(document.layers))]
    ends = np.array([rows[0].first_step - 1, *(row.step for row in rows)], dtype=float)
    middles = (ends[1:] + ends[:-1]) / 2
    height = min(24.0, max(3.0, 0.08 * sum(document.experts)))
    figure = Figure(figsize=(9, 2 + height), layout="constrained", dpi=120)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.6, height])

    curves = np.array([[variation(row) for row in layer] for layer in layers])
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
    """`decoder 3` for `decoder.layers.3.mlp`."""
    return layer.removesuffix(".mlp").replace(".layers.", " ")


def _read(path: Path) -> LoadDocument | None:
    """What a file holds, or None where it is not one of ours: a picture is no reason to stop a run."""
    try:
        document = LoadDocument.model_validate(read_json(path))
    except (DamagedFileError, ValidationError):
        return None
    return document if all(_fits(row, document.experts) for row in document.rows) else None


def _fits(row: LoadRow, experts: tuple[int, ...]) -> bool:
    return tuple(map(len, row.tokens)) == experts
