"""Logger that appends a line of text to a file for each record."""

from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only

import stoker


@stoker.register("logger", "text_file")
class TextFile(Logger):
    """Append `step: name=value ...` to metrics.txt."""

    name, version = "text", "0"

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        """Append a line."""
        with open("metrics.txt", "a") as file:
            file.write(f"{step}: " + " ".join(f"{name}={value:.4g}" for name, value in metrics.items()) + "\n")

    @rank_zero_only
    def log_hyperparams(self, params, *args, **kwargs):
        """Write the name of the run; `params` is the whole configuration."""
        with open("metrics.txt", "a") as file:
            file.write(f"{params['name']}\n")
