"""Unsupported NeMo values of keys that act, with the reason and the value to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .key_row import KeyState

_FP16 = "fp16 needs loss scaling; use bf16"
_FP8 = "training in fp8; use bf16"
_OTHER_TOKENIZER = "use huggingface with a tokenizer.json, sentencepiece, or byte-level"
_ADAM = "adam adds weight decay to the gradient, which its running square undoes; use adamw (equal without decay)"
_OTHER_OPTIMIZER = "the optimizers are AdamW, Adafactor, Muon and SGD; use adamw"
_OTHER_BALANCE = "the loss is computed per micro batch; use aux_loss, or moe_router_enable_expert_bias"
_SCHEDULE = "schedules depend on the step only, not on epochs or losses; use CosineAnnealing"


@dataclass(frozen=True, slots=True)
class Values:
    """Reason why some values of a key that acts are not supported.

    Attributes:
        state: not yet, or refused.
        note: description and alternative.
        replacement: the value to set instead; empty if there are several choices.
    """

    state: KeyState
    note: str
    replacement: str


def _values(state: KeyState, note: str, *values: Any, use: str = "") -> dict[Any, Values]:
    return dict.fromkeys(values, Values(state, note, use))


VALUES: Mapping[str, Mapping[Any, Values]] = MappingProxyType(
    {
        "trainer.precision": _values(
            KeyState.NOT_YET,
            _FP16,
            16,
            "16",
            "16-mixed",
            "16-true",
            "fp16",
            "fp16-mixed",
            "float16",
            "half",
            use="bf16",
        )
        | _values(
            KeyState.NOT_YET, _FP8, 8, "8", "fp8", "transformer-engine", "transformer-engine-float16", use="bf16"
        ),
        "trainer.accelerator": _values(
            KeyState.REFUSED, "not a device torch trains these models on", "tpu", "hpu", "ipu"
        ),
        "model.normalization": _values(
            KeyState.REFUSED,
            "norms always compute in fp32; use layernorm",
            "low_precision_layernorm",
            use="layernorm",
        ),
        "model.tokenizer.library": _values(
            KeyState.REFUSED, _OTHER_TOKENIZER, "regex", "tabular", "tiktoken", "null-tokenizer", "yttm"
        ),
        "model.data.data_impl": _values(
            KeyState.REFUSED, "use mmap or text", "text_mmap", "csv_mmap", "retmmap", "lazy", "cached"
        ),
        "model.data.dataset_type": _values(
            KeyState.REFUSED, "use t5, or t5_prefix_lm", "ul2", "ul2_prompt", "bart", "t5_prompt", "gpt_prompt"
        ),
        "model.moe_router_load_balancing_type": _values(
            KeyState.REFUSED, _OTHER_BALANCE, "seq_aux_loss", "global_aux_loss", "quantile"
        ),
        "model.peft.peft_scheme": _values(
            KeyState.REFUSED,
            "weights are not quantized, and schemes are not combined; use lora",
            "qlora",
            "sdlora",
            use="lora",
        ),
        "model.optim.name": _values(KeyState.REFUSED, _ADAM, "adam", use="adamw")
        | _values(
            KeyState.REFUSED,
            _OTHER_OPTIMIZER,
            "adadelta",
            "adamax",
            "adagrad",
            "rmsprop",
            "rprop",
            "novograd",
            "adan",
            "lamb",
            "radam",
            use="adamw",
        ),
        "model.optim.sched.name": _values(
            KeyState.REFUSED,
            _SCHEDULE,
            "StepLR",
            "ExponentialLR",
            "ReduceLROnPlateau",
            "CyclicLR",
            use="CosineAnnealing",
        ),
    }
)
"""Unsupported values by path of the key."""
