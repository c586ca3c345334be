"""Builds backward kernels for sm_90a and looks at them; needs the DSL, no GPU."""

import tempfile

import pytest

from cute_attn.config import SMEM_LIMIT, BwdConfig
from cute_attn.problem import Problem
from cute_attn.tools import inspect

pytestmark = pytest.mark.compile
DIMS = [(64, 64), (64, 128), (128, 128), (136, 40), (192, 128), (40, 192), (256, 64), (256, 256)]


def build(problem, config):
    from cute_attn.kernels.hopper.bwd import compile_bwd

    with tempfile.TemporaryDirectory() as folder:
        keep = f"--gpu-arch sm_90a --keep-cubin --keep-ptx --dump-dir {folder}"
        compiled = compile_bwd(problem.static(), config, options=keep)
        return bytes(compiled.artifacts.CUBIN), str(compiled.ir_module)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_backward_kernels(dims, causal):
    """Nothing spills, shared memory is what the config says, and products are asynchronous: one
    whose accumulators are touched too early makes the assembler fence and wait for every one."""
    problem, config = Problem("bf16", *dims, causal), BwdConfig()
    cubin, ir = build(problem, config)
    code = list(inspect.instructions(inspect.disassemble(cubin)))
    used = inspect.count(code)
    assert all(numbers["frame"] == 0 for numbers in inspect.elf_numbers(cubin).values())
    assert not used.get("STL") and not used.get("LDL")
    assert max(inspect.dynamic_smem(ir)) == config.smem_bytes(problem) <= SMEM_LIMIT
    assert 0 < used["WARPGROUP"] < used["HGMMA"]
