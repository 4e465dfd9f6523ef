"""Records in which the parts of a model describe their training cost, each beside its `forward`.

A part says which weights it holds (`Weights`), what it multiplies (`Matrix.inputs`), and what it saves for its backward
pass (`SavedTensors`, for each recompute module); a part split over ranks also what it sends to them
(`parallel.traffic.Collective`).
`models.layer_cost` sums them over a layer, `models.model_cost` parameters and FLOPs over a model; `trainer.plan` places
all of it on the timeline of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ...kernels.attention.dispatch import BackendSelection
from ...kernels.fp8.recipe import TILE, Fp8Recipe
from ..config.dense_stack import AttentionSlice
from ..config.fp8 import MULTIPLE
from ..config.memory import RecomputeModule
from ..config.peft import Projection
from ..config.stack import StackSlice
from ..dispatch.context_calls import ContextSplit
from ..parallel.layout import ONE_RANK, ParallelLayout
from ..parallel.traffic import Collective

MatrixInputs = Literal["tokens", "encoder tokens", "expert rows"]


class Matrix(NamedTuple):
    """Parameter of one weight matrix, or of the matrices of all experts of a layer.

    Attributes:
        name: of the parameter in its module.
        elements: of one matrix.
        inputs: rows that it multiplies; those of experts are shared out among its matrices.
        number: of matrices.
    """

    name: str
    elements: int
    inputs: MatrixInputs = "tokens"
    number: int = 1

    @property
    def numel(self) -> int:
        """Elements of all its matrices."""
        return self.elements * self.number


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of a part of the model.

    Attributes:
        matrices: parameters that are matrix-multiplied.
        others: elements of all other parameters: norms, biases, tables.
    """

    matrices: tuple[Matrix, ...] = ()
    others: int = 0

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.matrices + other.matrices, self.others + other.others)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.others + sum(matrix.numel for matrix in self.matrices)

    def multiplied(self, inputs: MatrixInputs) -> int:
        """Return the elements that a row of these inputs is multiplied with."""
        return sum(matrix.elements for matrix in self.matrices if matrix.inputs == inputs)

    def forward_flops(self, rows: Mapping[MatrixInputs, int]) -> float:
        """Return the FLOPs of the matmuls of a forward pass over this number of `rows` of each kind of inputs."""
        return 2.0 * sum(matrix.elements * rows[matrix.inputs] for matrix in self.matrices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteWidths:
    """Bytes per element.

    Attributes:
        weights: of parameters and their gradients.
        compute: of matmul operands.
        residual: of the residual stream.
    """

    weights: int
    compute: int
    residual: int

    @property
    def branch(self) -> int:
        """Bytes per element of what branches return, as norms see it: autocast widens it."""
        return self.residual if self.casts_weights else self.compute

    @property
    def casts_weights(self) -> bool:
        """True if layers multiply with low-precision copies of their weights (autocast)."""
        return self.compute < self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class StackInputs:
    """One transformer stack on a rank, and the shape of its micro batches.

    Attributes:
        name: `encoder` or `decoder` for T5, otherwise empty.
        stack: configuration of the stack; with tensor parallelism the rank's part, with all experts.
        batch: samples per micro batch.
        length: tokens per sample.
        attention: backend chosen for self-attention in training.
        cross: configuration of cross-attention; None without one.
        cross_attention: backend chosen for cross-attention in training.
        encoder_length: tokens per sample of the encoder output that cross-attention reads.
        widths: bytes per element.
        compiled: layers run through torch.compile.
        trained_projections: projections whose weights or LoRA updates are trained, and which therefore save their
            input.
        skips_norm_outputs: these projections save the residual stream, not the norm's output; see
            `models.layers.fused_linear`.
        fused_lora_mlp: MLPs with LoRA run as one fused operation; see `kernels.lora.lora_gated_mlp`.
        lora_experts: experts have LoRA updates; see `kernels.moe.lora_experts`.
        trains_router: the MoE router is trained.
        first_trained_layer: index of the first layer whose backward pass runs.
        mesh: ranks that the model and its samples are split over.
        context_split: how context-parallel ranks share attention; None for one rank.
        shared_heads: tensor-parallel ranks that have the same key and value heads.
        frozen_matrices: LoRA updates are trained, not the matrices.
        fp8: recipe of the linear layers of the layer at hand; None if they multiply in the compute dtype.
        keeps_fp8_casts: the fp8 casts of weights are made before, for several passes.
    """

    name: str
    stack: StackSlice
    batch: int
    length: int
    attention: BackendSelection
    cross: AttentionSlice | None
    cross_attention: BackendSelection | None
    encoder_length: int
    widths: ByteWidths
    compiled: bool
    trained_projections: frozenset[Projection]
    skips_norm_outputs: bool
    fused_lora_mlp: bool
    lora_experts: bool
    trains_router: bool
    first_trained_layer: int
    mesh: ParallelLayout = ONE_RANK
    context_split: ContextSplit | None = None
    shared_heads: int = 1
    frozen_matrices: bool = False
    fp8: Fp8Recipe | None = None
    keeps_fp8_casts: bool = False

    @property
    def experts_in_fp8(self) -> bool:
        """True if the experts of the layer at hand multiply in fp8."""
        return self.fp8 is not None and not self.stack.why_experts_without_fp8 and not self.lora_experts

    def is_in_fp8(self, matrix: Matrix) -> bool:
        """Return True if a matrix of the layer at hand multiplies in fp8."""
        if matrix.inputs == "expert rows":
            return self.experts_in_fp8
        return self.fp8 is not None and matrix.name != "router"

    @property
    def saves_fp8(self) -> bool:
        """True if linear layers save an fp8 cast of their input, not their input."""
        return self.fp8 is not None and self.fp8.wgrad and not self.frozen_matrices

    @property
    def gathers_fp8(self) -> bool:
        """True if column-parallel layers save and gather the rank's tokens in fp8."""
        whole = self.uses_transformer_engine or self.fp8 is None or self.fp8.scaling != "tensorwise"
        return self.saves_fp8 and not whole

    @property
    def uses_transformer_engine(self) -> bool:
        """True if the linear layers of the layer at hand multiply in fp8 through TransformerEngine."""
        return self.fp8 is not None and self.stack.fp8 is not None and self.stack.fp8.uses_transformer_engine

    def with_layer(self, *, is_fp8: bool) -> StackInputs:
        """Return the inputs of a layer, whose linear layers multiply in fp8 or not."""
        fp8, cross = self.stack.fp8, self.cross_attention
        if is_fp8 and fp8 is not None:
            return replace(self, fp8=fp8.recipe)
        return replace(
            self,
            fp8=None,
            attention=self.attention.without_fp8(),
            cross_attention=None if cross is None else cross.without_fp8(),
        )

    @property
    def agrees_on_amaxes(self) -> bool:
        """True if ranks with parts of a tensor of the layer at hand take the maximum of their amaxes; with delayed
        scaling once a step, and of experts.
        """
        fp8 = self.stack.fp8
        return (
            self.fp8 is not None and fp8 is not None and fp8.reduce_amax and fp8.expert_recipe.scaling == "tensorwise"
        )

    def amax_traffic(self) -> tuple[Collective, ...]:
        """Return the traffic of the amaxes of a linear layer in fp8: of input, weight, and the output's gradient."""
        if not self.agrees_on_amaxes or (self.fp8 is not None and self.fp8.scaling == "delayed"):
            return ()
        found: list[Collective] = []
        if self.mesh.context > 1:
            found += [Collective("context", "all-reduce", 4, during) for during in ("forward", "backward")]
        if self.mesh.tensor > 1:
            number = 1 if self.keeps_fp8_casts else 2
            found.append(Collective("tensor", "all-reduce", 4 * number, "forward", number=number))
            found.append(Collective("tensor", "all-reduce", 4, "backward"))
        return tuple(found)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the input of a column-parallel layer of all tensor-parallel ranks as it is gathered."""
        return self.outer_elements * (1 if self.gathers_fp8 else self.widths.compute)

    def saved_input_bytes(self, rows: int, width: int, *, gathers: bool = False) -> int:
        """Return the bytes that a trained linear layer saves of its input (rows, width).

        `gathers` says that other ranks have other tokens of it.
        """
        if gathers and self.saves_fp8 and self.uses_transformer_engine:  # the cast of the gathered tokens
            return self.saved_input_bytes(rows * self.mesh.tensor, width)
        if self.fp8 is None or not self.saves_fp8 or (gathers and not self.gathers_fp8):
            return rows * width * self.widths.compute
        if gathers:
            return rows * width
        tile = TILE if self.fp8.scaling == "blockwise" else MULTIPLE
        padded = -(-rows // tile) * tile
        scales = {"tensor": 1, "row": width, "tile": width * padded // TILE, "block": 0}[self.fp8.inputs]
        return padded * width + 4 * scales

    @property
    def tokens(self) -> int:
        """Tokens of the rank per micro batch; those of a sequence are shared by the context-parallel ranks."""
        return self.batch * self.length // self.mesh.context

    @property
    def residual_tokens(self) -> int:
        """Those between attention and MLP, which the tensor-parallel ranks share with sequence parallelism."""
        return self.tokens // (self.mesh.tensor if self.mesh.sequence else 1)

    @property
    def routed_tokens(self) -> int:
        """Tokens per micro batch that are routed to experts together: those of all ranks that share them."""
        return self.batch * self.length

    @property
    def residual_elements(self) -> int:
        """Elements of the rank's residual stream per micro batch."""
        return self.residual_tokens * self.stack.hidden_size

    @property
    def outer_elements(self) -> int:
        """Elements of the hidden states outside of the layers per micro batch."""
        return self.tokens * self.stack.hidden_size

    @property
    def computes_loss(self) -> bool:
        """True if the head and the loss come after it."""
        return self.stack.ends and self.name != "encoder"

    @property
    def num_branches(self) -> int:
        """Number of residual branches of a layer, each with its own norm: attention, cross-attention, MLP."""
        return 2 if self.cross is None else 3

    @property
    def saves_scores(self) -> bool:
        """True if self- or cross-attention saves its scores for the backward pass."""
        cross = self.cross_attention
        return self.attention.saves_scores or (cross is not None and cross.saves_scores)

    @property
    def encoder_tokens(self) -> int:
        """Tokens of the rank per micro batch that cross-attention reads."""
        return self.batch * self.encoder_length // self.mesh.context

    @property
    def saved_norm_bytes(self) -> int:
        """Bytes that a projection after a norm saves of the norm's output."""
        gathers = self.residual_tokens < self.tokens
        return self.saved_input_bytes(self.residual_tokens, self.stack.hidden_size, gathers=gathers)

    def saves_norm_output(self, projection: Projection) -> bool:
        """Return True if this projection after a norm saves the norm's output."""
        return projection in self.trained_projections and not self.skips_norm_outputs


class SavedTensors(NamedTuple):
    """Tensors a layer saves for its backward pass.

    Attributes:
        part: of the layer: `stream`, `norm`, `attention`, `scores`, `mlp`, `activation`, `experts`, `dropout`,
            `weights`.
        num_bytes: bytes per micro batch.
        module: entry of `activations_checkpoint_modules` that recomputes it; None if no entry does.
        also_requires: a second entry that is required as well; None without.
        alternative_module: another entry that recomputes it by itself; None without.
    """

    part: str
    num_bytes: int
    module: RecomputeModule | None = None
    also_requires: RecomputeModule | None = None
    alternative_module: RecomputeModule | None = None

    def is_recomputed(self, modules: frozenset[RecomputeModule]) -> bool:
        """True if it is recomputed, and so not saved, with these `modules`."""
        return self.alternative_module in modules or (
            self.module in modules and (self.also_requires is None or self.also_requires in modules)
        )


def recomputed_bytes(saved: tuple[SavedTensors, ...], modules: frozenset[RecomputeModule]) -> int:
    """Return the bytes of the `saved` tensors that are recomputed with `modules`."""
    return sum(each.num_bytes for each in saved if each.is_recomputed(modules))


@dataclass(frozen=True, slots=True)
class PartMemory:
    """Memory of a part of a layer for one micro batch, in bytes.

    Attributes:
        saved: tensors saved for the backward pass if nothing is recomputed, except the input of its first projection.
        working: peak working memory of the backward pass: gradients and accumulators.
        working_recomputed: the same if attention scores are recomputed.
        recompute_inputs: bytes saved additionally (or fewer, if negative) if attention scores or the activation
            function are recomputed: the inputs of that, instead of copies or results.
    """

    saved: tuple[SavedTensors, ...]
    working: int
    working_recomputed: int = 0
    recompute_inputs: int = 0

    @property
    def saved_bytes(self) -> int:
        """Bytes of the saved tensors."""
        return sum(each.num_bytes for each in self.saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Memory and matmuls of one layer for one micro batch.

    Attributes:
        inputs: its stack.
        weights: its parameters.
        mlp_weights: those of its MLP or experts.
        expert_rows: rows that its experts compute; 0 without experts.
        saves_input: its input is saved if nothing is recomputed.
        norm_input_bytes: bytes of the residual stream saved only to recompute a norm.
        mlp: memory of the MLP or the experts; if the activation is recomputed, that of a shared expert.
        attention: memory of attention and cross-attention, and of the residual stream and norms.
    """

    inputs: StackInputs
    weights: Weights
    mlp_weights: Weights
    expert_rows: int
    saves_input: bool
    norm_input_bytes: int
    mlp: PartMemory
    attention: PartMemory

    @property
    def has_experts(self) -> bool:
        """True for an MoE layer, whose second norm is recomputed only together with the experts."""
        return self.expert_rows > 0

    @property
    def input_bytes(self) -> int:
        """Bytes of its input (the residual stream)."""
        return self.inputs.residual_elements * self.inputs.widths.residual

    @property
    def mlp_input_bytes(self) -> int:
        """Bytes of the normalized input of the MLP."""
        if not self.has_experts and self.inputs.saves_norm_output("mlp_fc1"):
            return self.inputs.saved_norm_bytes
        return self.inputs.residual_elements * self.inputs.widths.compute if self.has_experts else 0

    @property
    def matmul_rows(self) -> dict[MatrixInputs, int]:
        """Rows that its matrices multiply."""
        tokens, encoder_tokens = self.inputs.tokens, self.inputs.encoder_tokens
        return {"tokens": tokens, "encoder tokens": encoder_tokens, "expert rows": self.expert_rows}

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return self.weights.numel

    @property
    def matmul_flops(self) -> float:
        """FLOPs of the matmuls of its forward pass, without the cores of attentions."""
        return self.weights.forward_flops(self.matmul_rows)

    @property
    def fp8_flops(self) -> float:
        """Those of linear layers and experts that multiply in fp8."""
        return Weights(tuple(filter(self.inputs.is_in_fp8, self.weights.matrices))).forward_flops(self.matmul_rows)

    @property
    def mlp_flops(self) -> float:
        """Those of its MLP, or of router, experts and shared expert."""
        return self.mlp_weights.forward_flops(self.matmul_rows)

    @property
    def grouped_flops(self) -> float:
        """Those of the grouped GEMMs of its experts."""
        return 2.0 * self.weights.multiplied("expert rows") * self.expert_rows

    @property
    def last_matmul_flops(self) -> float:
        """Those of its last matmul, the down projection; 0 with experts."""
        return 0.0 if self.has_experts else 2.0 * self.inputs.tokens * self.mlp_weights.matrices[-1].elements

    @property
    def saved(self) -> tuple[SavedTensors, ...]:
        """Tensors saved besides the layer's input if nothing is recomputed."""
        return self.attention.saved + self.mlp.saved

    @property
    def saved_bytes(self) -> int:
        """Bytes saved besides the layer's input if nothing is recomputed."""
        return self.attention.saved_bytes + self.mlp.saved_bytes

    def saved_bytes_with(self, modules: frozenset[RecomputeModule]) -> int:
        """Bytes saved besides the layer's input if `modules` are recomputed."""
        norms = self._recomputed_norms(modules)
        if self.inputs.stack.block == "parallel_ln":  # all norms have the same input
            norms = min(norms, 1)
        saved = self.saved_bytes - recomputed_bytes(self.saved, modules)
        return saved + norms * self.norm_input_bytes + sum(self.recompute_inputs(modules))

    def recompute_inputs(self, modules: frozenset[RecomputeModule]) -> tuple[int, int]:
        """Bytes saved to recompute the scores of attention and the activation of the MLP if `modules` are."""
        scores = self.attention.recompute_inputs if "core_attention" in modules else 0
        recomputes_activation = "mlp_activation" in modules and not (self.has_experts and "moe" in modules)
        return scores, self.mlp.recompute_inputs if recomputes_activation else 0

    def backward_peak(self, modules: frozenset[RecomputeModule]) -> tuple[int, int]:
        """Return (recomputed bytes, working bytes) at the peak of the backward pass if `modules` are recomputed.

        The peak is in the MLP, or in attention after the MLP's saved tensors were freed.
        """
        norm_bytes = recomputed_bytes(tuple(each for each in self.attention.saved if each.module == "norm"), modules)
        norms, in_mlp = self._recomputed_norms(modules), recomputed_bytes(self.mlp.saved, modules)
        norm = norm_bytes // norms if norms else 0
        mlp_norm_saved = norms < self.inputs.num_branches
        freed = self.mlp.saved_bytes - in_mlp + self.mlp_input_bytes * mlp_norm_saved
        freed += self.recompute_inputs(modules)[1]
        in_attention = recomputed_bytes(self.attention.saved, modules) - norm_bytes + norm
        working = self.attention.working_recomputed if "core_attention" in modules else self.attention.working
        candidates = (in_mlp + norm * (not mlp_norm_saved), self.mlp.working), (in_attention, working - freed)
        return max(candidates, key=sum)

    def full_recompute_backward_peak(self) -> tuple[int, int]:
        """Return (recomputed bytes, working bytes) at the peak of the backward pass of a fully recomputed layer."""
        freed = self.mlp.saved_bytes + self.mlp_input_bytes
        return self.saved_bytes, max(self.mlp.working, self.attention.working - freed)

    def _recomputed_norms(self, modules: frozenset[RecomputeModule]) -> int:
        """Return the number of branches whose norm is recomputed; the last one is the MLP."""
        if "norm" not in modules:
            return 0
        return self.inputs.num_branches - (self.has_experts and "moe" not in modules)
