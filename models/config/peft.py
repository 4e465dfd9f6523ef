"""Configuration keys of parameter-efficient fine-tuning (NeMo's `model.peft.*`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .key_block import Block

Scheme = Literal["lora", "adapter", "ptuning", "ia3", "selective", "none"]
TargetModule = Literal["attention_qkv", "attention_dense", "mlp_fc1", "mlp_fc2", "attention", "mlp", "all"]
InitMethod = Literal["xavier", "normal", "kaiming", "zero"]
LayerNumbers = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]


class LoRATuningKeys(Block):
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


class AdapterTuningKeys(Block):
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


class PTuningKeys(Block):
    """`model.peft.p_tuning.*`: trained virtual tokens prepended to the embeddings of a sequence (arXiv 2103.10385)."""

    virtual_tokens: int = Field(10, ge=1)
    """Number of virtual tokens."""
    bottleneck_dim: int = Field(1024, ge=1)
    """Hidden width of the MLP that computes them (the prompt encoder)."""
    embedding_dim: int = Field(1024, ge=1)
    """Input width of that MLP."""
    init_std: float = Field(0.023, gt=0)
    """Standard deviation of the MLP's initial weights."""


class IA3TuningKeys(Block):
    """`model.peft.ia3_tuning.*`: trained factors of keys, values and MLP activations (arXiv 2205.05638)."""

    layer_selection: LayerNumbers | None = None
    """Layers that get factors, counted from 1 (T5: in each stack); null: all."""


class SelectiveTuningKeys(Block):
    """`model.peft.selective_tuning.*`: train a subset of the model's own parameters."""

    tunable_base_param_names: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """Train parameters whose names contain one of these substrings, such as `attention.qkv`."""


class PeftKeys(Block):
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
