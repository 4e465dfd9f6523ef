"""Loss of logits of which each rank has some columns, as one rank's, in torch and in the Triton interpreter."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from tiers import DEVICES, spread
from torch import Tensor

from stoker.kernels import vocabulary_part
from stoker.kernels.cross_entropy import reference_linear_cross_entropy
from stoker.kernels.vocabulary_part import EXPONENTIALS, LARGEST, SUM, TARGET, part_gradient, part_statistics

COLUMNS, VOCABULARY = 40, 90
"""Columns of a rank, and tokens: the third rank has some padding, the fourth nothing else."""


def loss_and_gradient(logits: Tensor, labels: Tensor, denominator: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return losses and gradient of four ranks, each with its part of the logits (tokens, 160)."""
    smoothing, spread = options["smoothing"], options["smoothing"] / VOCABULARY
    parts = [each.clone() for each in logits.split(COLUMNS, dim=1)]
    places = [
        options | {"first": COLUMNS * rank, "valid_vocab": min(max(VOCABULARY - COLUMNS * rank, 0), COLUMNS)}
        for rank in range(4)
    ]
    found = torch.stack(
        [
            part_statistics(part, labels, vocabulary=VOCABULARY, ignore_index=-100, **place)
            for part, place in zip(parts, places, strict=True)
        ]
    )
    largest = found[:, LARGEST].amax(0)
    logsumexp = largest + (found[:, EXPONENTIALS] * (found[:, LARGEST] - largest).exp()).sum(0).log()
    losses = logsumexp - (1 - smoothing) * found[:, TARGET].sum(0) - spread * found[:, SUM].sum(0) * bool(smoothing)
    gradients = [
        part_gradient(part, labels, logsumexp, denominator, spread=spread, ignore_index=-100, **place)
        for part, place in zip(parts, places, strict=True)
    ]
    return losses * (labels != -100), torch.cat(gradients, dim=1)[:, :VOCABULARY]


@pytest.mark.parametrize(
    ("smoothing", "softcap", "interpreted", "dtype"),
    spread(
        (0.0, 0.1), (0.0, 2.5), product((False, True), (torch.float64, torch.float32, torch.bfloat16)),
    ),
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("device", DEVICES)
def test_ranks_have_loss_and_gradient_of_one(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    softcap: float,
    smoothing: float,
    interpreted: bool,
) -> None:
    """The gradient of bf16 is rounded to it by the kernel, not in torch."""
    in_kernel = interpreted if device == "cpu" else dtype != torch.float64
    if interpreted and (device == "cuda" or dtype == torch.float64):
        pytest.skip("no interpreter there")
    monkeypatch.setattr(vocabulary_part, "triton_runs_on", lambda _: in_kernel)
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(17, 4 * COLUMNS, generator=generator, dtype=torch.float64)).to(device, dtype)
    labels = torch.randint(0, VOCABULARY, (17,), generator=generator).to(device)
    labels[::5] = -100
    exact = logits.double()[:, :VOCABULARY].requires_grad_()
    identity = torch.eye(VOCABULARY, dtype=torch.float64, device=device)
    # the smoothing of the public function is spread over the other tokens only
    options: dict[str, Any] = {"softcap": softcap, "label_smoothing": smoothing * (VOCABULARY - 1) / VOCABULARY}
    wanted = reference_linear_cross_entropy(
        exact, identity, labels, valid_vocab=VOCABULARY, reduction="none", **options
    )
    (gradient,) = torch.autograd.grad(wanted.sum() / 3, exact)
    denominator = torch.tensor(3.0, device=device, dtype=torch.promote_types(dtype, torch.float32))
    found = loss_and_gradient(logits, labels, denominator, smoothing=smoothing, softcap=softcap)
    bounds = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-5}
    torch.testing.assert_close(found[0].double(), wanted.detach(), rtol=bounds[dtype], atol=bounds[dtype])
    rounding = 2**-7 if dtype == torch.bfloat16 and in_kernel else bounds[dtype]
    torch.testing.assert_close(found[1].double(), gradient, rtol=rounding, atol=bounds[dtype])


@pytest.mark.parametrize("in_kernel", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("label", [VOCABULARY, 130, -1])
def test_a_label_outside_of_the_vocabulary_makes_the_loss_nan(
    monkeypatch: pytest.MonkeyPatch, device: str, label: int, in_kernel: bool
) -> None:
    monkeypatch.setattr(vocabulary_part, "triton_runs_on", lambda _: in_kernel)
    logits = torch.randn(3, 4 * COLUMNS, device=device)
    labels = torch.tensor([2, label, -100], device=device)
    losses, _ = loss_and_gradient(logits, labels, torch.tensor(1.0, device=device), smoothing=0.0, softcap=0.0)
    assert losses.isnan().tolist() == [False, True, False]
