"""Activation memory of one layer: bytes saved for its backward pass, and working memory of that pass.

Eager and compiled layers differ. In eager mode autograd saves what each operation saves: an RMSNorm in 16 bits saves
its input and the normalized input in fp32. Compiled, the partitioner saves the inputs of matmuls and attention, the
operands of residual additions, and little else: pointwise results are recomputed. The tests compare both with what
torch really saves.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.launch import supports_fp32_output
from ...kernels.moe.routing import expert_capacity
from ...models.config.memory import RecomputeModule
from ...models.config.moe import MoESlice
from ...models.config.parameter_count import count_cross_attention, count_experts, count_layer, count_mlp, count_norm
from ...models.config.peft import Projection
from ...models.config.stack import MLPSlice
from ...models.recompute.analysis import saves_only_output
from .attention_memory import AttentionTokens, SavedTensors, attention_memory
from .inputs import StackInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Memory of one layer for one micro batch.

    Attributes:
        input_bytes: bytes of the layer's input (the residual stream).
        saves_input: the input is saved if nothing is recomputed.
        norm_input_bytes: bytes of the residual stream saved only to recompute a norm.
        shares_norm_input: all norms of the layer have the same input.
        has_experts: it is an MoE layer, whose second norm is recomputed only together with the experts.
        scores_recompute_bytes: additional (or, if negative, fewer) bytes saved if attention scores are recomputed.
        activation_recompute_bytes: bytes saved only if the activation function of the MLP is recomputed.
        mlp_saved: tensors saved by the MLP or the experts if nothing is recomputed, except their normalized input.
        other_saved: all other tensors saved if nothing is recomputed.
        mlp_input_bytes: bytes of the normalized input of the MLP.
        num_sublayers: number of sublayers, each with its own norm: attention, cross-attention, MLP.
        mlp_working: working memory of the backward pass of the MLP, in bytes.
        attention_working: working memory of the backward pass of attention, in bytes.
        attention_working_recomputed: the same if its scores are recomputed.
        num_parameters: number of parameters.
    """

    input_bytes: int
    saves_input: bool
    norm_input_bytes: int
    shares_norm_input: bool
    has_experts: bool
    scores_recompute_bytes: int
    activation_recompute_bytes: int
    mlp_saved: tuple[SavedTensors, ...]
    other_saved: tuple[SavedTensors, ...]
    mlp_input_bytes: int
    num_sublayers: int
    mlp_working: int
    attention_working: int
    attention_working_recomputed: int
    num_parameters: int

    @property
    def saved(self) -> tuple[SavedTensors, ...]:
        """Tensors saved besides the layer's input if nothing is recomputed."""
        return self.other_saved + self.mlp_saved

    @property
    def saved_bytes(self) -> int:
        """Bytes saved besides the layer's input if nothing is recomputed."""
        return sum(each.num_bytes for each in self.saved)

    def saved_bytes_with(self, modules: frozenset[RecomputeModule]) -> int:
        """Bytes saved besides the layer's input if `modules` are recomputed."""
        norms = self._recomputed_norms(modules)
        inputs = (min(norms, 1) if self.shares_norm_input else norms) * self.norm_input_bytes
        inputs += self.scores_recompute_bytes if "core_attention" in modules else 0
        inputs += self.activation_recompute_bytes_with(modules)
        return inputs + self.saved_bytes - recomputed_bytes(self.saved, modules)

    def backward_peak(self, modules: frozenset[RecomputeModule]) -> tuple[int, int]:
        """Return (recomputed bytes, working bytes) at the peak of the backward pass if `modules` are recomputed.

        The peak is in the MLP, or in attention after the MLP's saved tensors were freed.
        """
        norm_bytes = recomputed_bytes(tuple(each for each in self.other_saved if each.module == "norm"), modules)
        norms, in_mlp = self._recomputed_norms(modules), recomputed_bytes(self.mlp_saved, modules)
        norm = norm_bytes // norms if norms else 0
        mlp_norm_saved = norms < self.num_sublayers
        freed = sum(each.num_bytes for each in self.mlp_saved) - in_mlp + self.mlp_input_bytes * mlp_norm_saved
        freed += self.activation_recompute_bytes_with(modules)
        in_attention = recomputed_bytes(self.other_saved, modules) - norm_bytes + norm
        working = self.attention_working_recomputed if "core_attention" in modules else self.attention_working
        candidates = (in_mlp + norm * (not mlp_norm_saved), self.mlp_working), (in_attention, working - freed)
        return max(candidates, key=sum)

    def _recomputed_norms(self, modules: frozenset[RecomputeModule]) -> int:
        """Return the number of sublayers whose norm is recomputed; the last one is the MLP."""
        if "norm" not in modules:
            return 0
        return self.num_sublayers - (self.has_experts and "moe" not in modules)

    def activation_recompute_bytes_with(self, modules: frozenset[RecomputeModule]) -> int:
        """Bytes saved to recompute the activation function if `modules` are recomputed."""
        recomputes = "mlp_activation" in modules and not (self.has_experts and "moe" in modules)
        return self.activation_recompute_bytes if recomputes else 0

    def full_recompute_backward_peak(self) -> tuple[int, int]:
        """Return (recomputed bytes, working bytes) at the peak of the backward pass of a fully recomputed layer."""
        freed = sum(each.num_bytes for each in self.mlp_saved) + self.mlp_input_bytes
        return self.saved_bytes, max(self.mlp_working, self.attention_working - freed)


