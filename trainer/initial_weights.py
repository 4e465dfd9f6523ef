"""Start from the weights of another run: what fine-tuning begins with."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..models.config.family_rules import stacks_of_keys
from ..models.config.memory import MemoryKeys
from ..models.config.stack import StackKeys
from .checkpoint import Checkpoint, find_checkpoint
from .config.run_config import RunConfig
from .config.schema import AnyModelBlock, RootBlock
from .data.tokenizers import Tokenizer
from .environment import user_path
from .errors import UserError

_KEY = "model.restore_from_path"
_SAME_FUNCTION = {
    *("hidden_dropout", "attention_dropout", "ffn_dropout", "init_method_std", "use_scaled_init_method"),
    *("use_flash_attention", "attention_backend", "transformer_engine", "masked_softmax_fusion"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps", "moe_dropout", "moe_router_bias_update_rate"),
    *("moe_layer_recompute", "moe_grouped_gemm", "moe_token_dispatcher_type", "moe_per_layer_logging"),
    "moe_router_dtype",
    *MemoryKeys.model_fields,
}
"""Keys of a stack that leave it the same function of its weights."""


def load_initial_weights(root: RootBlock, model: nn.Module, tokenizer: Tokenizer) -> Iterator[str]:
    """Copy the weights of the checkpoint that `model.restore_from_path` names, if it names one, in any dtype.

    Args:
        root: the configuration.
        model: of the same shape; filled in place. Its optimizer must be made afterwards, from these weights.
        tokenizer: of this run.

    Yields:
        Lines for the log.

    Raises:
        UserError: there is no such checkpoint, it is of another family or shape, or of another tokenizer, whose token
            ids mean other things.
    """
    if root.model.restore_from_path is None:
        return
    checkpoint, complaints = find_checkpoint(user_path(root.model.restore_from_path, _KEY))
    yield from complaints
    trained = _trained_as(checkpoint)
    if trained is not None and trained.family != root.model.family:
        raise UserError(
            f"`{_KEY}`: {checkpoint.path} holds a model of `family: {trained.family}`, but `model.family` is "
            f"{root.model.family}; use a checkpoint of that family"
        )
    if checkpoint.tokenizer_document != tokenizer.to_document():
        raise UserError(
            f"`{_KEY}`: {checkpoint.path} has another tokenizer than this run, so its weights mean other tokens; use "
            "its `model.tokenizer`"
        )
    checkpoint.load_weights(model, cast=True)
    if trained is None:
        yield f"{checkpoint.path}: its configuration cannot be read here; only the shapes of its weights were compared"
    else:
        yield from _other_functions(root.model, trained)
    yield f"weights from {checkpoint.path}, trained for {checkpoint.state.step:,} steps"


def _trained_as(checkpoint: Checkpoint) -> AnyModelBlock | None:
    """The model that wrote a checkpoint, by its keys; None where this version does not know them."""
    try:
        document = checkpoint.config_document
        return RunConfig.from_document(document, trusted=False, origin=str(checkpoint.path)).root.model
    except UserError:
        return None


def _other_functions(model: AnyModelBlock, trained: AnyModelBlock) -> Iterator[str]:
    """Keys that no shape tells of, and with which the same weights compute something else: positions, norms, masks."""
    before = stacks_of_keys(trained)
    for at, stack in stacks_of_keys(model).items():
        for name, now in stack.model_dump(include=set(StackKeys.model_fields) - _SAME_FUNCTION).items():
            then = getattr(before[at], name)
            if then != now:
                yield (
                    f"`model.{at}{name}` is {now}, but these weights were trained with {then}: the model begins as "
                    "another function than they were"
                )
