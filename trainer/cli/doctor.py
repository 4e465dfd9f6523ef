"""`stoker doctor`: report packages, devices and problems of this machine. A failing check does not stop the others."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..utils import environment
from ..utils.errors import EXIT_FAILURE, EXIT_OK

Level = Literal["ok", "note", "warning", "error"]
_LABEL_WIDTH = 17


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        says: result, and for a warning or error the remedy.
        level: `error` if training cannot work here.
    """

    what: str
    says: str
    level: Level = "ok"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `stoker doctor`."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if training cannot work here, else 0."""
    findings = run_checks()
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            mark = "" if finding.level in ("ok", "note") else f"{finding.level}: "
            print(f"{finding.what:<{_LABEL_WIDTH}} {mark}{finding.says}")
    return EXIT_FAILURE if any(finding.level == "error" for finding in findings) else EXIT_OK


def run_checks() -> list[Finding]:
    """Run all checks and return their findings."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings.extend(check())
        except Exception as error:
            name = check.__name__.removeprefix("_").replace("_", " ")
            findings.append(Finding(name, f"check failed: {type(error).__name__}: {error}", "warning"))
    return findings


def _python() -> list[Finding]:
    says = f"{platform.python_version()} ({platform.platform()})"
    level: Level = "ok" if sys.version_info >= (3, 11) else "error"
    return [Finding("Python", says if level == "ok" else f"{says}; stoker needs 3.11 or later", level)]


def _packages() -> list[Finding]:
    """Check the required packages from their metadata; nothing is imported."""
    required = ("pytorch-lightning", "hydra-core", "pydantic", "safetensors", "tensorboard")
    versions = {name: _version(name) for name in required}
    missing = [name for name, version in versions.items() if version is None]
    findings = [Finding("packages", ", ".join(f"{name} {version}" for name, version in versions.items() if version))]
    if missing:
        findings.append(Finding("packages", f"missing: {', '.join(missing)}; pip install {' '.join(missing)}", "error"))
    return findings


def _torch() -> list[Finding]:
    started = time.perf_counter()
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        return [Finding("torch", f"cannot be imported: {type(error).__name__}: {error}; pip install torch", "error")]
    seconds = time.perf_counter() - started
    cuda = torch.version.cuda or getattr(torch.version, "hip", None)
    build = f"built for CUDA {cuda}" if cuda else "built for the CPU"
    findings = [Finding("torch", f"{torch.__version__}, {build}, imported in {seconds:.1f} s")]
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11):
        findings.append(Finding("torch", "stoker is tested with 2.11 and later", "warning"))
    return findings


def _devices() -> list[Finding]:
    torch = importlib.import_module("torch")
    findings: list[Finding] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            findings.append(_cuda_device(torch, index))
    elif torch.version.cuda:
        driver = _nvidia_driver()
        why = f"driver {driver} is too old for it, or the device is hidden" if driver else "there is no NVIDIA driver"
        findings.append(Finding("GPU", f"none: torch is built for CUDA {torch.version.cuda}, but {why}", "note"))
    else:
        driver = _nvidia_driver()
        hidden = "; there is an NVIDIA driver, so install a CUDA build of torch to use the GPU" if driver else ""
        findings.append(Finding("GPU", f"none{hidden}", "warning" if driver else "note"))
    mps = getattr(torch.backends, "mps", None)
    if mps is not None and mps.is_available():
        bf16 = _works(lambda: torch.ones(2, device="mps", dtype=torch.bfloat16).sum().item())
        findings.append(
            Finding("MPS", f"Apple GPU, bf16 {'works' if bf16 else 'does not work'}; attention by torch SDPA")
        )
    bf16 = _works(
        lambda: (torch.ones(4, 4, dtype=torch.bfloat16) @ torch.ones(4, 4, dtype=torch.bfloat16)).sum().item()
    )
    findings.append(Finding("CPU", f"{_cpu_name()}, trains in fp32{', bf16 works' if bf16 else ''}"))
    return findings


def _cuda_device(torch: Any, index: int) -> Finding:
    properties = torch.cuda.get_device_properties(index)
    major, minor = properties.major, properties.minor
    free, total = torch.cuda.mem_get_info(index)
    features = ["bf16" if major >= 8 else "no bf16 (fp32 training)", "SDPA flash" if major >= 8 else "SDPA efficient"]
    if major >= 9:
        features.append("SDPA cuDNN")
    if (major, minor) >= (8, 9):
        features.append("fp8")
    gib = 1 << 30
    says = (
        f"{properties.name}, sm_{major}{minor}, {properties.multi_processor_count} SMs, "
        f"{free / gib:.1f} of {total / gib:.1f} GiB free; {', '.join(features)}"
    )
    if free < total / 2:
        return Finding(f"GPU {index}", f"{says}; another process holds much of its memory", "warning")
    return Finding(f"GPU {index}", says)


def _driver() -> list[Finding]:
    driver = _nvidia_driver()
    return [Finding("driver", f"NVIDIA {driver}")] if driver else []


def _kernels() -> list[Finding]:
    findings = []
    triton = _version("triton")
    if triton:
        findings.append(Finding("triton", triton))
    elif sys.platform == "linux":
        findings.append(
            Finding("triton", "not installed; pip install triton (torch.compile on a GPU needs it)", "warning")
        )
    else:
        findings.append(Finding("triton", f"not available on {platform.system()}", "note"))
    if sys.platform == "linux" and not any(map(shutil.which, ("gcc", "cc", "g++"))):
        findings.append(
            Finding("compiler", "no C compiler; model.compile=true and triton need one (apt install g++)", "note")
        )
    but = " but for fp8_recipe=delayed and fp8_dot_product_attention=true"
    linear = "; with model.fp8=true model.transformer_engine=true linear layers too: `stoker explain fp8`"
    for name, module, extra, also in (
        ("TransformerEngine", "transformer_engine", "transformer-engine", linear),
        ("flash-attn", "flash_attn", "flash-attn", ""),
    ):
        version = _version(extra) or (importlib.util.find_spec(module) and "of unknown version")
        installed = f"{version} is installed (`stoker explain attention` shows where it is used{also})"
        says = installed if version else f"not installed, not needed{but if also else ''}"
        findings.append(Finding(name, says, "note"))
    return findings


def _threads() -> list[Finding]:
    torch = importlib.import_module("torch")
    cores = environment.available_cores()
    threads = torch.get_num_threads()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    says = f"torch uses {threads} of {cores} cores; load {load:.1f}"
    quota = _cpu_quota()
    if quota is not None and quota < cores:
        says += f"; this container may use {quota:g} cores"
        cores = max(1, int(quota))
    if threads > cores:
        return [
            Finding(
                "threads", f"{says}; more threads than cores slow training down: OMP_NUM_THREADS={cores}", "warning"
            )
        ]
    if load > cores:
        return [Finding("threads", f"{says}; the machine is busy, timings will vary", "warning")]
    return [Finding("threads", says)]


def _memory_and_disk() -> list[Finding]:
    gib = 1 << 30
    findings = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        findings.append(Finding("memory", f"{total / gib:.1f} GiB"))
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    findings.append(Finding("disk", f"{free / gib:.1f} GiB free in {here}", "warning" if free < gib else "ok"))
    try:
        with tempfile.TemporaryFile(dir=here):
            pass
    except OSError as error:
        findings.append(
            Finding("disk", f"{here} is not writable ({error.strerror}); set exp_manager.exp_dir", "warning")
        )
    return findings


def _flags() -> list[Finding]:
    from ...kernels.attention.flags import KNOWN_FLAGS
    from ..config.suggest import closest

    findings = []
    for name, value in sorted(environment.snapshot().items()):
        if not name.upper().startswith("NVTE"):
            continue
        if name in KNOWN_FLAGS:
            findings.append(Finding("flag", f"{name}={value}", "note"))
        else:
            suggestion = closest(name, KNOWN_FLAGS)
            findings.append(
                Finding(
                    "flag",
                    f"{name} is not a known flag{f'; did you mean {suggestion}?' if suggestion else ''}",
                    "warning",
                )
            )
    return findings


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    _python,
    _packages,
    _torch,
    _driver,
    _devices,
    _kernels,
    _threads,
    _memory_and_disk,
    _flags,
)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _works(action: Callable[[], Any]) -> bool:
    try:
        action()
    except Exception:
        return False
    return True


def _nvidia_driver() -> str | None:
    """Return the version of the NVIDIA driver, or None without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = found.stdout.split()
    return lines[0] if lines else None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cpu_quota() -> float | None:
    """Return the CPU limit of this process's cgroup in cores, or None without a limit."""
    try:
        text = Path("/sys/fs/cgroup/cpu.max").read_text()
    except OSError:
        return None
    limit, _, period = text.strip().partition(" ")
    return None if limit == "max" or not period else int(limit) / int(period)