def recomputed_bytes(kept: tuple[SavedTensors, ...], modules: frozenset[RecomputeModule]) -> int:
    """Bytes of the tensors in `kept` that are recomputed with `modules`."""
    return sum(each.num_bytes for each in kept if each.is_recomputed(modules))


def layer_memory(facts: StackInputs, *, is_moe: bool) -> LayerMemory:
    """Return the memory of a layer.

    Args:
        facts: inputs of its stack.
        is_moe: it is an MoE layer.
    """
    stack, widths, tokens = facts.stack, facts.widths, facts.tokens
    e, s = widths.compute, widths.residual
    elements = tokens * stack.hidden_size
    own = attention_memory(
        stack.attention,
        stack,
        facts.attention,
        AttentionTokens(queries=tokens, keys=tokens),
        widths,
        compiled=facts.compiled,
    )
    moe = stack.moe if is_moe else None
    saved = [*own.saved, *_stream_and_norms(facts, moe)]
    working, working_again, beside_scores = own.working, own.working_recomputed, own.scores_recompute_bytes
    parameters = count_layer(stack)
    if facts.cross is not None and facts.cross_attention is not None:
        sides = AttentionTokens(queries=tokens, keys=facts.encoder_tokens, is_cross=True)
        cross = attention_memory(facts.cross, stack, facts.cross_attention, sides, widths, compiled=facts.compiled)
        saved += cross.saved
        beside_scores += cross.scores_recompute_bytes
        working, working_again = max(working, cross.working), max(working_again, cross.working_recomputed)
        parameters += count_cross_attention(stack, facts.cross)
    if moe is None:
        mlp, mlp_working = _mlp(facts, stack.mlp, stack.mlp.ffn_hidden_size)
        mlp_parameters = count_mlp(stack)
    else:
        mlp, mlp_working = _experts(facts, moe)
        mlp_parameters = count_experts(stack, moe)
    parameters += mlp_parameters
    if widths.casts_weights:
        attention_weights = parameters - mlp_parameters - 2 * count_norm(stack)
        saved.append(SavedTensors("weights", attention_weights * e))
        mlp.append(SavedTensors("weights", mlp_parameters * e, "moe" if moe else None))
    keeps_boundary = facts.compiled or norm_saves_input(facts) or stack.block == "post_ln"
    residual = elements * s
    # gradients of the layer's output and of its input; compiled, the second overwrites the first
    residual_gradients = residual * (1 if facts.compiled else 2)
    down = stack.hidden_size * stack.mlp.ffn_hidden_size * widths.weights if moe is None else 0
    attention_base = 2 * residual + parameters * widths.weights
    return LayerMemory(
        input_bytes=elements * s,
        saves_input=keeps_boundary,
        norm_input_bytes=_norm_input(facts, keeps_boundary=keeps_boundary),
        shares_norm_input=stack.block == "parallel_ln",
        has_experts=moe is not None,
        scores_recompute_bytes=beside_scores,
        activation_recompute_bytes=_beside_activation(facts, moe),
        mlp_saved=tuple(each for each in mlp if each.num_bytes),
        other_saved=tuple(each for each in saved if each.num_bytes),
        mlp_input_bytes=elements * e if _saves_norm_output(facts, "mlp_fc1") or moe is not None else 0,
        num_sublayers=_num_sublayers(facts),
        mlp_working=residual_gradients + mlp_working + down,
        attention_working=attention_base + working,
        attention_working_recomputed=attention_base + working_again,
        num_parameters=parameters,
    )


# ---------------------------------------------------------------- residual stream, norms, dropout


def _num_sublayers(facts: StackInputs) -> int:
    """Number of residual branches of a layer."""
    return 2 if facts.cross is None else 3


