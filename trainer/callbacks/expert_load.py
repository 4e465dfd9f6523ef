"""Expert load metrics: statistics accumulated by the MoE layers since the last report.

The layers accumulate them in training mode only (`models.moe.moe_layer.MoE.statistics`); validation is not included.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Mapping
from operator import add
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...models.build import LanguageModel
from ...models.moe.moe_layer import MoE, find_moe_layers
from ...models.moe.router import STATISTIC_NAMES
from ..config.schema.root import AnyModelBlock
from ..distributed.process_group import DistributedContext
from ..lightning.expert_balance import stack_keys_of
from ..loggers.expert_load_map import ExpertLoadHistory, coefficient_of_variation, has_matplotlib
from ..utils.async_host_copy import AsyncHostCopy
from ..utils.errors import EXIT_IO, UserError

_MAX_PLOT_FRACTION = 0.02
"""Maximum fraction of the run time spent on plotting; one plot takes a second."""
_NAME = re.compile(r"(?P<stack>\w+)\.layers\.(?P<number>\d+)\.mlp")

Sums = tuple[tuple[float, ...], ...]
"""`MoE.statistics` of each layer, summed over reports and ranks."""


class ExpertLoadMetrics:
    """Collect the statistics of all MoE layers for the reports of a run.

    Args:
        layers: MoE layers of this rank by name (`decoder.layers.3.mlp`).
        experts: number of experts of each layer of all pipeline stages, by name, in forward order; None: those of
            `layers`.
        ranks: ranks with other samples; the statistics are summed over them.
        stages: ranks with other layers, likewise; None: this one has all.
        device: device of the statistics of other stages; None: CPU.
        per_layer: names of the layers with per-layer metrics.
        load_map: load history file, on rank 0 only.
        state: `sums` to resume from.
        report: prints a message.

    Attributes:
        sums: statistics since the last regular report; empty right after one. Saved in every checkpoint, so that a
            resumed run reports the same values up to rounding.
    """

    def __init__(
        self,
        layers: Mapping[str, MoE],
        *,
        experts: Mapping[str, int] | None = None,
        ranks: DistributedContext,
        stages: DistributedContext | None = None,
        device: torch.device | None = None,
        per_layer: Collection[str] = (),
        load_map: ExpertLoadHistory | None = None,
        state: Sums = (),
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._layers = layers
        self._ranks = ranks
        self._stages = stages or DistributedContext()
        experts = experts or {name: len(layer.router.weight) for name, layer in layers.items()}
        self._names = list(experts)
        self._experts = list(experts.values())
        self._device = device
        self._load_map = load_map
        self._log = report
        self._can_plot = load_map is not None and has_matplotlib()
        self._next_plot = 0.0
        self._logged = {index: _label(name, experts) for index, name in enumerate(experts) if name in per_layer}
        sizes = [experts + len(STATISTIC_NAMES) for experts in self._experts]
        self.sums: Sums = state if [len(sums) for sums in state] == sizes else ()

    def collect(self, step: int, *, restart: bool) -> Callable[[], dict[str, float]]:
        """Start an asynchronous copy of the statistics to the host and reset them.

        With `restart`, at a regular report, new averages are started.

        Returns:
            A function that waits for the copy and returns the metrics since the last regular report; call it exactly
            once, before the next `collect`.
        """
        copied = self._send()
        return lambda: self._add(copied.get(), step, restart=restart)

    def save(self, *, plot: bool, last: bool = False) -> None:
        """Write the load history file and plot.

        Args:
            plot: update the plot too, if matplotlib is installed, within the time limit `_MAX_PLOT_FRACTION`.
            last: final call: plot regardless of the time limit.

        Raises:
            UserError: disk full or no permission (exit code 74).
        """
        if self._load_map is None:
            return
        try:
            self._load_map.write()
            begin = time.monotonic()
            if plot and self._can_plot and (last or begin >= self._next_plot):
                self._load_map.write_png()
                self._next_plot = begin + (time.monotonic() - begin) / _MAX_PLOT_FRACTION
        except OSError as error:
            where = f"{error.filename or ''} {error.strerror or error}".strip()
            raise UserError(f"cannot write the expert load: {where}", EXIT_IO) from error
        except Exception as error:  # an error of the plotting library must not end the run
            self._can_plot = False
            self._log(f"warning: the expert load cannot be plotted: {type(error).__name__}: {error}")

    @torch.no_grad()
    def _send(self) -> AsyncHostCopy:
        """Start copying the concatenated statistics of all layers, summed over ranks; one all-reduce and one copy."""
        sizes = [experts + len(STATISTIC_NAMES) for experts in self._experts]
        statistics = [
            self._layers[name].statistics if name in self._layers else torch.zeros(size, device=self._device)
            for name, size in zip(self._names, sizes, strict=True)
        ]
        merged = torch.cat(statistics)
        if merged.device.type != "mps":
            merged = merged.double()  # counts summed over ranks may exceed the exact integers of fp32
        copied = AsyncHostCopy(self._stages.all_reduce_(self._ranks.all_reduce_(merged)))
        torch._foreach_zero_(statistics)
        return copied

    def _add(self, copied: Tensor, step: int, *, restart: bool) -> dict[str, float]:
        """Accumulate statistics and return the metrics.

        Non-finite statistics of a layer, from a step that was skipped because of them, are dropped.
        """
        values = copied.split([experts + len(STATISTIC_NAMES) for experts in self._experts])
        fresh = tuple(tuple(layer.tolist()) if layer.isfinite().all() else (0.0,) * len(layer) for layer in values)
        if self._load_map is not None:
            tokens = [sums[:experts] for sums, experts in zip(fresh, self._experts, strict=True)]
            self._load_map.add(step, tokens, regular=restart)
        known = self.sums or tuple((0.0,) * len(sums) for sums in fresh)
        total = tuple(tuple(map(add, old, new)) for old, new in zip(known, fresh, strict=True))
        self.sums = () if restart else total
        return self._metrics(total)

    def _metrics(self, total: Sums) -> dict[str, float]:
        layers = {
            index: _layer_metrics(np.array(sums[:experts]), dict(zip(STATISTIC_NAMES, sums[experts:], strict=True)))
            for index, (sums, experts) in enumerate(zip(total, self._experts, strict=True))
            if any(sums[:experts])  # otherwise the layer saw only padding, or nothing
        }
        if not layers:
            return {}
        means = {
            name: float(np.mean([layer[name] for layer in layers.values()])) for name in next(iter(layers.values()))
        }
        least, most = (
            extreme(layer[f"expert_share_{name}"] for layer in layers.values())
            for name, extreme in (("min", min), ("max", max))
        )
        each = {
            f"moe/{name}{self._logged[index]}": value
            for index, layer in layers.items()
            if index in self._logged
            for name, value in layer.items()
        }
        return means | {"expert_share_min": least, "expert_share_max": most} | each


def _layer_metrics(tokens: np.ndarray, sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a layer.

    Args:
        tokens: [E], tokens routed to each expert, before the capacity limit.
        sums: other statistics, by name.
    """
    calls = sums["calls"]
    shares = tokens / tokens.sum()
    return {
        "load_balancing_loss": sums["load_balancing_loss"] / calls,
        "z_loss": sums["z_loss"] / calls,
        "load_cv": coefficient_of_variation(tokens),
        "expert_share_min": float(shares.min()),
        "expert_share_max": float(shares.max()),
        "expert_share_mean": float(shares.mean()),
        "dropped_fraction": sums["dropped"] / sums["assignments"],
        "router_entropy": sums["entropy"] / calls,
    }


