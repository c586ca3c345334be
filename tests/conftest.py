import gc
import os

import pytest

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported: no GPU needed


def _why_no_gpu(ampere=False):
    """'' on a Hopper GPU, else why the tests marked gpu do not run. ampere: the same of those that
    8.0 and newer run."""
    wanted = "a GPU of compute capability 8.0 or newer" if ampere else "a Hopper GPU"
    try:
        import torch
    except ImportError:
        return f"needs torch and {wanted}"
    if not torch.cuda.is_available():
        return f"needs {wanted}: torch sees none"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0) if ampere else capability != (9, 0):
        name = torch.cuda.get_device_name()
        return f"needs {wanted}: {name} has compute capability {capability[0]}.{capability[1]}"
    return ""


def _why_no_dsl():
    try:
        import cutlass.cute  # noqa: F401
        import tvm_ffi  # noqa: F401
    except ImportError as error:
        return f"needs nvidia-cutlass-dsl and apache-tvm-ffi: {error}"
    return ""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "long" not in item.keywords)  # last, they would end alone
    ampere = {item for item in items if "sm80" in item.keywords}
    hopper = [item for item in items if "gpu" in item.keywords and item not in ampere]
    compiled = [item for item in items if "compile" in item.keywords]
    for marked, why in (
        (hopper, _why_no_gpu),
        (ampere, lambda: _why_no_gpu(ampere=True)),
        (compiled, _why_no_dsl),
    ):
        reason = why() if marked else ""
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def _spare_the_collector():
    """A build makes millions of objects: it takes 6 % longer if what was imported is looked through
    again and again meanwhile."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_collection_finish(session):
    """On a GPU, the kernels of the chosen tests from all cores: one after another takes minutes."""
    _spare_the_collector()
    gpu = any("gpu" in item.keywords for item in session.items)
    there = not _why_no_gpu(ampere=True) and not _why_no_dsl()
    if gpu and there and not session.config.option.collectonly:
        import ahead

        try:
            session.config.ready = ahead.compile_ahead(session.items)
        except RuntimeError as error:
            pytest.exit(str(error), returncode=1)


def pytest_terminal_summary(terminalreporter, config):
    """What had to be compiled one after another all the same."""
    if getattr(config, "ready", None):
        import ahead

        for line in ahead.left_out(config.ready):
            terminalreporter.write_line(f"not among the jobs of tests/ahead.py: {line}")


@pytest.fixture
def stand_in(monkeypatch):
    """CPU tensors take the device path; a stand-in for the kernel records what reaches it."""
    import standin

    return standin.install(monkeypatch)


@pytest.fixture
def ampere(stand_in, monkeypatch):
    """CPU tensors take the device path of an A100."""
    from cute_attn import launch

    monkeypatch.setattr(launch, "_native_arch", lambda device: "sm80")
    return stand_in


@pytest.fixture
def device(request, monkeypatch):
    """Of helpers.ALL_DEVICES, with indirect=True: 'cpu' or 'cuda', whose calls take the GPU's own
    kernels or Ampere's."""
    name, _, arch = request.param.partition(":")
    if arch:
        import helpers

        helpers.as_on_ampere(monkeypatch)
    return name
