"""The machinery under common.py: settings, the run folder, devices, files, archives, augmentation."""

import os

# Before torch loads OpenMP, whose threads wait for each other by spinning, for milliseconds. On a busy
# machine that takes the processor from the thread that they wait for: a round of FedAvg took 65 s there, and
# takes 18 s with this.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
