"""File of `stoker bench`: what was measured on one card, with which software; read by `train`, `plan` and `explain`."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, field_validator

from ...kernels.attention.call_spec import InstalledSoftware, MeasuredCall, MeasuredTimes
from ...kernels.attention.support_checks import format_version
from ...models.config.key_block import ConfigBlock
from ..utils.durable_files import atomic_write
from ..utils.environment import BENCH_VARIABLE, bench_folder, format_variable, snapshot, user_path
from ..utils.errors import UserError

if TYPE_CHECKING:
    import torch

_NO_TABLE = "none"


class MatmulRate(ConfigBlock):
    """TFLOP/s of the product of (tokens, 4096) and (4096, 4096); of (tokens, 1024) and (1024, 1024) on a CPU."""

    tokens: PositiveInt
    matmul: PositiveFloat
    """In bf16; in fp32 on a CPU."""
    fp8: PositiveFloat | None = None
    """With operands cast before; None without fp8 tensor cores."""


class Rates(ConfigBlock):
    """Rates that `stoker plan` estimates from."""

    matmul: Annotated[tuple[MatmulRate, ...], Field(min_length=1)]
    memory: PositiveFloat
    """GB/s, read and written, of a copy in the memory of the card."""
    launch: PositiveFloat
    """Microseconds in which the host launches a kernel."""
    host_link: PositiveFloat | None = None
    """GB/s of copies from pinned host memory; None on a CPU."""
    peer_link: PositiveFloat | None = None
    """GB/s of NCCL's all-reduce between the GPUs of a machine (bus bandwidth); None if not measured."""
    network: PositiveFloat | None = None
    """The same between machines, of each GPU."""

    def __str__(self) -> str:
        in_fp8 = [f" ({each.fp8:.3g} in fp8)" if each.fp8 else "" for each in self.matmul]
        sizes = [
            f"{each.matmul:.3g}{fp8} of {each.tokens:,} tokens" for each, fp8 in zip(self.matmul, in_fp8, strict=True)
        ]
        links = {"host link": self.host_link, "peer link": self.peer_link, "network": self.network}
        parts = [
            f"matmuls {', '.join(sizes)} TFLOP/s",
            f"memory {self.memory:,.0f} GB/s",
            f"launch {self.launch:.1f} us",
        ]
        return "; ".join([*parts, *(f"{name} {rate:,.1f} GB/s" for name, rate in links.items() if rate is not None)])


class BenchTable(ConfigBlock):
    """Measured times and rates of a card, with the software they were measured with."""

    model_config = ConfigDict(strict=False)  # lists of JSON are tuples
    card: str
    torch: str
    triton: str
    date: str
    rates: Rates | None = None
    """None in a checkpoint, which records the times that its attention was chosen by."""
    attention: tuple[MeasuredCall, ...]

    @field_validator("attention")
    @classmethod
    def _check_positive(cls, calls: tuple[MeasuredCall, ...]) -> tuple[MeasuredCall, ...]:
        for one in calls:
            sizes = one.call.head_dim, one.call.groups, one.call.queries, one.call.keys, one.call.batch, one.call.heads
            if min(*sizes, *(time for both in one.milliseconds.values() for time in both)) <= 0:
                raise ValueError("sizes and times must be positive")
        return calls

    def why_ignored(self, card: str, software: InstalledSoftware) -> str:
        """Return why the table does not hold for a card and software; empty if it does."""
        then = {"card": self.card, "torch": self.torch, "triton": self.triton}
        now = {"card": card, **versions(software)}
        others = (f"measured with {what} {then[what]}, not {now[what]}" for what in then if then[what] != now[what])
        return next(others, "")

    def recorded(self, head_dims: set[int]) -> BenchTable | None:
        """Return what a checkpoint records: the times of attention with these head widths; None if there are none."""
        calls = tuple(one for one in self.attention if one.call.head_dim in head_dims)
        return self.model_copy(update={"rates": None, "attention": calls}) if calls else None


