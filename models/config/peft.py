"""The keys of fine-tuning with few parameters: which scheme, and the settings of each (NeMo's `model.peft.*`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .key_block import Block

Scheme = Literal["lora", "adapter", "ptuning", "ia3", "selective", "none"]
TargetModule = Literal["attention_qkv", "attention_dense", "mlp_fc1", "mlp_fc2", "attention", "mlp", "all"]
InitMethod = Literal["xavier", "normal", "kaiming", "zero"]
LayerNumbers = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]


class LoRATuningKeys(Block):
    """`model.peft.lora_tuning.*`: a low-rank update of linear layers (arXiv 2106.09685)."""

    target_modules: Annotated[list[TargetModule], Field(min_length=1)] = Field(["attention_qkv"])
    """Which linear layers: `attention_qkv` (queries, keys, values), `attention_dense` (what follows the heads),
    `mlp_fc1` (gate and up), `mlp_fc2` (down), each of all experts too; `attention` and `mlp` are both of theirs,
    `all` is all four."""
    adapter_dim: int = Field(32, ge=1)
    """Rank of an update."""
    alpha: float | None = Field(None, gt=0)
    """Updates are multiplied with `alpha / adapter_dim`; null: `adapter_dim`, a factor of 1."""
    adapter_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on what the first matrix of an update reads, in training."""
    column_init_method: InitMethod = "xavier"
    """How the first matrix (A) starts: `xavier` and `normal` (deviation 0.2) are normal, `kaiming` is uniform as a
    linear layer of torch's."""
    row_init_method: InitMethod = "zero"
    """How the second matrix (B) starts; zero leaves the model what it was."""
    layer_selection: LayerNumbers | None = None
    """Numbers of the layers that get updates, the lowest is 1 (T5: of each stack); null: all."""
    variant: Literal["canonical", "nemo"] = "canonical"
    """`canonical`: queries, keys, values, gate and up have a pair of matrices each, as in Hugging Face's models.
    `nemo`: one pair for all projections of a fused matrix, which is NeMo's default."""


class AdapterTuningKeys(Block):
    """`model.peft.adapter_tuning.*`: a small MLP after the attention and after the MLP of a layer (arXiv 1902.00751).

    Each adds to what the part gives: y + up(silu(down(norm(y)))).
    """

    type: Literal["parallel_adapter", "linear_adapter"] = "parallel_adapter"
    """NeMo's two implementations of one function."""
    adapter_dim: int = Field(32, ge=1)
    """Width of the bottleneck."""
    adapter_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on what an adapter adds, in training."""
    norm_position: Literal["pre", "post"] | None = "pre"
    """Norm what an adapter reads, or what it adds; null: neither."""
    norm_type: Literal["mixedfusedlayernorm", "layernorm"] = "mixedfusedlayernorm"
    """Layer norm by both names."""
    column_init_method: InitMethod = "xavier"
    """How the first matrix starts; as in `lora_tuning`."""
    row_init_method: InitMethod = "zero"
    """How the second matrix starts; zero leaves the model what it was."""
    layer_selection: LayerNumbers | None = None
    """Numbers of the layers that get adapters, the lowest is 1 (T5: of each stack); null: all."""


class PTuningKeys(Block):
    """`model.peft.p_tuning.*`: learned vectors in front of the embeddings of a text (arXiv 2103.10385)."""

    virtual_tokens: int = Field(10, ge=1)
    """How many vectors."""
    bottleneck_dim: int = Field(1024, ge=1)
    """Width of the MLP that makes them."""
    embedding_dim: int = Field(1024, ge=1)
    """Width of what that MLP reads."""
    init_std: float = Field(0.023, gt=0)
    """Deviation of the MLP's initial weights."""


class IA3TuningKeys(Block):
    """`model.peft.ia3_tuning.*`: factors of keys, values and inner activations of the MLP (arXiv 2205.05638)."""

    layer_selection: LayerNumbers | None = None
    """Numbers of the layers that get factors, the lowest is 1 (T5: of each stack); null: all."""


class SelectiveTuningKeys(Block):
    """`model.peft.selective_tuning.*`: some of the model's own parameters."""

    tunable_base_param_names: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """Those whose name holds one of these texts, such as `attention.qkv`."""


class PeftKeys(Block):
    """`model.peft.*`: what is trained where the weights of `model.restore_from_path` stay as they are."""

    peft_scheme: Scheme | None = None
    """`lora`, `adapter`, `ptuning`, `ia3`: the model is frozen, and what the block of that name says is trained;
    `selective`: some of its own parameters. null or `none`: all of them are."""
    restore_from_path: Annotated[str, Field(min_length=1)] | None = None
    """Begin with the trained parameters of this checkpoint or run, or of a folder in the format of Hugging Face's peft,
    at step 0; null: with new ones."""
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
        """Whether a part of the parameters is trained, and the rest frozen."""
        return self.peft_scheme not in (None, "none")
