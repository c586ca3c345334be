"""The three ways to get the package onto a machine: wheel, editable install, bare checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cute_attn

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ["common/mask.py", "hopper/fwd.py", "hopper/mainloop.py", "ampere/__init__.py"]
# What an installation must be able to do: find the kernels' sources, below one import name only.
PROBE = """
import importlib.util as u, sys
import cute_attn, cute_attn.kernels
spec = u.find_spec("cute_attn.kernels.hopper.fwd")
print(spec.origin)
assert u.find_spec("cute_attn.kernels.common.mask") and u.find_spec("cute_attn.tools.bench")
top = u.find_spec("kernels")
assert top is None or top.origin is None, top
from cute_attn.__main__ import main
sys.exit(main(["info"]))
"""


def run(*command, **options):
    env = {**os.environ, "PYTHONPATH": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env |= options.pop("env", {})
    done = subprocess.run(command, capture_output=True, text=True, env=env, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy without build outputs: installs write into the tree."""
    target = tmp_path_factory.mktemp("tree")
    for name in ("cute_attn", "kernels", "pyproject.toml", "README.md", "LICENSE"):
        run("cp", "-r", str(ROOT / name), str(target))
    return target


@pytest.fixture
def venv(tmp_path):
    """Has what this interpreter has (torch, setuptools), and is writable."""
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    others = [p for p in sys.path if p.endswith("-packages")]
    (site / "others.pth").write_text("\n".join(others) + "\n")
    return tmp_path / "venv" / "bin" / "python"


def install(venv, *arguments):
    command = [str(venv), "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    return run(*command, "--no-index", "--ignore-installed", *map(str, arguments))


def test_bare_checkout(tmp_path):
    shown = run(sys.executable, "-c", PROBE, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert shown.startswith(str(ROOT / "kernels" / "hopper" / "fwd.py"))


def test_bare_checkout_from_its_root():
    """`import kernels` there must not find ours."""
    assert str(ROOT) in run(sys.executable, "-c", PROBE, cwd=ROOT)


def test_wheel_carries_the_kernels(tree, venv, tmp_path):
    run(str(venv), "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index",
        "-w", str(tmp_path), str(tree))  # fmt: skip
    (wheel,) = tmp_path.glob("cute_attn-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert all(f"cute_attn/kernels/{k}" in names for k in KERNELS)
    assert "cute_attn/py.typed" in names and "cute_attn/tools/bench.py" in names
    assert {n.split("/")[0] for n in names if not n.split("/")[0].endswith(".dist-info")} == {
        "cute_attn"
    }
    sources = {p.relative_to(ROOT / "kernels") for p in (ROOT / "kernels").rglob("*.py")}
    carried = {n.removeprefix("cute_attn/kernels/") for n in names}
    assert {p.as_posix() for p in sources} <= carried
    assert wheel.name.split("-")[1] == cute_attn.__version__
    install(venv, wheel)
    shown = run(str(venv), "-c", PROBE, cwd=tmp_path)
    assert str(venv.parents[1]) in shown.splitlines()[0]


def test_pip_install(tree, venv, tmp_path):
    install(venv, tree)
    shown = run(str(venv), "-c", PROBE, cwd=tmp_path)
    assert str(venv.parents[1]) in shown.splitlines()[0]


def test_pip_install_editable(tree, venv, tmp_path):
    install(venv, "-e", tree)
    shown = run(str(venv), "-c", PROBE, cwd=tmp_path)
    assert shown.startswith(str(tree / "kernels" / "hopper" / "fwd.py"))
    (tree / "kernels" / "hopper" / "fresh.py").write_text("VALUE = 1\n")
    code = "import cute_attn.kernels.hopper.fresh as f; print(f.VALUE)"
    assert run(str(venv), "-c", code, cwd=tmp_path).strip() == "1"


@pytest.mark.slow
def test_pip_install_with_build_isolation(tree, venv, tmp_path):
    """As a user types it; fetches setuptools, so it needs an index."""
    run(str(venv), "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", str(tree))
    run(str(venv), "-c", PROBE, cwd=tmp_path)
