"""The rules of CONTRIBUTING.md that a machine can check. Imports nothing of ours."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    p for d in ("cute_attn", "kernels", "scripts", "tests") for p in (ROOT / d).rglob("*.py")
)
MAX_FILE, MAX_FUNCTION, MAX_ARGUMENTS = 600, 80, 12
MAX_CONTRIBUTING, MAX_INIT = 60, 40
# the public functions of api.py: their signatures are the field's
PUBLIC = {"fwd", "bwd", "explain", "warmup", "merge"}
PUBLIC_PREFIX = "flash_attn_"

# who -> what it must not import at all
FORBIDDEN = {
    "kernels/common": (
        "torch",
        "cute_attn.kernels.hopper",
        "cute_attn.kernels.ampere",
    ),
    "kernels/hopper": ("torch", "cute_attn.kernels.ampere"),
    "kernels/ampere": ("torch", "cute_attn.kernels.hopper"),
    "cute_attn/problem.py": ("torch", "cutlass", "cute_attn.kernels"),
    "cute_attn/config": ("torch", "cutlass", "cute_attn.kernels"),
    "cute_attn/tuning": ("torch", "cutlass", "cute_attn.kernels"),
    "cute_attn/reference": ("cutlass", "cute_attn.kernels"),
    "cute_attn/autograd.py": ("cutlass", "cute_attn.kernels"),
    "cute_attn/backward.py": ("cutlass", "cute_attn.kernels"),
    "cute_attn/quantize.py": ("cutlass", "cute_attn.kernels"),
    "cute_attn/fp8": ("cutlass", "cute_attn.kernels"),
    "cute_attn/api.py": ("cutlass", "cute_attn.kernels"),
    "scripts": ("cute_attn.kernels",),
}
# who -> all of cute_attn that it may import
ALLOWED = {
    "kernels": (
        "cute_attn.problem",
        "cute_attn.config",
        "cute_attn.config_v1",
        "cute_attn.score_mods",
        "cute_attn.kernels",
    ),
    "cute_attn/problem.py": (),
    "cute_attn/config.py": ("cute_attn.problem",),
    "cute_attn/config_v1.py": ("cute_attn.problem", "cute_attn.config"),
    "cute_attn/tuning": (
        "cute_attn.problem",
        "cute_attn.config",
        "cute_attn.config_v1",
        "cute_attn.tuning_sm80",
    ),
}
# who -> what it must not import when it is imported (inside a function is fine)
LAZY = {
    "cute_attn/__init__.py": ("torch", "cutlass"),
    "cute_attn/__main__.py": ("torch", "cutlass"),
    "cute_attn/compile.py": ("cutlass", "tvm_ffi", "cute_attn.kernels"),
    "cute_attn/tools": ("torch", "cutlass", "tvm_ffi", "cute_attn.kernels", "cute_attn.api"),
}


def name(p):
    return p.relative_to(ROOT).as_posix()


def imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{a.name}" for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError("a relative import")


def at_import_time(node):
    """Everything below node that runs when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from at_import_time(child)


def below(module, packages):
    return any(module == p or module.startswith(p + ".") for p in packages)


