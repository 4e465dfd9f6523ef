"""What one layer keeps of a micro batch for its backward pass, and what that pass needs besides.

Two forms, told apart by whether the layer is compiled. As written, autograd keeps what each operation saves: an RMSNorm
in 16 bits keeps its input and its quotient in fp32. Compiled, the partitioner keeps the inputs of matrix products and
of attention, what the residual adds, and little else: pointwise results are calculated again. The tests hold both
against what torch really saves.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.launch import sums_wide
from ...kernels.moe.routing import capacity_of
from ...models.config.memory import RecomputeModule
from ...models.config.moe_slice import MoESlice
from ...models.config.parameter_count import count_cross_attention, count_experts, count_layer, count_mlp, count_norm
from ...models.config.peft_slice import Projection
from ...models.config.slices import MLPSlice
from ...models.recompute.analysis import keeps_result_alone
from .attention_memory import Kept, Sides, attention_memory
from .inputs import StackFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """One layer of a stack, for one micro batch.

    Attributes:
        boundary: bytes of its input, which the residual stream hands to it.
        keeps_boundary: whether it is kept where nothing is recomputed.
        norm_input: bytes of the stream that are kept only for a norm that is recomputed.
        shares_norm_input: all norms read the same.
        has_experts: beside their router, so that their norm is recomputed with them alone.
        beside_scores: bytes that are kept more, or less, where the scores of attention are recomputed.
        beside_activation: bytes that are kept only where the activation of the feed-forward part is recomputed.
        mlp: what its feed-forward part keeps where nothing is recomputed, but for the normed stream.
        rest: everything else that it keeps then.
        normed: bytes of the stream that the feed-forward part reads.
        parts: of the layer that have a norm of their own: attention, cross-attention, feed-forward part.
        mlp_working: bytes of the backward pass of the feed-forward part besides.
        attention_working: likewise of the attention.
        attention_again: the same where its scores are recomputed.
        parameters: of the layer.
    """

    boundary: int
    keeps_boundary: bool
    norm_input: int
    shares_norm_input: bool
    has_experts: bool
    beside_scores: int
    beside_activation: int
    mlp: tuple[Kept, ...]
    rest: tuple[Kept, ...]
    normed: int
    parts: int
    mlp_working: int
    attention_working: int
    attention_again: int
    parameters: int

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Everything besides the input that it keeps where nothing is recomputed."""
        return self.rest + self.mlp

    @property
    def all_kept(self) -> int:
        """Bytes kept besides the input where nothing is recomputed."""
        return sum(each.size for each in self.kept)

    def kept_with(self, modules: frozenset[RecomputeModule]) -> int:
        """Bytes kept besides the input where these parts are recomputed."""
        norms = self._norms_again(modules)
        inputs = (min(norms, 1) if self.shares_norm_input else norms) * self.norm_input
        inputs += self.beside_scores if "core_attention" in modules else 0
        inputs += self.beside_activation_with(modules)
        return inputs + self.all_kept - recomputed(self.kept, modules)

    def in_backward(self, modules: frozenset[RecomputeModule]) -> tuple[int, int]:
        """What its backward pass makes again, and what it needs besides, in bytes, when they are most together.

        That is in the feed-forward part, or in the attention, when what that part kept is given back.
        """
        of_norms = recomputed(tuple(each for each in self.rest if each.module == "norm"), modules)
        norms, in_mlp = self._norms_again(modules), recomputed(self.mlp, modules)
        norm = of_norms // norms if norms else 0
        kept_for_mlp = norms < self.parts
        given_back = sum(each.size for each in self.mlp) - in_mlp + self.normed * kept_for_mlp
        given_back += self.beside_activation_with(modules)
        in_attention = recomputed(self.rest, modules) - of_norms + norm
        of_attention = self.attention_again if "core_attention" in modules else self.attention_working
        moments = (in_mlp + norm * (not kept_for_mlp), self.mlp_working), (in_attention, of_attention - given_back)
        return max(moments, key=sum)

    def _norms_again(self, modules: frozenset[RecomputeModule]) -> int:
        """Of how many parts the norm is made again; the last of them is the feed-forward part."""
        if "norm" not in modules:
            return 0
        return self.parts - (self.has_experts and "moe" not in modules)

    def beside_activation_with(self, modules: frozenset[RecomputeModule]) -> int:
        """Bytes kept of what an activation is made from where these parts are recomputed."""
        again = "mlp_activation" in modules and not (self.has_experts and "moe" in modules)
        return self.beside_activation if again else 0

    def whole_in_backward(self) -> tuple[int, int]:
        """Likewise where everything is made again."""
        given_back = sum(each.size for each in self.mlp) + self.normed
        return self.all_kept, max(self.mlp_working, self.attention_working - given_back)