def _label(name: str, layers: Collection[str]) -> str:
    """Return the suffix of per-layer metric names, as in Megatron: `_layer_3`; with two stacks `_encoder_layer_3`."""
    match = _NAME.fullmatch(name)
    assert match is not None
    several = len({other.partition(".")[0] for other in layers}) > 1
    return f"_{match['stack']}_layer_{match['number']}" if several else f"_layer_{match['number']}"


def build_expert_load_metrics(
    keys: AnyModelBlock,
    model: LanguageModel,
    directory: Path | None,
    ranks: DistributedContext,
    stages: DistributedContext,
    *,
    resumed_at: int,
    state: Sums,
    report: Callable[[str], None],
) -> ExpertLoadMetrics | None:
    """Build the `ExpertLoadMetrics` of a model, or None without MoE layers.

    Args:
        keys: `model`.
        model: the model.
        directory: run directory, to write the load history to; None on ranks other than the first.
        ranks: ranks with other samples.
        stages: ranks with other layers.
        resumed_at: completed steps when this process starts.
        state: `sums` of the metrics at that step.
        report: prints a message.
    """
    layers = find_moe_layers(model)
    experts = {name: len(layer.router.weight) for name, layer in layers.items()}
    for text in stages.all_gather_text(json.dumps(experts)):
        experts |= json.loads(text)
    if not experts:
        return None
    experts = dict(sorted(experts.items(), key=lambda item: _place(item[0])))
    load_map = None
    if directory is not None:
        load_map = ExpertLoadHistory(directory / "expert_load.json", experts, resumed_at=resumed_at)
        if not has_matplotlib():
            report("expert_load.json will hold the expert load; to plot it, pip install 'stoker[plots]'")
    per_layer = {name for name in experts if stack_keys_of(keys, name).moe_per_layer_logging}
    return ExpertLoadMetrics(
        layers,
        experts=experts,
        ranks=ranks,
        stages=stages,
        device=next(model.parameters()).device,
        per_layer=per_layer,
        load_map=load_map,
        state=state,
        report=report,
    )


def _place(name: str) -> tuple[bool, int]:
    """Return the place of a layer in forward order, for sorting: those of an encoder come first."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return match["stack"] != "encoder", int(match["number"])
