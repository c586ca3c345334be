"""Rule 12 of the contract: one compile a key, whatever happens to the cache directory."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cute_attn import compile as jit  # noqa: E402
from cute_attn.config import FwdConfig  # noqa: E402
from cute_attn.problem import Problem  # noqa: E402

pytestmark = pytest.mark.compile

ROOT = Path(__file__).resolve().parents[1]
PROBLEM, CONFIG = Problem("bf16", 64, 64), FwdConfig()

# What the other processes run: one kernel, its answer, and all that it said.
CHILD = """
import json, os, sys, warnings
for line in sys.argv[1:]:
    exec(line)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch
    from cute_attn import FwdConfig, Problem, compile as jit
    kernel = jit.get(Problem("bf16", 64, 64), FwdConfig(), "sm90")
    said = [str(w.message) for w in said if "cute_attn" in str(w.message)]
x, lse = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 1, 8)
kernel(x, x, x, x, lse, torch.zeros(1, dtype=torch.int32), 132, 0.5)
right = x[0, 0, 0, 0].item() == 0.5 and lse[0, 0, 0].item() == 64128
print(json.dumps({"compiles": jit.count(), "right": right, "said": said}))
"""


def answer(kernel):
    x, lse = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 1, 8)
    kernel(x, x, x, x, lse, torch.zeros(1, dtype=torch.int32), 132, 0.5)
    assert x[0, 0, 0, 0].item() == 0.5
    return lse[0, 0, 0].item()


def expected(problem, config=CONFIG):
    name = problem.head_dim * 1000 + config.tile_n
    return -name if problem.causal else name


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache directory and a builder that takes a tenth of a second."""
    monkeypatch.setitem(jit.BUILDERS, "sm90", "host_kernel:compile_fwd")
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_warned", False)
    jit.forget()
    yield tmp_path / "cache"
    jit.forget()


@pytest.fixture(scope="module")
def tree():
    """A copy of the package whose kernel is tests/host_kernel.py."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name, "tree")
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "cute_attn", copy / "cute_attn", ignore=ignore)
        (copy / "kernels" / "hopper").mkdir(parents=True)
        shutil.copy(ROOT / "tests" / "host_kernel.py", copy / "kernels" / "hopper" / "fwd.py")
        yield copy


def start(tree, environment, *lines):
    keep = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
    keep.pop("CUTE_ATTN_CACHE_DIR", None)
    return subprocess.Popen(
        [sys.executable, "-B", "-c", CHILD, *lines],
        env={**keep, "PYTHONPATH": str(tree), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def only_file(directory, pattern="*.o"):
    (path,) = directory.glob(pattern)
    return path


def changed_by(act):
    """How many compiles act causes."""
    before = jit.count()
    act()
    return jit.count() - before


def fetch(problem=PROBLEM, config=CONFIG):
    assert answer(jit.get(problem, config, "sm90")) == expected(problem, config)


def refetch():
    jit.forget()
    fetch()


# One compile a key


def test_memory_then_disk(cache):
    assert jit.state(PROBLEM, CONFIG, "sm90") == "not compiled"
    assert changed_by(fetch) == 1
    assert jit.state(PROBLEM, CONFIG, "sm90") == "in memory"
    assert changed_by(fetch) == 0
    jit.forget()
    assert jit.state(PROBLEM, CONFIG, "sm90") == "on disk"
    assert changed_by(fetch) == 0
    assert jit.cache_dir() == cache
    assert jit.cache_size() == only_file(cache).stat().st_size > 0


def test_sizes_are_no_part_of_the_key(cache):
    sized = Problem("bf16", 64, 64, batch=3, seqlen_q=100, seqlen_k=7, heads_q=4, heads_kv=2)
    assert changed_by(lambda: [fetch(), fetch(sized)]) == 1


@pytest.mark.parametrize(
    "problem, config",
    [
        (Problem("fp16", 64, 64), CONFIG),
        (Problem("bf16", 80, 64), CONFIG),
        (Problem("bf16", 64, 96), CONFIG),
        (Problem("bf16", 64, 64, causal=True), CONFIG),
        (Problem("bf16", 64, 64, negative_scale=True), CONFIG),
        (PROBLEM, FwdConfig(tile_n=64)),
        (PROBLEM, FwdConfig(kv_stages=3)),
        (PROBLEM, FwdConfig(exact_max=True)),
    ],
)
def test_every_field_is_part_of_the_key(cache, problem, config):
    paths = {jit.object_path(p, c, "sm90") for p, c in ((PROBLEM, CONFIG), (problem, config))}
    assert len(paths) == 2 and all(path.parent == cache for path in paths)


def test_eight_threads_one_compile_a_key(cache):
    problems = [Problem("bf16", d, d, causal) for d in (64, 128) for causal in (False, True)]
    barrier = threading.Barrier(8)

    def work(i):
        barrier.wait()
        return [answer(jit.get(problems[(i + j) % 4], CONFIG, "sm90")) for j in range(4)]

    def all_threads():
        with ThreadPoolExecutor(8) as pool:
            for i, answers in enumerate(pool.map(work, range(8))):
                assert answers == [expected(problems[(i + j) % 4]) for j in range(4)]

    assert changed_by(all_threads) == 4


def test_eight_processes_one_compile(tree, tmp_path):
    environment = {"CUTE_ATTN_CACHE_DIR": str(tmp_path / "cache")}
    results = [finish(p) for p in [start(tree, environment) for _ in range(8)]]
    assert sum(r["compiles"] for r in results) == 1
    assert all(r["right"] and not r["said"] for r in results)


def test_waits_longer_than_a_compile(cache):
    """Another process holds the key's lock for a second, ten compiles: wait, then load."""
    fetch()
    lock, kernel = only_file(cache, "*.lock"), only_file(cache)
    hidden = kernel.rename(kernel.with_suffix(".hidden"))
    code = (
        "import fcntl, os, sys, time\n"
        "handle = open(sys.argv[1], 'r+'); fcntl.lockf(handle, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(1); os.rename(sys.argv[2], sys.argv[3])"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, lock, hidden, kernel], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    assert changed_by(refetch) == 0
    assert holder.wait() == 0


