"""What a compiled kernel uses: registers, local memory, shared memory, SASS. Needs no GPU.

The cubin's own tables give registers and the stack frame (anything above 0 is a spill or a local
array); the compiler's IR gives dynamic shared memory, which no cubin field holds; nvdisasm gives
the instructions, and the control-flow graph over them finds the loops that hold matrix products.
"""

import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from cute_attn.compile import AnyConfig, builder, target
from cute_attn.problem import Problem

# .nv.info attributes, a 4-byte header and (symbol, value) each
INFO_ATTRIBUTES = {0x2F: "registers", 0x11: "frame", 0x12: "min_stack"}
FATBIN_MAGIC = b"\x50\xed\x55\xba"
# what the committed counts hold: what the loop computes, moves and waits for
GOLDEN_OPCODES = (
    *(
        "HGMMA",
        "QGMMA",
        "MUFU.EX2",
        "FFMA",
        "FMUL",
        "FADD",
        "FMNMX",
        "FSEL",
        "F2FP",
        "SHFL",
        "VOTE",
    ),
    *("SYNCS", "BAR", "WARPGROUP", "UTMALDG", "UTMASTG", "REDG", "STL", "LDL", "TOTAL"),
)
WARPGROUP_PRODUCTS = ("HGMMA", "QGMMA")
AMPERE_OPCODES = ("HMMA", "LDSM", "LDGSTS")  # which Hopper kernels have in rare branches only
INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)(.*)$"
)
LABEL = re.compile(r"^(\.L_x_\d+):")
SECTION = re.compile(r"^\.text\.(\S+):")
TARGET = re.compile(r"^\s*(.*?)`\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Resources:
    """Of one kernel. counts and loops map opcodes (MUFU with its function) to static counts;
    loops has one entry for each innermost loop with matrix products, in address order."""

    name: str
    registers: int  # at launch; setmaxnreg moves them between warpgroups afterwards
    frame: int  # bytes of local memory a thread
    smem: int  # bytes of dynamic shared memory, -1 where the IR does not tell
    counts: dict[str, int] = field(default_factory=dict)
    loops: tuple[dict[str, int], ...] = ()

    @property
    def spills(self) -> bool:
        return bool(self.frame or self.counts.get("STL") or self.counts.get("LDL"))

    def golden(self) -> dict[str, Any]:
        """What tests/golden_counts.json keeps of it."""
        opcodes: tuple[str, ...] = GOLDEN_OPCODES
        if product_opcodes(self.counts) != WARPGROUP_PRODUCTS:
            opcodes = (*AMPERE_OPCODES, *opcodes)
        pick = [{op: c[op] for op in opcodes if c.get(op)} for c in self.loops]
        kernel = {op: self.counts[op] for op in opcodes if self.counts.get(op)}
        return {"registers": self.registers, "smem": self.smem, "kernel": kernel, "loops": pick}


@dataclass(frozen=True)
class Build:
    """Kernels compiled together to be looked at, never to be run."""

    ptx: str
    cubin: bytes
    ir: str
    sass: str
    kernels: tuple[Resources, ...]  # in launch order

    @property
    def resources(self) -> Resources:
        """Of the kernel that does the work."""
        return main_kernel(self.kernels)


def build(problem: Problem, config: AnyConfig, arch: str = "sm90") -> Build:
    """Compile for arch without a GPU what the config is of. Raises what the compiler
    raises; ImportError without it."""
    module, _, name = builder(config, arch).partition(":")
    compiler: Any = getattr(import_module(module), name)
    with tempfile.TemporaryDirectory() as folder:
        keep = f"--gpu-arch {target(arch)} --keep-cubin --keep-ptx --dump-dir {folder}"
        compiled: Any = compiler(problem.static(), config, options=keep)
        artifacts, ir = compiled.artifacts, str(compiled.ir_module)
        cubin, ptx = bytes(artifacts.CUBIN), str(artifacts.PTX)
    sass = disassemble(cubin)
    return Build(ptx, cubin, ir, sass, resources(cubin, sass, ir))


def resources(cubin: bytes, sass: str = "", ir: str = "") -> tuple[Resources, ...]:
    """Of each kernel in a cubin, in launch order; without sass no counts, without ir smem is -1."""
    numbers, smem, code = elf_numbers(cubin), dynamic_smem(ir), sections(sass)
    # subroutines, such as a division's slow path, are functions without registers of their own
    names = sorted((n for n in numbers if "registers" in numbers[n]), key=launch_number)
    found = []
    for n, name in enumerate(names):
        body = list(instructions(code.get(name, "")))
        found.append(
            Resources(
                name,
                numbers[name].get("registers", -1),
                numbers[name].get("frame", -1),
                smem[n] if len(smem) == len(names) else -1,
                dict(count(body)),
                tuple(dict(count(loop)) for loop in mma_loops(body)),
            )
        )
    return tuple(found)


def main_kernel(kernels: Sequence[Resources]) -> Resources:
    """The one with matrix products; without counts, the one with the most registers."""

    def products(k: Resources) -> int:
        return sum(k.counts.get(op, 0) for op in product_opcodes(k.counts))

    return max(kernels, key=lambda k: (products(k), k.registers))


def product_opcodes(opcodes: Container[str]) -> tuple[str, ...]:
    """Of the main loop's matrix products: a warp's own are in rare branches where there are a
    warpgroup's."""
    return WARPGROUP_PRODUCTS if any(op in opcodes for op in WARPGROUP_PRODUCTS) else ("HMMA",)


def launch_number(name: str) -> int:
    """The compiler numbers the kernels of one function by the order of their launches."""
    tail = name.rpartition("_")[2]
    return int(tail) if tail.isdigit() else 0


def sections(sass: str) -> dict[str, str]:
    """{kernel: its part of a disassembly}."""
    lines: dict[str, list[str]] = {}
    here: list[str] = []
    for line in sass.splitlines():
        if match := SECTION.match(line):
            here = lines.setdefault(match[1], [])
        here.append(line)
    return {name: "\n".join(part) for name, part in lines.items()}


def cubin_of_object(data: bytes) -> bytes:
    """The cubin inside an exported object file; raises ValueError if there is none."""
    fatbin = data.find(FATBIN_MAGIC)
    elf = data.find(b"\x7fELF", fatbin)
    if min(fatbin, elf) < 0:
        raise ValueError("the object file holds no cubin")
    return data[elf:]


def elf_numbers(cubin: bytes) -> dict[str, dict[str, int]]:
    """{kernel: {"registers", "frame", "min_stack"}} from the cubin's .nv.info section."""
    (sections_at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, sections_at + i * size) for i in range(number)
    ]

    def text(table: int, at: int) -> str:
        start = headers[table][4] + at
        return cubin[start : cubin.index(b"\0", start)].decode()

    section = {text(names_index, h[0]): h for h in headers}
    symbols, info = section[".symtab"], section[".nv.info"]
    found: dict[str, dict[str, int]] = {}
    at, end = info[4], info[4] + info[5]
    while at < end:
        form, attribute, value = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form != 4:  # the value is in the header
            continue
        if attribute in INFO_ATTRIBUTES:
            symbol, number = struct.unpack_from("<II", cubin, at)
            (name_at,) = struct.unpack_from("<I", cubin, symbols[4] + 24 * symbol)
            kernel = found.setdefault(text(symbols[6], name_at), {})
            kernel[INFO_ATTRIBUTES[attribute]] = number
        at += value
    return found


