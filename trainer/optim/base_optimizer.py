"""Base class of all optimizers: weight-decay groups, fp32 main weights and accumulation, clipping, skipped steps.

Everything stays on the device: the gradient norm and the clip coefficient are tensors, without host synchronization.
A step whose gradient norm is not finite changes neither weights nor state, and is not counted.

With sharded parameters, an optimizer updates the local shard (`utils.local_shard`), and communicates with the other
shards through `sum_over_shards` and `gather_rows` of its `sharding`. Under tensor or expert parallelism these see the
data-parallel shards of this rank's part of a parameter only, and `sum_over_parts` those with the other parts: every
rank counts its share of what several hold once (`counted`).

Main weights and state may be kept in host memory (`model.cpu_offloading_optimizer`, see `host_state`): an update then
gets them on the device, a bucket of parameters at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...models.memory.host_copies import CopyEngine
from ...models.parallel.partition import RankPart
from ..utils.errors import UserError
from ..utils.local_shard import LocalShard, local_tensor, whole_shard
from ..utils.safetensors_io import TensorSpec
from .gradient_clipping import clip_coefficient
from .gradient_sums import GradientSums
from .host_state import HostState
from .loss_scale import LossScale, LossScaleState
from .parameter_sharding import ParameterSharding, replica_of
from .state_buckets import BUCKET_BYTES, Bucket, StateShape, plan_buckets


def has_weight_decay(name: str, parameter: Tensor, *, norms_decay: bool = False) -> bool:
    """Return True for parameters with weight decay: matrices and embeddings, and norm weights with `norms_decay`.

    NeMo's rule (`do_layer_norm_weight_decay`), decided by shape and name. Never biases, nor other vectors: scales of
    heads or activations and parameters of position biases, for which decay to zero makes no sense.
    """
    if name.endswith(("up_bias", "down_bias")):  # biases of all experts of a layer, stacked to a matrix
        return False
    if parameter.ndim >= 2:
        return True
    return norms_decay and name.endswith("norm.weight")


class ShardUpdate(NamedTuple):
    """A parameter in an update: its local shard, or the part of it that is in the bucket.

    Attributes:
        name: name of the parameter.
        parameter: the parameter.
        weight: local part of the parameter.
        gradient: local part of its gradient, neither clipped nor divided by the loss scale; may be overwritten.
        state: local part of its state; `main` is the weight to update, and `weight` is a cast of it.
    """

    name: str
    parameter: nn.Parameter
    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]


class Optimizer(torch.optim.Optimizer):
    """Optimizer over the named parameters of a model; subclasses implement `initial_state` and `update`.

    `step` computes the global L2 norm of the gradients, calls `update`, which scales them to at most `clip_norm` and
    updates the weights, and drops the gradients. After it, `grad_norm` is the norm before clipping, a scalar tensor,
    and `updates` the number of steps that were not skipped, a scalar fp64 tensor (fp32 on a device without fp64).

    Args:
        named_parameters: name and parameter; those without `requires_grad` are ignored.
        defaults: settings of the parameter groups, including `lr`.
        weight_decay: weight decay of the parameters selected by `has_weight_decay`.
        norms_decay: apply weight decay to norm weights too.
        main_weights: keep an fp32 copy (main weight) of each parameter narrower than fp32, update that, and accumulate
            the gradients of several micro batches in fp32 (NeMo's `megatron_amp_O2`).
        clip_norm: clip the global gradient norm to this; None or 0: off.
        loss_scale: factor of the loss in fp16, by which gradients are divided; None for 1.
        sharding: shards and parts of the parameters on this rank; None: all of each.
        reduce_gradients: called before each update with the local gradients by name, to sum in place those of which
            each rank of a tensor-parallel group has computed a part.
        host: copy engine, to keep main weights and state in host memory; None: on the device. Ranks with different
            shards must then construct their optimizers at the same time.
        bucket_bytes: bytes of state that are moved to the device at once, with `host`.

    Attributes:
        gradients: those of the next step.
        sharding: as given.
        main_alone: parameters without values of their own: `update` writes their main weights only.
        host_state: state in host memory; None without `host`.

    Raises:
        UserError: the optimizer does not support the part of a parameter that this rank holds.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        defaults: dict[str, Any],
        *,
        weight_decay: float = 0.0,
        norms_decay: bool = False,
        main_weights: bool = False,
        clip_norm: float | None = None,
        loss_scale: LossScale | None = None,
        sharding: ParameterSharding | None = None,
        reduce_gradients: Callable[[Mapping[str, Tensor]], None] | None = None,
        host: CopyEngine | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        groups: dict[bool, dict[str, Any]] = {
            decay: {"params": [], "names": [], "weight_decay": weight_decay if decay else 0.0}
            for decay in (True, False)
        }
        for name, parameter in named_parameters:
            if parameter.requires_grad:
                group = groups[has_weight_decay(name, parameter, norms_decay=norms_decay)]
                group["params"].append(parameter)
                group["names"].append(name)
        super().__init__([g for g in groups.values() if g["params"]], defaults)
        self.main_weights = main_weights
        self.clip_norm = clip_norm
        self.loss_scale = loss_scale
        self.sharding = sharding or ParameterSharding()
        self.grad_norm: Tensor | None = None
        self.main_alone: Set[Tensor] = frozenset()
        self._reduce_gradients = reduce_gradients
        self._names: dict[nn.Parameter, str] = {}
        for group in self.param_groups:
            self._names.update(zip(group["params"], group["names"], strict=True))
        self.gradients = GradientSums(self._names, in_fp32=main_weights)
        self._check_parts()
        # Not in torch's `state`, which Lightning moves to the device.
        self._states: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.host_state = None if host is None else self._state_on_host(host, bucket_bytes)
        for number, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                state = self._first_state(parameter)
                if self.host_state is not None:
                    for key, host_tensor in self.host_state.tensors[number][index].items():
                        state[key] = host_tensor.copy_(state[key])
                self._states[parameter] = state

        device = next(iter(self._names)).device
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.updates = torch.zeros((), dtype=wide, device=device)

    @property
    def step_count(self) -> int:
        """`updates` as an integer, for checkpoints; synchronizes with the device."""
        return int(self.updates)

    @step_count.setter
    def step_count(self, count: int) -> None:
        self.updates.fill_(count)

    def initial_state(self, name: str, main: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the initial state by key; `main` is the local shard, `shape` that of the full parameter."""
        raise NotImplementedError

    def is_elementwise(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True if `update` is elementwise for this parameter, so that it may get any part of it as a vector."""
        return False

    def supports_part(self, name: str, shape: tuple[int, ...], part: RankPart) -> bool:
        """Return True if `update` is correct for a rank with one part of a parameter of this (full) shape.

        By default it is, unless matrices of experts are split.
        """
        return part.partition is None or self.is_elementwise(name, shape) or len(shape) < 3 or part.partition.dim == 0

    def update(self, group: dict[str, Any], shards: list[ShardUpdate], scale: Tensor) -> None:
        """Update weights of one group in place: all of them, or those of a bucket.

        Args:
            group: settings of the group.
            shards: parameters of the group.
            scale: scalar on the device, the clip coefficient over the loss scale, to multiply gradients by; negative:
                skip the step.
        """
        raise NotImplementedError

    def is_replicated(self, key: str, shape: tuple[int, ...]) -> bool:
        """Return True if a state tensor is replicated on all ranks instead of sharded like its parameter."""
        return False

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def accumulate(self, parameters: Iterable[nn.Parameter] | None = None) -> list[Tensor]:
        """Add the gradients of one micro batch to the fp32 sums and drop them; call it after every backward.

        Applies to parameters with main weights only; other gradients accumulate in `.grad`.

        Args:
            parameters: a subset of the optimizer's parameters; None: all that have a gradient.

        Returns:
            The accumulated gradient of each parameter, from its sum or `.grad`, as used by the next `step`.
        """
        if parameters is None:
            everything = chain.from_iterable(group["params"] for group in self.param_groups)
            parameters = [parameter for parameter in everything if parameter.grad is not None]
        return self.gradients.accumulate(parameters)

    def add_gradients(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Add these, the rows that this rank updates, to the gradients of parameters in the next `step`.

        They are kept, and overwritten by the next ones: sums of several with main weights are in fp32.
        """
        self.gradients.add(parameters, gradients)

    def take_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the local gradient of a parameter, and drop `.grad`."""
        return self.gradients.take(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip the gradients (the sums of `accumulate`, or `.grad`), update the weights and drop the gradients.

        Args:
            closure: called first, with gradients enabled; Lightning passes one that runs its hooks.

        Raises:
            ValueError: a parameter has no gradient.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        gradients = [[self._local_gradient(parameter) for parameter in group["params"]] for group in self.param_groups]
        if self._reduce_gradients is not None:
            self._reduce_gradients(dict(zip(self._names.values(), chain.from_iterable(gradients), strict=True)))
        self.grad_norm, scale = self._norm_and_scale(gradients)
        # As in torch and Megatron, skipped steps are not counted: bias correction depends on updates of the moments.
        self.updates.add_(scale >= 0)
        if self.host_state is not None:
            self.host_state.run(lambda bucket, states: self._update_bucket(bucket, gradients, states, scale))
        else:
            for group, group_gradients in zip(self.param_groups, gradients, strict=True):
                shards = [
                    ShardUpdate(name, parameter, self._written(parameter), gradient, self._states[parameter])
                    for name, parameter, gradient in zip(group["names"], group["params"], group_gradients, strict=True)
                ]
                self.update(group, shards, scale)
        self.gradients.start_anew()
        return result

    def local_shards(self) -> dict[str, LocalShard]:
        """Return the state for a checkpoint, by parameter name plus `.main` or a key of `initial_state`.

        With `host`, the tensors are in host memory, and this synchronizes until they are up to date.

        `.main` is present with `main_weights` only, but then also for fp32 parameters, which have no copy: the keys of
        a checkpoint do not depend on the dtype of the parameters.
        """
        self.synchronize()
        named: dict[str, LocalShard] = {}
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                shard, part = self.sharding.placed_shard(name, parameter), self.sharding.parts.get(name)
                for key, tensor in self._states[parameter].items():
                    if key == "main" and not self.main_weights:
                        continue
                    if self.is_replicated(key, shard.shape):
                        named[f"{name}.{key}"] = whole_shard(tensor, *replica_of(part))
                    elif part and shard.columns and tensor.ndim < 2:  # of rows, the same for all parts of them
                        of_rows = self.sharding.shard_of(parameter, replace(part, partition=None))
                        named[f"{name}.{key}"] = of_rows.with_local(tensor)
                    else:
                        named[f"{name}.{key}"] = shard.with_local(tensor)
        return named

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank by name (see `local_shards`), the settings of the groups and `updates`.

        For Lightning's checkpoints; those of `stoker train` hold `local_shards`, which fit other layouts too.

        Raises:
            UserError: the parameters are sharded, so that this would be the state of a rank only.
        """
        if any(self.sharding.placed_shard(name, each).local.shape != each.shape for each, name in self._names.items()):
            raise UserError("stoker train alone saves the optimizer state of sharded parameters; save weights only")
        groups = [{k: v for k, v in group.items() if k not in ("params", "names")} for group in self.param_groups]
        state = {key: shard.local for key, shard in self.local_shards().items()}
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state().model_dump()}
        return {"state": state, "param_groups": groups, "updates": self.step_count, **scale}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned, on the same layout; nothing is loaded from another one.

        Raises:
            ValueError: it is the state of another optimizer or of other parameters.
        """
        own, saved = {key: shard.local for key, shard in self.local_shards().items()}, state_dict["state"]
        differing = sorted({*own, *saved} - {key for key in own if key in saved and own[key].shape == saved[key].shape})
        if differing:
            raise ValueError(
                f"the optimizer state must be that of {type(self).__name__} for the same parameters, but differs in "
                f"{', '.join(differing[:3])}; resume with the configuration of the checkpoint."
            )
        for key, tensor in own.items():
            tensor.copy_(saved[key])
        for group, settings in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(settings)
        self.step_count = state_dict["updates"]
        if self.loss_scale is not None and "loss_scale" in state_dict:
            self.loss_scale.load(LossScaleState.model_validate(state_dict["loss_scale"]))

    def load_shards(
        self, saved: Callable[[], Mapping[str, TensorSpec]], fill: Callable[[Mapping[str, LocalShard]], None]
    ) -> None:
        """Load the state of a checkpoint.

        Args:
            saved: returns the tensors of the checkpoint.
            fill: fills shards by name, which must be those of the checkpoint.
        """
        fill(self.local_shards())

    def synchronize(self) -> None:
        """With `host`, wait until the state of the last step is in host memory; call before reading it there."""
        if self.host_state is not None:
            self.host_state.synchronize()

    def _first_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        name = self._names[parameter]
        shard = self.sharding.placed_shard(name, parameter)
        main = shard.local.float() if self.gradients.is_in_fp32(parameter) else shard.local
        return {"main": main, **self.initial_state(name, main, shard.shape)}

    def _norm_and_scale(self, gradients: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the gradient norm and what `update` multiplies gradients by; adapt the loss scale.

        The norm is that of all ranks, so an overflow on one of them skips the step on all.
        """
        norm = self.sharding.global_norm(self._names, list(chain.from_iterable(gradients)))
        if self.loss_scale is None:
            return norm, clip_coefficient(norm, self.clip_norm)
        norm = norm / self.loss_scale.scale
        scale = clip_coefficient(norm, self.clip_norm) / self.loss_scale.scale
        self.loss_scale.update(scale >= 0)
        return norm, scale

    def _check_parts(self) -> None:
        for parameter, name in self._names.items():
            shape, part = self.sharding.placed_shard(name, parameter).shape, self.sharding.parts.get(name)
            if part is not None and not self.supports_part(name, shape, part):
                raise UserError(
                    f"`{name}` is a stack of matrices that are split over {part.ranks} ranks, but "
                    f"{type(self).__name__} needs whole ones; set model.optim.name=adamw"
                )

    def _state_on_host(self, host: CopyEngine, bucket_bytes: int) -> HostState:
        device = next(iter(self._names)).device
        shards = int(self.sharding.sum_over_shards(torch.ones((), device=device)))
        shapes = [[self._state_shape(parameter, shards) for parameter in g["params"]] for g in self.param_groups]
        return HostState(plan_buckets(shapes, bucket_bytes), host)

    def _state_shape(self, parameter: nn.Parameter, shards: int) -> StateShape:
        """Return the shapes of a parameter's state in host memory: all except a main weight that is the parameter."""
        name = self._names[parameter]
        shard, part = self.sharding.placed_shard(name, parameter), self.sharding.parts.get(name)
        shape, weight = shard.shape, shard.local
        has_main_weight = self.gradients.is_in_fp32(parameter)

        def tensors(rows: tuple[int, ...]) -> dict[str, Tensor]:
            dtype = torch.float32 if has_main_weight else weight.dtype
            main = torch.empty(rows + tuple(weight.shape[1:]), dtype=dtype, device="meta")
            return ({"main": main} if has_main_weight else {}) | self.initial_state(name, main, shape)

        if shards > 1 and part is not None and part.axis == "expert":
            shards = part.num_replicas
        # The largest shard of any rank, given how `chunk_bounds` splits rows.
        max_rows = (max(weight.shape[0], -(-parameter.shape[0] // shards)),) if weight.ndim else ()
        return StateShape(
            {key: (tuple(t.shape), t.dtype) for key, t in tensors(tuple(weight.shape[:1])).items()},
            max_shard_bytes=sum(t.numel() * t.element_size() for t in tensors(max_rows).values()),
            elements=weight.numel() if self.is_elementwise(name, shape) else None,
        )

    def _update_bucket(
        self, bucket: Bucket, gradients: list[list[Tensor]], states: list[dict[str, Tensor]], scale: Tensor
    ) -> None:
        group = self.param_groups[bucket.group]
        shards: list[ShardUpdate] = []
        for part, state in zip(bucket.slices, states, strict=True):
            name, parameter = group["names"][part.index], group["params"][part.index]
            gradient = gradients[bucket.group][part.index]
            if part.element_range is not None:
                gradient = gradient.contiguous()
            weight = part.view(self.sharding.placed_shard(name, parameter).local)
            state.setdefault("main", weight)
            shards.append(ShardUpdate(name, parameter, weight, part.view(gradient), state))
        self.update(group, shards, scale)

    def _written(self, parameter: nn.Parameter) -> Tensor:
        """Return the local shard that an update writes besides the main weight; that itself if there is no other."""
        if parameter in self.main_alone:
            return self._states[parameter]["main"]
        return self._own_rows(parameter, local_tensor(parameter))

    def _local_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the local shard of the accumulated gradient, and drop `.grad`."""
        given = self.gradients.take_given(parameter)
        if given is not None:
            return given
        return self._own_rows(parameter, self.gradients.accumulated(parameter))

    def _own_rows(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        return self.sharding.local_rows(tensor, self.sharding.parts.get(self._names[parameter]))
