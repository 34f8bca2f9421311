"""Found instead of ../common.py by `python baselines/NAME.py`, which Python starts in this folder: says
how a baseline is started."""

import sys
from pathlib import Path

if __name__ == "common":
    name = Path(sys.argv[0]).stem
    print(f"{name}: start it as python -m baselines.{name}, in {Path(__file__).resolve().parent.parent}",
          file=sys.stderr)
    sys.exit(2)
