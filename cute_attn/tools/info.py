"""python -m cute_attn info: answers on any machine, without a GPU, a driver, torch or the DSL."""

import argparse
import ctypes
import platform
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from cute_attn import __version__
from cute_attn.tools.records import ROOT, version

PACKAGES = (
    ("torch", ""),
    ("nvidia-cutlass-dsl", "CuTe DSL"),
    ("nvidia-cutlass-dsl-libs-cu12", "its CUDA 12 flavour"),
    ("nvidia-cutlass-dsl-libs-cu13", "its CUDA 13 flavour"),
    ("apache-tvm-ffi", "launch path"),
    ("cuda-python", "driver bindings"),
    ("numpy", ""),
    ("nvidia-cuda-nvdisasm", "SASS for scripts/dump.py and the compile tests"),
    ("matplotlib", "plots of scripts/report.py"),
)
PEERS = (("fa3-fwd", "fa3"), ("flash-attn-4", "fa4"))
OLDEST_DRIVER = 12  # CUDA major that the DSL's smaller flavour needs


def attempt(module: str) -> tuple[Any, str]:
    """(module, '') or (None, why it does not import): a broken install may raise anything."""
    try:
        return import_module(module), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def driver() -> tuple[int, str]:
    """(highest CUDA version as 1000 * major + 10 * minor or 0, text) from the driver itself."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return 0, f"none ({error})"
    number = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return 0, "libcuda.so.1 answers with an error"
    cuda = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split("\n")[0].split()
        return number.value, f"{next(w for w in words if w[:1].isdigit() and '.' in w)} ({cuda})"
    except (OSError, StopIteration):
        return number.value, cuda


def device_lines(torch: Any, why: str, cuda_version: int) -> Iterator[str]:
    if torch is None:
        yield f"cpu     nothing runs: torch does not import ({why})"
        return
    yield "cpu     runs the block-wise path in torch (fp32 statistics, O(N) memory)"
    if not torch.cuda.is_available():
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        reason = "torch finds none" if built else "this torch is a CPU build"
        yield f"no GPU  {reason}; kernels can be compiled here, not run"
        return
    for n in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(n)
        name = f"cuda:{n}  {p.name}, compute capability {p.major}.{p.minor}"
        size = f"{p.multi_processor_count} SMs, {p.total_memory / 2**30:.0f} GiB"
        yield f"{name}, {size}: {verdict(p.major, p.minor, cuda_version)}"


def verdict(major: int, minor: int, cuda_version: int) -> str:
    if major < 8:
        return "no kernels (they need compute capability 8.0 or newer); use CPU tensors"
    kernels = "hopper (sm90)" if (major, minor) == (9, 0) else "ampere (sm80)"
    if cuda_version and cuda_version < 1000 * OLDEST_DRIVER:
        return f"kernels/{kernels} need a driver for CUDA {OLDEST_DRIVER}"
    if (why := attempt("cutlass.cute")[1]) or (why := attempt("tvm_ffi")[1]):
        return f"kernels/{kernels} cannot be compiled: {why}"
    return f"runs kernels/{kernels}{', if asked by arch' if major > 9 else ''}"


def compiler_line() -> str:
    for module in ("cutlass.cute", "tvm_ffi"):
        why = attempt(module)[1]
        if why:
            return f"cannot compile kernels: {why}"
    return "compiles for sm90 and sm80 (python -m cute_attn compile)"


def cache_line() -> str:
    compile, why = attempt("cute_attn.compile")
    if compile is None:
        return f"unknown: {why}"
    directory = compile.cache_dir()
    if directory is None:
        return "none: no home directory; set CUTE_ATTN_CACHE_DIR"
    try:
        count = len(list(directory.glob("*.o")))
    except OSError:
        count = 0
    size = f"{count} kernels, {compile.cache_size() / 2**20:.1f} MiB"
    trouble = compile.cache_trouble()
    note = f", not kept, every process compiles its own: {trouble}" if trouble else ""
    return f"{directory}: {size}{note}"


def main(argv: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="python -m cute_attn info", description=__doc__).parse_args(argv)
    torch, torch_error = attempt("torch")
    cuda_version, driver_text = driver()
    print(f"cute_attn {__version__} in {ROOT / 'cute_attn'}")
    print(f"python {platform.python_version()} on {platform.platform()}")
    print("\nversions")
    for package, what in (*PACKAGES, *((p, f"peer {name}") for p, name in PEERS)):
        print(f"  {package:29} {version(package) or 'not installed':18} {what}".rstrip())
    if torch is not None:
        cuda = torch.version.cuda or "no"
        cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else "no"
        print(f"  {'torch is built for CUDA':29} {cuda:18} cuDNN {cudnn}")
    print(f"  {'driver':29} {driver_text}")
    print("\nwhat runs here")
    for line in device_lines(torch, torch_error, cuda_version):
        print(f"  {line}")
    print(f"  {compiler_line()}")
    print(f"\ncache of compiled kernels\n  {cache_line()}")
    return 0
