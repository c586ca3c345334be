"""The Hadamard transform as kernels/hopper/quantize_products.py takes it apart, on the CPU: what
lanes read, multiply and write, by the layouts of mma.sync's fragments. Needs the DSL, no GPU."""

import pytest
import torch

from cute_attn.quantize import walsh_hadamard

pytestmark = pytest.mark.compile
DIMS = (32, 64, 128)


@pytest.fixture(scope="module")
def products():
    from cute_attn.kernels.hopper import quantize_products

    return quantize_products


def test_head_dims(products):
    assert products.DIMS == DIMS


@pytest.mark.parametrize("dim", DIMS)
def test_lanes_share_rows(products, dim):
    """Each k and each column is one lane's, and what a thread reads and writes at a time are
    neighbours."""
    groups, quad = dim // 16, [(lane, i) for lane in range(4) for i in range(4)]
    assert sorted(products.k_of(dim, *one) for one in quad) == list(range(16))
    assert sorted(products.n_of(dim, *one) for one in quad) == list(range(16))
    for lane in range(4):
        channels = [
            products.k_of(dim, lane, i) * groups + g for i in range(4) for g in range(groups)
        ]
        for j in range(dim // 32):
            first = 32 * j + 8 * lane
            assert channels[8 * j : 8 * j + 8] == list(range(first, first + 8))
        columns = [
            products.n_of(dim, lane, i) * groups + g for i in range(4) for g in range(groups)
        ]
        run = products.run(dim)
        for begin in range(0, dim // 4, run):
            first = begin * 4 + lane * run
            assert columns[begin : begin + run] == list(range(first, first + run))


@pytest.mark.parametrize("dim", DIMS)
def test_products_and_sums_are_the_transform(products, dim):
    groups = dim // 16
    x = torch.randint(-8, 9, (16, dim)).float()
    factors = torch.randint(-3, 4, (dim,)).float().exp2() * (torch.randint(0, 2, (dim,)) * 2 - 1)
    out = torch.zeros(16, dim)
    # slots of a fragment: a lane's are 2 lane, 2 lane + 1, and those + 8; columns of tiles likewise
    k = {
        2 * lane + i % 2 + 8 * (i // 2): products.k_of(dim, lane, i)
        for lane in range(4)
        for i in range(4)
    }
    n = {
        2 * lane + i % 2 + 8 * (i // 2): products.n_of(dim, lane, i)
        for lane in range(4)
        for i in range(4)
    }
    sums = torch.zeros(16, 16, groups)
    for g in range(groups):
        A = torch.stack([x[:, k[slot] * groups + g] for slot in range(16)], 1)
        B = torch.tensor(
            [
                [
                    factors[k[slot] * groups + g] * (-1) ** (k[slot] & n[at]).bit_count()
                    for at in range(16)
                ]
                for slot in range(16)
            ]
        )
        sums[:, :, g] = A @ B
    sums = walsh_hadamard(sums)
    for at in range(16):
        out[:, n[at] * groups : (n[at] + 1) * groups] = sums[:, at]
    assert torch.equal(out, walsh_hadamard(x * factors))
