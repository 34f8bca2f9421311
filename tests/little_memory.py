"""python -m tests.little_memory FOLDER: decode a small PACS, then open a huge cache, with 200 MB to spare.

For test_decoding.py: a process of its own, because it limits its memory. Prints, for each of the two steps,
by how many bytes its memory grew and how many bytes of pixels it got.
"""

import dataclasses
import json
import os
import re
import resource
import sys
import types
from pathlib import Path

import common
from plumbing.catalog import FOLDERS

import torch

SPARE = 200 << 20
MANY = 300_000  # images of a domain: 236 GB
SIZE = 512
SETTINGS = {"dataset": "pacs", "image_size": SIZE, "limit": 0, "seed": 0, "skip_broken": False}


def status(key: str) -> int:
    """Bytes of this process, by a line of /proc."""
    line = re.search(key + r":\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line[1]) << 10


def enlarge(cache: Path) -> None:
    """Make each domain of a cache large: a file that is a hole almost everywhere."""
    index = json.loads((cache / "index.json").read_text())
    for domain in index["domains"]:
        index["domains"][domain] = [0] * MANY
    os.truncate(cache / "pixels.bin", len(index["domains"]) * MANY * SIZE * SIZE * 3)
    (cache / "index.json").write_text(json.dumps(index))


def measure(step: str, args) -> None:
    before = status("RssAnon")
    domains = common.open_dataset(args).domains
    print(step, status("RssAnon") - before, sum(d.images.nbytes for d in domains))


def main(folder: str) -> None:
    args = types.SimpleNamespace(**SETTINGS, data=folder, archives=folder)
    source = FOLDERS["pacs"]
    counts = {domain: (name, 49) for domain, (name, _) in source.domains.items()}
    FOLDERS["pacs"] = dataclasses.replace(source, domains=counts)
    torch.zeros(9)[torch.randperm(9)]  # what torch needs once
    limit = status("VmData") + SPARE
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    measure("decoded", args)  # 196 images: 154 MB
    enlarge(next(Path(folder, "cache").glob("pacs-*")))
    args.limit = 20
    measure("opened", args)


if __name__ == "__main__":
    main(sys.argv[1])
