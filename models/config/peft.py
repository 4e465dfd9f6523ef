"""Parameter-efficient fine-tuning (NeMo's `model.peft.*`): keys, and what they resolve to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from .key_block import ConfigBlock
from .stack import StackSlice

Scheme = Literal["lora", "adapter", "ptuning", "ia3", "selective", "none"]
TargetModule = Literal["attention_qkv", "attention_dense", "mlp_fc1", "mlp_fc2", "attention", "mlp", "all"]
InitMethod = Literal["xavier", "normal", "kaiming", "zero"]
LayerNumbers = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]

Projection = Literal["attention_qkv", "attention_dense", "mlp_fc1", "mlp_fc2"]
_GROUPS: dict[str, tuple[Projection, ...]] = {
    "attention": ("attention_qkv", "attention_dense"),
    "mlp": ("mlp_fc1", "mlp_fc2"),
    "all": get_args(Projection),
}
PROJECTIONS: frozenset[Projection] = frozenset(get_args(Projection))


class LoRATuningKeys(ConfigBlock):
    """`model.peft.lora_tuning.*`: low-rank updates of linear layers (arXiv 2106.09685)."""

    target_modules: Annotated[list[TargetModule], Field(min_length=1)] = Field(["attention_qkv"])
    """Linear layers to update: `attention_qkv` (query, key, value), `attention_dense` (attention output), `mlp_fc1`
    (gate and up), `mlp_fc2` (down), the latter two in all experts too; `attention` and `mlp` select both of theirs,
    `all` all four."""
    adapter_dim: int = Field(32, ge=1)
    """Rank of the updates."""
    alpha: float | None = Field(None, gt=0)
    """Updates are multiplied by `alpha / adapter_dim`; null: `adapter_dim`, a factor of 1."""
    adapter_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the input of the first matrix (A), in training."""
    column_init_method: InitMethod = "xavier"
    """Initialization of the first matrix (A): `xavier` and `normal` (standard deviation 0.2) are normal, `kaiming` is
    uniform as in torch.nn.Linear."""
    row_init_method: InitMethod = "zero"
    """Initialization of the second matrix (B); with `zero` training starts from the unchanged model."""
    layer_selection: LayerNumbers | None = None
    """Layers that get updates, counted from 1 (T5: in each stack); null: all."""
    variant: Literal["canonical", "nemo"] = "canonical"
    """`canonical`: separate matrices for query, key, value, gate and up, as in Hugging Face's models. `nemo`: one pair
    for all projections of a fused matrix, NeMo's default."""


class AdapterTuningKeys(ConfigBlock):
    """`model.peft.adapter_tuning.*`: bottleneck MLPs after the attention and the MLP of each layer (arXiv 1902.00751).

    Each computes y + up(silu(down(norm(y)))) from the output y of attention or MLP.
    """

    type: Literal["parallel_adapter", "linear_adapter"] = "parallel_adapter"
    """NeMo's two implementations of the same function."""
    adapter_dim: int = Field(32, ge=1)
    """Width of the bottleneck."""
    adapter_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the output of the adapter, in training."""
    norm_position: Literal["pre", "post"] | None = "pre"
    """Apply a norm to the input (`pre`) or the output (`post`) of the adapter; null: neither."""
    norm_type: Literal["mixedfusedlayernorm", "layernorm"] = "mixedfusedlayernorm"
    """Both names select LayerNorm."""
    column_init_method: InitMethod = "xavier"
    """Initialization of the first matrix; as in `lora_tuning`."""
    row_init_method: InitMethod = "zero"
    """Initialization of the second matrix; with `zero` training starts from the unchanged model."""
    layer_selection: LayerNumbers | None = None
    """Layers that get adapters, counted from 1 (T5: in each stack); null: all."""


class PTuningKeys(ConfigBlock):
    """`model.peft.p_tuning.*`: trained virtual tokens prepended to the embeddings of a sequence (arXiv 2103.10385)."""

    virtual_tokens: int = Field(10, ge=1)
    """Number of virtual tokens."""
    bottleneck_dim: int = Field(1024, ge=1)
    """Hidden width of the MLP that computes them (the prompt encoder)."""
    embedding_dim: int = Field(1024, ge=1)
    """Input width of that MLP."""
    init_std: float = Field(0.023, gt=0)
    """Standard deviation of the MLP's initial weights."""


class IA3TuningKeys(ConfigBlock):
    """`model.peft.ia3_tuning.*`: trained factors of keys, values and MLP activations (arXiv 2205.05638)."""

    layer_selection: LayerNumbers | None = None
    """Layers that get factors, counted from 1 (T5: in each stack); null: all."""


class SelectiveTuningKeys(ConfigBlock):
    """`model.peft.selective_tuning.*`: train a subset of the model's own parameters."""

    tunable_base_param_names: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """Train parameters whose names contain one of these substrings, such as `attention.qkv`."""