def dynamic_smem(ir: str) -> list[int]:
    """Bytes the host code stores in each launch's dynamicSmemBytes (field 2 of the launch
    configuration). Reads the pinned compiler's IR: -1 where it is not a constant."""
    config = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    store = re.compile(
        r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
        + config
        + r"\n\s+llvm\.store (%\w+), \1 : i64"
    )
    sizes = []
    for function in re.split(r"\n\s+llvm\.func ", ir):
        constants = re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)", function)
        value = {name: int(number) for name, number in constants}
        sizes += [value.get(match[2], -1) for match in store.finditer(function)]
    return sizes


def nvdisasm() -> str:
    """Path of the disassembler: the pip package's, else the CUDA toolkit's."""
    try:
        dist = metadata.distribution("nvidia-cuda-nvdisasm")
        for file in dist.files or []:
            if file.name == "nvdisasm":
                return str(dist.locate_file(file))
    except metadata.PackageNotFoundError:
        pass
    found = shutil.which("nvdisasm")
    if found is None:
        raise FileNotFoundError("nvdisasm: pip install nvidia-cuda-nvdisasm")
    return found


def disassemble(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [nvdisasm(), "-c", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Instruction:
    opcode: str
    modifiers: str
    predicated: bool
    operands: str
    labels: tuple[str, ...]  # that stand in front of it

    def jump(self) -> tuple[str, bool]:
        """(target label or '', whether the next instruction may follow)."""
        if self.opcode in ("EXIT", "RET"):
            return "", self.predicated
        if self.opcode != "BRA":
            return "", True
        match = TARGET.match(self.operands)
        if match is None:
            return "", True
        always = not (self.predicated or match[1].strip() or self.modifiers)
        return match[2], not always


def instructions(sass: str) -> Iterator[Instruction]:
    labels: list[str] = []
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels.append(label[1])
        elif match := INSTRUCTION.match(line):
            _, predicate, opcode, modifiers, operands = match.groups()
            yield Instruction(opcode, modifiers, bool(predicate), operands, tuple(labels))
            labels = []


def count(code: "list[Instruction]") -> "Counter[str]":
    found: Counter[str] = Counter()
    for i in code:
        found[i.opcode + (i.modifiers if i.opcode == "MUFU" else "")] += 1
    found["TOTAL"] = len(code)
    return found


def mma_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """Bodies of the innermost loops with matrix products.

    Loops are natural loops of the control-flow graph: the cold blocks that wait for a barrier
    stand behind the kernel and jump back into it, so a backward jump alone is no loop.
    """
    blocks, successors = basic_blocks(code)
    products = product_opcodes({i.opcode for i in code})
    loops: dict[int, set[int]] = {}
    dominators = dominator_sets(successors)
    for tail, nexts in enumerate(successors):
        for head in nexts:
            if head in dominators[tail]:
                loops.setdefault(head, set()).update(natural_loop(successors, head, tail))
    bodies = {
        head: body
        for head, body in loops.items()
        if any(i.opcode in products for b in body for i in blocks[b])
    }
    inner = [
        body
        for body in bodies.values()
        if not any(other < body for other in bodies.values() if other is not body)
    ]
    return [[i for b in sorted(body) for i in blocks[b]] for body in sorted(inner, key=min)]


def basic_blocks(code: list[Instruction]) -> tuple[list[list[Instruction]], list[list[int]]]:
    blocks: list[list[Instruction]] = []
    at: dict[str, int] = {}
    ended = True
    for i in code:
        if ended or i.labels:
            blocks.append([])
        at.update(dict.fromkeys(i.labels, len(blocks) - 1))
        blocks[-1].append(i)
        target, falls = i.jump()
        ended = bool(target) or not falls
    successors = []
    for n, block in enumerate(blocks):
        target, falls = block[-1].jump()
        nexts = [at[target]] if target in at else []
        if falls and n + 1 < len(blocks):
            nexts.append(n + 1)
        successors.append(nexts)
    return blocks, successors


def dominator_sets(successors: list[list[int]]) -> list[set[int]]:
    """Which blocks every path from the entry, block 0, passes; empty for unreachable ones."""
    predecessors: list[list[int]] = [[] for _ in successors]
    for n, nexts in enumerate(successors):
        for m in nexts:
            predecessors[m].append(n)
    everything = set(range(len(successors)))
    dominators = [{0} if n == 0 else set(everything) for n in everything]
    changed = bool(successors)
    while changed:
        changed = False
        for n in range(1, len(successors)):
            over = [dominators[p] for p in predecessors[n] if dominators[p]]
            new = {n} | set.intersection(*over) if over else set()
            if new != dominators[n]:
                dominators[n], changed = new, True
    return dominators


def natural_loop(successors: list[list[int]], head: int, tail: int) -> set[int]:
    body, todo = {head, tail}, [tail]
    while todo:
        n = todo.pop()
        if n == head:
            continue
        for p, nexts in enumerate(successors):
            if n in nexts and p not in body:
                body.add(p)
                todo.append(p)
    return body
