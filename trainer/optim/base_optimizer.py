"""What all optimizers of a run share: weight-decay groups, fp32 main weights and accumulation, clipping, skipping.

Everything stays on the device: the gradient norm and the clip coefficient are tensors that the host never waits for.
A step whose gradient norm is not finite changes neither weights nor state, and is not counted.

Where parameters are cut over ranks, an optimizer works on the rows of this rank (`distributed.pieces`); what it must
know of the other rows it asks for through `sum_over_shards` and `gather_rows`.

Main weights and state may live in host memory (`model.cpu_offloading_optimizer`, see `host_state`): an update then gets
them on the device, some parameters at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.launch import triton_runs_on
from ...kernels.optim.sum_of_squares import sum_of_squares
from ...models.memory.host_copies import Copies
from ..utils.local_shard import Piece, local_tensor, piece_of, place_among_all
from .host_state import HostState
from .state_buckets import BUCKET_BYTES, Bucket, StateShape, plan_buckets


def decays(name: str, parameter: Tensor, *, norms_decay: bool = False) -> bool:
    """Whether weight decay applies: to matrices and tables; to norm weights only with `norms_decay`; to nothing else.

    This is NeMo's rule (`do_layer_norm_weight_decay`), told by shape and name. The biases of all experts of a layer are
    one matrix. Vectors that are neither biases nor of norms scale heads or activations and shape distances: zero is not
    where those rest.
    """
    if name.endswith(("up_bias", "down_bias")):
        return False
    if parameter.ndim >= 2:
        return True
    return norms_decay and name.endswith("norm.weight")


def no_shards(tensor: Tensor) -> Tensor:
    """The sum over the ranks that share the parameters, where there is one such rank."""
    return tensor


def all_rows_are_here(local: Tensor, rows: int) -> Tensor:
    """The whole tensor from this rank's rows, where one rank has all of them."""
    return local