def recomputed(kept: tuple[Kept, ...], modules: frozenset[RecomputeModule]) -> int:
    """Bytes of what belongs to these modules."""
    return sum(each.size for each in kept if each.is_made_again(modules))


def layer_memory(facts: StackFacts, *, experts: bool) -> LayerMemory:
    """What a layer of a stack needs.

    Args:
        facts: of the stack.
        experts: whether this layer has experts.
    """
    stack, widths, tokens = facts.stack, facts.widths, facts.tokens
    e, s = widths.compute, widths.stream
    wide = tokens * stack.hidden_size
    own = attention_memory(
        stack.attention, stack, facts.attention, Sides(queries=tokens, keys=tokens), widths, compiled=facts.compiled
    )
    moe = stack.moe if experts else None
    kept = [*own.kept, *_stream_and_norms(facts, moe)]
    working, again, beside_scores = own.working, own.working_again, own.beside_scores
    parameters = count_layer(stack)
    if facts.cross is not None and facts.cross_attention is not None:
        sides = Sides(queries=tokens, keys=facts.memory_tokens, across=True)
        across = attention_memory(facts.cross, stack, facts.cross_attention, sides, widths, compiled=facts.compiled)
        kept += across.kept
        beside_scores += across.beside_scores
        working, again = max(working, across.working), max(again, across.working_again)
        parameters += count_cross_attention(stack, facts.cross)
    if moe is None:
        mlp, mlp_working = _mlp(facts, stack.mlp, stack.mlp.ffn_hidden_size)
        in_mlp = count_mlp(stack)
    else:
        mlp, mlp_working = _experts(facts, moe)
        in_mlp = count_experts(stack, moe)
    parameters += in_mlp
    if widths.casts_weights:
        attention_weights = parameters - in_mlp - 2 * count_norm(stack)
        kept.append(Kept("weights", attention_weights * e))
        mlp.append(Kept("weights", in_mlp * e, "moe" if moe else None))
    keeps_boundary = facts.compiled or norm_keeps_input(facts) or stack.block == "post_ln"
    stream = wide * s  # its gradient as it comes; as it goes it is written over where a compiler sees that
    comes_and_goes = stream * (1 if facts.compiled else 2)
    down = stack.hidden_size * stack.mlp.ffn_hidden_size * widths.weights if moe is None else 0
    beside = 2 * stream + parameters * widths.weights
    return LayerMemory(
        boundary=wide * s,
        keeps_boundary=keeps_boundary,
        norm_input=_norm_input(facts, keeps_boundary=keeps_boundary),
        shares_norm_input=stack.block == "parallel_ln",
        has_experts=moe is not None,
        beside_scores=beside_scores,
        beside_activation=_beside_activation(facts, moe),
        mlp=tuple(each for each in mlp if each.size),
        rest=tuple(each for each in kept if each.size),
        normed=wide * e if _learns(facts, "mlp_fc1") or moe is not None else 0,
        parts=_sublayers(facts),
        mlp_working=comes_and_goes + mlp_working + down,
        attention_working=beside + working,
        attention_again=beside + again,
        parameters=parameters,
    )


# ---------------------------------------------------------------- stream, norms, dropout


def _sublayers(facts: StackFacts) -> int:
    """Parts of a layer that add to the stream."""
    return 2 if facts.cross is None else 3


def _norm_input(facts: StackFacts, *, keeps_boundary: bool) -> int:
    """Bytes that are kept of the stream for a norm that is recomputed, beside the input of the layer."""
    stack, wide = facts.stack, facts.tokens * facts.stack.hidden_size
    if facts.compiled and stack.block == "parallel_ln" and stack.norm.kind == "layernorm":
        return wide * 4  # the compiler sees that all norms centre and divide the same input, and keeps that for them
    return 0 if keeps_boundary else wide * facts.widths.stream


