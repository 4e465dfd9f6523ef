"""megatron-core's own routing functions beside ours on random logits."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from routing_cases import random_logits, to_dense
from torch import Tensor

from stoker.kernels.moe.routing import (
    RoutingResult,
    attach_auxiliary_loss,
    capacity_mask,
    expert_capacity,
    load_balancing_loss,
    router_probabilities,
    sinkhorn_routing,
    tokens_per_expert,
    topk_routing,
    z_loss,
)

MEGATRON = os.environ.get("STOKER_TEST_MEGATRON_CORE")
"""A folder into which megatron-core was installed (`pip install --no-deps --target FOLDER megatron-core`)."""

CASES: list[dict[str, Any]] = [
    {"topk": 2},
    {"topk": 1, "pre_softmax": True},
    {"topk": 2, "pre_softmax": True, "scaling_factor": 1.5},
    {"topk": 1, "score": "sigmoid"},
    {"topk": 4, "score": "sigmoid", "scaling_factor": 2.5, "biased": True},
    {"topk": 4, "score": "sigmoid", "biased": True, "num_groups": 4, "group_topk": 2},
    {"topk": 4, "num_groups": 4, "group_topk": 3},
    {"topk": 2, "pre_softmax": True, "num_groups": 2, "group_topk": 1},
]

# What megatron-core makes of the logits, one array for each name; the first of two dimensions are tokens.
MEGATRON_PROGRAM = """
import json, types, warnings
warnings.simplefilter("ignore")
import numpy as np, torch
import megatron.core
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

cases = json.loads(open("cases.json").read())
given = {name: torch.from_numpy(array) for name, array in np.load("given.npz").items()}
made = {"version": np.array(megatron.core.__version__)}

def gradient(output, logits):
    return torch.autograd.grad((output * given["cotangent"]).sum(), logits)[0]

for name in ("even", "uneven"):
    for number, case in enumerate(cases):
        logits = given[name].clone().requires_grad_()
        score = case.get("score", "softmax")
        gates, chosen = moe_utils.topk_routing_with_score_function(
            logits, case["topk"], use_pre_softmax=case.get("pre_softmax", False),
            num_groups=case.get("num_groups"), group_topk=case.get("group_topk"),
            scaling_factor=case.get("scaling_factor"), score_function=score,
            expert_bias=given["bias"] if case.get("biased") else None,
        )
        key = f"{name}/{number}/"
        made[key + "gates"], made[key + "chosen"] = gates, chosen
        made[key + "gates_gradient"] = gradient(gates, logits)
        for factor in (0.5, 1.0, 1.3, 9.0):
            for policy in ("probs", "position"):
                kept, where = moe_utils.apply_router_token_dropping(
                    gates, chosen, case["topk"], factor, drop_policy=policy
                )
                made[f"{key}{policy}/{factor}/gates"], made[f"{key}{policy}/{factor}/chosen"] = kept, where
        _, chances = moe_utils.compute_routing_scores_for_aux_loss(logits, case["topk"], score)
        loss = moe_utils.switch_load_balancing_loss_func(
            chances, chosen.sum(dim=0), len(logits), case["topk"], logits.shape[1], 0.01
        )
        made[key + "balance"] = loss
        made[key + "balance_gradient"] = torch.autograd.grad(loss, logits)[0]
    logits = given[name].clone().requires_grad_()
    loss = moe_utils.z_loss_func(logits, 0.001)
    made[name + "/z"], made[name + "/z_gradient"] = loss, torch.autograd.grad(loss, logits)[0]
    for topk in (1, 2):
        for training in (True, False):
            logits = given[name].clone().requires_grad_()
            router = types.SimpleNamespace(
                topk=topk, training=training, config=types.SimpleNamespace(moe_aux_loss_coeff=0)
            )
            gates, chosen = TopKRouter.sinkhorn_load_balancing(router, logits)
            key = f"{name}/sinkhorn/{topk}/{training}/"
            made[key + "gates"], made[key + "chosen"] = gates, chosen
            made[key + "gates_gradient"] = gradient(gates, logits)
    logits = given[name].clone().requires_grad_()
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(0.25))
    output = moe_utils.MoEAuxLossAutoScaler.apply(logits.softmax(dim=1), moe_utils.z_loss_func(logits, 0.1))
    made[name + "/injected"] = gradient(output, logits)
