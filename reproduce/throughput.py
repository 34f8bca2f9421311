"""How fast a device computes: three numbers, fitted to the recorded times of runs on it, or a guess.

A run takes its FLOPs, its bytes and its operators, each divided by what the device does of them in a second:
of large batches the first part is the most, of BN and small images the second, of small networks the third.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from plumbing.provenance import cpu_name
from plumbing.settings import Args
from reproduce.methods import method
from reproduce.work import Counted, Work, work_of

import numpy as np
import torch

STARTUP = 8.0  # seconds until a run trains: Python, torch, the data (measured on two cores)
FEWEST = 5  # records of a machine to fit its throughput to


@dataclass(frozen=True)
class Device:
    """Seconds of a FLOP, of a byte that is read or written, and of an operator's call."""

    name: str
    flop: float
    byte: float
    operator: float
    origin: str  # whether it is measured or a guess
    memory: int = 0  # bytes of a GPU
    together: int = 1  # runs that shared it while it was measured

    def seconds(self, work: Work) -> float:
        return STARTUP + work.flops * self.flop + work.bytes * self.byte + work.operators * self.operator

    def seconds_of_card(self, work: Work) -> float:
        """Of these the part in which the GPU itself computes."""
        return work.flops * self.flop + work.bytes * self.byte

    def with_tflops(self, tflops: float) -> Device:
        """The same with another rate of arithmetic."""
        return dataclasses.replace(self, name=f"{self.name}, {tflops:g} TFLOPS", flop=1e-12 / tflops,
                                   origin="TFLOPS as given; the rest: " + self.origin)

    @property
    def described(self) -> str:
        return (f"{self.name}: {1e-12 / max(self.flop, 1e-18):.3g} TFLOPS, "
                f"{1e-9 / max(self.byte, 1e-15):.3g} GB/s (counted in float32), "
                f"{1e6 * self.operator:.3g} us an operator; {self.origin}")


GUESS = "a guess: nothing was measured on one"

# What PyTorch reaches without compilation, in bf16: about a quarter of the peak of large matrix products, two
# thirds of the memory's rate (twice that of the bytes counted in float32), the call of an operator.
DEVICES = {
    "h200": Device("one H200", 1 / 250e12, 1 / 6e12, 8e-6, GUESS, 139 << 30),
    "a100": Device("one A100", 1 / 80e12, 1 / 2.5e12, 10e-6, GUESS, 40 << 30),
    "rtx4090": Device("one RTX 4090", 1 / 60e12, 1 / 1.3e12, 8e-6, GUESS, 24 << 30),
    "two-cores": Device("two processor cores", 1 / 0.2e12, 1 / 20e9, 10e-6, GUESS),
}


@dataclass
class Error:
    """How far the estimates of recorded runs are from their times; each method's estimated by the others'."""

    runs: int
    median: float  # of the factors between estimate and time, the larger over the smaller
    of_nine_in_ten: float  # below which nine in ten are

    @property
    def described(self) -> str:
        return (f"of {self.runs} recorded runs, each method's estimated by the other methods' times, half "
                f"are within a factor of {self.median:.2f}, nine in ten within {self.of_nine_in_ten:.2f}")


def machine_of(record: dict) -> tuple:
    """What the times of a record depend on beside its work."""
    hardware, args = record["hardware"], record["args"]
    return (hardware.get("gpu"), hardware.get("cpu"), hardware.get("threads"), args.get("precision"),
            hardware.get("runs_on_gpu", 1))


def measured_here(records: list[dict], counted: Counted) -> tuple[Device, Error | None]:
    """This machine by the records of its kind, those with most records if their threads or precisions differ,
    and the error of that; a guess and None where there are too few."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    kinds = Counter()
    records = [record for record in records if "trained_by" not in record]  # these have no times
    for record in records:
        machine = machine_of(record)
        if machine[:2] == (gpu, cpu_name()) or (gpu and machine[0] == gpu):
            kinds[machine] += 1
    if not kinds or max(kinds.values()) < FEWEST:
        return DEVICES["h200" if gpu else "two-cores"], None
    machine = kinds.most_common(1)[0][0]
    found = fitted([record for record in records if machine_of(record) == machine], machine, counted)
    return found or (DEVICES["h200" if gpu else "two-cores"], None)


def fitted(records: list[dict], machine: tuple, counted: Counted) -> tuple[Device, Error | None] | None:
    """The device that explains the records' times best, by the squares of relative errors; no error is known
    where all are of one method. None if the work of too few is known: that of one's own images is not."""
    names, rows, seconds = [], [], []
    for record in records:
        module = method(record["method"]).__name__
        run = work_of(module, arguments_of(record), counted)
        if run is None:
            continue
        names.append(record["method"])
        rows.append([run.total.flops, run.total.bytes, run.total.operators])
        seconds.append(sum(record["seconds"].values()))
    if len(names) < FEWEST:
        return None
    names, rows, seconds = np.array(names), np.array(rows), np.array(seconds)
    factors = []
    for name in sorted(set(names)):
        others = names != name
        if others.any():
            estimates = rows[~others] @ rates(rows[others], seconds[others])
            factors += list(np.exp(np.abs(np.log(estimates / seconds[~others]))))
    gpu, cpu, threads, precision, together = machine
    how = f"{threads} threads, {precision}"
    if together > 1:
        how += f", {together} at a time on a GPU"
    device = Device(gpu or cpu, *rates(rows, seconds), f"fitted to {len(records)} recorded runs ({how})",
                    together=together)
    if not factors:
        return device, None
    return device, Error(len(factors), float(np.median(factors)), float(np.quantile(factors, 0.9)))


def rates(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Seconds of a FLOP, a byte and an operator, none negative."""
    from scipy.optimize import nnls
    size = rows.max(0) + 1e-9
    found, _ = nnls(rows / size / seconds[:, None], np.ones(len(seconds)))
    return found / size


def arguments_of(record: dict) -> Args:
    """A record's arguments; what it lacks has its default."""
    cls = method(record["method"]).Args
    names = {f.name for f in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in record["args"].items() if name in names})
