"""Rows of q or K on their way: a tile of 128 is brought by cp.async while the one before it is
worked on, into slots of shared memory of 16 bytes: the vectors of the quads' rows in the order of
the threads that read them.

By stripes (hadamard.py) a thread reads what it wrote. By quarters others of its quad wrote it, and
owners change places in a quad, so that threads which write at once do so next to each other, as
those do which read at once: no bank is hit twice.
"""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from cute_attn.kernels.hopper import hadamard
from cute_attn.kernels.hopper.hadamard import LANES, VECTOR

THREADS = 512
STAGES = 2  # tiles of which a thread's rows are in shared memory or on their way to it
SLOT = 16  # bytes


def of_thread(cfg, raw: cute.Tensor) -> tuple[Int32, Int32]:
    """Addresses of the thread's first vector, as it reads and as it writes."""
    tidx, n = cute.arch.thread_idx()[0], hadamard.vectors(cfg.dim)
    begin = raw.iterator.toint()
    if not cfg.quarters:
        return begin + tidx * SLOT, begin + tidx * SLOT
    owner, i = tidx % LANES // n, tidx % LANES % n
    place = i * THREADS + (tidx // LANES * LANES + (owner ^ exchange(n, i)))
    return begin + tidx * SLOT, begin + place * SLOT


def exchange(n: int, i: int | Int32):
    """By what the owners of the i-th of n vectors change places."""
    return i * max(1, LANES // n) % LANES


def read(cfg, reads: Int32, tile: Int32, i: int) -> Int32:
    """Of the thread's i-th vector."""
    change = exchange(hadamard.vectors(cfg.dim), i) if cfg.quarters else 0
    return moved(cfg, reads, tile, change, i)


def written(cfg, writes: Int32, tile: Int32, j: int) -> Int32:
    """Where the thread puts what it reads 32j + 8 * lane channels into a row."""
    if not cfg.quarters:
        return moved(cfg, writes, tile, 0, j)
    n = hadamard.vectors(cfg.dim)
    return moved(cfg, writes, tile, j * LANES // n, j * LANES % n)


def moved(cfg, at: Int32, tile: Int32, change: int, i: int) -> Int32:
    """From a tile's first slot, where owners change places by change. A quad's four slots begin at
    a multiple of what they take."""
    at = at + tile % STAGES * (hadamard.vectors(cfg.dim) * THREADS * SLOT)
    return (at ^ (change * SLOT)) + i * THREADS * SLOT


def at(kind, address: Int32) -> cute.Tensor:
    pointer = cute.make_ptr(kind, address, cute.AddressSpace.smem, assumed_align=SLOT)
    return cute.make_tensor(pointer, cute.make_layout(VECTOR))


def load(kind, address: Int32) -> cute.Tensor:
    values = cute.make_rmem_tensor(VECTOR, kind)
    cute.autovec_copy(at(kind, address), values)
    return values


def words(cfg) -> int:
    """Of 16 bit, in all slots."""
    return STAGES * hadamard.vectors(cfg.dim) * THREADS * VECTOR


def copy_ahead(dtype):
    mode = cpasync.LoadCacheMode.GLOBAL
    return cute.make_copy_atom(cpasync.CopyG2SOp(mode), dtype, num_bits_per_copy=128)
