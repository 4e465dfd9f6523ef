"""Lightning without what it never needs here, the first import of it in a process.

Lightning imports torchmetrics, and that imports transformers, matplotlib and more wherever they are installed: 2.6 s
instead of 0.4, beside torch and its compiler. Here neither is used; who wants torchmetrics whole imports it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_utilities.core import imports
from lightning_utilities.core.imports import RequirementCache

EXTRAS = (
    "gammatone", "librosa", "matplotlib", "nltk", "pesq", "pystoi", "regex", "scienceplots", "scipy", "torch_fidelity",
    "torchvision", "transformers",
)  # fmt: skip
"""What torchmetrics asks for while it is imported, to have more metrics."""


@contextmanager
def _without_extras() -> Iterator[None]:
    """Within it they seem not to be installed."""
    is_there, is_available = RequirementCache.__bool__, imports.package_available

    def seems_there(self: RequirementCache) -> bool:
        asked: Any = self.requirement or self.module
        return not str(asked).startswith(EXTRAS) and is_there(self)

    def seems_available(package_name: str) -> bool:
        return package_name not in EXTRAS and is_available(package_name)

    RequirementCache.__bool__, imports.package_available = seems_there, seems_available
    try:
        yield
    finally:
        RequirementCache.__bool__, imports.package_available = is_there, is_available


with _without_extras():
    import pytorch_lightning as pl
    from lightning_fabric.plugins import ClusterEnvironment
    from pytorch_lightning.strategies import ParallelStrategy, SingleDeviceStrategy
    from pytorch_lightning.utilities.exceptions import SIGTERMException

__all__ = ["ClusterEnvironment", "ParallelStrategy", "SIGTERMException", "SingleDeviceStrategy", "pl"]
