"""Found instead of ../common.py by `python official/fdse.py`, which Python starts in this folder: says
how it is started."""

import sys
from pathlib import Path

if __name__ == "common":
    name = Path(sys.argv[0]).stem
    print(f"{name}: start it as python -m official.{name}, in {Path(__file__).resolve().parent.parent}",
          file=sys.stderr)
    sys.exit(2)
