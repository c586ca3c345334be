"""Shared by the tests that build kernels: the ban on float maxima, the golden counts, and which
builds of a sweep CI has time for."""

import contextlib
import json
import os
from functools import cache
from importlib import metadata

import pytest

from cute_attn.tools.compile import describe


def job_id(job):
    return describe(job[0]).replace(" ", "-").replace("/", "v")


def one_of_each(jobs, among=(), every=1):
    """Parameters for jobs, (problem, config) at their end. CI builds one for every so many pairs of
    head dims of these, or of those that they are among: of the first pair the first, of the second
    the second, so that dtypes, masks and configs take turns. The others are marked exhaustive."""
    jobs, pairs = list(jobs), {}
    for job in among or jobs:
        pairs.setdefault((job[-2].head_dim, job[-2].head_dim_v), []).append(job)
    chosen = [pair[n % len(pair)] for n, pair in enumerate(list(pairs.values())[::every])]
    return [
        pytest.param(job, marks=() if job in chosen else pytest.mark.exhaustive) for job in jobs
    ]


@contextlib.contextmanager
def no_float_maxima():
    """cutlass.max and min on floats are a compare and a select where fmax is one instruction, and
    they drop NaN differently. Types are known while tracing only."""
    import cutlass

    found = []

    def watched(name, original):
        def call(*values, **keywords):
            kinds = [type(value).__name__ for value in values]
            if any(isinstance(v, float) or "Float" in kind for v, kind in zip(values, kinds)):
                found.append(f"cutlass.{name}({', '.join(kinds)})")
            return original(*values, **keywords)

        return call

    originals = {name: getattr(cutlass, name) for name in ("max", "min")}
    for name, original in originals.items():
        setattr(cutlass, name, watched(name, original))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(cutlass, name, original)


@cache
def toolchain():
    cu13 = any(d.name == "nvidia-cutlass-dsl-libs-cu13" for d in metadata.distributions())
    return f"nvidia-cutlass-dsl {metadata.version('nvidia-cutlass-dsl')} cu{13 if cu13 else 12}"


def compare_golden(path, name, counts, names):
    """Counts with those of the file, or with UPDATE_GOLDEN into it. names: of all its rows."""
    if os.environ.get("UPDATE_GOLDEN"):
        write_golden(path, name, counts, {"toolchain", *names})
        return
    golden = json.loads(path.read_text())
    if golden["toolchain"] != toolchain():
        pytest.skip(f"the counts are of {golden['toolchain']}")
    assert counts == golden.get(name), "meant? then UPDATE_GOLDEN=1, and say why in the commit"


def write_golden(path, name, counts, rows):
    """One test at a time, whatever the workers: the file is read and written under a lock."""
    import fcntl

    with open(path, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        golden = json.loads(text) if text else {}
        if golden.get("toolchain") != toolchain():
            golden = {"toolchain": toolchain()}
        golden = {key: value for key, value in golden.items() if key in rows}  # others are gone
        golden[name] = counts
        file.seek(0)
        file.truncate()
        lines = [f"{json.dumps(k)}: {json.dumps(golden[k])}" for k in sorted(golden)]
        file.write("{\n" + ",\n".join(lines) + "\n}\n")