def test_a_lock_never_released_ends_in_an_uncached_run(cache, monkeypatch):
    fetch()
    only_file(cache).unlink()
    code = (
        "import fcntl, sys, time\n"
        "handle = open(sys.argv[1], 'r+'); fcntl.lockf(handle, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, only_file(cache, "*.lock")]
    monkeypatch.setattr(jit, "LOCK_SECONDS", 0.1)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.warns(RuntimeWarning, match="was locked for"):
            assert changed_by(refetch) == 1
        holder.send_signal(signal.SIGKILL)
    assert changed_by(refetch) == 1  # the lock died with its holder, and now the file is written
    assert changed_by(refetch) == 0


# Damage


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "garbage"])
def test_damaged_file_is_rebuilt(cache, damage):
    fetch()
    path = only_file(cache)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    content = {"truncated": whole[:-100], "empty": b"", "flipped": bytes(flipped)}
    path.write_bytes(content.get(damage, b"not an object file" * 99))
    assert changed_by(refetch) == 1
    assert changed_by(refetch) == 0


def test_half_written_file_of_a_killed_process_is_ignored(cache):
    fetch()
    path = only_file(cache)
    path.with_suffix(".tmp").write_bytes(path.read_bytes()[:1000])
    path.unlink()
    assert changed_by(refetch) == 1
    assert changed_by(refetch) == 0
    assert not list(cache.glob("*.tmp"))


def test_an_object_the_loader_refuses_is_rebuilt(cache, monkeypatch):
    fetch()
    load, calls = jit._load_module, []

    def refuse_first(path):
        calls.append(path)
        if len(calls) <= 2:  # once before the lock and once under it
            raise RuntimeError("unknown relocation")
        return load(path)

    monkeypatch.setattr(jit, "_load_module", refuse_first)
    assert changed_by(refetch) == 1


# What must miss


def test_changed_source_byte_misses(tree, tmp_path):
    environment = {"CUTE_ATTN_CACHE_DIR": str(tmp_path / "cache")}
    copy = tmp_path / "tree"
    shutil.copytree(tree, copy)
    compiles = [finish(start(copy, environment))["compiles"]]
    for path in (copy / "kernels" / "hopper" / "fwd.py", copy / "cute_attn" / "tuning.py"):
        path.write_text(path.read_text() + "\n")
        compiles.append(finish(start(copy, environment))["compiles"])
    compiles.append(finish(start(copy, environment))["compiles"])
    assert compiles == [1, 1, 1, 0]


@pytest.mark.parametrize("name", ["_sources", "_toolchain", "_host_cpu"])
def test_every_part_of_the_environment_misses(cache, monkeypatch, name):
    fetch()
    monkeypatch.setattr(jit, name, lambda: "another")
    assert changed_by(refetch) == 1


def test_dsl_settings_miss(cache, monkeypatch):
    """They change the code: line info, assertions, compiler options, the arch."""
    fetch()
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert changed_by(refetch) == 1


def test_the_key_names_version_flavour_and_cpu():
    import cutlass.cute  # noqa: F401

    version, flavour, ffi = jit._toolchain().split()
    assert version.startswith("4.8") and flavour.startswith("_cutlass_ir.cu") and ffi[0].isdigit()
    assert len(jit._host_cpu()) > 20
    names = [name for name, _ in jit._source_files()]
    assert {"cute_attn/compile.py", "kernels/hopper/fwd.py"} <= set(names)
    assert len(set(names)) == len(names)


# Directories that cannot be used