made["capacities"] = np.array(
    [moe_utils.get_capacity(t * k, e, f)
     for t in range(40) for k in (1, 2, 6) for e in (6, 7, 64) for f in (0.5, 1.1, 1.25)]
)
np.savez("made.npz", **{n: v.detach().numpy() if isinstance(v, torch.Tensor) else v for n, v in made.items()})
"""


@pytest.mark.skipif(
    MEGATRON is None and importlib.util.find_spec("megatron") is None,
    reason="needs megatron-core: set STOKER_TEST_MEGATRON_CORE to a folder it was installed into",
)
def test_megatron_core_routes_alike(tmp_path: Path) -> None:
    logits = {"even": random_logits(96, 16).float(), "uneven": random_logits(96, 16, 3.0, seed=1).float()}
    logits["uneven"][:, 3] += 4.0
    bias, cotangent = random_logits(1, 16, 0.3, seed=2)[0].float(), random_logits(96, 16, seed=3).float()
    arrays = {**logits, "bias": bias, "cotangent": cotangent}
    given: dict[str, Any] = {name: tensor.numpy() for name, tensor in arrays.items()}
    np.savez(tmp_path / "given.npz", **given)
    (tmp_path / "cases.json").write_text(json.dumps(CASES))
    environment = {**os.environ, **({"PYTHONPATH": MEGATRON} if MEGATRON else {})}
    done = subprocess.run(
        [sys.executable, "-c", MEGATRON_PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    made = dict(np.load(tmp_path / "made.npz"))
    print("megatron-core", made.pop("version"), "torch", torch.__version__)

    def same(key: str, ours: Tensor) -> None:
        torch.testing.assert_close(ours.detach(), torch.from_numpy(made.pop(key)), rtol=2e-6, atol=1e-7, msg=key)

    def same_choice(key: str, ours: RoutingResult, leaf: Tensor) -> None:
        dense = to_dense(ours, 16)
        assert (
            to_dense(RoutingResult(ours.experts, torch.ones_like(ours.gates)), 16) == 1
        ).numpy().tolist() == made.pop(key + "chosen").tolist(), key
        same(key + "gates", dense)
        same(key + "gates_gradient", torch.autograd.grad((dense * cotangent).sum(), leaf, retain_graph=True)[0])

    for name, values in logits.items():
        for number, case in enumerate(CASES):
            leaf = values.clone().requires_grad_()
            topk, score = case["topk"], case.get("score", "softmax")
            kinds = {key: value for key, value in case.items() if key not in ("topk", "biased")}
            ours = topk_routing(leaf, topk, selection_bias=bias if case.get("biased") else None, **kinds)
            same_choice(f"{name}/{number}/", ours, leaf)
            for factor in (0.5, 1.0, 1.3, 9.0):
                capacity = expert_capacity(96, 16, topk, factor)
                key = f"{name}/{number}/probs/{factor}/"
                kept = capacity_mask(ours, 16, capacity, "probs")
                assert (
                    to_dense(RoutingResult(ours.experts, kept.float()), 16).bool().tolist()
                    == made.pop(key + "chosen").tolist()
                )
                same(key + "gates", to_dense(RoutingResult(ours.experts, ours.gates * kept), 16))
                # its topk over ones and zeros keeps any of the ones: as many of the same as we do
                key = f"{name}/{number}/position/{factor}/"
                kept = capacity_mask(ours, 16, capacity, "position")
                wanted = made.pop(key + "chosen")
                made.pop(key + "gates")
                assert not (wanted & (to_dense(ours, 16) == 0).numpy()).any()
                assert to_dense(RoutingResult(ours.experts, kept.float()), 16).sum(0).tolist() == wanted.sum(0).tolist()
            counts = tokens_per_expert(ours.experts, 16)
            loss = 0.01 * load_balancing_loss(router_probabilities(leaf, score), counts, topk)
            same(f"{name}/{number}/balance", loss)
            same(f"{name}/{number}/balance_gradient", torch.autograd.grad(loss, leaf)[0])
        leaf = values.clone().requires_grad_()
        loss = 0.001 * z_loss(leaf)
        same(name + "/z", loss)
        same(name + "/z_gradient", torch.autograd.grad(loss, leaf)[0])
        for topk in (1, 2):
            for training in (True, False):
                ours = sinkhorn_routing(leaf, topk, training=training)
                same_choice(f"{name}/sinkhorn/{topk}/{training}/", ours, leaf)
        output = attach_auxiliary_loss(leaf.softmax(dim=1), 0.1 * z_loss(leaf), torch.tensor(0.25))
        same(name + "/injected", torch.autograd.grad((output * cotangent).sum(), leaf)[0])
    grid = [
        expert_capacity(t, e, k, f) for t in range(40) for k in (1, 2, 6) for e in (6, 7, 64) for f in (0.5, 1.1, 1.25)
    ]
    assert grid == made.pop("capacities").tolist()
    assert not made, "everything that was made is compared"