class FoundTable(NamedTuple):
    """The table that holds for a card and software.

    Attributes:
        table: None if there is none.
        file: where it is from; empty without a table.
        ignored: one line about a file that does not hold; empty otherwise.
    """

    table: BenchTable | None = None
    file: str = ""
    ignored: str = ""

    @property
    def source(self) -> str:
        """File and date; empty without a table."""
        return "" if self.table is None else f"{self.file} of {self.table.date}"

    @property
    def times(self) -> MeasuredTimes | None:
        """Times of the attention backends; None if there are none."""
        if self.table is None or not self.table.attention:
            return None
        return MeasuredTimes(source=self.source, calls=self.table.attention)


def card_name(device: torch.device) -> str:
    """Return the name of a GPU by its driver; of another device its type, and the machine's processor and cores."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return f"{device.type}, {platform.machine()}, {os.cpu_count()} cores"


def bench_file(card: str, environ: Mapping[str, str]) -> Path | None:
    """Return the file of `STOKER_BENCH`, or that of a card in the user's configuration folder; None for `none`.

    Raises:
        UserError: the variable holds no path.
    """
    text = environ.get(BENCH_VARIABLE, "")
    if text == _NO_TABLE:
        return None
    name = re.sub(r"[^A-Za-z0-9]+", "-", card).strip("-")
    return user_path(text, BENCH_VARIABLE) if text else bench_folder(environ) / f"{name}.json"


def find_table(
    card: str, software: InstalledSoftware, env_vars: Mapping[str, str | int | float | bool] | None = None
) -> FoundTable:
    """Read the table of a card, and check that it holds for the software.

    Args:
        card: as `card_name` returns it.
        software: installed, or assumed, versions.
        env_vars: variables of the configuration.

    Raises:
        UserError: the file that `STOKER_BENCH` names cannot be read.
    """
    environ = {**snapshot(), **{name: format_variable(value) for name, value in (env_vars or {}).items()}}
    file = bench_file(card, environ)
    if file is None:
        return FoundTable()
    shown = home_relative(file)
    try:
        text = file.read_text(errors="replace")
    except OSError as error:
        if not environ.get(BENCH_VARIABLE):
            return FoundTable(ignored=f"{shown} is ignored: {error.strerror}" if file.exists() else "")
        cure = f"write it with `stoker bench {shown}`, or use {BENCH_VARIABLE}={_NO_TABLE}"
        raise UserError(f"`{BENCH_VARIABLE}` ({shown}) cannot be read: {error.strerror}; {cure}") from None
    return parse_table(text, shown, card, software)


def parse_table(text: str, source: str, card: str, software: InstalledSoftware) -> FoundTable:
    """Parse the content of a file from `source`, and check that it holds for a card and software."""
    try:
        table = BenchTable.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".strip(": ")
        return FoundTable(ignored=f"{source} is ignored: no table of `stoker bench` of this version ({problem})")
    if why := table.why_ignored(card, software):
        return FoundTable(ignored=f"{source} is ignored: {why}; `stoker bench` measures again")
    return FoundTable(table, source)


def write_table(table: BenchTable, file: Path) -> None:
    """Write a table, each measured call on a line, without options that have their default.

    Raises:
        UserError: it cannot be written.
    """
    document = table.model_dump(exclude={"attention"})
    head = json.dumps(document, indent=1)[:-2]
    rows = ",\n".join(f"  {json.dumps(_without_defaults(one))}" for one in table.attention)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, f'{head},\n "attention": [\n{rows}\n ]\n}}\n'.encode())
    except OSError as error:
        raise UserError(f"{home_relative(file)} cannot be written: {error.strerror}") from None


def versions(software: InstalledSoftware) -> dict[str, str]:
    """Return the versions that a table holds for; `none` if the package is missing."""
    return {"torch": format_version(software.torch), "triton": format_version(software.triton or ()) or "none"}


def _without_defaults(one: MeasuredCall) -> dict[str, Any]:
    defaults = {each.name: each.default for each in fields(one.call)}
    call = {name: value for name, value in asdict(one.call).items() if value != defaults[name] or name == "causal"}
    return asdict(one) | {"call": call}


def home_relative(file: Path) -> str:
    """Return a path as shown to the user, `~` for the home directory."""
    home = Path.home()
    return f"~/{file.relative_to(home)}" if file.is_relative_to(home) else str(file)