def rules(table, path):
    return [value for prefix, value in table.items() if name(path).startswith(prefix)]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_sizes(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE
    for f in ast.walk(ast.parse(text)):
        if isinstance(f, ast.FunctionDef):
            public = name(path) == "cute_attn/api.py" and (
                f.name in PUBLIC or f.name.startswith(PUBLIC_PREFIX)
            )
            assert f.end_lineno - f.lineno + 1 <= MAX_FUNCTION, f.name
            if not public and f.name != "__call__":  # a kernel's entry lists its tensors
                arguments = f.args.posonlyargs + f.args.args + f.args.kwonlyargs
                assert len(arguments) <= MAX_ARGUMENTS, f.name


@pytest.mark.parametrize("path", FILES, ids=name)
def test_import_direction(path):
    tree = ast.parse(path.read_text())
    for module in imports(ast.walk(tree)):
        for banned in rules(FORBIDDEN, path):
            assert not below(module, banned), module
        for allowed in rules(ALLOWED, path):
            assert not below(module, ["cute_attn"]) or below(module, allowed), module
    for module in imports(at_import_time(tree)):
        for banned in rules(LAZY, path):
            assert not below(module, banned), f"{module} must be imported where it is used"


def test_the_import_rule_can_fail():
    tree = ast.parse("import torch\ndef f():\n    import cutlass.cute")
    assert list(imports(at_import_time(tree))) == ["torch"]
    assert list(imports(ast.walk(tree))) == ["torch", "cutlass.cute"]
    assert below("torch.nn", ["torch"]) and not below("torchvision", ["torch"])


def test_every_kernel_folder_is_packaged():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = {
        f"cute_attn.kernels.{p.parent.name}" for p in (ROOT / "kernels").glob("*/__init__.py")
    }
    assert on_disk == set(setup["package-dir"]) and on_disk <= set(setup["packages"])
    for package, folder in setup["package-dir"].items():
        assert (ROOT / folder / "__init__.py").is_file(), package
    ours = {p.parent for p in (ROOT / "cute_attn").rglob("__init__.py")}
    listed = set(setup["packages"]) - on_disk
    assert {".".join(p.relative_to(ROOT).parts) for p in ours} == listed


def test_nothing_here_is_named_kernels_at_top_level():
    """From the repository's root `import kernels` must find Hugging Face's package, or nothing
    that has code: a folder without __init__.py loses against any installed package."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "kernels.py").exists()
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s and s.origin)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert not done.stdout.strip().startswith(str(ROOT)), done.stdout


def test_an_installed_kernels_package_wins(tmp_path):
    """As above, with one installed: it comes later on sys.path than the repository's root."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("WHOSE = 'theirs'")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.WHOSE)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "theirs", done.stderr


def shell_blocks(text):
    return "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S))


def test_readme_and_ci_run_the_same_test_command():
    readme = shell_blocks((ROOT / "README.md").read_text())
    tests = [line.split("#")[0].strip() for line in readme.splitlines() if "pytest" in line]
    assert tests, "README.md has no line that runs pytest"
    ci = (ROOT / ".ci" / "run").read_text()
    assert tests[0] in ci, f"{tests[0]!r} is not in .ci/run"


def test_readme_commands_exist():
    text = shell_blocks((ROOT / "README.md").read_text())
    text += shell_blocks((ROOT / "CONTRIBUTING.md").read_text())
    for script in re.findall(r"python (scripts/\S+\.py)", text):
        assert (ROOT / script).is_file(), script
    for command in re.findall(r"python -m cute_attn (\w+)", text):
        assert (ROOT / "cute_attn" / "tools" / f"{command}.py").is_file(), command
    for marker in re.findall(r"pytest -m (\w+)", text):
        assert f'"{marker}:' in (ROOT / "pyproject.toml").read_text(), marker


def test_readme_table_of_places_is_true():
    text = (ROOT / "README.md").read_text()
    table = text[text.index("## Where do I") :].split("\n## ")[0]
    for path in re.findall(r"`((?:cute_attn|kernels|scripts|tests|docs)/[\w/.]+)`", table):
        assert (ROOT / path).exists(), path


def test_short_files_stay_short():
    assert (ROOT / "CONTRIBUTING.md").read_text().count("\n") <= MAX_CONTRIBUTING
    assert (ROOT / "cute_attn" / "__init__.py").read_text().count("\n") < MAX_INIT


def test_public_functions_are_documented():
    tree = ast.parse((ROOT / "cute_attn" / "api.py").read_text())
    for f in tree.body:
        if isinstance(f, ast.FunctionDef) and not f.name.startswith("_"):
            overload = any(isinstance(d, ast.Name) and d.id == "overload" for d in f.decorator_list)
            assert overload or ast.get_docstring(f), f.name
