"""(problem.static(), config, arch) -> compiled kernel: from memory, from disk, or built now.

One compile per key however many threads and processes ask. On disk a kernel is one object file
that ends in its own SHA-256; its name is the hash of everything that shaped it. Needs no GPU.
"""

import contextlib
import hashlib
import importlib
import os
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from cute_attn.config import (
    AmpereBwdConfig,
    AmpereConfig,
    BwdConfig,
    Fp8Config,
    FwdConfig,
    QuantizeConfig,
    TransposeConfig,
)
from cute_attn.config_v1 import V1Config
from cute_attn.problem import Problem

Kernel = Callable[..., Any]
Config = FwdConfig | AmpereConfig | BwdConfig | AmpereBwdConfig
AnyConfig = Config | QuantizeConfig | TransposeConfig

# The architectures that kernels exist for, each with the chip that it is compiled for if no other
# is named, as in 'sm80:sm_86'
DSL_ARCH = {"sm90": "sm_90a", "sm80": "sm_80"}
BUILDERS = {"sm90": "cute_attn.kernels.hopper.fwd:compile_fwd"}
AMPERE_BUILDERS = {"sm80": "cute_attn.kernels.ampere.fwd:compile_fwd"}
V1_BUILDERS = {"sm80": "cute_attn.kernels.ampere.v1:compile_v1"}
AMPERE_BACKWARD_BUILDERS = {"sm80": "cute_attn.kernels.ampere.bwd:compile_bwd"}
FP8_BUILDERS = {"sm90": "cute_attn.kernels.hopper.fp8_fwd:compile_fp8_fwd"}
BACKWARD_BUILDERS = {"sm90": "cute_attn.kernels.hopper.bwd:compile_bwd"}
QUANTIZE_BUILDERS = {"sm90": "cute_attn.kernels.hopper.quantize:compile_quantize"}
TRANSPOSE_BUILDERS = {"sm90": "cute_attn.kernels.hopper.transpose:compile_transpose"}
DSL_WANTED = "nvidia-cutlass-dsl>=4.8,<4.9"
LOCK_SECONDS = 600.0  # far above a compile: 3 to 6 s, minutes when all cores are taken
_FUNCTION = "cute_attn_kernel"  # name of the entry in every object file
_TRAILER = b"cute_attn sha256"  # then the digest; linkers ignore what follows an ELF file's tables

_memory: dict[tuple[Problem, AnyConfig, str], Kernel] = {}
_lock = threading.Lock()  # the compiler is not thread-safe: two at once abort the process
_compiles = 0
_warned = False


def get(problem: Problem, config: AnyConfig, arch: str) -> Kernel:
    """The kernel that serves the problem's class; a first call compiles, which takes seconds.

    Raises ImportError without a suitable CuTe DSL and NotImplementedError for an arch without
    kernels. The result is called as the fwd.py of its folder says.
    """
    key = (problem.static(), config, arch)
    kernel = _memory.get(key)
    if kernel is None:
        with _lock:
            kernel = _memory.get(key)
            if kernel is None:
                kernel = _memory[key] = _from_disk_or_build(*key)
    return kernel


def in_memory(problem: Problem, config: AnyConfig, arch: str) -> Kernel | None:
    """As get, but None instead of any work."""
    return _memory.get((problem.static(), config, arch))


def state(problem: Problem, config: AnyConfig, arch: str) -> str:
    """'in memory', 'on disk' or 'not compiled'. Never compiles, never raises."""
    if in_memory(problem, config, arch) is not None:
        return "in memory"
    try:
        path = object_path(problem, config, arch)
    except ImportError as error:
        return f"not compiled ({error})"
    return "on disk" if path is not None and _read(path) is not None else "not compiled"


def object_path(problem: Problem, config: AnyConfig, arch: str) -> Path | None:
    """Where the kernel's object file is or would be; None if there is no cache directory.

    Raises ImportError without a suitable CuTe DSL: its version is part of the name.
    """
    directory = cache_dir()
    return None if directory is None else directory / _file_name(problem.static(), config, arch)


def count() -> int:
    """How many kernels this process has compiled, disk hits excluded."""
    return _compiles


def forget() -> None:
    """Drop the kernels in memory, as a new process would find it."""
    _memory.clear()


def cache_dir() -> Path | None:
    """$CUTE_ATTN_CACHE_DIR, else cute_attn in the user's cache directory; None if there is none."""
    named = os.environ.get("CUTE_ATTN_CACHE_DIR")
    if named:
        try:
            return Path(named).expanduser().absolute()
        except RuntimeError:  # ~ of nobody: a name like any other
            return Path(named).absolute()
    user = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(user):
        return Path(user) / "cute_attn"
    try:
        return Path.home() / ".cache" / "cute_attn"
    except RuntimeError:  # HOME unset and no such user
        return None


