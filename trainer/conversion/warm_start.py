"""Load pretrained weights and adapters into a new run (fine-tuning)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ...models.config.families import keys_by_stack
from ...models.config.stack import StackKeys
from ..checkpoint.reader import Checkpoint
from ..config.override_typos import quoted_override
from ..config.resolved_run import ResolvedRun
from ..config.schema.root import MODEL_BLOCKS, AnyModelBlock, RootBlock
from ..config.schema.trainer_and_data import TokenizerBlock
from ..data.tokenizers.tokenizer import Tokenizer, is_same_tokenizer
from ..data.tokenizers.tokenizer_files import tokenizer_from_config
from ..utils.errors import UserError
from ..utils.text import pluralize
from .adapter_weights import load_pretrained_adapter
from .checkpoint_io import checkpoint_config
from .finetune_defaults import EXECUTION_KEYS
from .from_hf import open_source
from .pretrained import RESTORE_KEY, PretrainedWeights, hf_tokenizer_keys, map_hf_model

TRAINING_ONLY_KEYS = (
    *("hidden_dropout", "attention_dropout", "ffn_dropout", "moe_dropout", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
    *("moe_input_jitter_eps", "moe_router_force_load_balancing", "moe_router_bias_update_rate"),
)
"""Keys of a stack that change its training, but not the function its weights compute at inference."""
_FUNCTION_PRESERVING_KEYS = {
    *EXECUTION_KEYS,
    *TRAINING_ONLY_KEYS,
    *("init_method_std", "use_scaled_init_method", "moe_token_dispatcher_type", "moe_router_dtype"),
}
"""Keys of a stack that do not change the function its weights compute at inference."""
_FUNCTION_KEYS = {"apply_embedding_scaling", "logits_soft_cap", "scale_tied_logits"}
"""Keys beside those of stacks that change it, but no shape."""


def load_pretrained_weights(
    run: ResolvedRun, model: nn.Module, tokenizer: Tokenizer, base: PretrainedWeights | None
) -> Iterator[str]:
    """Load the weights of `model.restore_from_path` and `model.peft.restore_from_path`, converting dtypes.

    Args:
        model: a model of the same shapes; loaded in place. Build its optimizer afterwards, from these weights.

    Yields:
        Log lines.

    Raises:
        UserError: the family, the shapes or the tokenizer differ.
    """
    if base is not None:
        yield from base.warnings
        trained = _trained_model_keys(base)
        if trained is not None and trained.family != run.model.family:
            raise UserError(
                f"`{RESTORE_KEY}`: {base.path} holds a model of `family: {trained.family}`, but `model.family` is "
                f"{run.model.family}; use a checkpoint of that family"
            )
        if not _has_same_tokenizer(base, run.model.tokenizer, tokenizer):
            at, own = "model.tokenizer", "its"
            if base.checkpoint is not None:
                own = f"{at}.library=checkpoint {quoted_override(f'{at}.type', str(base.path))}, its"
            raise UserError(
                f"`{RESTORE_KEY}`: {base.path} was trained with a different tokenizer, so token ids do not match; use "
                f"{own} own `{at}`"
            )
        base.load(model)
        if trained is None:
            yield f"{base.path}: its configuration cannot be read here; only the shapes of its weights were compared"
        else:
            yield from function_mismatch_warnings(run.model, trained)
        steps = f", trained for {pluralize(base.checkpoint.state.step, 'step')}" if base.checkpoint is not None else ""
        yield f"weights from {base.path}{steps}"
    yield from load_pretrained_adapter(run, model, tokenizer, base)


def _has_same_tokenizer(base: PretrainedWeights, keys: TokenizerBlock, tokenizer: Tokenizer) -> bool:
    """Return True if the weights were trained with the tokenizer of the run, or if that is unknown."""
    if base.checkpoint is not None:
        return is_same_tokenizer(base.checkpoint.tokenizer_document, tokenizer.to_dict())
    theirs = hf_tokenizer_keys(base.path)
    files = dict.fromkeys(("type", "model", "vocab_file", "merge_file"))
    if not theirs or all(getattr(keys, name) == value for name, value in {**files, **theirs}.items()):
        return True
    if {keys.library, theirs["library"]} & {"byte-level", "char"}:  # without a tokenizer file to compare
        return False
    one, other = (tokenizer_from_config(each) for each in (keys, keys.model_copy(update={**files, **theirs})))
    return is_same_tokenizer(one.to_dict(), other.to_dict())


def _trained_model_keys(base: PretrainedWeights) -> AnyModelBlock | None:
    """Return the model keys the weights were trained with; None if this version does not support them."""
    if base.checkpoint is None:
        with open_source(base.path) as source:
            incoming = map_hf_model(source)
            return MODEL_BLOCKS[incoming.architecture.family].model_validate(incoming.keys)
    root = load_checkpoint_config(base.checkpoint)
    return None if root is None else root.model


def load_checkpoint_config(checkpoint: Checkpoint) -> RootBlock | None:
    """Return the configuration stored in a checkpoint; None if this version does not support its keys."""
    try:
        return checkpoint_config(checkpoint).root
    except UserError:
        return None


def function_mismatch_warnings(model: AnyModelBlock, trained: AnyModelBlock) -> Iterator[str]:
    """Yield a warning for each key (positions, norms, masks) with which the same weights compute another function."""
    before = keys_by_stack(trained)
    names = set(StackKeys.model_fields) - _FUNCTION_PRESERVING_KEYS
    blocks = [("", model, trained, _FUNCTION_KEYS)]
    blocks += [(at, stack, before[at], names) for at, stack in keys_by_stack(model).items()]
    for at, block, block_before, include in blocks:
        for name, now in block.model_dump(include=include).items():
            then = getattr(block_before, name)
            if then != now:
                yield (
                    f"`model.{at}{name}` is {now}, but these weights were trained with {then}: before training, the "
                    "model computes a different function"
                )
