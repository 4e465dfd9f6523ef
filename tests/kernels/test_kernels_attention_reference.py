"""The reference is the definition, and the bar that kernels are held to notices errors."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import (
    CASES_BY_FEATURE,
    Case,
    Problem,
    assert_accurate,
    build,
    check_gradients,
    close,
    per_sequence,
    plain_attention,
    told,
)
from torch import Tensor

from stoker.kernels import reference_attention
from stoker.kernels.attention.dropout import dropout_keep_mask

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])

PATHS = pytest.mark.parametrize("case", CASES_BY_FEATURE.values(), ids=CASES_BY_FEATURE.keys())


def by_hand(problem: Problem, *, first: int = 0) -> tuple[Tensor, Tensor]:
    """Dense attention one query at a time, straight from the definition, in fp64."""
    options = problem.options
    q, k, v = (problem.tensors[name].detach() for name in "qkv")
    batch, queries, heads, width = q.shape
    keys, groups = k.shape[1:3]
    out, lse = q.new_zeros(*q.shape[:-1], v.shape[-1]), torch.full((batch, heads, queries), -math.inf, dtype=q.dtype)
    left, right = options["window_size"]
    scale = options["softmax_scale"] if options["softmax_scale"] is not None else 1 / math.sqrt(width)
    tensors = {name: tensor.detach() for name, tensor in problem.tensors.items()}
    bias, distance_bias = tensors.get("bias"), tensors.get("distance_bias")
    bias = None if bias is None else bias.expand(batch, heads, queries, keys)
    slopes = tensors.get("alibi_slopes", torch.zeros(heads))
    sinks = tensors.get("sinks")
    mask = options.get("key_padding_mask")
    p = options.get("dropout_p", 0.0)
    kept = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    if p:
        sizes = {"batch": batch, "heads": heads, "queries": queries, "keys": keys}
        kept = dropout_keep_mask(options["rng"], p, **sizes, first_sequence=first)
    for b, h, i in itertools.product(range(batch), range(heads), range(queries)):
        scores: dict[int, float] = {}
        for j in range(keys):
            distance = j - (i + keys - queries)
            hidden = options["causal"] and distance > 0
            chunk = options["attention_chunk"] or keys
            hidden = hidden or (options["attention_chunk"] > 0 and j // chunk != (i + keys - queries) // chunk)
            hidden = hidden or (left >= 0 and distance < -left) or (right >= 0 and distance > right)
            if hidden or (mask is not None and not mask[b, j]):
                continue
            score = scale * float(q[b, i, h] @ k[b, j, h // (heads // groups)])
            score = options["softcap"] * math.tanh(score / options["softcap"]) if options["softcap"] else score
            score += 0.0 if bias is None else float(bias[b, h, i, j])
            if distance_bias is not None:
                reach = distance_bias.shape[1] // 2
                score += float(distance_bias[h, reach + min(max(distance, -reach), reach)])
            score -= float(slopes[h]) * abs(distance)
            scores[j] = score
        terms = [*scores.values(), *([] if sinks is None else [float(sinks[h])])]
        if terms:
            top = max(terms)
            lse[b, h, i] = top + math.log(sum(math.exp(term - top) for term in terms))
            for j, score in scores.items():
                weight = math.exp(score - float(lse[b, h, i])) * float(kept[b, h, i, j]) / (1 - p)
                out[b, i, h] += weight * v[b, j, h // (heads // groups)]
    return out, lse


@PATHS
def test_reference_is_the_definition(case: Case) -> None:
    small = replace(case, head_dim=3, queries=case.queries // 4, keys=case.keys // 4)
    small = replace(small, lengths=tuple((q // 3, k // 3) for q, k in case.lengths))
    problem = build(small, torch.float64)
    out, lse = reference_attention(**problem.arguments, return_lse=True)
    if small.lengths:
        for number, dense in enumerate(per_sequence(problem)):
            expected, expected_lse = by_hand(dense, first=number)
            rows = slice(*problem.options["cu_seqlens_q"][number : number + 2].tolist())
            assert close(out[rows], expected[0])
            assert close(lse[:, rows], expected_lse[0])
    else:
        expected, expected_lse = by_hand(problem)
        assert close(out, expected)
        assert close(lse, expected_lse)


@PATHS
def test_reference_passes_gradcheck(case: Case) -> None:
    check_gradients(reference_attention, case)


@DTYPES
def test_plain_torch_meets_the_bar(dtype: torch.dtype) -> None:
    """The measure of the kernels is itself within the bar, on the cases of this file."""
    for case in CASES_BY_FEATURE.values():
        with told(case, 0):
            assert_accurate(plain_attention, case, dtype, relative=False)


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dv", "ddistance_bias"])
def test_the_bar_notices_a_small_error(name: str) -> None:
    case = Case(reach=4, queries=40, keys=40)

    def wrong(**arguments: Any) -> Any:
        if name.startswith("d"):
            tensor = arguments[name[1:]]
            arguments[name[1:]] = tensor.detach() + 1.02 * (tensor - tensor.detach())
        out, lse = reference_attention(**arguments)
        return (out * 1.02 if name == "out" else out), (lse * 1.001 if name == "lse" else lse)

    assert_accurate(reference_attention, case, torch.bfloat16)
    with pytest.raises(AssertionError, match=name):
        assert_accurate(wrong, case, torch.bfloat16)
