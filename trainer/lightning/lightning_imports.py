"""Import Lightning without the optional dependencies of torchmetrics.

Lightning imports torchmetrics, which imports transformers, matplotlib and more if they are installed: 2.6 s instead of
0.4 s, on top of torch and its compiler. Neither is used here, and neither library has a public switch for it, so the
checks for optional packages are replaced during the import. To get all of torchmetrics, import it before stoker.
Whatever else uses Lightning imports it from here, or the first import would not be this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_utilities.core import imports
from lightning_utilities.core.imports import RequirementCache

TORCHMETRICS_EXTRAS = (
    "gammatone", "librosa", "matplotlib", "nltk", "pesq", "pystoi", "regex", "scienceplots", "scipy", "torch_fidelity",
    "torchvision", "transformers",
)  # fmt: skip
"""Optional packages that torchmetrics probes for at import time."""


@contextmanager
def _without_extras() -> Iterator[None]:
    """Report the packages in `TORCHMETRICS_EXTRAS` as not installed within this context."""
    is_available, package_available = RequirementCache.__bool__, imports.package_available

    def is_available_and_not_extra(self: RequirementCache) -> bool:
        requirement: Any = self.requirement or self.module
        return not str(requirement).startswith(TORCHMETRICS_EXTRAS) and is_available(self)

    def package_available_and_not_extra(package_name: str) -> bool:
        return package_name not in TORCHMETRICS_EXTRAS and package_available(package_name)

    RequirementCache.__bool__ = is_available_and_not_extra
    imports.package_available = package_available_and_not_extra  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        RequirementCache.__bool__, imports.package_available = is_available, package_available


with _without_extras():
    import pytorch_lightning as pl
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from pytorch_lightning import callbacks
    from pytorch_lightning.loggers import Logger
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, SingleDeviceStrategy
    from pytorch_lightning.utilities import rank_zero_warn
    from pytorch_lightning.utilities.exceptions import SIGTERMException

__all__ = [
    "DDPStrategy", "LightningEnvironment", "Logger", "ModelParallelStrategy", "ParallelStrategy", "SIGTERMException",
    "SingleDeviceStrategy", "callbacks", "pl", "rank_zero_warn",
]  # fmt: skip