def _norm_input(facts: StackInputs, *, keeps_boundary: bool) -> int:
    """Bytes of the residual stream saved, besides the layer's input, for each recomputed norm."""
    stack, elements = facts.stack, facts.tokens * facts.stack.hidden_size
    if facts.compiled and stack.block == "parallel_ln" and stack.norm.kind == "layernorm":
        return elements * 4  # the compiler shares one normalized fp32 input among all norms, and saves it
    return 0 if keeps_boundary else elements * facts.widths.residual


def norm_saves_input(facts: StackInputs) -> bool:
    """True if an eager norm saves the residual stream itself instead of an fp32 copy."""
    return facts.widths.residual >= 4 or (facts.stack.norm.kind == "layernorm" and not facts.stack.norm.zero_centered)


def norm_saved_bytes(facts: StackInputs, elements: int) -> int:
    """Bytes that one eager norm saves besides its input of `elements` elements."""
    if facts.stack.norm.kind == "rmsnorm":  # the fp32 copy of the input, and the normalized input in fp32
        return elements * 4 * (1 if norm_saves_input(facts) else 2)
    return 0 if norm_saves_input(facts) else elements * 4


def _stream_and_norms(facts: StackInputs, moe: MoESlice | None) -> list[SavedTensors]:
    stack, widths = facts.stack, facts.widths
    e, s = widths.compute, widths.residual
    elements = facts.tokens * stack.hidden_size
    parts = _num_sublayers(facts)
    # inputs of the first projection of each sublayer; with post-LN the residual stream, of which the layer's input
    # is counted elsewhere
    projections = [_saves_norm_output(facts, "attention_qkv")] * (parts - 1)
    projections += [_saves_norm_output(facts, "mlp_fc1")] * (moe is None)
    normed = projections.count(True) - (stack.block == "post_ln")
    module: RecomputeModule | None = "norm" if stack.block != "post_ln" else None
    saved = [SavedTensors("norm", normed * elements * e, module)]
    # router and experts save one input; experts that gather rows save those rows instead
    if moe is not None and (not _is_eager_moe(facts, moe) or moe.shared_ffn_hidden_size):
        saved.append(SavedTensors("norm", elements * e, module, "moe"))
    statistics = facts.tokens * 4 * (2 if stack.norm.kind == "layernorm" else 1)
    norms = parts + (parts if stack.block == "normformer" else 0)
    saved.append(SavedTensors("norm", norms * statistics))
    sequential = stack.block != "parallel_ln"  # in a parallel block all sublayers read the layer's input
    if facts.compiled and sequential:
        # the output of the first sublayer; the residual stream before each further one
        saved.append(SavedTensors("stream", elements * e + (parts - 2) * elements * s))
        saved += [SavedTensors("stream", elements * s)] if stack.block == "post_ln" else []
    elif not facts.compiled:
        inputs = parts if stack.block == "post_ln" else (parts - 1) * sequential
        saved += [SavedTensors("stream", inputs * elements * s)] if norm_saves_input(facts) else []
        extra, moe_norms = norm_saved_bytes(facts, elements), int(moe is not None)
        saved += [
            SavedTensors("norm", (parts - moe_norms) * extra, module),
            SavedTensors("norm", moe_norms * extra, module, "moe"),
        ]
        if stack.block == "normformer":
            outputs = parts - 1
            saved.append(
                SavedTensors(
                    "norm", outputs * (norm_saved_bytes(facts, elements) + norm_saves_input(facts) * elements * e)
                )
            )
    if stack.hidden_dropout:
        saved.append(SavedTensors("dropout", parts * elements))
    return saved


def _saves_norm_output(facts: StackInputs, projection: Projection) -> bool:
    """True if a projection after a norm saves the norm's output."""
    return projection in facts.trained_projections and not facts.skips_norm_outputs


# ---------------------------------------------------------------- MLP and experts


