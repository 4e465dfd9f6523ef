"""What all optimizers of a run share: weight-decay groups, fp32 main weights and accumulation, clipping, skipping.

Everything stays on the device: the gradient norm and the clip coefficient are tensors that the host never waits for.
A step whose gradient norm is not finite changes neither weights nor state.

Under FSDP2 parameters are DTensors. An optimizer works on the rows of this rank (`distributed.pieces`); what it must
know of the other rows it asks for through `sum_over_shards` and `gather_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.pieces import Piece, local_tensor, piece_of


def decays(name: str, parameter: Tensor, *, norms_decay: bool = False) -> bool:
    """Whether weight decay applies: to matrices and tables; to norm weights only with `norms_decay`; never to biases.

    This is NeMo's rule (nemo_semantics 1.7, `do_layer_norm_weight_decay`), told by shape and name: a vector that is
    not a bias is the weight of a norm.
    """
    if parameter.ndim >= 2:
        return True
    return norms_decay and not name.endswith("bias")


def no_shards(tensor: Tensor) -> Tensor:
    """The sum over the ranks that share the parameters, where there is one such rank."""
    return tensor


def all_rows_are_here(local: Tensor, rows: int) -> Tensor:
    """The whole tensor from this rank's rows, where one rank has all of them."""
    return local


class Optimizer(torch.optim.Optimizer):
    """An optimizer over the named parameters of a model; subclasses give `initial_state` and `update`.

    One `step` computes the global L2 norm of the gradients, has `update` scale them to at most `clip_norm` and change
    the weights, and drops the gradients. After it, `grad_norm` holds the norm before clipping, a scalar tensor.

    Args:
        named_parameters: name and parameter; those without `requires_grad` are left alone.
        defaults: settings of the groups, `lr` among them.
        weight_decay: weight decay of the parameters that `decays` picks.
        norms_decay: apply it to norm weights too.
        main_weights: weights and gradients are narrower than fp32: keep an fp32 copy of each such parameter, update
            that, and accumulate the gradients of several micro batches in fp32 (NeMo's `megatron_amp_O2`). Parameters
            that are fp32 all the same (FSDP2 casts them itself) are their own main weights.
        clip_norm: clip the global gradient norm to this; None or 0: off.
        sum_over_shards: adds a tensor up, in place, over the ranks that hold the other rows of the parameters.
        gather_rows: this rank's rows of a tensor that is cut like a parameter, and the number of rows of the whole
            one, to the whole one. All ranks call it for the same tensors in the same order; some may have no rows.
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
        self.step_count = 0
        self.grad_norm: Tensor | None = None
        self._accumulates = main_weights and any(
            parameter.element_size() < 4 for group in self.param_groups for parameter in group["params"]
        )
        self._sums: list[list[Tensor]] | None = None
        self._sums_hold_gradients = False
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                weight = local_tensor(parameter)
                main = weight.float() if self._accumulates and weight.element_size() < 4 else weight
                self.state[parameter] = {"main": main, **self.initial_state(name, main, tuple(parameter.shape))}

    def initial_state(self, name: str, main: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """The state of one parameter before the first step, by key.

        Args:
            name: of the parameter.
            main: this rank's rows of the weight that is updated.
            shape: of the whole parameter.
        """
        raise NotImplementedError

    def update(
        self, group: dict[str, Any], gradients: list[Tensor], states: list[dict[str, Tensor]], scale: Tensor
    ) -> None:
        """Update the weights of one group in place.

        Args:
            group: `params`, `names` and the settings.
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
    def accumulate(self) -> None:
        """Add the gradients of one micro batch to the fp32 sum and drop them; call it after every backward.

        Only narrow parameters with main weights need this; all others accumulate in `.grad`, where it does nothing.
        """
        if not self._accumulates:
            return
        if self._sums is None:
            self._sums = [
                [torch.empty_like(self.state[p]["main"]) for p in group["params"]] for group in self.param_groups
            ]
        into = torch._foreach_add_ if self._sums_hold_gradients else torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        for group, sums in zip(self.param_groups, self._sums, strict=True):
            into(sums, self._take_gradients(group))
        self._sums_hold_gradients = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Clip, update and drop the gradients: the sums if `accumulate` was called since the last step, else `.grad`.

        Args:
            closure: called first, with gradients enabled; Lightning passes one that runs its hooks.

        Raises:
            ValueError: a parameter has no gradient.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        gradients = self._sums if self._sums_hold_gradients else None
        gradients = gradients or [self._take_gradients(group) for group in self.param_groups]
        self.grad_norm = global_norm([g for group in gradients for g in group], self.sum_over_shards)
        scale = clip_coefficient(self.grad_norm, self.clip_norm)
        self.step_count += 1
        for group, group_gradients in zip(self.param_groups, gradients, strict=True):
            self.update(group, group_gradients, [self.state[parameter] for parameter in group["params"]], scale)
        self._sums_hold_gradients = False
        return result

    def pieces(self) -> dict[str, Piece]:
        """The state as a checkpoint holds it: parameter name plus `.main` and the keys of `initial_state`.

        `.main` is there with main weights only, even where it is the parameter itself: a checkpoint does not depend on
        who casts.
        """
        named: dict[str, Piece] = {}
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                rows = piece_of(parameter)
                whole = Piece(rows.local, 0, rows.rows, *self._place_among_all(rows))
                for key, tensor in self.state[parameter].items():
                    if key == "main" and not self.main_weights:
                        continue
                    if self.is_whole(key, tuple(parameter.shape)):
                        named[f"{name}.{key}"] = Piece(
                            tensor, 0, tensor.shape[0] if tensor.ndim else 1, whole.copy, whole.copies
                        )
                    else:
                        named[f"{name}.{key}"] = rows.of(tensor)
        return named

    @staticmethod
    def _place_among_all(rows: Piece) -> tuple[int, int]:
        if not torch.distributed.is_initialized():
            return 0, 1
        return torch.distributed.get_rank(), torch.distributed.get_world_size()

    def _take_gradients(self, group: dict[str, Any]) -> list[Tensor]:
        gradients: list[Tensor] = []
        for name, parameter in zip(group["names"], group["params"], strict=True):
            if parameter.grad is None:
                raise ValueError(f"`{name}` has no gradient; every trained parameter must take part in the loss")
            gradients.append(local_tensor(parameter.grad))
            parameter.grad = None
        return gradients


def arithmetic_dtype(tensor: Tensor) -> torch.dtype:
    """What an update is calculated in: the dtype of the weight, but at least fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def overwrite(old: Tensor, new: Tensor, live: Tensor) -> None:
    """Write `new` over `old`, rounded to its dtype, unless the scalar `live` is False."""
    old.copy_(torch.where(live, new, old))


def write_weight(parameter: Tensor, main: Tensor, new: Tensor, live: Tensor) -> None:
    """Overwrite a main weight, and the parameter where that is another tensor."""
    overwrite(main, new, live)
    if parameter.dtype != main.dtype:
        local_tensor(parameter).copy_(main)


def global_norm(gradients: list[Tensor], sum_over_shards: Callable[[Tensor], Tensor] = no_shards) -> Tensor:
    """L2 norm of all gradients together, a scalar tensor: squares are summed in fp32, or in fp64 for fp64 gradients.

    Args:
        gradients: this rank's rows of each gradient.
        sum_over_shards: adds up over the ranks that hold the other rows.
    """
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
