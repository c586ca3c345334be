"""Run the GPU tests and append what came out to benchmarks/gpu_tests.jsonl.

python scripts/gpu_tests.py                     # all of them
python scripts/gpu_tests.py tests/test_forward.py -x

Their kernels are compiled first, from all cores (tests/ahead.py).
"""

import sys
import time
from collections import Counter
from pathlib import Path

sys.path.pop(0)  # scripts/ has a profile.py, as Python has
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import pytest
import torch

from cute_attn.tools import records

RECORD = records.ROOT / "benchmarks" / "gpu_tests.jsonl"


class Tally:
    """A pytest plugin: outcomes of the tests, and the names of those that failed."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        if report.when == "call" or report.outcome != "passed":
            missed = hasattr(report, "wasxfail")  # a bar that is known to be missed, not a skip
            self.outcomes["xfailed" if missed else report.outcome] += 1


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU: python -m cute_attn info says why")
    tally, started = Tally(), time.time()
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", *arguments]
    status = int(pytest.main(options, plugins=[tally]))
    record = records.environment("cuda", [])
    record["command"] = records.command_line(["python scripts/gpu_tests.py", *arguments])
    record["seconds"] = round(time.time() - started, 1)
    record["outcomes"] = dict(tally.outcomes)
    record["failed"] = tally.failed
    record["exit_status"] = status
    records.append(RECORD, [record])
    print(f"{dict(tally.outcomes)} in {record['seconds']} s -> {RECORD}")
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