def cache_trouble() -> str:
    """Why compiled kernels would not be kept; '' if they are. Makes nothing."""
    path = cache_dir()
    if path is None:
        return "there is no home directory"
    place = path
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        entry = os.stat(place)
        trouble = _distrust(entry) if place == path else ""
        if not stat.S_ISDIR(entry.st_mode):
            trouble = "is not a directory"
        elif not trouble and not os.access(place, os.W_OK | os.X_OK):
            trouble = "is not writable"
    except OSError as error:
        trouble = f"cannot be used: {error.strerror}"
    return trouble and f"{place} {trouble}"


def cache_size() -> int:
    """Bytes of compiled kernels on disk."""
    directory = cache_dir()
    total = 0
    if directory is not None:
        with contextlib.suppress(OSError):
            total = sum(path.stat().st_size for path in directory.glob("*.o"))
    return total


def _from_disk_or_build(problem: Problem, config: AnyConfig, arch: str) -> Kernel:
    if not builder(config, arch):
        raise NotImplementedError(
            f"arch is {arch!r}: {type(config).__name__}'s kernels are not built for it"
        )
    _import_dsl()
    place = _open_cache()
    if place.path is None:
        return _load_bytes(_build(problem, config, arch))
    path = place.path / _file_name(problem, config, arch)
    kernel = _load(path)
    if kernel is not None:
        return kernel
    if place.trouble:
        _warn_uncached(place.trouble)
        return _load_bytes(_build(problem, config, arch))
    with _file_lock(path.with_suffix(".lock")) as trouble:
        kernel = _load(path)  # another process may have built it while this one waited
        if kernel is not None:
            return kernel
        code = _build(problem, config, arch)
        trouble = trouble or _store(path, code)
    if trouble:
        _warn_uncached(trouble)
    return _load_bytes(code)


# The compiler


def _import_dsl() -> None:
    """Import the DSL, or say in one ImportError what is wanted."""
    try:
        found = metadata.version("nvidia-cutlass-dsl")
        metadata.version("apache-tvm-ffi")
    except metadata.PackageNotFoundError as error:
        raise ImportError(
            f"{error.name} is not installed: kernels need {DSL_WANTED} and apache-tvm-ffi"
        ) from None
    if found.split(".")[:2] != ["4", "8"]:
        raise ImportError(f"nvidia-cutlass-dsl {found} is installed: kernels need {DSL_WANTED}")
    try:
        importlib.import_module("cutlass.cute")
        importlib.import_module("tvm_ffi")
    except Exception as error:  # whatever a broken install or a clashing `cutlass` raises
        raise ImportError(
            f"nvidia-cutlass-dsl {found} does not import ({type(error).__name__}: {error}); "
            f"kernels need {DSL_WANTED}, and no other package named cutlass"
        ) from error


def _build(problem: Problem, config: AnyConfig, arch: str) -> bytes:
    """Compile to an object file. The target is named by option, whatever GPU is or is not here."""
    global _compiles
    module, _, name = builder(config, arch).partition(":")
    build = getattr(importlib.import_module(module), name)
    compiled = build(problem, config, f"--gpu-arch {target(arch)}")
    _compiles += 1
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "kernel.o")
        compiled.export_to_c(path, function_name=_FUNCTION)
        return Path(path).read_bytes()


def target(arch: str) -> str:
    """The chip, as the compiler calls it; '' where there is none."""
    family, _, chip = arch.partition(":")
    return chip or DSL_ARCH.get(family, "")


def builder(config: AnyConfig, arch: str) -> str:
    """'module:function' that compiles it, '' where there is none."""
    table = BUILDERS
    for kind, builders in (
        (AmpereConfig, AMPERE_BUILDERS),
        (V1Config, V1_BUILDERS),
        (BwdConfig, BACKWARD_BUILDERS),
        (AmpereBwdConfig, AMPERE_BACKWARD_BUILDERS),
        (Fp8Config, FP8_BUILDERS),
        (QuantizeConfig, QUANTIZE_BUILDERS),
        (TransposeConfig, TRANSPOSE_BUILDERS),
    ):
        table = builders if isinstance(config, kind) else table
    return table.get(arch.partition(":")[0], "")


def _load_module(path: str) -> Kernel:
    import cutlass.cute.runtime

    module = cutlass.cute.runtime.load_module(path, enable_tvm_ffi=True)
    kernel: Kernel = module[_FUNCTION]
    return kernel


def _load_bytes(code: bytes) -> Kernel:
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "kernel.o")
        Path(path).write_bytes(code)
        return _load_module(path)


# The key


def _file_name(problem: Problem, config: AnyConfig, arch: str) -> str:
    """Reads the environment each time: a test, or a user, may change it between two compiles."""
    dsl_settings = sorted(item for item in os.environ.items() if item[0].startswith("CUTE_DSL_"))
    parts = (problem, config, arch, target(arch), builder(config, arch), dsl_settings)
    text = repr((*parts, _sources(), _toolchain(), _host_cpu()))
    return hashlib.sha256(text.encode()).hexdigest()[:40] + ".o"


