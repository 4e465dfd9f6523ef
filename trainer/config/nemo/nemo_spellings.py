"""What NeMo's files write in other words: spellings that are read as the key or value they mean, and reported."""

from __future__ import annotations

from collections.abc import Iterator

from ....models.config.key_block import Finding
from .. import dotted_paths
from ..dotted_paths import Tree
from ..schema.key_index import STACKS, plain_path, schema_keys, show_value
from ..schema.root import family_of
from .unsupported_values import VALUES

_SOURCE, _FILES = "model.data.data_impl", "model.data.train_ds.file_names"
_WANDB = "exp_manager.wandb_logger_kwargs"
_SUMMED_IN = "model.optim.grad_sync_dtype"
_OTHER_NAMES = {
    f"{_WANDB}.dir": f"{_WANDB}.save_dir",
    f"{_WANDB}.version": f"{_WANDB}.id",
    _SUMMED_IN: "model.fsdp_grad_reduce_dtype",
}
_TYPES = {"fp32": "fp32", "float32": "fp32", "32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}
_GATED = {"gelu": "geglu", "silu": "swiglu", "swish": "swiglu", "relu": "reglu"}
_DISPATCHERS = ("allgather", "alltoall", "alltoall_seq", "flex")
_ANY_CASE = ("normalization", "position_embedding_type", "activation")
_NULL_IS_DEFAULT = (
    "hidden_dropout",
    "attention_dropout",
    "ffn_dropout",
    "moe_dropout",
    "moe_aux_loss_coeff",
    "moe_router_dtype",
)


def respelled(tree: Tree, moved: dict[str, str]) -> Iterator[Finding]:
    """Rewrite `tree` in place.

    Args:
        tree: resolved values.
        moved: takes new path -> old path for a key that was written under another name.

    Yields:
        What was read differently, and for the typo of NeMo's documentation also a contradiction.
    """
    family = family_of(tree.get("model"))
    for stack in STACKS[family]:
        yield from _token_dispatcher(tree, stack, moved)
        yield from _drop_policy(tree, stack)
        yield from _gated_linear_unit(tree, stack)
    yield from _files_of_prompts(tree, moved)
    yield from _other_names(tree, moved)
    keys = schema_keys(family)
    for path in (f"{stack}.{name}" for stack in STACKS[family] for name in _ANY_CASE):
        value = dotted_paths.get(tree, path)
        known = [*map(str, keys[path].choices), *map(str, VALUES.get(plain_path(path), ()))]
        if isinstance(value, str) and value not in known:
            meant = [choice for choice in known if choice.lower() == value.lower()]
            if meant:
                dotted_paths.put(tree, path, meant[0])
                yield Finding("warning", (path,), f"`{value}` is read as `{meant[0]}`", f"{path}={meant[0]}")
    for path in (f"{stack}.{name}" for stack in STACKS[family] for name in _NULL_IS_DEFAULT):
        if dotted_paths.get(tree, path, 0) is None:
            default = keys[path].default
            dotted_paths.remove(tree, path)
            yield Finding("info", (path,), f"null is read as the default, {default}", f"{path}={default}")


def names_files_of_prompts(tree: Tree) -> bool:
    """Whether files to learn from are named as NeMo's fine-tuning does, without a kind of data."""
    return dotted_paths.get(tree, _SOURCE) is None and dotted_paths.get(tree, _FILES) not in (
        None,
        dotted_paths.MISSING,
    )


def _files_of_prompts(tree: Tree, moved: dict[str, str]) -> Iterator[Finding]:
    """NeMo's fine-tuning names files and no kind of data."""
    if names_files_of_prompts(tree):
        dotted_paths.put(tree, _SOURCE, "jsonl")
        moved[_SOURCE] = _FILES
        yield Finding(
            "info", (_SOURCE, _FILES), "`train_ds.file_names` are read with `data_impl: jsonl`", f"{_SOURCE}=jsonl"
        )


def _other_names(tree: Tree, moved: dict[str, str]) -> Iterator[Finding]:
    """What NeMo's loggers and optimizers call a key; one that says something else than ours is left, to be refused."""
    for theirs, ours in _OTHER_NAMES.items():
        value = dotted_paths.get(tree, theirs)
        if value is None or value == dotted_paths.MISSING:
            continue
        if theirs == _SUMMED_IN:
            value = _TYPES.get(str(value).removeprefix("torch."))
        if value is None or dotted_paths.get(tree, ours) not in (None, value):
            continue
        dotted_paths.remove(tree, theirs)
        dotted_paths.put(tree, ours, value)
        moved[ours] = theirs
        yield Finding("info", (ours,), f"`{theirs}` is read as `{ours}`", f"{ours}={show_value(value)}")


def _gated_linear_unit(tree: Tree, stack: str) -> Iterator[Finding]:
    """Megatron's second word for a gated activation, beside the activation."""
    path, activation = f"{stack}.gated_linear_unit", f"{stack}.activation"
    if dotted_paths.get(tree, path) is not True:
        return
    named = dotted_paths.get(tree, activation) or "gelu"
    if named in _GATED:
        yield Finding(
            "error",
            (path, activation),
            f"refused: a gated `{named}` is `activation: {_GATED[named]}` here",
            f"~{path} {activation}={_GATED[named]}",
        )
    elif named in _GATED.values() or str(named).startswith("fast-"):
        yield Finding("info", (activation,), f"`{path}` adds nothing to `{named}`, which is gated")
    else:
        return
    dotted_paths.remove(tree, path)


def _token_dispatcher(tree: Tree, stack: str, moved: dict[str, str]) -> Iterator[Finding]:
    """NeMo's documentation lists `moe_token_dropping` twice; the second, with a word, is the dispatcher."""
    wrong, right = f"{stack}.moe_token_dropping", f"{stack}.moe_token_dispatcher_type"
    value = dotted_paths.get(tree, wrong)
    if not isinstance(value, str) or value not in _DISPATCHERS:
        return
    given = dotted_paths.get(tree, right)
    if given is not None and given != value:
        yield Finding(
            "error",
            (wrong, right),
            f"`{value}` is a value of `moe_token_dispatcher_type`, which is `{given}`",
            f"{right}={value}, and {wrong}=false",
        )
        dotted_paths.remove(tree, wrong)  # told once; its type would be wrong too
        return
    dotted_paths.remove(tree, wrong)
    dotted_paths.put(tree, right, value)
    moved[right] = moved.get(wrong, wrong)
    yield Finding(
        "warning",
        (right,),
        f"`moe_token_dropping: {value}` is a typo of NeMo's documentation and is read as `moe_token_dispatcher_type`",
        f"{right}={value}",
    )


def _drop_policy(tree: Tree, stack: str) -> Iterator[Finding]:
    """Megatron's own default was misspelled (Megatron-LM #812)."""
    path = f"{stack}.moe_token_drop_policy"
    if dotted_paths.get(tree, path) == "prob":
        dotted_paths.put(tree, path, "probs")
        yield Finding("warning", (path,), "`prob` is read as `probs`", f"{path}=probs")
