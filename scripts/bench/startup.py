"""Start-up time of `stoker --help`, `config` and an invalid configuration, compared with `python -c "import hydra"`.

    python scripts/bench/startup.py [--runs 15]

Commands alternate, so that changes in the machine's speed affect all of them; medians of wall time of whole processes.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time

COMMANDS = {
    'python -c "import hydra"': (["-c", "import hydra"], 0),
    "stoker --help": (["-m", "stoker", "--help"], 0),
    "stoker config model=gpt_125m": (["-m", "stoker", "config", "model=gpt_125m"], 0),
    "stoker train model.num_query_group=2 (invalid)": (["-m", "stoker", "train", "model.num_query_group=2"], 2),
    'python -c "import torch"': (["-c", "import torch"], 0),
}
"""Title to (arguments of the interpreter, expected exit code)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(runs + 1):
        for name, (arguments, code) in COMMANDS.items():
            start = time.perf_counter()
            done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
            elapsed = time.perf_counter() - start
            if done.returncode != code:
                sys.exit(f"`{name}` exited with {done.returncode} instead of {code}:\n{done.stderr}")
            if number:  # the first round fills the file cache
                seconds[name].append(elapsed)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = next(iter(medians.values()))
    print(f"Python {platform.python_version()}, {platform.machine()}, {runs} runs each, median wall time\n")
    print("| command | ms | relative to `import hydra` |\n|---|---|---|")
    for name, median in medians.items():
        print(f"| `{name}` | {median * 1e3:.0f} | {median / base:.2f} x |")


if __name__ == "__main__":
    main()