def _source_files() -> Iterator[tuple[str, Path]]:
    """Every .py file of the package and of the kernel folders, wherever they are installed."""
    kernels = importlib.import_module("cute_attn.kernels")
    roots = {"cute_attn": Path(__file__).resolve().parent}
    for place in kernels.__path__:
        if not Path(place).resolve().is_relative_to(roots["cute_attn"]):
            roots["kernels"] = Path(place).resolve()
    for name, root in sorted(roots.items()):
        for path in sorted(root.rglob("*.py")):
            yield f"{name}/{path.relative_to(root).as_posix()}", path


def _once(function: Callable[[], str]) -> Callable[[], str]:
    """Cache for the life of the process: modules that are loaded do not change either."""
    held: list[str] = []

    def cached() -> str:
        if not held:
            held.append(function())
        return held[0]

    return cached


@_once
def _sources() -> str:
    digest = hashlib.sha256()
    for name, path in _source_files():
        code = path.read_bytes()
        digest.update(f"{name} {len(code)}\n".encode())
        digest.update(code)
    return digest.hexdigest()


@_once
def _toolchain() -> str:
    """Versions, and which CUDA flavour of the DSL was loaded: it decides at import, by driver."""
    _import_dsl()
    library = sys.modules.get("cutlass._mlir._mlir_libs._cutlass_ir")
    flavour = ".".join(os.path.basename(getattr(library, "__file__", None) or "").split(".")[:2])
    return (
        f"{metadata.version('nvidia-cutlass-dsl')} {flavour} {metadata.version('apache-tvm-ffi')}"
    )


@_once
def _host_cpu() -> str:
    """The object file holds host code for the CPU it was built on, AVX-512 included."""
    machine = os.uname().machine
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return f"{machine} {' '.join(sorted(line.partition(':')[2].split()))}"
    return machine


# The disk


@dataclass(frozen=True)
class _Place:
    path: Path | None  # where to look
    trouble: str = ""  # why nothing can be written there


def _open_cache() -> _Place:
    path = cache_dir()
    if path is None:
        trouble = "there is no home directory (CUTE_ATTN_CACHE_DIR names another place)"
        _warn_uncached(trouble)
        return _Place(None, trouble)
    try:
        _make_directory(path)
        entry = os.stat(path)
    except OSError as error:
        trouble = f"{path} cannot be made: {error.strerror}"
        _warn_uncached(trouble)
        return _Place(None, trouble)
    trouble = _distrust(entry) if stat.S_ISDIR(entry.st_mode) else "is not a directory"
    if trouble:  # what is in there may be anybody's code
        _warn_uncached(f"{path} {trouble}")
        return _Place(None, trouble)
    if not os.access(path, os.W_OK | os.X_OK):
        return _Place(path, f"{path} is read-only")
    return _Place(path)


def _make_directory(path: Path) -> None:
    """Not makedirs: that gives the missing parents whatever the umask allows."""
    if not path.is_dir():
        _make_directory(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o755)


def _distrust(entry: os.stat_result) -> str:
    """Loading an object file runs it: only this user or root may have written it."""
    if entry.st_uid not in (os.geteuid(), 0):
        return "belongs to another user"
    if entry.st_mode & 0o022:
        return "is writable by others (chmod go-w makes it usable)"
    return ""


def _read(path: Path) -> bytes | None:
    """The whole file if it is complete and nobody else's, else None."""
    try:
        with open(path, "rb") as file:
            if _distrust(os.fstat(file.fileno())):
                return None
            content = file.read()
    except OSError:
        return None
    code, trailer = content[: -len(_TRAILER) - 32], content[-len(_TRAILER) - 32 :]
    return content if trailer == _TRAILER + hashlib.sha256(code).digest() else None


def _load(path: Path) -> Kernel | None:
    if _read(path) is None:
        return None
    try:
        return _load_module(str(path))
    except Exception:  # an object that this loader refuses is rebuilt like a damaged one
        return None


def _store(path: Path, code: bytes) -> str:
    """Write under another name, then rename: readers see all of it or nothing. Returns the trouble.

    The caller holds the key's lock, so one fixed temporary name serves: a writer that was killed
    leaves at most one file behind, which the next one overwrites.
    """
    temporary = path.with_suffix(".tmp")
    try:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with open(handle, "wb") as file:
            file.write(code + _TRAILER + hashlib.sha256(code).digest())
        os.replace(temporary, path)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return ""


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[str]:
    """Hold path against other processes; yields '' or why that failed.

    A record lock ends with its process: none is ever stale, and a forked child has no part in it.
    """
    import fcntl

    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        yield f"{path} cannot be opened: {error.strerror}"
        return
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        trouble = ""
        while True:
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    trouble = f"{path} was locked for {LOCK_SECONDS:.0f} s"
                    break
                time.sleep(0.02)
            except OSError as error:  # file systems without locks
                trouble = f"{path} cannot be locked: {error.strerror}"
                break
        yield trouble
    finally:
        os.close(handle)


def _warn_uncached(trouble: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"cute_attn: compiled kernels are not kept on disk: {trouble}. "
            "Every process compiles its own; set CUTE_ATTN_CACHE_DIR to a directory of yours.",
            RuntimeWarning,
            stacklevel=2,
        )


def _after_fork() -> None:
    """A thread of the parent may have held the lock; that thread is not in the child."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