class Optimizer(torch.optim.Optimizer):
    """An optimizer over the named parameters of a model; subclasses give `initial_state` and `update`.

    One `step` computes the global L2 norm of the gradients, has `update` scale them to at most `clip_norm` and change
    the weights, and drops the gradients. After it, `grad_norm` holds the norm before clipping, a scalar tensor, and
    `updates` the number of steps that changed the weights, a scalar fp64 tensor (fp32 on a device that has no fp64).

    Args:
        named_parameters: name and parameter; those without `requires_grad` are left alone.
        defaults: settings of the groups, `lr` among them.
        weight_decay: weight decay of the parameters that `decays` picks.
        norms_decay: apply it to norm weights too.
        main_weights: weights and gradients are narrower than fp32: keep an fp32 copy of each such parameter, update
            that, and accumulate the gradients of several micro batches in fp32 (NeMo's `megatron_amp_O2`).
        clip_norm: clip the global gradient norm to this; None or 0: off.
        sum_over_shards: adds a tensor up, in place, over the ranks that hold the other rows of the parameters.
        gather_rows: this rank's rows of a tensor that is cut like a parameter, and the number of rows of the whole
            one, to the whole one. All ranks call it for the same tensors in the same order; some may have no rows.
        piece_of: the rows of a parameter, or of its whole gradient, that this rank updates.
        host: keep main weights and state in host memory, which this copies from and to; None: on the device. Ranks
            that hold different rows make their optimizers at the same time then.
        bucket_bytes: of state that goes through the device together, with `host`.

    Attributes:
        host_state: the state in host memory; None without `host`.
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
        sum_over_shards: Callable[[Tensor], Tensor] = no_shards,
        gather_rows: Callable[[Tensor, int], Tensor] = all_rows_are_here,
        piece_of: Callable[[Tensor], Piece] = piece_of,
        host: Copies | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        groups: dict[bool, dict[str, Any]] = {
            decay: {"params": [], "names": [], "weight_decay": weight_decay if decay else 0.0}
            for decay in (True, False)
        }
        for name, parameter in named_parameters:
            if parameter.requires_grad:
                group = groups[decays(name, parameter, norms_decay=norms_decay)]
                group["params"].append(parameter)
                group["names"].append(name)
        super().__init__([g for g in groups.values() if g["params"]], defaults)
        self.main_weights = main_weights
        self.clip_norm = clip_norm
        self.sum_over_shards = sum_over_shards
        self.gather_rows = gather_rows
        self.grad_norm: Tensor | None = None
        self.piece_of = piece_of
        self._names: dict[nn.Parameter, str] = {}
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._sums_in_use: set[nn.Parameter] = set()
        for group in self.param_groups:
            self._names.update(zip(group["params"], group["names"], strict=True))
        # Not torch's `state`, which Lightning moves to the device.
        self._states: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.host_state = None if host is None else self._state_on_host(host, bucket_bytes)
        for number, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                state = self._first_state(parameter)
                if self.host_state is not None:
                    for key, home in self.host_state.tensors[number][index].items():
                        state[key] = home.copy_(state[key])
                self._states[parameter] = state

        device = next(iter(self._names)).device
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.updates = torch.zeros((), dtype=wide, device=device)

    @property
    def step_count(self) -> int:
        """`updates` as a number, for which the host waits; it is part of a checkpoint."""
        return int(self.updates)

    @step_count.setter
    def step_count(self, count: int) -> None:
        self.updates.fill_(count)

    def _has_copy(self, parameter: Tensor) -> bool:
        return self.main_weights and parameter.element_size() < 4

    def initial_state(self, name: str, main: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """The state of one parameter before the first step, by key.

        Args:
            name: of the parameter.
            main: this rank's rows of the weight that is updated.
            shape: of the whole parameter.
        """
        raise NotImplementedError

    def is_elementwise(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether `update` treats the elements of a parameter one by one, so that it may get some of them as a vector.

        Args:
            name: of the parameter.
            shape: of the whole parameter.
        """
        return False

    def update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
        scale: Tensor,
    ) -> None:
        """Update weights of one group in place: all of them, or those whose state is on the device.

        Args:
            group: `params`, `names` and the settings.
            weights: this rank's rows of each parameter.
            gradients: this rank's rows of each gradient, unscaled; may be overwritten.
            states: the state of each parameter; `main` is the weight to update, from which the parameter follows.
            scale: fp32 scalar on the device: gradients times this are clipped; negative: change nothing.
        """
        raise NotImplementedError

    def is_whole(self, key: str, shape: tuple[int, ...]) -> bool:
        """Whether every rank holds all of a state tensor, rather than the rows that go with those of its parameter.

        Args:
            key: of the state.
            shape: of the whole parameter.
        """
        return False

    def set_lr(self, lr: float) -> None:
        """Use this learning rate for the steps that follow."""
        for group in self.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def accumulate(self, parameters: Iterable[nn.Parameter] | None = None) -> list[Tensor]:
        """Add the gradients of one micro batch to fp32 sums and drop them; call it after every backward.

        Only narrow parameters with main weights need this; the gradients of others accumulate in `.grad`.

        Args:
            parameters: some of the optimizer's; None: all.

        Returns:
            The sum of each parameter, or its `.grad`: what the next `step` will take.
        """
        if parameters is None:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        parameters = list(parameters)
        narrow = [parameter for parameter in parameters if self._has_copy(parameter)]
        if narrow:
            gradients = [self._take_gradient(parameter) for parameter in narrow]
            for parameter, gradient in zip(narrow, gradients, strict=True):
                if parameter not in self._sums:
                    self._sums[parameter] = torch.empty_like(gradient, dtype=torch.float32)
            for is_first in (True, False):
                chosen = [i for i, p in enumerate(narrow) if (p not in self._sums_in_use) == is_first]
                if chosen:
                    into = torch._foreach_copy_ if is_first else torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
                    into([self._sums[narrow[i]] for i in chosen], [gradients[i] for i in chosen])
            self._sums_in_use.update(narrow)
        return [self._sums[p] if self._has_copy(p) else local_tensor(self._gradient(p)) for p in parameters]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Clip, update and drop the gradients: the sums of what `accumulate` took since the last step, else `.grad`.

        Args:
            closure: called first, with gradients enabled; Lightning passes one that runs its hooks.

        Raises:
            ValueError: a parameter has no gradient.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        gradients = [[self._rows(parameter) for parameter in group["params"]] for group in self.param_groups]
        self.grad_norm = global_norm([g for group in gradients for g in group], self.sum_over_shards)
        scale = clip_coefficient(self.grad_norm, self.clip_norm)
        # As torch and Megatron count: a skipped step is none, and bias corrections go by what the moments have seen.
        self.updates.add_(scale >= 0)
        if self.host_state is not None:
            self.host_state.run(lambda bucket, states: self._update_bucket(bucket, gradients, states, scale))
        else:
            for group, group_gradients in zip(self.param_groups, gradients, strict=True):
                weights = [self.piece_of(parameter).local for parameter in group["params"]]
                states = [self._states[parameter] for parameter in group["params"]]
                self.update(group, weights, group_gradients, states, scale)
        self._sums_in_use.clear()
        return result

    def pieces(self) -> dict[str, Piece]:
        """The state as a checkpoint holds it: parameter name plus `.main` and the keys of `initial_state`.

        With `host` the tensors are in host memory, and the host has waited until they are complete.

        `.main` is there with main weights only, even where it is the parameter itself: a checkpoint does not depend on
        who casts.
        """
        self.settle()
        named: dict[str, Piece] = {}
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                rows = self.piece_of(parameter)
                for key, tensor in self._states[parameter].items():
                    if key == "main" and not self.main_weights:
                        continue
                    if self.is_whole(key, tuple(parameter.shape)):
                        rows_of_all = tensor.shape[0] if tensor.ndim else 1
                        named[f"{name}.{key}"] = Piece(tensor, 0, rows_of_all, *place_among_all())
                    else:
                        named[f"{name}.{key}"] = rows.of(tensor)
        return named

    def settle(self) -> None:
        """With `host`, wait until what the last step has made is in host memory: for whoever reads it there."""
        if self.host_state is not None:
            self.host_state.settle()

    def _first_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        weight = self.piece_of(parameter).local
        main = weight.float() if self._has_copy(parameter) else weight
        return {"main": main, **self.initial_state(self._names[parameter], main, tuple(parameter.shape))}

    def _state_on_host(self, host: Copies, bucket_bytes: int) -> HostState:
        device = next(iter(self._names)).device
        shards = int(self.sum_over_shards(torch.ones((), device=device)))
        shapes = [[self._state_shape(parameter, shards) for parameter in g["params"]] for g in self.param_groups]
        return HostState(plan_buckets(shapes, bucket_bytes), host)

    def _state_shape(self, parameter: nn.Parameter, shards: int) -> StateShape:
        """What of a parameter's state goes to host memory: all but a weight that is the parameter itself."""
        name, shape, piece = self._names[parameter], tuple(parameter.shape), self.piece_of(parameter)
        weight = piece.local
        has_copy = self._has_copy(parameter)

        def tensors(rows: tuple[int, ...]) -> dict[str, Tensor]:
            dtype = torch.float32 if has_copy else weight.dtype
            main = torch.empty(rows + tuple(weight.shape[1:]), dtype=dtype, device="meta")
            return ({"main": main} if has_copy else {}) | self.initial_state(name, main, shape)

        # As `pieces.chunk` cuts: no rank has more rows.
        most = (max(weight.shape[0], -(-piece.rows // shards)),) if weight.ndim else ()
        return StateShape(
            {key: (tuple(t.shape), t.dtype) for key, t in tensors(tuple(weight.shape[:1])).items()},
            most_bytes=sum(t.numel() * t.element_size() for t in tensors(most).values()),
            elements=weight.numel() if self.is_elementwise(name, shape) else None,
        )

    def _update_bucket(
        self, bucket: Bucket, gradients: list[list[Tensor]], states: list[dict[str, Tensor]], scale: Tensor
    ) -> None:
        group = self.param_groups[bucket.group]
        indices = [stretch.index for stretch in bucket.stretches]
        some = {**group, **{key: [group[key][index] for index in indices] for key in ("params", "names")}}
        weights = [s.of(self.piece_of(p).local) for s, p in zip(bucket.stretches, some["params"], strict=True)]
        for weight, state in zip(weights, states, strict=True):
            state.setdefault("main", weight)
        whole = [gradients[bucket.group][index] for index in indices]
        some_gradients = [
            s.of(gradient if s.cut is None else gradient.contiguous())
            for s, gradient in zip(bucket.stretches, whole, strict=True)
        ]
        self.update(some, weights, some_gradients, states, scale)

    def _rows(self, parameter: nn.Parameter) -> Tensor:
        """This rank's rows of a complete gradient, which is dropped."""
        whole = self._sums[parameter] if parameter in self._sums_in_use else self._take_gradient(parameter)
        return self.piece_of(whole).local

    def _take_gradient(self, parameter: nn.Parameter) -> Tensor:
        gradient = self._gradient(parameter)
        parameter.grad = None
        return local_tensor(gradient)

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            name = self._names[parameter]
            raise ValueError(f"`{name}` has no gradient; every trained parameter must take part in the loss")
        return parameter.grad


def arithmetic_dtype(tensor: Tensor) -> torch.dtype:
    """What an update is calculated in: the dtype of the weight, but at least fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def overwrite(old: Tensor, new: Tensor, live: Tensor) -> None:
    """Write `new` over `old`, rounded to its dtype, unless the scalar `live` is False."""
    old.copy_(torch.where(live, new, old))


def write_weight(weight: Tensor, main: Tensor, new: Tensor, live: Tensor) -> None:
    """Overwrite a main weight, and this rank's rows of the parameter where they are another tensor."""
    overwrite(main, new, live)
    if weight.dtype != main.dtype:
        weight.copy_(main)


def global_norm(gradients: list[Tensor], sum_over_shards: Callable[[Tensor], Tensor] = no_shards) -> Tensor:
    """L2 norm of all gradients together, a scalar tensor: squares are summed in fp32, or in fp64 for fp64 gradients.

    A number that is not finite makes the norm so too. On a GPU one kernel reads all gradients (`sum_of_squares`), and
    the same gradients give the same bits.

    Args:
        gradients: this rank's rows of each gradient.
        sum_over_shards: adds up over the ranks that hold the other rows.
    """
    if all(map(triton_runs_on, gradients)):
        return sum_over_shards(sum_of_squares(gradients)).sqrt()
    dtype = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
    norms = torch._foreach_norm(gradients, 2, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
    if sum_over_shards is no_shards:
        return torch.linalg.vector_norm(torch.stack(norms))
    return sum_over_shards(torch.stack(norms).square().sum()).sqrt()


def clip_coefficient(norm: Tensor, clip_norm: float | None) -> Tensor:
    """What to multiply gradients by so that their norm is at most `clip_norm`; -1 where the norm is not finite.

    It is min(1, clip_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_.
    """
    scale = (clip_norm / (norm + 1e-6)).clamp(max=1.0) if clip_norm else torch.ones_like(norm)
    return torch.where(norm.isfinite(), scale, -1.0)
