"""Aliases in NeMo files: keys and values under other names are read as their equivalent, and reported."""

from __future__ import annotations

from collections.abc import Iterator

from ....models.config.extensions import extension_names
from ....models.config.key_block import Finding
from ....models.config.model import Family
from ....models.config.positions import BOUNDED_POSITION_TYPES
from .. import dotted_paths
from ..dotted_paths import MISSING, Tree
from ..schema.key_index import STACKS, format_value, schema_blocks, schema_keys, without_stack
from ..schema.root import family_of
from .key_table import unsupported_values

_TRAIN = "model.data.train_ds"
_SOURCE, _FILES = "model.data.data_impl", f"{_TRAIN}.file_names"
_WANDB = "exp_manager.wandb_logger_kwargs"
_GRAD_SYNC_DTYPE = "model.optim.grad_sync_dtype"
_MCORE, _NAME, _BLOCK = "model.mcore_customization_config", "model.name", "model.transformer_block_type"
_FALCON = "megatron_falcon_gpt"
_EXAMPLE_LENGTH, _LENGTH = f"{_TRAIN}.max_seq_length", "model.encoder_seq_length"
_RENAMED_KEYS = {
    "run.name": "name",
    _EXAMPLE_LENGTH: _LENGTH,
    f"{_WANDB}.dir": f"{_WANDB}.save_dir",
    f"{_WANDB}.version": f"{_WANDB}.id",
    _GRAD_SYNC_DTYPE: "model.fsdp_grad_reduce_dtype",
}
_ANSWERS = "model.answer_only_loss"
_SPLITS, _PREFIX, _TYPO = "model.data.splits_string", "model.data.data_prefix", "model.deteministic_mode"
_NULL_AS_DEFAULT = (
    *("trainer.deterministic", "trainer.enable_progress_bar", "trainer.enable_model_summary"),
    "exp_manager.create_wandb_logger",
)
"""Keys whose null is the default, in Lightning; in NeMo also blocks of `exp_manager`, and lists empty by default."""
_DTYPES = {"fp32": "fp32", "float32": "fp32", "32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}
_GATED = {"gelu": "geglu", "silu": "swiglu", "swish": "swiglu", "relu": "reglu"}
_DISPATCHERS = ("allgather", "alltoall", "alltoall_seq", "flex")
_CASE_INSENSITIVE = ("normalization", "position_embedding_type", "activation")
_NULL_IS_DEFAULT = (
    "hidden_dropout",
    "attention_dropout",
    "ffn_dropout",
    "moe_dropout",
    "moe_aux_loss_coeff",
    "moe_router_dtype",
)


def apply_nemo_aliases(tree: Tree, moved: dict[str, str]) -> Iterator[Finding]:
    """Replace aliases in `tree`, in place.

    Args:
        tree: resolved values.
        moved: receives new path -> old path for each renamed key.

    Yields:
        A finding for each replacement, and an error for each contradiction.
    """
    family = family_of(tree.get("model"))
    for stack in STACKS[family]:
        yield from _token_dispatcher(tree, stack, moved)
        yield from _drop_policy(tree, stack)
        yield from _gated_linear_unit(tree, stack)
    yield from _falcon_layer(tree)
    yield from _prompts_of_older_files(tree)
    if family == "t5":
        yield from _answer_only_loss(tree)
    yield from _infer_jsonl(tree, moved)
    yield from _renamed_keys(tree, moved)
    yield from _dtype_of_optimizer_state(tree)
    keys = schema_keys(family)
    for path in (f"{stack}.{name}" for stack in STACKS[family] for name in _CASE_INSENSITIVE):
        value = dotted_paths.get(tree, path)
        known = [*map(str, keys[path].choices), *map(str, unsupported_values().get(without_stack(path), ()))]
        kind = keys[path].extends
        if isinstance(value, str) and value not in known:
            matches = [choice for choice in known if choice.lower() == value.lower()]
            if matches and not (kind and value in extension_names(kind)):
                dotted_paths.put(tree, path, matches[0])
                yield Finding.warning((path,), f"`{value}` is read as `{matches[0]}`", f"{path}={matches[0]}")
    for path in (f"{stack}.{name}" for stack in STACKS[family] for name in _NULL_IS_DEFAULT):
        if dotted_paths.get(tree, path, 0) is None:
            default = keys[path].default
            dotted_paths.remove(tree, path)
            yield Finding.info((path,), f"null is read as the default, {default}", f"{path}={default}")

    yield from _nulls_and_switches(tree, family)
    yield from _sample_length(tree, moved)
    if dotted_paths.get(tree, _TYPO) not in (None, MISSING, False, 0):
        rule = "`deteministic_mode` has no effect: a typo in one of NVIDIA's files, which NeMo ignores too"
        yield Finding.warning((_TYPO,), rule, f"~{_TYPO} trainer.deterministic=true")


def _nulls_and_switches(tree: Tree, family: Family) -> Iterator[Finding]:
    """Read null as the default where NeMo does, and 0 and 1 as booleans, as OmegaConf and Python do."""
    keys = schema_keys(family)
    null_blocks = [path for path in schema_blocks(family) if path.startswith("exp_manager.")]
    switches: list[str] = []
    for path, value in list(dotted_paths.leaves(tree)):
        key = keys.get(path)
        if value is None and (path in null_blocks or path in _NULL_AS_DEFAULT or (key and key.default in ([], {}))):
            dotted_paths.remove(tree, path)
        elif key and key.kind.startswith("true or false") and "integer" not in key.kind and _is_bit(value):
            dotted_paths.put(tree, path, bool(value))
            switches.append(path)
    if switches:
        names = ", ".join(f"`{path}`" for path in switches)
        fixes = " ".join(f"{path}={format_value(dotted_paths.get(tree, path))}" for path in switches)
        yield Finding.info(tuple(switches), f"0 and 1 are read as false and true: {names}", fixes)
    if dotted_paths.get(tree, _SPLITS, 0) is None and isinstance(dotted_paths.get(tree, _PREFIX), dict):
        dotted_paths.remove(tree, _SPLITS)  # each split has its own data


def _is_bit(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value in (0, 1)


def _sample_length(tree: Tree, moved: dict[str, str]) -> Iterator[Finding]:
    """Let `data.seq_length` differ from the model's length, as in NeMo: the model's remains its number of positions.

    Longer samples need positions without a learned table; otherwise they are left, and refused later.
    """
    family = family_of(tree.get("model"))
    model_key = "model.seq_length" if family == "t5" else "model.encoder_seq_length"
    stack, rows_key, keys = STACKS[family][0], "model.max_position_embeddings", schema_keys(family)
    tokens = dotted_paths.get(tree, "model.data.seq_length")
    length = dotted_paths.get(tree, model_key, keys[model_key].default)
    rows = dotted_paths.get(tree, rows_key)
    if not _is_count(tokens) or not _is_count(length) or tokens == length or not (rows is None or _is_count(rows)):
        return
    kind_key = f"{stack}.position_embedding_type"
    kind = dotted_paths.get(tree, kind_key, keys[kind_key].default)
    if tokens > max(length, rows or 0) and str(kind).startswith("learned_"):
        return
    dotted_paths.put(tree, model_key, tokens)
    moved[model_key] = "model.data.seq_length"
    fix = f"{model_key}={tokens}"
    if length > max(tokens, rows or 0) and kind in BOUNDED_POSITION_TYPES:
        dotted_paths.put(tree, rows_key, length)
        moved[rows_key] = model_key
        fix += f" {rows_key}={length}"
    yield Finding.warning(
        ("model.data.seq_length", model_key),
        f"samples have `data.seq_length` ({tokens}) tokens, not `{model_key.removeprefix('model.')}` ({length}): "
        "the model is trained on that length",
        fix,
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def has_example_length(tree: Tree) -> bool:
    """Return True if a file that fine-tunes a GPT gives the length of samples by `train_ds.max_seq_length` only."""
    length, files, given = (dotted_paths.get(tree, path) for path in (_EXAMPLE_LENGTH, _FILES, _LENGTH))
    return family_of(tree.get("model")) == "gpt" and _is_count(length) and files is not None and given is None


def has_nemo_file_names(tree: Tree) -> bool:
    """Return True if `train_ds.file_names` is set without `data_impl`, as in NeMo's fine-tuning files."""
    return dotted_paths.get(tree, _SOURCE) is None and dotted_paths.get(tree, _FILES) is not None


def _infer_jsonl(tree: Tree, moved: dict[str, str]) -> Iterator[Finding]:
    """Set `data_impl: jsonl` for NeMo's fine-tuning files, which set file names only."""
    if has_nemo_file_names(tree):
        dotted_paths.put(tree, _SOURCE, "jsonl")
        moved[_SOURCE] = _FILES
        yield Finding.info(
            (_SOURCE, _FILES), "`train_ds.file_names` are read with `data_impl: jsonl`", f"{_SOURCE}=jsonl"
        )


def _renamed_keys(tree: Tree, moved: dict[str, str]) -> Iterator[Finding]:
    """Rename keys of NeMo's launcher, loggers and optimizers; a contradicting one is left, and refused later."""
    for theirs, ours in _RENAMED_KEYS.items():
        value = dotted_paths.get(tree, theirs)
        if value in (None, MISSING):
            continue
        if theirs == _GRAD_SYNC_DTYPE:
            value = _DTYPES.get(str(value).removeprefix("torch."))
        other = dotted_paths.get(tree, ours)
        # NeMo reads the keys of FSDP with `fsdp` only.
        inert = theirs == _GRAD_SYNC_DTYPE and not dotted_paths.get(tree, "model.fsdp")
        if value is None or not (inert or other in (None, value)):
            continue
        if theirs == _EXAMPLE_LENGTH and not has_example_length(tree):
            continue
        dotted_paths.remove(tree, theirs)
        dotted_paths.put(tree, ours, value)
        moved[ours] = theirs
        if inert and _DTYPES.get(str(other)) not in (None, value):
            rule = (
                f"`{theirs}` ({value}) is read as `{ours}`, in place of {format_value(other)}, which NeMo reads with "
            )
            yield Finding.warning((ours,), f"{rule}`model.fsdp` only", f"~{theirs} {ours}={format_value(value)}")
            continue
        yield Finding.info((ours,), f"`{theirs}` is read as `{ours}`", f"{ours}={format_value(value)}")


def _dtype_of_optimizer_state(tree: Tree) -> Iterator[Finding]:
    """Drop `optim.dtype`, which NeMo reads with its older distributed optimizer only."""
    path, name = "model.optim.dtype", dotted_paths.get(tree, "model.optim.name")
    value = dotted_paths.get(tree, path)
    if value is not None and name == "mcore_distributed_optim":
        dotted_paths.remove(tree, path)
        if _DTYPES.get(str(value)) != "fp32":
            rule = f"`dtype` ({value}) has no effect with `name` ({name}), as in NeMo: the optimizer's state is fp32"
            yield Finding.warning((path, "model.optim.name"), rule, f"~{path}")


def _gated_linear_unit(tree: Tree, stack: str) -> Iterator[Finding]:
    """Replace Megatron's `gated_linear_unit`, which is part of `activation` here."""
    path, activation = f"{stack}.gated_linear_unit", f"{stack}.activation"
    if dotted_paths.get(tree, path) is not True:
        return
    name = dotted_paths.get(tree, activation) or "gelu"
    if name in _GATED:
        yield Finding.error(
            (path, activation),
            f"refused: a gated `{name}` is `activation: {_GATED[name]}` here",
            f"~{path} {activation}={_GATED[name]}",
        )
    elif name in _GATED.values() or str(name).startswith("fast-"):
        yield Finding.info((activation,), f"`{path}` is redundant with `{name}`, which is gated")
    else:
        return
    dotted_paths.remove(tree, path)


def _prompts_of_older_files(tree: Tree) -> Iterator[Finding]:
    """Read keys of NeMo 1.20 as later versions do, and as 1.20 does with a prompt template.

    `truncation_field: context` is `input` in a template that begins with it, and a template has its own line breaks.
    """
    found: dict[str, str] = {}
    for block in (_TRAIN, "model.data.validation_ds", "model.data.test_ds"):
        truncated, newline = f"{block}.truncation_field", f"{block}.separate_prompt_and_response_with_newline"
        templates = (dotted_paths.get(tree, f"{name}.prompt_template") for name in (block, _TRAIN))
        template = next((text for text in templates if isinstance(text, str)), None)
        begin = "{input}" if template is None else template
        if dotted_paths.get(tree, truncated) == "context" and begin.partition("{")[2].startswith("input}"):
            dotted_paths.put(tree, truncated, "input")
            found[truncated] = f"{truncated}=input"
        if template is not None and dotted_paths.get(tree, newline) is True:
            dotted_paths.put(tree, newline, False)
            found[newline] = f"~{newline}"
    if found:
        rule = "read as by NeMo from 1.21: `context` is `input`, and the prompt template holds the line breaks"
        yield Finding.info(tuple(found), rule, " ".join(found.values()))


def _answer_only_loss(tree: Tree) -> Iterator[Finding]:
    """Accept the key of a GPT in NeMo's files that fine-tune a T5, whose loss is on the answers without it."""
    value, rule = dotted_paths.get(tree, _ANSWERS, MISSING), "the loss of a T5 is on its answers only"
    if value in (True, None):
        yield Finding.info((_ANSWERS,), f"no effect: {rule}", f"~{_ANSWERS}")
    elif value is False:
        yield Finding.error((_ANSWERS, "model.family"), f"refused: {rule}", f"~{_ANSWERS}")
    else:
        return
    dotted_paths.remove(tree, _ANSWERS)


def _falcon_layer(tree: Tree) -> Iterator[Finding]:
    """Reject Falcon's parallel layers, which `model.name` chooses in NeMo; other layers do not read their keys."""
    keys = [f"{_MCORE}.{name}" for name in ("new_decoder_architecture", "parallel_attention")]
    given = [path for path in keys if dotted_paths.get(tree, path) is True]
    if not given or dotted_paths.get(tree, _BLOCK) == "parallel_ln":
        return
    if dotted_paths.get(tree, _NAME) != _FALCON:
        rule = f"no effect, as in NeMo: only the layer of `name: {_FALCON}` reads it"
        yield Finding.warning((*given, _NAME), rule, " ".join(f"~{path}" for path in given))
        return
    two_norms = "with a norm each for attention and MLP, is `transformer_block_type: parallel_ln`"
    one_norm = "in which attention and MLP share a norm; `parallel_ln` has a norm for each"
    rule = f"refused: Falcon's layer, {two_norms if given[0] == keys[0] else one_norm}"
    yield Finding.error((given[0], _NAME), rule, f"{_BLOCK}=parallel_ln")


def _token_dispatcher(tree: Tree, stack: str, moved: dict[str, str]) -> Iterator[Finding]:
    """Rename `moe_token_dropping` with a dispatcher's name; NeMo's documentation lists the key twice."""
    wrong, right = f"{stack}.moe_token_dropping", f"{stack}.moe_token_dispatcher_type"
    value = dotted_paths.get(tree, wrong)
    if not isinstance(value, str) or value not in _DISPATCHERS:
        return
    given = dotted_paths.get(tree, right)
    if given is not None and given != value:
        yield Finding.error(
            (wrong, right),
            f"`{value}` is a value of `moe_token_dispatcher_type`, which is `{given}`",
            f"{right}={value}, and {wrong}=false",
        )
        dotted_paths.remove(tree, wrong)  # otherwise its type would be reported as well
        return
    dotted_paths.remove(tree, wrong)
    dotted_paths.put(tree, right, value)
    moved[right] = moved.get(wrong, wrong)
    yield Finding.warning(
        (right,),
        f"`moe_token_dropping: {value}` is a typo of NeMo's documentation and is read as `moe_token_dispatcher_type`",
        f"{right}={value}",
    )


def _drop_policy(tree: Tree, stack: str) -> Iterator[Finding]:
    """Replace Megatron's misspelled default `prob` (Megatron-LM #812)."""
    path = f"{stack}.moe_token_drop_policy"
    if dotted_paths.get(tree, path) == "prob":
        dotted_paths.put(tree, path, "probs")
        yield Finding.warning((path,), "`prob` is read as `probs`", f"{path}=probs")
