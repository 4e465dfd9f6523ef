"""Rotary embedding in config.json: `rope_theta`, `rope_scaling`, and `rope_parameters` of newer versions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.families import FamilyKeys
from .config_fields import FieldError, HFConfig, format_value, get_key, validate_value


@dataclass(frozen=True, slots=True)
class RotaryFields:
    """Base, rotated fraction of a head, and frequency scaling for long contexts.

    Args:
        base: field of the base in older versions.
        fraction: field of the rotated fraction of a head in older versions; None if whole heads are rotated.
        default_fraction: rotated fraction if the field is absent.
        default_base: base if the field is absent.
    """

    base: str = "rope_theta"
    fraction: str | None = None
    default_fraction: float = 1.0
    default_base: float = 10000.0

    @property
    def fields(self) -> tuple[str, ...]:
        """See `FieldMapping.fields`."""
        return (self.base, "rope_scaling", "rope_parameters", *([self.fraction] if self.fraction else []))

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        """See `FieldMapping.read`."""
        parameters: dict[str, Any] = {}
        for field in ("rope_scaling", "rope_parameters"):
            value = config.get(field)
            if value is not None and not isinstance(value, dict):
                raise FieldError(f"`{field}` ({format_value(value)}) must be an object")
            read = {("rope_type" if name == "type" else name): part for name, part in (value or {}).items()}
            if any(parameters[name] != read[name] for name in parameters.keys() & read.keys()):
                raise FieldError("`rope_scaling` and `rope_parameters` contradict each other")
            parameters |= read
        base = parameters.pop("rope_theta", config.get(self.base, self.default_base))
        keys: dict[str, Any] = {
            "position_embedding_type": "rope",
            "rotary_interleaved": False,
            "rotary_base": validate_value(self.base, base, "number"),
        }
        part = parameters.pop(
            "partial_rotary_factor", config.get(self.fraction, self.default_fraction) if self.fraction else 1.0
        )
        keys["rotary_percentage"] = validate_value(self.fraction or "partial_rotary_factor", part, "number")
        return keys | self._read_scaling(parameters.pop("rope_type", "default"), parameters, config)

    def _read_scaling(self, kind: Any, parameters: dict[str, Any], config: HFConfig) -> dict[str, Any]:
        """Convert frequency scaling to keys; consumes the known entries of `parameters`."""

        def pop(name: str, default: Any = None) -> Any:
            return validate_value(f"rope_scaling.{name}", parameters.pop(name, default), "number")

        longest = config.get("max_position_embeddings")
        keys: dict[str, Any] = {}
        match kind:
            case "default":
                pass
            case "linear":
                keys["seq_len_interpolation_factor"] = pop("factor")
            case "llama3" | "yarn":
                keys["rotary_scaling"] = kind
                keys["rotary_scaling_factor"] = factor = pop("factor")
                length = parameters.pop("original_max_position_embeddings", longest)
                keys["rotary_original_length"] = validate_value("original_max_position_embeddings", length, "size")
                low, high = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
                keys["rotary_low_turns"] = pop(low, 1.0)
                keys["rotary_high_turns"] = pop(high, 4.0 if kind == "llama3" else 32.0)
                if kind == "yarn":
                    amplitude = parameters.pop("attention_factor", None)
                    if amplitude is not None and not math.isclose(
                        validate_value("rope_scaling.attention_factor", amplitude, "number"), 0.1 * math.log(factor) + 1
                    ):
                        raise FieldError(
                            f"`rope_scaling.attention_factor` ({format_value(amplitude)}) must be 0.1 "
                            "ln(factor) + 1, or null"
                        )
                    if parameters.pop("truncate", True) is not True:
                        raise FieldError("`rope_scaling.truncate` (false) must be true")
            case _:
                raise FieldError(
                    f"`rope_scaling.rope_type` ({format_value(kind)}) must be default, linear, llama3 or yarn"
                )
        if parameters and kind != "default":
            raise FieldError(f"`rope_scaling.{next(iter(parameters))}` is not supported and may change the results")
        return keys

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        """Return the fields of both newer and older versions, with the same meaning."""
        if get_key(keys, "position_embedding_type") != "rope":
            raise FieldError(f"`position_embedding_type` ({get_key(keys, 'position_embedding_type')}) must be rope")
        parameters: dict[str, Any] = {"rope_type": "default"}
        kind = "llama3" if get_key(keys, "scale_positional_embedding") else get_key(keys, "rotary_scaling")
        linear = get_key(keys, "seq_len_interpolation_factor")
        if kind is not None and linear not in (None, 1):
            raise FieldError(f"`seq_len_interpolation_factor` ({linear}) must be null with `rotary_scaling`")
        if kind is not None:
            low, high = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
            parameters = {
                "rope_type": kind,
                "factor": get_key(keys, "rotary_scaling_factor"),
                "original_max_position_embeddings": get_key(keys, "rotary_original_length"),
                low: get_key(keys, "rotary_low_turns") or 1.0,
                high: get_key(keys, "rotary_high_turns") or (4.0 if kind == "llama3" else 32.0),
            }
        elif linear not in (None, 1):
            parameters = {"rope_type": "linear", "factor": linear}
        scaling = None if parameters["rope_type"] == "default" else dict(parameters)
        parameters["rope_theta"] = get_key(keys, "rotary_base")
        written: dict[str, Any] = {self.base: parameters["rope_theta"], "rope_scaling": scaling}
        if self.fraction:
            parameters["partial_rotary_factor"] = written[self.fraction] = get_key(keys, "rotary_percentage")
        return written | {"rope_parameters": parameters}