# root writes anywhere: give up that power (CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH) in the child.
NO_PRIVILEGE = """
import ctypes
head, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc = ctypes.CDLL(None)
assert libc.capget(head, sets) == 0
sets[0], sets[1] = sets[0] & ~6, sets[1] & ~6
assert libc.capset(head, sets) == 0
"""


def test_read_only_directory(tree, tmp_path):
    """A full one is read; an empty one gives one warning and an uncached run."""
    environment = {"CUTE_ATTN_CACHE_DIR": str(tmp_path)}
    tmp_path.chmod(0o555)
    result = finish(start(tree, environment, NO_PRIVILEGE))
    assert result["compiles"] == 1 and result["right"]
    assert len(result["said"]) == 1 and "read-only" in result["said"][0]
    tmp_path.chmod(0o755)
    assert not list(tmp_path.iterdir())
    assert finish(start(tree, environment))["compiles"] == 1
    tmp_path.chmod(0o555)
    result = finish(start(tree, environment, NO_PRIVILEGE))
    assert result == {"compiles": 0, "right": True, "said": []}
    tmp_path.chmod(0o755)


def test_home_cannot_be_written(tree, tmp_path):
    tmp_path.chmod(0o555)
    result = finish(start(tree, {"HOME": str(tmp_path / "away")}, NO_PRIVILEGE))
    assert result["compiles"] == 1 and result["right"]
    assert len(result["said"]) == 1 and "away" in result["said"][0]


def test_unset_home(tree):
    """The user data base may name another home; without one: one warning, an uncached run."""
    result = finish(start(tree, {}, "import pwd; pwd.getpwuid = {}.__getitem__"))
    assert result["compiles"] == 1 and result["right"]
    assert len(result["said"]) == 1 and "no home directory" in result["said"][0]


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(tmp_path))
    assert jit.cache_dir() == tmp_path
    monkeypatch.delenv("CUTE_ATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit.cache_dir() == tmp_path / "cute_attn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert jit.cache_dir() == tmp_path / ".cache" / "cute_attn"
    monkeypatch.setattr(
        Path, "home", classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError()))
    )
    assert jit.cache_dir() is None
    assert jit.cache_size() == 0


def test_disk_full_runs_uncached(cache, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.warns(RuntimeWarning, match="No space left") as record:
        assert changed_by(refetch) == 1
        assert changed_by(refetch) == 1
    assert len(record) == 1


# Other users


def test_files_are_not_writable_by_others_whatever_the_umask(cache, monkeypatch):
    monkeypatch.setenv("CUTE_ATTN_CACHE_DIR", str(cache / "a" / "b"))
    before = os.umask(0)
    try:
        fetch()
    finally:
        os.umask(before)
    paths = [cache, *cache.rglob("*")]
    assert len(paths) >= 4
    for path in paths:
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH), path


def test_directory_writable_by_others_is_not_trusted(cache):
    fetch()
    cache.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="writable by others"):
        assert changed_by(refetch) == 1


def test_file_writable_by_others_is_not_loaded(cache):
    fetch()
    only_file(cache).chmod(0o666)
    assert changed_by(refetch) == 1
    assert not only_file(cache).stat().st_mode & 0o022
    assert changed_by(refetch) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["directory", "file"])
def test_code_of_another_user_is_not_loaded(cache, what):
    fetch()
    os.chown(cache if what == "directory" else only_file(cache), 12345, 12345)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert changed_by(refetch) == 1


# Errors and forks


def test_wrong_dsl_is_one_clear_import_error(cache, monkeypatch):
    monkeypatch.setattr(jit.metadata, "version", lambda name: "4.7.0")
    with pytest.raises(ImportError, match=r"4\.7\.0 is installed.*>=4\.8,<4\.9"):
        jit.get(PROBLEM, CONFIG, "sm90")


def test_missing_dsl_is_one_clear_import_error(cache, monkeypatch):
    def missing(name):
        raise jit.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(jit.metadata, "version", missing)
    with pytest.raises(ImportError, match="nvidia-cutlass-dsl is not installed"):
        jit.get(PROBLEM, CONFIG, "sm90")


def test_unknown_arch(cache):
    with pytest.raises(NotImplementedError, match="sm80"):
        jit.get(PROBLEM, CONFIG, "sm80")


def test_a_failed_build_leaves_no_trace(cache, monkeypatch):
    monkeypatch.setitem(jit.BUILDERS, "sm90", "host_kernel:no_such_function")
    with pytest.raises(AttributeError):
        jit.get(PROBLEM, CONFIG, "sm90")
    monkeypatch.setitem(jit.BUILDERS, "sm90", "host_kernel:compile_fwd")
    assert changed_by(fetch) == 1


def test_fork_while_another_thread_compiles(cache):
    """The child must not wait for a thread that it does not have."""
    fetch()
    with jit._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks with threads
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            jit.forget()
            os._exit(0 if jit.get(PROBLEM, CONFIG, "sm90") else 1)
    assert os.waitpid(child, 0)[1] == 0