class PeftKeys(ConfigBlock):
    """`model.peft.*`: parameter-efficient fine-tuning with frozen weights of `model.restore_from_path`."""

    peft_scheme: Scheme | None = None
    """`lora`, `adapter`, `ptuning`, `ia3`: freeze the model and train the parameters that the block of that name
    configures; `selective`: train a subset of its own parameters. null or `none`: train all parameters."""
    restore_from_path: Annotated[str, Field(min_length=1)] | None = None
    """Initialize the trained parameters from this checkpoint, run or Hugging Face PEFT folder, starting at step 0;
    null: with new ones."""
    lora_tuning: LoRATuningKeys = LoRATuningKeys.model_validate({})
    """`peft_scheme: lora`."""
    adapter_tuning: AdapterTuningKeys = AdapterTuningKeys.model_validate({})
    """`peft_scheme: adapter`."""
    p_tuning: PTuningKeys = PTuningKeys.model_validate({})
    """`peft_scheme: ptuning`."""
    ia3_tuning: IA3TuningKeys = IA3TuningKeys.model_validate({})
    """`peft_scheme: ia3`."""
    selective_tuning: SelectiveTuningKeys = SelectiveTuningKeys.model_validate({})
    """`peft_scheme: selective`."""

    @property
    def is_on(self) -> bool:
        """True if only a part of the parameters is trained."""
        return self.peft_scheme not in (None, "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSelection:
    """Selected layers of each stack.

    Attributes:
        numbers: layer numbers, counted from 1; None for all.
    """

    numbers: frozenset[int] | None = None

    def includes(self, index: int) -> bool:
        """Return True if the layer with this 0-based index is selected."""
        return self.numbers is None or index + 1 in self.numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRASlice:
    """Low-rank updates of linear layers.

    Attributes:
        targets: projections of a layer that get updates.
        rank: rank of the updates.
        alpha: updates are multiplied by alpha / rank.
        dropout: dropout probability of the input of the first matrix, in training.
        column_init: initialization of the first matrix (A).
        row_init: initialization of the second matrix (B).
        layers: layers that get updates.
        canonical: separate matrices for each projection of a fused matrix.
    """

    targets: frozenset[Projection]
    rank: int
    alpha: float
    dropout: float
    column_init: InitMethod
    row_init: InitMethod
    layers: LayerSelection
    canonical: bool

    @property
    def scale(self) -> float:
        """Factor of the updates."""
        return self.alpha / self.rank

    @property
    def updates_all_norm_consumers(self) -> bool:
        """True if every projection that reads a norm of the residual stream has an update, in every layer."""
        return self.layers.numbers is None and {"attention_qkv", "mlp_fc1"} <= self.targets

    def can_skip_norm_output(self, stack: StackSlice) -> bool:
        """Return True if compiled projections with updates save the residual, saved anyway, instead of its norm."""
        spares = stack.norm.kind == "rmsnorm" and not stack.fp32_residual and stack.fp8 is None
        return spares and stack.block != "post_ln" and not (self.dropout or stack.is_own_block)

    def can_fuse_mlp(self, stack: StackSlice) -> bool:
        """Return True if the LoRA MLP can be fused: both projections updated, with only a gated activation between."""
        mlp, both = stack.mlp, {"mlp_fc1", "mlp_fc2"} <= self.targets
        between = mlp.bias or mlp.dropout > 0 or self.dropout > 0 or stack.block == "normformer"
        return both and mlp.gated and not mlp.is_own and not between


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSlice:
    """Bottleneck MLPs after attention and MLP; attributes as in `AdapterTuningKeys`."""

    width: int
    dropout: float
    norm_position: Literal["pre", "post"] | None
    column_init: InitMethod
    row_init: InitMethod
    layers: LayerSelection


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSlice:
    """Trained virtual tokens prepended to a sequence; attributes as in `PTuningKeys`."""

    virtual_tokens: int
    bottleneck: int
    embedding: int
    init_std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IA3Slice:
    """Trained factors of keys, values and MLP activations."""

    layers: LayerSelection


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveSlice:
    """The model's own parameters whose names contain one of these substrings."""

    names: tuple[str, ...]


FROZEN_SCHEMES = frozenset({"lora", "adapter", "ptuning", "ia3"})
"""Values of `peft_scheme` that train no weight of the base model."""

PeftSlice = LoRASlice | AdapterSlice | PromptSlice | IA3Slice | SelectiveSlice


def peft_dropout(peft: PeftSlice | None) -> float:
    """Return the dropout probability of the fine-tuning modules in the layers; 0 for none."""
    return peft.dropout if isinstance(peft, LoRASlice | AdapterSlice) else 0.0


def peft_slice(keys: PeftKeys) -> PeftSlice | None:
    """Resolve the keys; None for full fine-tuning."""
    match keys.peft_scheme:
        case "lora":
            lora = keys.lora_tuning
            return LoRASlice(
                targets=frozenset(_projections(lora.target_modules)),
                rank=lora.adapter_dim,
                alpha=lora.adapter_dim if lora.alpha is None else lora.alpha,
                dropout=lora.adapter_dropout,
                column_init=lora.column_init_method,
                row_init=lora.row_init_method,
                layers=_layers(lora.layer_selection),
                canonical=lora.variant == "canonical",
            )
        case "adapter":
            adapter = keys.adapter_tuning
            return AdapterSlice(
                width=adapter.adapter_dim,
                dropout=adapter.adapter_dropout,
                norm_position=adapter.norm_position,
                column_init=adapter.column_init_method,
                row_init=adapter.row_init_method,
                layers=_layers(adapter.layer_selection),
            )
        case "ptuning":
            prompt = keys.p_tuning
            return PromptSlice(
                virtual_tokens=prompt.virtual_tokens,
                bottleneck=prompt.bottleneck_dim,
                embedding=prompt.embedding_dim,
                init_std=prompt.init_std,
            )
        case "ia3":
            return IA3Slice(layers=_layers(keys.ia3_tuning.layer_selection))
        case "selective":
            return SelectiveSlice(names=tuple(keys.selective_tuning.tunable_base_param_names or ()))
        case _:
            return None


def _layers(numbers: list[int] | None) -> LayerSelection:
    return LayerSelection(numbers=None if numbers is None else frozenset(numbers))


def _projections(names: Sequence[str]) -> Iterator[Projection]:
    for name in names:
        group: tuple[Projection, ...] = _GROUPS.get(name, (name,))  # pyrefly: ignore[bad-assignment]
        yield from group
