"""Any `torch.optim.Optimizer` of the user's own (kind `optimizer`), inside stoker's `Optimizer`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...models.parallel.partition import RankPart
from ..utils.errors import UserError
from ..utils.local_shard import LocalShard, whole_shard
from ..utils.safetensors_io import TensorSpec
from .base_optimizer import Optimizer, ShardUpdate
from .parameter_sharding import replica_of
from .update_arithmetic import arithmetic_dtype

_NUMBER = ".number"
"""End of the name of a Python number in a checkpoint, stored as a tensor without dimensions."""
_GROUP = "param_groups"
"""Name before the index of a parameter group, in place of a parameter's."""
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


class _Owner(NamedTuple):
    """A parameter that has state, with its shard and this rank's part of it, or a parameter group."""

    values: dict[str, Any]
    shard: LocalShard | None = None
    part: RankPart | None = None

    def to_shard(self, value: Tensor) -> LocalShard:
        """Return a value as a shard: like the parameter if it has its shape, otherwise whole."""
        if self.shard is not None and value.ndim and value.shape == self.shard.local.shape:
            return self.shard.with_local(value)
        return whole_shard(value, *replica_of(self.part))


class OwnOptimizer(Optimizer):
    """Runs the user's optimizer on the main weights (or the parameters, without any), after clipping.

    It has stoker's parameter groups, with and without weight decay, and gets the learning rate of each step. Whether a
    step is skipped is decided on the host, so each step waits for the device. A checkpoint stores the tensors and
    numbers of its `state`, and those of its `param_groups` that it changes.

    Args:
        make: the optimizer's class, or a function: `make(groups, lr=..., weight_decay=..., **kwargs)`.
        name: its name, for messages.
        kwargs: `model.optim.kwargs`.
        common: the other arguments of `Optimizer`.

    Attributes:
        inner: the user's optimizer.

    Raises:
        UserError: it cannot be built with these arguments.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        make: Callable[..., torch.optim.Optimizer],
        name: str,
        lr: float,
        weight_decay: float,
        kwargs: Mapping[str, Any],
        **common: Any,
    ) -> None:
        super().__init__(named_parameters, {"lr": lr}, weight_decay=weight_decay, **common)
        at = f"`model.optim.name` ({name})"
        self._name = name
        self._shards: list[ShardUpdate] = []
        decays = _takes(make, "weight_decay")
        if weight_decay and not decays:
            raise UserError(f"{at} takes no weight_decay; set model.optim.weight_decay=0")
        groups: list[dict[str, Any]] = [
            {"params": [self._states[parameter]["main"] for parameter in group["params"]]}
            | ({"weight_decay": group["weight_decay"]} if decays else {})
            for group in self.param_groups
        ]
        try:
            self.inner = make(groups, lr=lr, **({"weight_decay": weight_decay} if decays else {}), **kwargs)
        except (TypeError, ValueError) as error:
            raise UserError(f"{at}: {type(error).__name__}: {error}") from error
        if not isinstance(self.inner, torch.optim.Optimizer) or len(self.inner.param_groups) != len(groups):
            kind = type(self.inner).__name__
            raise UserError(f"{at} must return a torch.optim.Optimizer with the parameter groups given, not {kind}")
        self._first_settings = [deepcopy(_settings(group)) for group in self.inner.param_groups]

    def initial_state(self, name: str, main: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return nothing: the user's optimizer has its own state, from its first step on."""
        return {}

    def supports_part(self, name: str, shape: tuple[int, ...], part: RankPart) -> bool:
        """Return True: a configuration rule asks whether the update is elementwise."""
        return True

    def update(self, group: dict[str, Any], shards: list[ShardUpdate], scale: Tensor) -> None:
        """Update all weights once the last group has come."""
        self._shards += shards
        if group is not self.param_groups[-1]:
            return
        shards, self._shards = self._shards, []
        if scale < 0:
            return
        for shard in shards:
            main = shard.state["main"]
            main.grad = (shard.gradient.to(arithmetic_dtype(main)) * scale).to(main.dtype)
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"] = own["lr"]
        self.inner.step()
        for shard in shards:
            main = shard.state["main"]
            main.grad = None
            if shard.weight.dtype != main.dtype:
                shard.weight.copy_(main)

    def local_shards(self) -> dict[str, LocalShard]:
        """Return main weights and state; a number becomes a tensor, with `.number` after its name.

        Raises:
            UserError: the state holds something else.
        """
        named = super().local_shards()
        for name, owner in self._owners():
            for key, value in self._saved_values(name, owner).items():
                if isinstance(value, bool | int | float):
                    named[f"{name}.{key}{_NUMBER}"] = owner.to_shard(torch.tensor(value, dtype=_NUMBERS[type(value)]))
                elif isinstance(value, Tensor):
                    named[f"{name}.{key}"] = owner.to_shard(value)
                elif value is not None:
                    raise UserError(
                        f"`model.optim.name` ({self._name}) has `{key}` of type {type(value).__name__} in its state; a "
                        "checkpoint holds tensors and numbers"
                    )
        return named

    def load_shards(
        self, saved: Callable[[], Mapping[str, TensorSpec]], fill: Callable[[Mapping[str, LocalShard]], None]
    ) -> None:
        """Load main weights, and the state that the checkpoint has."""
        shards, owners = super().local_shards(), dict(self._owners())
        numbers: list[tuple[dict[str, Any], str, Tensor]] = []
        for name, spec in saved().items():
            at, _, key = name.removesuffix(_NUMBER).rpartition(".")
            owner = owners.get(at)
            if owner is None or name in shards:
                continue
            of_parameter = owner.shard is not None and bool(spec.shape) and spec.shape == owner.shard.shape
            shape = owner.shard.local.shape if of_parameter and owner.shard else spec.shape
            value = torch.zeros(shape, dtype=spec.dtype, device=self._device_of(name, key, owner))
            shards[name] = owner.to_shard(value)
            if name.endswith(_NUMBER):
                numbers.append((owner.values, key, value))
            else:
                owner.values[key] = value
        fill(shards)
        for values, key, value in numbers:
            values[key] = value.item()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned, on the same layout.

        Raises:
            ValueError: it is the state of another optimizer or of other parameters.
        """
        saved: Mapping[str, Tensor] = state_dict["state"]

        def fill(shards: Mapping[str, LocalShard]) -> None:
            for name in shards.keys() & saved.keys():
                if shards[name].local.shape == saved[name].shape:
                    shards[name].local.copy_(saved[name])

        self.load_shards(
            lambda: {name: TensorSpec(each.dtype, tuple(each.shape)) for name, each in saved.items()}, fill
        )
        super().load_state_dict(state_dict)

    def _owners(self) -> Iterator[tuple[str, _Owner]]:
        """Yield each parameter and parameter group by name."""
        for number, (group, inner) in enumerate(zip(self.param_groups, self.inner.param_groups, strict=True)):
            yield f"{_GROUP}.{number}", _Owner(inner)
            for name, parameter in zip(group["names"], group["params"], strict=True):
                state = self.inner.state[self._states[parameter]["main"]]
                shard, part = self.sharding.placed_shard(name, parameter), self.sharding.parts.get(name)
                yield name, _Owner(state, shard, part)

    def _saved_values(self, name: str, owner: _Owner) -> Mapping[str, Any]:
        """Return the values to save: all of a parameter, those of a group that have changed since the start."""
        if owner.shard is not None:
            return owner.values
        first = self._first_settings[int(name.rpartition(".")[2])]
        return {key: value for key, value in _settings(owner.values).items() if not _equals(value, first.get(key))}

    def _device_of(self, name: str, key: str, owner: _Owner) -> torch.device:
        """Return the device of a loaded value: numbers, and steps as torch's optimizers count them, are on the host."""
        counts_on_host = key == "step" and not any(self.inner.defaults.get(on) for on in ("capturable", "fused"))
        if owner.shard is None or name.endswith(_NUMBER) or counts_on_host:
            return torch.device("cpu")
        return owner.shard.local.device


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a parameter group holds besides the parameters and the learning rate, which the schedule sets."""
    return {key: value for key, value in group.items() if key not in ("params", "lr")}


def _equals(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and one == other


def _takes(make: Callable[..., Any], name: str) -> bool:
    """Return whether a function takes a keyword argument, as far as its signature says."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
