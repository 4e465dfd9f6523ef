"""Attention test cases: shapes and features, their tensors, a plain torch implementation, and error bounds.

Error bounds: for the same rounded inputs, the error against the fp64 reference is compared with the error of plain
torch in the same dtype, in two norms.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tiers import DEVICES, TIER, extra
from torch import Tensor

from stoker.kernels.attention.dropout import dropout_keep_mask
from stoker.kernels.attention.inputs import AttentionInputs
from stoker.kernels.attention.reference import reference_attention, relative_positions, visibility_mask

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 128, 129, 200, 257, 1023, 1025)
HEAD_DIMS = (16, 24, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)
Attention = Callable[..., Any]
Results = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shape and features of one attention problem.

    Attributes:
        bias: dimensions of `bias` that are not 1, out of "bhqk"; None for no bias. `bias_fp32`: in fp32 instead of q's
            dtype.
        reach: R of `distance_bias`; 0 for none.
        slopes: use `alibi_slopes`.
        sinks: use `sinks`.
        value_dim: width of value heads; 0 for `head_dim`.
        chunk: `attention_chunk`.
        lengths: (queries, keys) of packed sequences; `batch`, `queries` and `keys` are ignored then.
        padding: mask a random number of keys at the end of each sequence.
        spread: standard deviation of q and k.
    """

    batch: int = 1
    heads: int = 2
    groups: int = 1
    head_dim: int = 16
    queries: int = 33
    keys: int = 33
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    bias: str | None = None
    bias_fp32: bool = False
    reach: int = 0
    slopes: bool = False
    sinks: bool = False
    value_dim: int = 0
    chunk: int = 0
    dropout: float = 0.0
    lengths: tuple[tuple[int, int], ...] = ()
    padding: bool = False
    spread: float = 1.0

    def __str__(self) -> str:
        """List the fields that differ from the defaults; used as test id."""
        default = Case()
        parts = [f"{n}={v}" for n, v in vars(self).items() if v != getattr(default, n)]
        return ",".join(parts).replace(" ", "") or "default"


@dataclass(frozen=True)
class Problem:
    """Arguments of an attention call: differentiable tensors by name, and all other arguments."""

    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.tensors, **self.options}

    def detached(self, dtype: torch.dtype | None = None) -> Problem:
        """Return new leaf tensors with the same values, in another dtype if given."""
        return Problem(
            {n: t.detach().clone().to(dtype or t.dtype).requires_grad_() for n, t in self.tensors.items()},
            dict(self.options),
        )

    def with_tensors(self, **tensors: Tensor) -> Problem:
        return Problem(self.tensors | tensors, dict(self.options))

    def with_options(self, **options: Any) -> Problem:
        return Problem(dict(self.tensors), self.options | options)