def norm_keeps_input(facts: StackFacts) -> bool:
    """Whether a norm, as written, keeps the stream itself rather than a copy in fp32."""
    narrow = facts.widths.stream < 4
    centred = facts.stack.norm.zero_centered
    return not narrow or (facts.stack.norm.kind == "layernorm" and not centred)


def norm_extra(facts: StackFacts, numbers: int) -> int:
    """Bytes that one norm of `numbers`, as written, keeps besides an input that something else keeps too."""
    if facts.stack.norm.kind == "rmsnorm":  # the input and its quotient by the root, in fp32
        return numbers * 4 * (1 if norm_keeps_input(facts) else 2)
    return 0 if norm_keeps_input(facts) else numbers * 4


def _stream_and_norms(facts: StackFacts, moe: MoESlice | None) -> list[Kept]:
    stack, widths = facts.stack, facts.widths
    e, s = widths.compute, widths.stream
    wide = facts.tokens * stack.hidden_size
    parts = _sublayers(facts)
    # what the first projection of each part reads; post-norm it is the stream, and the first of them is the input
    projections = [_learns(facts, "attention_qkv")] * (parts - 1) + [_learns(facts, "mlp_fc1")] * (moe is None)
    normed = projections.count(True) - (stack.block == "post_ln")
    module: RecomputeModule | None = "norm" if stack.block != "post_ln" else None
    found = [Kept("norm", normed * wide * e, module)]
    # router and experts both read theirs, but for experts that gather rows and keep those
    if moe is not None and (not _is_written_out(facts, moe) or moe.shared_ffn_hidden_size):
        found.append(Kept("norm", wide * e, module, "moe"))
    statistics = facts.tokens * 4 * (2 if stack.norm.kind == "layernorm" else 1)
    norms = parts + (parts if stack.block == "normformer" else 0)
    found.append(Kept("norm", norms * statistics))
    in_turn = stack.block != "parallel_ln"  # else all parts read the input of the layer, none of them a sum
    if facts.compiled and in_turn:
        # what the first part adds; the sum of stream and updates before each further one
        found.append(Kept("stream", wide * e + (parts - 2) * wide * s))
        found += [Kept("stream", wide * s)] if stack.block == "post_ln" else []
    elif not facts.compiled:
        inputs = parts if stack.block == "post_ln" else (parts - 1) * in_turn
        found += [Kept("stream", inputs * wide * s)] if norm_keeps_input(facts) else []
        extra, of_experts = norm_extra(facts, wide), int(moe is not None)
        found += [Kept("norm", (parts - of_experts) * extra, module), Kept("norm", of_experts * extra, module, "moe")]
        if stack.block == "normformer":
            outputs = parts - 1
            found.append(Kept("norm", outputs * (norm_extra(facts, wide) + norm_keeps_input(facts) * wide * e)))
    if stack.hidden_dropout:
        found.append(Kept("dropout", parts * wide))
    return found


def _learns(facts: StackFacts, projection: Projection) -> bool:
    """Whether a projection keeps what it reads of a norm."""
    return projection in facts.learnt and not facts.spares_norms


# ---------------------------------------------------------------- feed-forward part


def _mlp(facts: StackFacts, mlp: MLPSlice, width: int) -> tuple[list[Kept], int]:
    """What an MLP of `width` keeps besides its input, and bytes that its backward pass needs besides."""
    e, numbers = facts.widths.compute, facts.tokens * width
    ups = 2 if mlp.gated else 1
    has_norm = facts.stack.block == "normformer"
    if facts.low_rank_mlp:  # the gradients of what is between, that of what was projected
        return [Kept("mlp", ups * numbers * e)], (1 + ups) * numbers * e
    kept: list[Kept] = []
    if not keeps_result_alone(mlp):
        kept.append(Kept("mlp", ups * numbers * e))
        if mlp.nonlinearity == "gelu_sigmoid" and not mlp.gated and not facts.compiled:
            kept.append(Kept("activation", numbers * e, "mlp_activation"))  # the sigmoid
    elif facts.compiled:  # where it is positive; a norm keeps the result itself
        kept.append(Kept("activation", 0 if has_norm else numbers, "mlp_activation"))
    else:  # the result, unless what comes next keeps it too
        kept_next = norm_keeps_input(facts) if has_norm else "mlp_fc2" in facts.learnt and not mlp.dropout
        kept.append(Kept("activation", 0 if kept_next else numbers * e, "mlp_activation"))
    if "mlp_fc2" in facts.learnt:
        kept.append(Kept("activation", numbers * e, "mlp_activation"))
    if has_norm:
        inner = numbers * e if facts.compiled or norm_keeps_input(facts) else 0
        if not facts.compiled:
            inner += norm_extra(facts, numbers)
        kept.append(Kept("activation", inner, "mlp_activation"))
    if mlp.dropout:
        kept.append(Kept("dropout", numbers, "mlp_activation"))
    # the gradient of the result, then that of what was projected; by then the result is given back, unless it is read
    both = keeps_result_alone(mlp) and not facts.compiled
    return kept, (2 if both else ups) * numbers * e


