"""AdamW as a run uses it: weight-decay groups, fp32 main weights, fp32 gradient accumulation and clipping together.

Everything stays on the device: the gradient norm and the clip coefficient are tensors that the host never waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.adamw import adamw_step


def decays(name: str, parameter: Tensor, *, norms_decay: bool = False) -> bool:
    """Whether weight decay applies: to matrices and tables; to norm weights only with `norms_decay`; never to biases.

    This is NeMo's rule (nemo_semantics 1.7, `do_layer_norm_weight_decay`), told by shape and name: a vector that is
    not a bias is the weight of a norm.
    """
    if parameter.ndim >= 2:
        return True
    return norms_decay and not name.endswith("bias")


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) over the named parameters of a model.

    One `step` computes the global L2 norm of the gradients, scales them to at most `clip_norm`, updates weights and
    moments in one pass (`kernels.adamw`) and drops the gradients. After it, `grad_norm` holds the norm before clipping,
    a scalar tensor.

    Args:
        named_parameters: name and parameter; those without `requires_grad` are left alone.
        lr: learning rate until `set_lr` is called.
        betas: decay of the running mean and of the running square.
        eps: added to the root of the running square.
        weight_decay: decoupled weight decay of the parameters that `decays` picks.
        norms_decay: apply it to norm weights too.
        main_weights: keep an fp32 copy of each parameter that is narrower than fp32, update that, and accumulate the
            gradients of several micro batches in fp32 (NeMo's `megatron_amp_O2`).
        clip_norm: clip the global gradient norm to this; None or 0: off.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        norms_decay: bool = False,
        main_weights: bool = False,
        clip_norm: float | None = None,
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
        super().__init__([g for g in groups.values() if g["params"]], {"lr": lr, "betas": betas, "eps": eps})
        self.main_weights = main_weights
        self.clip_norm = clip_norm
        self.step_count = 0
        self.grad_norm: Tensor | None = None
        self._sums: list[list[Tensor]] | None = None
        self._sums_hold_gradients = False
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = _initial_state(parameter, main_weights)

    def set_lr(self, lr: float) -> None:
        """Use this learning rate for the steps that follow."""
        for group in self.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients of one micro batch to the fp32 sum and drop them; call it after every backward.

        Only narrow parameters with main weights need this; all others accumulate in `.grad`, where it does nothing.
        """
        if not self.main_weights:
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
        self.grad_norm = global_norm([gradient for group in gradients for gradient in group])
        scale = clip_coefficient(self.grad_norm, self.clip_norm)
        self.step_count += 1
        for group, group_gradients in zip(self.param_groups, gradients, strict=True):
            states = [self.state[parameter] for parameter in group["params"]]
            adamw_step(
                group["params"],
                [state["main"] for state in states],
                group_gradients,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=self.step_count,
                grad_scale=scale,
            )
        self._sums_hold_gradients = False
        return result

    def tensors(self) -> dict[str, Tensor]:
        """The state as a checkpoint holds it: parameter name plus `.main`, `.exp_avg`, `.exp_avg_sq`.

        `.main` exists only where it is a tensor of its own.
        """
        named: dict[str, Tensor] = {}
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                for key, tensor in self.state[parameter].items():
                    if tensor is not parameter:
                        named[f"{name}.{key}"] = tensor
        return named

    def _take_gradients(self, group: dict[str, Any]) -> list[Tensor]:
        gradients: list[Tensor] = []
        for name, parameter in zip(group["names"], group["params"], strict=True):
            if parameter.grad is None:
                raise ValueError(f"`{name}` has no gradient; every trained parameter must take part in the loss")
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients


def _initial_state(parameter: Tensor, main_weights: bool) -> dict[str, Tensor]:
    weight = parameter.detach()
    main = weight.float() if main_weights and weight.element_size() < 4 else parameter
    return {
        "main": main,
        "exp_avg": torch.zeros_like(main, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(main, requires_grad=False),
    }


def global_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm of all gradients together, a scalar tensor: squares are summed in fp32, or in fp64 for fp64 gradients."""
    dtype = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
    norms = torch._foreach_norm(gradients, 2, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_coefficient(norm: Tensor, clip_norm: float | None) -> Tensor:
    """What to multiply gradients by so that their norm is at most `clip_norm`: min(1, clip_norm / (norm + 1e-6))."""
    if not clip_norm:
        return torch.ones_like(norm)
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0)
