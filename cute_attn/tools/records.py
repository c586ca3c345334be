"""Benchmark records: one JSON line per (case, data, implementation)."""

import hashlib
import json
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Record = dict[str, Any]
FP8_ONLY = ("quantize", "hadamard", "v_layout", "transpose")  # how such kernels' files begin
PACKAGES = {
    "torch": "torch",
    "cutlass_dsl": "nvidia-cutlass-dsl",
    "cutlass_dsl_cu13": "nvidia-cutlass-dsl-libs-cu13",
    "tvm_ffi": "apache-tvm-ffi",
    "fa3": "fa3-fwd",
    "fa4": "flash-attn-4",
    "cudnn_frontend": "nvidia-cudnn-frontend",
}


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git() -> dict[str, Any]:
    """{"sha", "dirty"}: what CUTE_ATTN_GIT says (SHA or SHA+dirty), for a machine that was sent the
    tree; else of the checkout."""
    sha, _, dirty = os.environ.get("CUTE_ATTN_GIT", "").partition("+")
    if sha:
        return {"sha": sha, "dirty": bool(dirty)}
    try:
        text = [
            subprocess.run(
                ["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return {"sha": None, "dirty": None}
    return {"sha": text[0], "dirty": bool(text[1])}


def source_digest(which: str = "fwd") -> str:
    """Of the Python files that decide what runs on the device in a pass, beside the config that a
    record holds: says which code was timed, whatever else has changed around it."""
    package = ROOT / "cute_attn"
    kernels = package / "kernels" if (package / "kernels" / "hopper").is_dir() else ROOT / "kernels"
    files = {package / "tuning.py"} | set(kernels.rglob("*.py"))
    if which.startswith("fwd_fp8"):
        files.add(package / "tuning_fp8.py")
    else:
        files = {p for p in files if "fp8" not in p.name and not p.name.startswith(FP8_ONLY)}
    if which in ("bwd", "fwd_bwd"):
        files.add(package / "tuning_bwd.py")
    else:
        files = {p for p in files if not p.name.startswith("bwd")}
    digest = hashlib.sha256()
    for name, path in sorted((f"{p.parent.name}/{p.name}", p) for p in files):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def pass_of(record: Record) -> str:
    """What a record timed, by the names of passes.py, '_sm80' behind it where ours were Ampere's
    kernels; records older than the backward do not say that it was the forward."""
    return str(record.get("pass", "fwd")) + "_sm80" * (record.get("arch") == "sm80")


def command_line(words: Iterable[str]) -> str:
    """A command as records hold it: of an absolute path, which says something of one machine only,
    the last part."""
    shown = []
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        shown.append(option + equals + (Path(value).name if Path(value).is_absolute() else value))
    return " ".join(shown)


def error_line(error: Exception) -> str:
    """The first line of what went wrong, files without their folders."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return re.sub(r"(?<![\w/:.])(?:/[\w.+@-]+)+/", "", text)


def environment(device: str, command: Iterable[str], which: str = "fwd") -> Record:
    """What is the same for all records of a run of python -m cute_attn COMMAND."""
    import torch

    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    versions = {name: version(package) for name, package in PACKAGES.items()}
    versions |= {"python": platform.python_version(), "cuda": torch.version.cuda}
    versions["torch"] = torch.__version__
    if device == "cuda":
        versions["cudnn"] = str(torch.backends.cudnn.version())
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "run": f"{int(time.time())}-{os.getpid()}",
        "command": command_line(["python -m cute_attn", *command]),
        "git": git(),
        "source": source_digest(which),
        "gpu": gpu,
        "driver": driver_version() if device == "cuda" else None,
        "device": device,
        "versions": {name: v for name, v in versions.items() if v},
    }


def driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.split()
    return lines[0] if lines else None


def rate_against_peers(group: list[Record], time_key: str = "p50_ms") -> None:
    """Set ratio = best peer's median time / own median time, on records of one cell. Peers are
    all that are not ours; ratio is missing where no peer ran."""
    peers = {r["impl"]: r[time_key] for r in group if not r["ours"] and r.get(time_key)}
    if not peers:
        return
    best = min(peers, key=lambda name: peers[name])
    for record in group:
        if record.get(time_key):
            record["best_peer"] = best
            record["ratio"] = peers[best] / record[time_key]


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def error_table(found: Iterable[Record]) -> list[str]:
    """Lines of a table of scripts/fp8_accuracy.py's records, a row each."""
    found = list(found)
    schemes = list(dict.fromkeys(scheme for r in found for scheme in r["rmse"]))
    lines = ["| head_dim | seqlen | heads | rms of O | " + " | ".join(schemes) + " |"]
    lines.append("|---" * (4 + len(schemes)) + "|")
    for r in found:
        p = r["problem"]
        cells = (f"{r['rmse'][s]:.2e}" if s in r["rmse"] else "not built" for s in schemes)
        sizes = f"{p['head_dim']} | {p['seqlen_k']} | {p['heads_q']} | {r['rms']:.3f}"
        lines.append(f"| {sizes} | {' | '.join(cells)} |")
    return lines


def append(path: str | Path, records: Iterable[Record]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, sort_keys=False) + "\n" for record in records)


def read(paths: Iterable[str | Path]) -> list[Record]:
    """Raises ValueError that names file and line where one is not JSON."""
    found: list[Record] = []
    for path in paths:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                try:
                    found.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}:{number}: {error}") from None
    return found
