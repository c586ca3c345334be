import os

import pytest

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported: no GPU needed


def _why_no_gpu():
    """'' on a Hopper GPU, else why the tests marked gpu do not run."""
    try:
        import torch
    except ImportError:
        return "needs torch and a Hopper GPU"
    if not torch.cuda.is_available():
        return "needs a Hopper GPU: torch sees none"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        name = torch.cuda.get_device_name()
        return f"needs a Hopper GPU: {name} has compute capability {capability[0]}.{capability[1]}"
    return ""


def _why_no_dsl():
    try:
        import cutlass.cute  # noqa: F401
        import tvm_ffi  # noqa: F401
    except ImportError as error:
        return f"needs nvidia-cutlass-dsl and apache-tvm-ffi: {error}"
    return ""


def pytest_collection_modifyitems(items):
    for mark, why in (("gpu", _why_no_gpu), ("compile", _why_no_dsl)):
        marked = [item for item in items if mark in item.keywords]
        reason = why() if marked else ""
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def stand_in(monkeypatch):
    """CPU tensors take the device path; a stand-in for the kernel records what reaches it."""
    import standin

    return standin.install(monkeypatch)
