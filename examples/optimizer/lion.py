"""Lion (Chen et al. 2023, arXiv 2302.06675), a plain `torch.optim.Optimizer`, as an optimizer of stoker's."""

import torch

import stoker


@stoker.register("optimizer", "lion")
class Lion(torch.optim.Optimizer):
    """Sign of the momentum, with decoupled weight decay."""

    elementwise = True  # each element is updated by itself, so a rank may have any part of a parameter

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(momentum.lerp(parameter.grad, 1 - beta1).sign_(), alpha=group["lr"])
                momentum.lerp_(parameter.grad, 1 - beta2)
