"""Random numbers from counters."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_all(*key) -> torch.Generator:
    """Seed torch, numpy and random from a key such as (seed, "train", t, k); returns a CPU generator of torch
    of the same seed.

    Randomness is counter-based: no generator state is carried from one client or round to the next. So a
    result depends neither on the order in which clients are trained nor on an interruption.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # torch.manual_seed keeps each call for a GPU that nobody uses
        torch.cuda.manual_seed_all(number)
    np.random.seed(number % 2 ** 32)
    random.seed(number)
    return torch.Generator().manual_seed(number)
