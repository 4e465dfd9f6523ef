"""Start-up benchmark: `stoker --help`, `config` and a refused configuration beside `python -c "import hydra"`.

    python scripts/bench/startup.py [--runs 15]

Commands take turns, so that a change in the machine's speed meets all of them; medians of wall time, whole processes.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time

COMMANDS = {
    'python -c "import hydra"': ["-c", "import hydra"],
    "stoker --help": ["-m", "stoker", "--help"],
    "stoker config model=gpt_125m": ["-m", "stoker", "config", "model=gpt_125m"],
    "stoker train model.num_query_group=2 (refused)": ["-m", "stoker", "train", "model.num_query_group=2"],
    'python -c "import torch"': ["-c", "import torch"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(runs + 1):
        for name, arguments in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
            if number:  # the first round fills the file cache
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = next(iter(medians.values()))
    print(f"Python {platform.python_version()}, {platform.machine()}, {runs} runs each, median wall time\n")
    print("| command | ms | beside `import hydra` |\n|---|---|---|")
    for name, median in medians.items():
        print(f"| `{name}` | {median * 1e3:.0f} | {median / base:.2f} x |")


if __name__ == "__main__":
    main()