def build(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Problem:
    """Return random tensors for a case; before rounding, values do not depend on dtype or device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, spread: float = 1.0, to: torch.dtype = dtype) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
        return drawn.to(to).to(device).requires_grad_()

    options: dict[str, Any] = {
        "causal": case.causal, "window_size": case.window, "softmax_scale": case.scale, "softcap": case.softcap,
        "attention_chunk": case.chunk,
    }  # fmt: skip
    if case.lengths:
        leading_q, leading_k = [(sum(pair[side] for pair in case.lengths),) for side in (0, 1)]
        for side, name in ((0, "q"), (1, "k")):
            ends = torch.tensor([0, *(pair[side] for pair in case.lengths)]).cumsum(0)
            options[f"cu_seqlens_{name}"] = ends.to(torch.int32).to(device)
            options[f"max_seqlen_{name}"] = max(pair[side] for pair in case.lengths)
        if all(queries == keys for queries, keys in case.lengths):  # one tensor, as in self-attention
            options["cu_seqlens_k"] = options["cu_seqlens_q"]
    else:
        leading_q, leading_k = (case.batch, case.queries), (case.batch, case.keys)
    tensors = {
        "q": draw(*leading_q, case.heads, case.head_dim, spread=case.spread),
        "k": draw(*leading_k, case.groups, case.head_dim, spread=case.spread),
        "v": draw(*leading_k, case.groups, case.value_dim or case.head_dim),
    }
    accumulate = torch.promote_types(dtype, torch.float32)
    if case.bias is not None:
        full = {"b": case.batch, "h": case.heads, "q": case.queries, "k": case.keys}
        shape = [size if name in case.bias else 1 for name, size in full.items()]
        tensors["bias"] = draw(*shape, to=accumulate if case.bias_fp32 else dtype)
    if case.reach:
        tensors["distance_bias"] = draw(case.heads, 2 * case.reach + 1, to=accumulate)
    if case.slopes:
        tensors["alibi_slopes"] = draw(case.heads, spread=0.2, to=accumulate)
    if case.sinks:
        tensors["sinks"] = draw(case.heads, to=accumulate)
    if case.dropout:
        options |= {"dropout_p": case.dropout, "rng": torch.tensor([seed + 7, 3], device=device)}
    if case.padding:
        kept = torch.randint(0, case.keys + 1, (case.batch, 1), generator=generator)
        options["key_padding_mask"] = (torch.arange(case.keys) < kept).to(device)
    return Problem(tensors, options)


def run(
    attention: Attention, problem: Problem, *, lse_gradient: bool = True, wanted: tuple[str, ...] = (),
    rounded: torch.dtype | None = None,
) -> Results:  # fmt: skip
    """Return output, log-sum-exp, and the gradients of a fixed random projection of both.

    Args:
        attention: function under test.
        problem: its arguments.
        lse_gradient: project the log-sum-exp too.
        wanted: tensors to differentiate by; empty for all.
        rounded: dtype to which the gradient of the output is rounded first; by default the output's. An exact result
            needs that of the inputs in 16 bits, else it is of another problem than theirs.
    """
    leaves = {name: problem.tensors[name] for name in wanted or problem.tensors}
    out, lse = attention(**problem.tensors, **problem.options, return_lse=True)
    generator = torch.Generator().manual_seed(99)
    upstream = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in (out, lse)]
    upstream[0] = upstream[0].to(rounded or out.dtype).to(out.dtype)
    ends = [(t, u) for t, u in zip((out, lse), upstream, strict=True) if t.requires_grad]
    ends = ends[:1] if not lse_gradient else ends
    gradients = torch.autograd.grad([t for t, _ in ends], list(leaves.values()), [u for _, u in ends])
    named = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window_size: tuple[int, int],
    softmax_scale: float | None,
    softcap: float,
    bias: Tensor | None = None,
    distance_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    attention_chunk: int = 0,
    key_padding_mask: Tensor | None = None,
    return_lse: bool = True,
    sequence: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention in plain torch: matmuls in the dtype of the inputs, scores and softmax in fp32."""
    assert return_lse
    options: dict[str, Any] = {
        "causal": causal, "window_size": window_size, "softmax_scale": softmax_scale, "softcap": softcap,
        "distance_bias": distance_bias, "alibi_slopes": alibi_slopes, "sinks": sinks, "dropout_p": dropout_p,
        "rng": rng, "attention_chunk": attention_chunk,
    }  # fmt: skip
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        rows, columns = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        parts = zip(q.split(rows), k.split(columns), v.split(columns), strict=True)
        bounds = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        results = [
            plain_attention(*(t[None] for t in part), **options, **bounds, sequence=number)
            for number, part in enumerate(parts)
        ]
        return torch.cat([out[0] for out, _ in results]), torch.cat([lse[0] for _, lse in results], dim=1)
    queries, keys, heads = q.shape[1], k.shape[1], q.shape[2]
    wide_k, wide_v = (t.repeat_interleave(heads // t.shape[2], dim=2).transpose(1, 2) for t in (k, v))
    scores = q.transpose(1, 2) @ wide_k.transpose(2, 3)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    scores = scores * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    scores = scores if bias is None else scores + bias
    if distance_bias is not None:
        reach = distance_bias.shape[1] // 2
        scores = scores + distance_bias[:, relative_positions(queries, keys, q.device).clamp(-reach, reach) + reach]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * relative_positions(queries, keys, q.device).abs()
    visible = visibility_mask(queries, keys, causal=causal, window=window_size, device=q.device, chunk=attention_chunk)
    if key_padding_mask is not None:
        visible = visible & key_padding_mask[:, None, None]
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    lse = scores.logsumexp(-1).masked_fill(empty[..., 0], float("-inf"))
    weights = scores.softmax(-1).masked_fill(empty, 0.0)[..., :keys]
    if dropout_p and rng is not None:
        keep = dropout_keep_mask(
            rng, dropout_p, batch=q.shape[0], heads=heads, queries=queries, keys=keys, first_sequence=sequence
        )  # fmt: skip
        weights = weights * keep / (1 - dropout_p)
    return (weights.to(q.dtype) @ wide_v).transpose(1, 2), lse


# ---------------------------------------------------------------- error bounds


def _rms(tensor: Tensor) -> float:
    return tensor.square().mean().sqrt().item() if tensor.numel() else 0.0


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


RELATIVE = {  # RMS of the error over RMS of the exact result: (output, gradients)
    torch.bfloat16: (3e-3, 6e-3),
    torch.float16: (8e-4, 2e-3),
    torch.float32: (2e-6, 4e-6),
    torch.float64: (1e-12, 1e-12),
}


def delta_error(problem: Problem, ours: Tensor) -> dict[str, Tensor]:
    """Return the error of the gradients that results from computing delta = sum(out * dO) from the output `ours`.

    An error e of a row's delta changes the gradients of its scores by -e times their weights, like a gradient -e of the
    row's log-sum-exp. It matters where the sums of a bias gradient cancel, or where a softcap leaves little else. In 16
    bits e comes from rounding the output; in fp32 from rounding the sum, which differs from the rounding of dO @ v: in
    a row with one visible key the two should cancel, as they do in plain torch.
    """
    if ours.dtype == torch.float64:
        return {}
    exact = problem.detached(torch.float64)
    out, lse = reference_attention(**exact.arguments, return_lse=True)
    generator = torch.Generator().manual_seed(99)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(ours.dtype).to(out)
    if ours.dtype == torch.float32:
        rounding = (
            torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) * torch.finfo(ours.dtype).eps
        )
        error = out.detach() * rounding * upstream
    else:
        error = (ours.double() - out.detach()) * upstream
    error = error.sum(-1).transpose(-1, -2)
    error = error.masked_fill(lse == float("-inf"), 0.0)
    if not lse.requires_grad:
        return {}
    gradients = torch.autograd.grad(lse, list(exact.tensors.values()), -error, allow_unused=True)
    named = zip(exact.tensors, gradients, strict=True)
    return {f"d{name}": gradient for name, gradient in named if gradient is not None}


def assert_accurate(
    attention: Attention, case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0, *, relative: bool = True
) -> None:
    """Check output, log-sum-exp and all gradients of `attention` on one case against the error bounds.

    Args:
        attention: function under test.
        case: problem to build.
        dtype: of the inputs.
        device: of the inputs.
        seed: of the inputs.
        relative: also bound the error relative to the exact result, which plain torch in 16 bits need not meet.
    """
    problem = build(case, dtype, device, seed)
    exact = run(reference_attention, problem.detached(torch.float64), rounded=dtype)
    plain = run(plain_attention, problem)
    ours = run(attention, problem)
    assert ours["out"].dtype == dtype
    assert ours["lse"].dtype == torch.promote_types(dtype, torch.float32)
    lenient = case.dropout > 0 or case.head_dim > 192
    of_delta = delta_error(problem, ours["out"])
    largest_score = max(1.0, _largest(exact["lse"].masked_fill(exact["lse"] == float("-inf"), 0.0)) / 8)
    for name, gold in exact.items():
        actual = ours[name].double()
        assert actual.shape == gold.shape, name
        if name == "lse":
            empty = gold == float("-inf")
            assert torch.equal(empty, actual == float("-inf")), "lse of rows without keys"
            error = (actual - gold).masked_fill(empty, 0.0)
            allowed = 1e-5 if relative else 8 * torch.finfo(dtype).eps
            assert _largest(error / (1 + gold.masked_fill(empty, 0.0).abs())) <= allowed, name
            continue
        assert name == "out" or ours[name].dtype == problem.tensors[name[1:]].dtype, name
        assert actual.isfinite().all(), f"{name} is not finite"
        error, allowed = actual - gold, plain[name].double() - gold
        message = f"{name}: max {_largest(error):.3g} rms {_rms(error):.3g}, plain {_largest(allowed):.3g} " + (
            f"{_rms(allowed):.3g}, exact {_largest(gold):.3g} {_rms(gold):.3g}"
        )
        largest, slack = (size(of_delta[name]) if name in of_delta else 0.0 for size in (_largest, _rms))
        if dtype in (torch.bfloat16, torch.float16):
            by_max, by_rms = (1.25, 1.05) if name == "out" else (2.0, 1.25)
            by_max, by_rms = (max(by_max, 2.0), max(by_rms, 1.25)) if lenient else (by_max, by_rms)
            # with few elements, or one weight for all keys, the ratio of two errors is mostly random
            if gold.numel() < 2048 or case.scale == 0.0:
                by_max, by_rms = 3.0, 2.0
            unit = torch.finfo(dtype).eps
            assert _largest(error) <= by_max * _largest(allowed) + unit * _largest(gold) + 2.0 * largest, message
            assert _rms(error) <= by_rms * _rms(allowed) + 0.02 * unit * _rms(gold) + 1.25 * slack, message
        # a gradient that cancels to nearly zero has no meaningful relative error; a weight is exp(score - lse), so its
        # relative error is that of fp32 times the score
        if relative:
            bar = RELATIVE[dtype][0 if name == "out" else 1] * (largest_score if dtype == torch.float32 else 1.0)
            # with few elements, such as the gradient of the slopes, the error may randomly be twice the usual
            chance = 2.0 if gold.numel() < 64 else 1.0
            assert _rms(error) <= chance * max(bar * max(_rms(gold), 0.1) + 1.25 * slack, _rms(allowed)), message


# ---------------------------------------------------------------- random cases


def random_case(draw: random.Random, *, largest: int, widest: int) -> Case:
    """Return a case with random features, sequences up to `largest` and head widths up to `widest`."""
    groups = draw.choice((1, 2, 3))
    heads = groups * draw.choice((1, 1, 2, 3, 6))
    lengths = [length for length in LENGTHS if length <= largest]
    queries = draw.choice(lengths)
    keys = queries if draw.random() < 0.5 else draw.choice(lengths)
    case = Case(
        batch=draw.choice((1, 2)), heads=heads, groups=groups, queries=queries, keys=keys,
        head_dim=draw.choice([d for d in HEAD_DIMS if d <= widest]), causal=draw.random() < 0.5,
        scale=draw.choice((None, None, 1.0, 0.0, -0.3)), softcap=draw.choice((0.0, 0.0, 0.0, 2.0)),
        dropout=draw.choice((0.0, 0.0, 0.0, 0.17)),
    )  # fmt: skip
    if draw.random() < 0.35:
        case = replace(case, window=(draw.choice((-1, 0, 1, 16, 40)), draw.choice((-1, 0, 1, 16, 40))))
    if draw.random() < 0.35:
        case = replace(case, reach=draw.choice((1, 2, 15, 16, 31, 128)))
    if draw.random() < 0.3:
        case = replace(case, slopes=True)
    if draw.random() < 0.2:
        case = replace(case, sinks=True)
    if case.causal and draw.random() < 0.3:
        case = replace(case, chunk=draw.choice((1, 7, 16, 32, 40, 128)))
    if draw.random() < 0.2:
        case = replace(case, value_dim=draw.choice([d for d in HEAD_DIMS if d <= widest]))
    if draw.random() < 0.3:
        count = draw.choice((1, 2, 4))
        pairs = tuple((draw.choice([0, *lengths]), draw.choice([0, *lengths])) for _ in range(count))
        if max(pair[0] for pair in pairs) and max(pair[1] for pair in pairs):
            return replace(case, batch=count, lengths=pairs, queries=33, keys=33)
    if draw.random() < 0.3:
        bias = draw.choice(("", "k", "q", "qk", "hqk", "bqk", "bhqk", "bhk", "h"))
        case = replace(case, bias=bias, bias_fp32=draw.random() < 0.5)
    return replace(case, padding=draw.random() < 0.25)


# ---------------------------------------------------------------- shared marks and helpers

ON_DEVICES = pytest.mark.parametrize("device", DEVICES)


def mostly_full(
    argument: str, cases: dict[str, Any], fast: Sequence[str], *, gpu: bool = False
) -> pytest.MarkDecorator:
    """Parametrize by `argument` and "device": on a CPU the `fast` names in the fast tier, all others in the full one.

    Args:
        argument: name of the test's parameter.
        cases: by name.
        fast: names of the cases in the fast tier.
        gpu: run all cases on a GPU too.
    """
    params = [pytest.param(case, "cpu", id=name) for name, case in cases.items() if name in fast or extra(name)]
    if gpu and TIER == "gpu":
        params += [pytest.param(case, "cuda", marks=pytest.mark.gpu, id=f"{n}-cuda") for n, case in cases.items()]
    return pytest.mark.parametrize((argument, "device"), params)


PACKED = ((5, 9), (0, 4), (33, 20), (7, 0), (18, 18), (0, 0))
CASES_BY_FEATURE = {
    "plain": Case(),
    "causal": Case(causal=True, queries=20, keys=33),
    "window": Case(window=(9, 3), queries=40, keys=33),
    "softcap": Case(softcap=1.5, causal=True),
    "bias": Case(bias="hqk", heads=3, groups=3),
    "distance_bias": Case(reach=6, queries=40, keys=50),
    "slopes": Case(slopes=True, queries=40, keys=50, heads=4, groups=2),
    "values": Case(value_dim=40, head_dim=24, heads=4, groups=2, causal=True, queries=40, keys=33, reach=5),
    "chunks": Case(chunk=12, causal=True, heads=4, groups=2, queries=50, keys=45, reach=4),
    "sinks": Case(sinks=True, heads=4, groups=2, causal=True, queries=40, keys=33),
    "both_biases": Case(bias="bqk", bias_fp32=True, reach=40, causal=True),
    "packed": Case(batch=len(PACKED), lengths=PACKED, reach=8, causal=True),
    "padding": Case(padding=True, batch=3),
    "dropout": Case(dropout=0.3, window=(20, -1)),
}


def assert_equal(ours: Results, theirs: Results, *, but: tuple[str, ...] = ()) -> None:
    """Check that results are bitwise equal, except those named in `but`."""
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - set(but):
        assert torch.equal(ours[name], theirs[name]), name


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> bool:
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def attend(backend: Callable[[AttentionInputs], Tensor], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call an attention backend."""
    return backend(AttentionInputs(q, k, v, **options))


def per_sequence(problem: Problem) -> list[Problem]:
    """Split a packed problem into dense problems of one sequence each."""
    options = {n: v for n, v in problem.options.items() if "seqlen" not in n}
    q_sizes, k_sizes = (problem.options[f"cu_seqlens_{side}"].diff().tolist() for side in "qk")
    shared = {n: t for n, t in problem.tensors.items() if n not in ("q", "k", "v")}
    q, k, v = (problem.tensors[n].detach().split(s) for n, s in zip("qkv", (q_sizes, k_sizes, k_sizes), strict=True))
    return [
        Problem({n: t[None].requires_grad_() for n, t in zip("qkv", part, strict=True)} | shared, options)
        for part in zip(q, k, v, strict=True)
    ]


def outputs(attention: Callable[..., Any], problem: Problem) -> list[Tensor]:
    """Return output, log-sum-exp and the gradients of the output's sum of squares, without random projections."""
    out, lse = attention(**problem.tensors, **problem.options, return_lse=True)
    gradients = torch.autograd.grad(out.float().square().sum(), list(problem.tensors.values()))
    return [out.detach(), lse.detach(), *gradients]


def check_gradients(attention: Callable[..., Any], case: Case) -> None:
    """Check the gradients of output and log-sum-exp by finite differences in fp64."""
    problem = build(case, torch.float64)
    names = list(problem.tensors)

    def finite(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(**dict(zip(names, tensors, strict=True)), **problem.options, return_lse=True)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(finite, tuple(problem.tensors.values()), fast_mode=True, atol=1e-6, rtol=1e-4)


class told:  # noqa: N801 - reads as a word
    """Context manager that adds case and seed to a failure inside a loop."""

    def __init__(self, case: object, seed: int) -> None:
        self.note = f"case {case}, seed {seed}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            error.add_note(self.note)
