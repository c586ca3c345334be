"""The same as `python -m cute_attn tune`, for a bare checkout."""

import sys
from pathlib import Path

sys.path.pop(0)  # scripts/ has a profile.py, as Python has
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cute_attn.tools.tune import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
