"""Software that attention depends on: NVTE flags of a run, and versions assumed for a device that is not installed."""

from __future__ import annotations

from dataclasses import replace

from ...kernels.attention.call_spec import InstalledSoftware
from ...kernels.attention.flags import AttentionFlags
from ...models.config.families import FamilyKeys, keys_by_stack
from ..config.resolved_run import ResolvedRun
from ..utils import environment
from ..utils.errors import UserError


def run_flags(run: ResolvedRun) -> AttentionFlags:
    """Return the NVTE_* flags as the run sees them: the environment updated with `env_vars`."""
    from ..device.determinism import attention_flags

    own = {name: environment.format_variable(value) for name, value in run.env_vars.items()}
    try:
        return attention_flags(run.trainer.deterministic, {**environment.snapshot(), **own})
    except ValueError as error:
        raise UserError(str(error)) from None


def assumed_software(keys: FamilyKeys, device: str) -> InstalledSoftware:
    """Return the software of this machine, as assumed on another device.

    A GPU is assumed to have cuDNN and Triton. Packages that a configuration key requires are assumed to be installed.
    """
    from ...kernels.attention.installed_software import detect_installed_software

    local, stacks = detect_installed_software(), keys_by_stack(keys).values()
    needs_te = any(stack.transformer_engine or stack.attention_backend.startswith("te_") for stack in stacks)
    if device == "cpu":
        return replace(local, te=local.te or (ASSUMED_TE if needs_te else None))
    needs_flash_attn = any(stack.attention_backend in ("flash_attn", "te_flash") for stack in stacks)
    return replace(
        local,
        cudnn=local.cudnn or ASSUMED_CUDNN,
        triton=local.triton or ASSUMED_TRITON,
        interpreted=False,
        te=local.te or (ASSUMED_TE if needs_te else None),
        flash_attn=local.flash_attn or (ASSUMED_FLASH_ATTN if needs_flash_attn else None),
    )


ASSUMED_CUDNN, ASSUMED_TRITON, ASSUMED_TE, ASSUMED_FLASH_ATTN = 91900, (3, 6), (2, 20), (2, 8, 3)
