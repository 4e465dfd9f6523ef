"""`stoker bench`: measure attention backends and rates of this machine, for `train`, `plan` and `explain`."""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..utils.environment import BENCH_VARIABLE, snapshot
from ..utils.errors import EXIT_OK, UserError

if TYPE_CHECKING:
    import torch

    from ...kernels.attention.call_spec import InstalledSoftware, MeasuredCall


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `stoker bench`."""
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        help=f"file to write; default: the one of {BENCH_VARIABLE}, or that of the card in ~/.config/stoker/bench",
    )
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="start no further shape of attention after this time (default: 4)"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="device to measure")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the table; under torchrun all ranks measure the links between them, and the first one
    everything else.

    Raises:
        UserError: there is no such device, or the file cannot be written.
    """
    begin = time.monotonic()
    # these import torch, which takes seconds
    from ...kernels.attention.installed_software import detect_installed_software
    from ..device.bench_table import BenchTable, bench_file, card_name, home_relative, versions, write_table
    from ..device.choose_device import device_from_option
    from ..plan.measure_rates import measure_rates

    device = device_from_option(args.device)
    if device.type == "mps":
        raise UserError("`--device` (auto) is mps here, which is not measured; use --device cpu")
    card, software = card_name(device), detect_installed_software(device.type)
    file = args.file or bench_file(card, snapshot())
    if file is None:
        raise UserError(f"`{BENCH_VARIABLE}` (none) names no file; give one: stoker bench FILE")
    links = _measure_links(device.type)
    if links is None:
        return EXIT_OK
    if device.type == "cpu":
        print("no GPU is measured: only PyTorch's and unfused attention on this CPU, matmuls in fp32, and memory")
    print(f"{card}: forward and backward of attention in ms, the fastest first, then rates", flush=True)
    shapes, left = _measure_shapes(device, software, begin + 60 * args.minutes)
    rates, date = measure_rates(device, links), datetime.date.today().isoformat()
    print(f"  {rates}")
    write_table(BenchTable(card=card, **versions(software), date=date, rates=rates, attention=tuple(shapes)), file)
    if left:
        print(f"{left} shapes were not measured within {args.minutes:g} minutes; --minutes gives more")
    print(f"wrote {home_relative(file)} in {time.monotonic() - begin:.0f} s", end="")
    used = file == bench_file(card, snapshot())
    print("; train, plan and explain use it from now on" if used else f"; {BENCH_VARIABLE}={file} makes runs use it")
    return EXIT_OK


def _measure_links(device_type: str) -> dict[str, float] | None:
    """Return the rates of collectives, if there are several ranks; None for all ranks but the first."""
    import torch

    from ..distributed.inference_ranks import inference_ranks
    from ..distributed.placement import torchrun_ranks
    from ..plan.measure_rates import measure_links

    environ, links = snapshot(), {}
    rank, size, local_rank = torchrun_ranks(environ)
    with inference_ranks() as mesh:
        if mesh is not None:
            device = torch.device("cuda", local_rank) if device_type == "cuda" else torch.device("cpu")
            links = measure_links(device, size, int(environ.get("LOCAL_WORLD_SIZE", size)))
    return links if rank == 0 else None


def _measure_shapes(
    device: torch.device, software: InstalledSoftware, deadline: float
) -> tuple[list[MeasuredCall], int]:
    """Return the measured calls, and the number of those that are left at the deadline."""
    from ...kernels.attention.measure import calls_to_measure, measure_attention
    from ..device.choose_device import compute_capability

    found: list[MeasuredCall] = []
    wanted = list(calls_to_measure(compute_capability(device)))
    for call in wanted:
        if time.monotonic() > deadline:
            break
        measured = measure_attention(call, device, software)
        found.append(measured)
        sums = sorted((sum(both), backend) for backend, both in measured.milliseconds.items())
        refused = "".join(f"; {backend} failed: {why}" for backend, why in measured.refused.items())
        print(f"  {measured}: {', '.join(f'{name} {ms:.3g}' for ms, name in sums)}{refused}", flush=True)
    return found, len(wanted) - len(found)