def _mlp(facts: StackInputs, mlp: MLPSlice, width: int) -> tuple[list[SavedTensors], int]:
    """Return the tensors an MLP of `width` saves besides its input, and the working bytes of its backward pass."""
    e, elements = facts.widths.compute, facts.tokens * width
    ups = 2 if mlp.gated else 1
    has_norm = facts.stack.block == "normformer"
    if facts.fused_lora_mlp:  # working: gradients of the input of fc2 and of the outputs of fc1
        return [SavedTensors("mlp", ups * elements * e)], (1 + ups) * elements * e
    kept: list[SavedTensors] = []
    if not saves_only_output(mlp):
        kept.append(SavedTensors("mlp", ups * elements * e))
        if mlp.nonlinearity == "gelu_sigmoid" and not mlp.gated and not facts.compiled:
            kept.append(SavedTensors("activation", elements * e, "mlp_activation"))  # the sigmoid
    elif facts.compiled:  # a sign mask; not needed if a norm saves the result itself
        kept.append(SavedTensors("activation", 0 if has_norm else elements, "mlp_activation"))
    else:  # the result, unless the next operation saves it too
        next_saves_it = (
            norm_saves_input(facts) if has_norm else "mlp_fc2" in facts.trained_projections and not mlp.dropout
        )
        kept.append(SavedTensors("activation", 0 if next_saves_it else elements * e, "mlp_activation"))
    if "mlp_fc2" in facts.trained_projections:
        kept.append(SavedTensors("activation", elements * e, "mlp_activation"))
    if has_norm:
        inner = elements * e if facts.compiled or norm_saves_input(facts) else 0
        if not facts.compiled:
            inner += norm_saved_bytes(facts, elements)
        kept.append(SavedTensors("activation", inner, "mlp_activation"))
    if mlp.dropout:
        kept.append(SavedTensors("dropout", elements, "mlp_activation"))
    # the gradient of the result, then those of the outputs of fc1; by then the result is freed, unless it is read
    reads_result = saves_only_output(mlp) and not facts.compiled
    return kept, (2 if reads_result else ups) * elements * e


def _beside_activation(facts: StackInputs, moe: MoESlice | None) -> int:
    """Bytes of the activation function's input, which is saved to recompute it where otherwise only its result is.

    For the MLP, or for the shared expert of an MoE layer.
    """
    width = facts.stack.mlp.ffn_hidden_size if moe is None else moe.shared_ffn_hidden_size or 0
    return facts.tokens * width * facts.widths.compute if saves_only_output(facts.stack.mlp) else 0


def expert_rows(moe: MoESlice, tokens: int) -> int:
    """Number of rows the experts of a layer compute, N * K unless padded to capacity."""
    rows = tokens * moe.topk
    if moe.capacity_factor is not None and moe.pad_to_capacity:
        return moe.experts * expert_capacity(tokens, moe.experts, moe.topk, moe.capacity_factor)
    return rows


def _is_eager_moe(facts: StackInputs, moe: MoESlice) -> bool:
    """True if the experts run as separate operations, not as the fused one that saves less."""
    return facts.lora_experts or bool(moe.dropout) or moe.pad_to_capacity or moe.implementation == "sequential"


def _copies_for_router(facts: StackInputs, moe: MoESlice) -> bool:
    """True if the router saves a copy of its input in its own dtype; see `kernels.moe.router_logits`."""
    if not facts.trains_router and not moe.jitter:  # a frozen weight needs no saved input
        return False
    if moe.jitter or moe.router_dtype == "fp64":
        return True
    if facts.widths.residual >= 4:
        return False
    aligned = supports_fp32_output(moe.experts, facts.stack.hidden_size)
    return not (facts.attention.call.device == "cuda" and aligned)


def _experts(facts: StackInputs, moe: MoESlice) -> tuple[list[SavedTensors], int]:
    """Return the tensors router, experts and shared expert save, and the working bytes of their backward pass."""
    stack, widths, tokens = facts.stack, facts.widths, facts.tokens
    e, hidden = widths.compute, stack.hidden_size
    ups = 2 if stack.mlp.gated else 1
    rows, width = expert_rows(moe, tokens), moe.ffn_hidden_size
    router_itemsize = 8 if moe.router_dtype == "fp64" else 4
    # the input in the router's dtype, jitter noise, and for each token the scores of all experts and its top-k
    router = tokens * hidden * router_itemsize * (1 + bool(moe.jitter)) if _copies_for_router(facts, moe) else 0
    router += tokens * (3 * moe.experts * router_itemsize + moe.topk * 28)
    if widths.casts_weights:  # the norm's output is in fp32; the experts read a low-precision copy
        router += tokens * hidden * 4
    kept = [SavedTensors("experts", router, "moe"), SavedTensors("experts", rows * width * ups * e, "moe")]
    if _is_eager_moe(facts, moe):  # gathered rows, inputs of fc2, outputs of fc2
        kept.append(SavedTensors("experts", rows * (2 * hidden + width) * e, "moe"))
    if moe.dropout:
        mask = 1 if facts.compiled else e  # a boolean mask, or the scaled one in the compute dtype
        kept.append(SavedTensors("dropout", tokens * moe.topk * width * mask, "moe"))
    activation_gradients = rows * width * e * (2 + ups)
    weight_gradients = rows * width * ups * e + rows * hidden * e + count_experts(stack, moe) * widths.weights
    working = max(activation_gradients, weight_gradients)
    if moe.shared_ffn_hidden_size:
        shared, _ = _mlp(facts, stack.mlp, moe.shared_ffn_hidden_size)
        kept += [each._replace(module=each.module or "moe", alternative_module="moe") for each in shared]
    return kept, working