def _beside_activation(facts: StackFacts, moe: MoESlice | None) -> int:
    """Bytes of what the activation of an MLP, or of the shared expert, is made from, where else its result is kept."""
    width = facts.stack.mlp.ffn_hidden_size if moe is None else moe.shared_ffn_hidden_size or 0
    return facts.tokens * width * facts.widths.compute if keeps_result_alone(facts.stack.mlp) else 0


def rows_of(moe: MoESlice, tokens: int) -> int:
    """Rows that the experts of a layer compute."""
    rows = tokens * moe.topk
    if moe.capacity_factor is not None and moe.pad_to_capacity:
        return moe.experts * capacity_of(tokens, moe.experts, moe.topk, moe.capacity_factor)
    return rows


def _is_written_out(facts: StackFacts, moe: MoESlice) -> bool:
    """Whether the experts are not one operation that keeps little."""
    return facts.low_rank_experts or bool(moe.dropout) or moe.pad_to_capacity or moe.implementation == "sequential"


def _copies_for_router(facts: StackFacts, moe: MoESlice) -> bool:
    """Whether the router reads a copy of the stream; see `kernels.moe.router_logits`."""
    if not facts.trains_router and not moe.jitter:  # its weight is frozen, and needs no copy
        return False
    if moe.jitter or moe.router_dtype == "fp64":
        return True
    if facts.widths.stream >= 4:
        return False
    aligned = sums_wide(moe.experts, facts.stack.hidden_size)
    return not (facts.attention.call.device == "cuda" and aligned)


def _experts(facts: StackFacts, moe: MoESlice) -> tuple[list[Kept], int]:
    """What router, experts and shared expert keep, and bytes that their backward pass needs besides."""
    stack, widths, tokens = facts.stack, facts.widths, facts.tokens
    e, hidden = widths.compute, stack.hidden_size
    ups = 2 if stack.mlp.gated else 1
    rows, width = rows_of(moe, tokens), moe.ffn_hidden_size
    wide_router = 8 if moe.router_dtype == "fp64" else 4
    # the stream in the router's dtype, noise, and per token the scores of all experts and the choice of some
    router = tokens * hidden * wide_router * (1 + bool(moe.jitter)) if _copies_for_router(facts, moe) else 0
    router += tokens * (3 * moe.experts * wide_router + moe.topk * 28)
    if widths.casts_weights:  # the normed stream is in fp32; the experts read a narrow copy
        router += tokens * hidden * 4
    kept = [Kept("experts", router, "moe"), Kept("experts", rows * width * ups * e, "moe")]
    if _is_written_out(facts, moe):  # gathered rows, what the second matrices read, and their results
        kept.append(Kept("experts", rows * (2 * hidden + width) * e, "moe"))
    if moe.dropout:
        noise = 1 if facts.compiled else e  # a mask, or the factors themselves
        kept.append(Kept("dropout", tokens * moe.topk * width * noise, "moe"))
    gradients = rows * width * e * (2 + ups)
    later = rows * width * ups * e + rows * hidden * e + count_experts(stack, moe) * widths.weights
    working = max(gradients, later)
    if moe.shared_ffn_hidden_size:
        shared, _ = _mlp(facts, stack.mlp, moe.shared_ffn_hidden_size)
        kept += [each._replace(module=each.module or "moe", within="moe") for each in shared]
    return kept, working
