"""Files of the NeMo-Framework-Launcher: NeMo's blocks below the name of a stage, or at the root, with a `run:` block.

The launcher composes one tree with a block per stage (`training:`, `peft:`) beside its own keys (`data_dir:`,
`cluster:`), and starts NeMo with one of these blocks. Values refer to the whole tree: `${training.run.name}`,
`${data_dir}`. Here the block of the stage is moved to the root, and the launcher's keys are variables: accepted, and
used where a value refers to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...utils.errors import UserError
from ...utils.redaction import redact
from .. import dotted_paths
from ..dotted_paths import Tree
from ..problems import Problem

if TYPE_CHECKING:
    from ..compose import Composition
    from ..overrides import ValueOverride

STAGES = (
    *("training", "fine_tuning", "peft", "prompt_learning", "adapter_learning", "ia3_learning"),
    *("steerlm_reg", "rlhf_rm", "rlhf_ppo"),
)
"""Stages that train a model."""
VARIABLES = frozenset(
    {"run", "data_dir", "base_results_dir", "launcher_scripts_path", "cluster", "cluster_type", "container"}
    | {"data_preparation", "conversion", "conversion_hf2nemo", "evaluation", "export"}
)
"""Keys and blocks at the launcher's root, and `run`, that values of a stage refer to."""
_BLOCKS = frozenset({"run", "trainer", "exp_manager", "model"})


def is_variable(path: str) -> bool:
    """Return True for a key of the launcher, which NeMo itself does not have."""
    return path.partition(".")[0] in VARIABLES


def without_stage(path: str, stage: str = "") -> str:
    """Return a path below `stage`, or any stage, as it is at the root: `peft.model.seed` becomes `model.seed`.

    In `peft.peft_scheme`, `peft` is the block of the model.
    """
    head, _, rest = path.partition(".")
    stages = (stage,) if stage else STAGES
    return rest if head in stages and rest.partition(".")[0] in (*_BLOCKS, "name", "env_vars") else path


def move_stage_to_root(
    composition: Composition, config_name: str, edits: Sequence[ValueOverride]
) -> tuple[list[ValueOverride], list[Problem]]:
    """Move the block of the launcher's stage in `composition` to the root, in place; other files are left as they are.

    Args:
        composition: merged files.
        config_name: the primary file; Hydra places `training/gpt3/5b` below `training.gpt3`.
        edits: value overrides.

    Returns:
        The overrides, those of the stage (`training.model.seed=1`) at the root as well, and problems with others.

    Raises:
        UserError: the files configure several stages, and `stages` names none or several of them.
    """
    tree = composition.tree
    prefix = config_name.rpartition("/")[0].replace("/", ".")
    if not (prefix and _is_stage(dotted_paths.get(tree, prefix))):
        prefix = _chosen_stage(tree, edits)
    if prefix:
        block = dotted_paths.get(tree, prefix)
        emptied = prefix
        while emptied and dotted_paths.remove(tree, emptied):
            emptied = dotted_paths.parent_of(emptied)
            if dotted_paths.get(tree, emptied):
                break
        composition.tree = dotted_paths.merged(tree, block)
        below = f"{prefix}."
        moved = {path.removeprefix(below): text for path, text in composition.origins.items() if path.startswith(below)}
        kept = {path: text for path, text in composition.origins.items() if not path.startswith(below)}
        composition.origins = kept | moved
        composition.stage = prefix if prefix in STAGES else ""
    if prefix or isinstance(tree.get("run"), dict):
        _remove_null_variables(composition)
        edits = [replace(edit, path=without_stage(edit.path, composition.stage)) for edit in edits]
    stray = [edit for edit in edits if without_stage(edit.path) != edit.path and edit.path.split(".")[0] not in tree]
    return [edit for edit in edits if edit not in stray], [_no_stage(edit) for edit in stray]


def _remove_null_variables(composition: Composition) -> None:
    """Remove environment variables that are null, which the launcher does not set."""
    variables = composition.tree.get("env_vars")
    for name in [name for name, value in variables.items() if value is None] if isinstance(variables, dict) else ():
        dotted_paths.remove(composition.tree, f"env_vars.{name}")
        composition.origins.pop(f"env_vars.{name}", None)


def _no_stage(edit: ValueOverride) -> Problem:
    stage = edit.path.partition(".")[0]
    fix = redact(edit.typed.replace(f"{stage}.", "", 1))
    return Problem(edit.path, None, redact(edit.typed), f"there is no such key: the files have no stage `{stage}`", fix)


def _is_stage(block: Any) -> bool:
    return isinstance(block, dict) and not _BLOCKS.isdisjoint(block)


def _chosen_stage(tree: Tree, edits: Sequence[ValueOverride]) -> str:
    present = [stage for stage in STAGES if _is_stage(tree.get(stage))]
    if len(present) < 2:
        return "".join(present)
    wanted = next((edit.value for edit in edits if edit.path == "stages"), tree.get("stages"))
    chosen = [stage for stage in present if isinstance(wanted, list) and stage in wanted]
    if len(chosen) != 1:
        raise UserError(
            f"the configuration has several stages of the NeMo-Framework-Launcher: {', '.join(present)}; a run is one "
            f"of them, such as stages=[{present[0]}]"
        )
    return chosen[0]
