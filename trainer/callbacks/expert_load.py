"""How the experts of a model are loaded, for the logs: what the layers counted since the last report.

The layers add up in training alone (`models.moe.layer.MoE.statistics`), so validation does not count.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping
from operator import add
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...models.build import LanguageModel
from ...models.moe.find_moe_layers import moe_layers
from ...models.moe.moe_layer import MoE
from ...models.moe.router import SUMS
from ..config.schema.root import RootBlock
from ..distributed.process_group import Ranks
from ..lightning.expert_balance import stack_keys_of
from ..loggers.expert_load_map import LoadMap, can_draw, variation
from ..utils.async_host_copy import LateValues
from ..utils.errors import EXIT_IO, UserError

_PART_FOR_PICTURES = 0.02
"""Of the time of a run: a picture takes a second."""
_NAME = re.compile(r"(?P<stack>\w+)\.layers\.(?P<number>\d+)\.mlp")

Sums = tuple[tuple[float, ...], ...]
"""For each layer what `MoE.statistics` holds, added up over reports and ranks."""


class ExpertLoad:
    """Reads the counters of all layers at the reports of a run.

    Args:
        layers: the layers with experts by name (`decoder.layers.3.mlp`).
        ranks: the processes of the run, which report together.
        per_layer: names of the layers whose own figures are logged too.
        load_map: where the load is kept, of the process that writes for all.
        state: `sums` of an earlier process, to go on from.
        say: takes a line for the user.

    Attributes:
        sums: what was counted since the last regular report; empty right after one. Part of every checkpoint, so that
            a resumed run reports, but for rounding, what the unbroken one does.
    """

    def __init__(
        self,
        layers: Mapping[str, MoE],
        *,
        ranks: Ranks,
        per_layer: Collection[str] = (),
        load_map: LoadMap | None = None,
        state: Sums = (),
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._layers = layers
        self._ranks = ranks
        self._experts = [len(layer.router.weight) for layer in layers.values()]
        self._load_map = load_map
        self._say = say
        self._draws = load_map is not None and can_draw()
        self._next_picture = 0.0
        self._logged = {index: _label(name, layers) for index, name in enumerate(layers) if name in per_layer}
        sizes = [experts + len(SUMS) for experts in self._experts]
        self.sums: Sums = state if [len(sums) for sums in state] == sizes else ()

    def take(self, step: int, *, restart: bool) -> Callable[[], dict[str, float]]:
        """Send what was counted to the host and begin to count anew, without a wait for the device.

        Args:
            step: completed steps.
            restart: this is a regular report: begin a new mean.

        Returns:
            What waits for it and gives the figures since the last regular report; to be called once, before the next
            call of this.
        """
        counted = self._send()
        return lambda: self._add(counted.get(), step, restart=restart)

    def keep(self, *, draw: bool, last: bool = False) -> None:
        """Write the load over all steps to its files.

        Args:
            draw: the picture too, where it can be had; not so often that it takes more than `_PART_FOR_PICTURES`.
            last: nothing comes after this: draw in any case.

        Raises:
            UserError: the disk is full or not ours (exit code 74).
        """
        if self._load_map is None:
            return
        try:
            self._load_map.write()
            begin = time.monotonic()
            if draw and self._draws and (last or begin >= self._next_picture):
                self._load_map.draw()
                self._next_picture = begin + (time.monotonic() - begin) / _PART_FOR_PICTURES
        except OSError as error:
            where = f"{error.filename or ''} {error.strerror or error}".strip()
            raise UserError(f"cannot write the load of the experts: {where}", EXIT_IO) from error
        except Exception as error:  # of another package, for a picture: a run is worth more
            self._draws = False
            self._say(f"warning: no picture of the load of the experts: {type(error).__name__}: {error}")

    @torch.no_grad()
    def _send(self) -> LateValues:
        """What all ranks have counted since the last call, one layer after the other: one message and one copy."""
        statistics = [layer.statistics for layer in self._layers.values()]
        together = torch.cat(statistics)
        if together.device.type != "mps":
            together = together.double()  # counts of all ranks may be beyond the integers of fp32
        counted = LateValues(self._ranks.sum_(together))
        torch._foreach_zero_(statistics)  # pyright: ignore[reportPrivateImportUsage]
        return counted

    def _add(self, counted: Tensor, step: int, *, restart: bool) -> dict[str, float]:
        """Add up what was counted, and give the figures of all.

        The sums of a layer that are not all finite, of a step that was skipped for it, are left out.
        """
        values = counted.split([experts + len(SUMS) for experts in self._experts])
        fresh = tuple(tuple(layer.tolist()) if layer.isfinite().all() else (0.0,) * len(layer) for layer in values)
        if self._load_map is not None:
            tokens = [sums[:experts] for sums, experts in zip(fresh, self._experts, strict=True)]
            self._load_map.add(step, tokens, regular=restart)
        known = self.sums or tuple((0.0,) * len(sums) for sums in fresh)
        total = tuple(tuple(map(add, old, new)) for old, new in zip(known, fresh, strict=True))
        self.sums = () if restart else total
        return self._figures(total)

    def _figures(self, total: Sums) -> dict[str, float]:
        layers = {
            index: _figures_of(np.array(sums[:experts]), dict(zip(SUMS, sums[experts:], strict=True)))
            for index, (sums, experts) in enumerate(zip(total, self._experts, strict=True))
            if any(sums[:experts])  # else nothing but padding came by, or nothing at all
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


def _figures_of(tokens: np.ndarray, sums: Mapping[str, float]) -> dict[str, float]:
    """The figures of a layer.

    Args:
        tokens: that chose each expert, before any capacity.
        sums: the other sums, by name.
    """
    calls = sums["calls"]
    shares = tokens / tokens.sum()
    return {
        "load_balancing_loss": sums["load_balancing_loss"] / calls,
        "z_loss": sums["z_loss"] / calls,
        "load_cv": variation(tokens),
        "expert_share_min": float(shares.min()),
        "expert_share_max": float(shares.max()),
        "expert_share_mean": float(shares.mean()),
        "dropped_fraction": sums["dropped"] / sums["assignments"],
        "router_entropy": sums["entropy"] / calls,
    }


def _label(name: str, layers: Collection[str]) -> str:
    """The end of the name of a figure, as Megatron's tracker has it: `_layer_3`; with two stacks `_encoder_layer_3`."""
    match = _NAME.fullmatch(name)
    assert match is not None
    several = len({other.partition(".")[0] for other in layers}) > 1
    return f"_{match['stack']}_layer_{match['number']}" if several else f"_layer_{match['number']}"


def build_expert_load(
    root: RootBlock,
    model: LanguageModel,
    directory: Path,
    ranks: Ranks,
    *,
    resumed_at: int,
    state: Sums,
    say: Callable[[str], None],
) -> ExpertLoad | None:
    """What reports the load of a model's experts, or None for one without experts.

    Args:
        root: the configuration.
        model: the model.
        directory: of the run.
        ranks: the processes of the run.
        resumed_at: the step the run goes on from.
        state: `ExpertLoad.sums` there.
        say: takes a line for the user.
    """
    layers = moe_layers(model)
    if not layers:
        return None
    load_map = None
    if ranks.is_first:
        experts = {name: len(layer.router.weight) for name, layer in layers.items()}
        load_map = LoadMap(directory / "expert_load.json", experts, resumed_at=resumed_at)
        if not can_draw():
            say("expert_load.json will hold the load of the experts; its picture needs pip install 'stoker[plots]'")
    per_layer = {name for name in layers if stack_keys_of(root.model, name).moe_per_layer_logging}
    return ExpertLoad(layers, ranks=ranks, per_layer=per_layer, load_map=load_map, state=state, say=say)
