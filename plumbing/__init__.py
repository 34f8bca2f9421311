"""The machinery under common.py: settings, the run folder, devices, files, archives, augmentation."""

import os
import sys

# Before torch loads OpenMP, whose threads wait for each other by spinning, for milliseconds. On a busy
# machine that takes the processor from the thread that they wait for: a round of FedAvg took 65 s there, and
# takes 18 s with this.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# tqdm, which torch imports, would end with a traceback.
WHOLE = ("INITIAL", "NCOLS", "NROWS", "POSITION", "UNIT_DIVISOR")
for name in (*WHOLE, "DELAY", "MAXINTERVAL", "MININTERVAL", "MINITERS", "SMOOTHING", "TOTAL"):
    value = os.environ.get(f"TQDM_{name}", "0")
    try:
        int(value) if name in WHOLE else float(value)
    except ValueError:
        del os.environ[f"TQDM_{name}"]
        print(f"TQDM_{name} is {value!r}, expected a number: it is left out", file=sys.stderr)
