"""The output folder of one run: settings, metrics, checkpoints and result; and what it needs to go on after
an interruption.

    settings.json     every setting with its origin, written before round 1
    metrics.jsonl     a line for each round, deterministic
    timing.jsonl      seconds so far, a line for each round
    checkpoint.pt     the state after the last round that was kept: server and clients
    best.pt           the state of the best validation round
    result.json       the finished run: accuracies, curves, bytes, seconds, code, versions, hardware
    curves.png        accuracy and training loss over the rounds
    tensorboard/      with --tensorboard the same numbers as scalars

Everything is written to a temporary name and renamed, except the two .jsonl files, which grow by a line each
round and are cut to the checkpoint on a resume. With torchrun process 0 alone writes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from plumbing.catalog import short_name
from plumbing.errors import AfterTheRound, Interrupted, Stop, handled
from plumbing.files import in_units, load_file, locked, save, write_json, write_whole
from plumbing.processes import from_server, gathered, process
from plumbing.provenance import code, forget_peak_memory, hardware, load, peak_memory
from plumbing.results import best_of, draw_curves, record, refuse_record, result_of, summary
from plumbing.settings import Args, differences, settings_of

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

FILES = ("result.json", "checkpoint.pt", "best.pt", "metrics.jsonl", "timing.jsonl", "curves.png",
         "settings.json")
AT_ONCE = "stopping after this round, to keep it; once more: at once, and what was kept before is kept"
DAMAGED = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError)


def folder_of(args: Args, key: dict) -> Path:
    """The output folder of a run with the identity `key`."""
    if args.out:
        return Path(args.out)
    protocol = args.protocol
    if protocol != "indomain":
        protocol = f"{protocol}-{args.target}"
    name = f"{key['method']}-{short_name(args.dataset)}-{protocol}-{args.scale}-s{args.seed}-{digest_of(key)}"
    return Path("runs") / name


def digest_of(key: dict) -> str:
    """Eight hexadecimal digits for an identity, in the names of folders."""
    return hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=4).hexdigest()


class Run:
    """One run's folder and its progress: `t` rounds are done, `history` has a line of metrics for each."""

    def __init__(self, args: Args, key: dict, method_file: Path, stack: contextlib.ExitStack):
        self.args, self.key, self.path, self.stack = args, key, folder_of(args, key), stack
        self.rank, self.processes = process()
        self.code = code(method_file)
        self.t, self.history, self.images, self.parts = 0, [], 0, []
        self.saved, self.result, self.best_state = None, None, None
        self.seconds = {"train": 0.0, "server": 0.0, "evaluate": 0.0, "write": 0.0}
        self.bar, self.shown, self.scalars = None, {}, None

    @classmethod
    @contextlib.contextmanager
    def open(cls, args: Args, key: dict, method_file: Path) -> Iterator[Run]:
        """A run whose folder is locked and read: `result` is that of a finished one. Stop if the folder holds
        something else."""
        forget_peak_memory(args)
        with contextlib.ExitStack() as stack:
            run = cls(args, key, method_file, stack)
            if run.rank == 0:
                refuse_foreign(run.path)
                refuse_record(args.record)
                run.lock()
                run.read()
            run.saved, run.history, run.result = from_server((run.saved, run.history, run.result))
            yield run

    def lock(self) -> None:
        """Keep other processes out of the folder; a finished run in a folder that cannot be written is only
        shown and needs no lock."""
        try:
            self.stack.enter_context(locked(self.path / ".lock", wait=False))
        except OSError as e:
            may_show = e.errno in (errno.EACCES, errno.EROFS, errno.EPERM) and self.args.resume
            if not may_show or not read_result(self.path):
                raise

    def read(self) -> None:
        """What the folder holds of this run: its checkpoint with the metrics up to there, and its result."""
        if not self.args.resume:
            return
        result = read_result(self.path)
        file = self.path / "checkpoint.pt"
        if file.exists():
            self.saved = read_state(file, "give another --out, or --no-resume to replace it")
            refuse_another(self.path, self.saved, self.args, self.key)
            self.history = read_history(self.path, self.saved["round"])
        elif result:
            theirs = {"identity": result["args"], "round": self.args.rounds}
            refuse_another(self.path, theirs, self.args, self.key)
        if result and result["args"] == self.key:
            self.result = result
        state = self.saved or self.result
        if state and not self.args.any_code:
            refuse_other_code(self.path, state["code"], self.code)

    def begin(self, federation) -> None:
        """Restore what was saved; tell the user what starts; write the settings."""
        if self.saved:
            self.restore(federation)
        self.parts.append({"from": self.t + 1, **self.code, "threads": torch.get_num_threads(),
                           "precision": self.args.precision, "load": load()})
        self.saved_at, self.room_is_known = time.monotonic(), False
        if self.rank == 0:
            self.clean()
            self.announce(federation)
            settings = {"method": self.key["method"], "identity": self.key, "code": self.parts,
                        "settings": settings_of(self.args), "data": federation.data()}
            write_json(self.path / "settings.json", settings)
            wide = bool(sys.stderr and sys.stderr.isatty())
            title = f"{self.key['method']} {short_name(self.args.dataset)}"
            bar = tqdm(total=self.args.rounds, initial=self.t, unit="round", dynamic_ncols=wide, desc=title,
                       mininterval=0.2 if wide else 30)
            self.bar = self.stack.enter_context(bar)
            if self.args.tensorboard:
                from torch.utils.tensorboard import SummaryWriter
                writer = SummaryWriter(self.path / "tensorboard", purge_step=self.t + 1)
                self.scalars = self.stack.enter_context(contextlib.closing(writer))
        self.ending = AfterTheRound(AT_ONCE if self.rank == 0 else "", self.processes > 1)
        self.stack.enter_context(handled(self.ending))
        self.since = time.perf_counter()

    def restore(self, federation) -> None:
        """The states of server and clients, and the progress, from the checkpoint."""
        try:
            self.t, self.seconds = self.saved["round"], dict(self.saved["seconds"])
            self.images, self.parts = self.saved["images"], list(self.saved["code"])
            federation.restore(self.saved)
        except DAMAGED as e:
            why = " ".join(f"{type(e).__name__}: {e}".split())[:100]  # torch names tensors on many lines
            raise Stop(f"{self.path / 'checkpoint.pt'} does not fit this method ({why}): give another --out, "
                       "or --no-resume to replace it")
        self.saved = None  # its memory is free again

    def clean(self) -> None:
        """Remove what earlier processes left: temporary files, the files of a run that starts afresh, lines
        of rounds to come."""
        stale = [file for name in FILES for file in self.path.glob(f"{name}.*.tmp")]  # of killed writes
        stale.append(self.path / "result.json")
        if self.t == 0:
            stale += [self.path / name for name in FILES]
            shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        for file in stale:
            file.unlink(missing_ok=True)
        for name in ("metrics.jsonl", "timing.jsonl"):
            file = self.path / name
            lines = file.read_bytes().splitlines(keepends=True)[:self.t] if self.t and file.exists() else []
            write_whole(file, lambda opened, lines=lines: opened.write(b"".join(lines)))

    def announce(self, federation) -> None:
        """Who takes part, on a line, and each setting that differs from its default."""
        print(f"output in {self.path}\n{described(federation)}")
        lines = differences(self.args)
        if lines:
            print("settings that differ from the defaults, by origin (all: settings.json or "
                  "--show-settings):")
            print("\n".join(lines))
        if self.t:
            print(f"going on after round {self.t} of {self.args.rounds}")
        sys.stdout.flush()

    @property
    def best_val(self) -> float:
        """The best validation accuracy of the rounds that are done; -1 without any."""
        return best_of(self.history)["val"]

    def lap(self, part: str) -> None:
        """Count the seconds since the last call for a part of the round: train, server, evaluate or write."""
        now = time.perf_counter()
        self.seconds[part] += now - self.since
        self.since = now

    def log(self, entry: dict) -> None:
        """A round is done: append its metrics (deterministic) and times (not) to their files and show
        them."""
        self.t += 1
        if self.rank:
            return
        self.history.append(entry)
        append_line(self.path / "metrics.jsonl", entry)
        append_line(self.path / "timing.jsonl", {"round": entry["round"], "seconds": self.seconds})
        if self.scalars:
            for tag, value in numbers_in(entry):
                self.scalars.add_scalar(tag, value, entry["round"])
            self.scalars.flush()
        shown = {}
        losses = [log["loss"] for log in entry["clients"].values() if "loss" in log]
        if losses:
            shown["loss"] = f"{np.mean(losses):.3f}"
        if "val" in entry:
            shown["val"] = f"{100 * entry['val']['ALL']:.1f}"
        if "test" in entry:
            shown["ALL"] = f"{100 * entry['test']['ALL']:.1f}"
            shown["AVG"] = f"{100 * entry['test']['AVG']:.1f}"
        if "target" in entry:
            shown["target"] = f"{100 * entry['target']:.1f}"
        if "val" in entry or "target" in entry:
            self.shown = shown  # stays on the bar until the next evaluation
        self.bar.set_postfix(self.shown | shown, refresh=False)
        self.bar.update()

    def save(self, federation) -> None:
        """Keep the state of the best validation round (the first of equals); write it and the last state when
        it is time. After a signal, or --stop-after, end the program."""
        last = self.t == self.args.rounds
        better = best_of(self.history)["round"] == self.t
        stopped = self.t == self.args.stop_after
        due = last or stopped or time.monotonic() - self.saved_at >= self.args.checkpoint_every
        better, due, stopped, number = from_server((better, due, stopped, self.ending.number))
        due = due or number
        if better or due:
            state = federation.state()
            state["clients"] = gathered(state["clients"])
            progress = {"identity": self.key, "round": self.t, "seconds": self.seconds, "images": self.images,
                        "code": self.parts}
            if better and self.rank == 0:
                self.best_state = copied(progress | state)
            if due and self.rank == 0:
                self.write(progress | state)
            if due:
                self.saved_at = time.monotonic()
        self.lap("write")
        if (number or stopped) and not last:
            from_server(None)  # no process leaves before the state is written
            raise Interrupted(number, f"round {self.t} of {self.args.rounds} is kept in {self.path}: the "
                                      "same command without --no-resume goes on from there")

    def write(self, state: dict) -> None:
        """best.pt, if there is a better state than the one in it, and checkpoint.pt."""
        if not self.room_is_known:
            self.room_is_known = True
            size = 3 * bytes_of(state)  # two that are kept, and one that is being written
            there = sum(file.stat().st_size for file in self.path.glob("*.pt"))
            free = shutil.disk_usage(self.path).free + there
            if size > free:
                raise Stop(f"the run needs up to {in_units(size)} of disk for its checkpoints, and "
                           f"{in_units(free)} are free in {self.path}: make room there, or give --out a "
                           "folder on another disk")
        with open(self.path / "metrics.jsonl", "rb") as lines:
            os.fsync(lines.fileno())  # a checkpoint never knows of more rounds than they do
        if self.best_state:
            write_whole(self.path / "best.pt", lambda file: save(self.best_state, file))
            self.best_state = None
        write_whole(self.path / "checkpoint.pt", lambda file: save(state, file))

    def finish(self) -> dict:
        """The finished run's result, in result.json, curves.png and `--record`, and for every process."""
        if self.rank == 0:
            self.bar.close()
            seconds = {part: round(value, 3) for part, value in self.seconds.items()}
            first = {name: value for name, value in self.parts[0].items() if name in ("commit", "sha256")}
            self.result = result_of(self.args, self.key, self.history) | {
                "seconds": seconds, "images_per_second": round(self.images / max(seconds["train"], 1e-9), 1),
                "peak_memory_mib": peak_memory(), **first, "dirty": any(part["dirty"] for part in self.parts),
                **hardware(self.args, self.processes), "code": self.parts}
            title = f"{self.key['method']}, {short_name(self.args.dataset)}, {self.args.scale}"
            if self.args.figures:
                draw_curves(self.path / "curves.png", self.history, title)
            write_json(self.path / "result.json", self.result)
            record(self.args, self.result)
            print(f"{self.path}: {summary(self.result)}")
        number = from_server(self.ending.number)
        if number:  # there may be other targets to come
            raise Interrupted(number, f"the run in {self.path} is finished")
        return from_server(self.result)

    def show(self) -> dict:
        """The result of a run that was finished when it was started again."""
        if self.rank == 0:
            print(f"{self.path} holds this run, finished: {summary(self.result)}")
            record(self.args, self.result)
        return self.result


def described(federation) -> str:
    """4 clients (amazon, caltech, dslr, webcam), 2,025 images to train on, tested on ..."""
    clients, targets = federation.names[:federation.K], federation.names[federation.K:]
    words = f"{len(clients)} clients ({first_names(clients)}), {sum(federation.sizes):,} training images"
    if targets:
        words += f", tested on {first_names(targets)} ({federation.tested:,} images), which no client has"
    return words


def first_names(names: list[str]) -> str:
    """Up to eight names."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def copied(value):
    """The same nested dicts and lists with a copy of each tensor, which no training changes."""
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(v) for v in value)
    return value.detach().clone() if isinstance(value, Tensor) else value


def append_line(path: Path, entry: dict) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(entry) + "\n")


def numbers_in(value, name: str = "") -> Iterator[tuple[str, float]]:
    """(tag, number) of each number in nested dicts: clients/amazon/loss, test/ALL."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers_in(inner, f"{name}/{key}".strip("/"))
    elif name != "round":
        yield name, value


def tensors_in(value) -> Iterator[Tensor]:
    """The tensors in nested dicts and lists."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, Tensor):
        yield value


def bytes_of(state: dict) -> int:
    """Bytes that torch.save writes of a state: of each storage once."""
    storages = [v.untyped_storage() for v in tensors_in(state)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


# What is in a folder


def read_state(file: Path, advice: str) -> dict:
    """A checkpoint: identity, round, seconds, images, code, server, clients. Stop if it is no whole one."""
    saved = load_file(file, "checkpoint")
    try:
        whole = saved["round"] > 0 and isinstance(saved["identity"]["method"], str)
        whole = whole and all(isinstance(saved[name], dict) for name in ("seconds", "server", "clients"))
        whole = whole and all(isinstance(part["files"], dict) for part in saved["code"])
        whole = whole and not any(bool(torch.isnan(v).any()) for v in tensors_in(saved))
    except DAMAGED:
        whole = False
    if not whole:
        raise Stop(f"{file} is no whole checkpoint: {advice}")
    return saved


def read_history(path: Path, rounds: int) -> list[dict]:
    """The metrics of the first rounds. Stop if they are not all there."""
    file = path / "metrics.jsonl"
    try:
        lines = file.read_text().splitlines()[:rounds]
        history = [json.loads(line) for line in lines]
        whole = [entry["round"] for entry in history] == list(range(1, rounds + 1))
        whole = whole and all(log["bytes_up"] >= 0 for entry in history for log in entry["clients"].values())
    except (OSError, *DAMAGED):
        whole = False
    if not whole:
        raise Stop(f"{file} is damaged: it has not the {rounds} rounds of checkpoint.pt: give another --out, "
                   "or --no-resume to replace it")
    return history


def read_result(path: Path) -> dict | None:
    """A finished run's result; None if there is none, or if it is damaged: then it is made again from the
    checkpoint."""
    try:
        result = json.loads((path / "result.json").read_text())
        whole = bool(summary(result)) and isinstance(result["args"]["method"], str)
        return result if whole and isinstance(result["code"], list) else None
    except (OSError, *DAMAGED):
        return None


def refuse_foreign(path: Path) -> None:
    """Stop if the folder has files of a run's names that no run has written: they would be lost."""
    if path.exists() and not path.is_dir():
        raise Stop(f"{path} is a file; expected a folder for the output: give another --out", 2)
    there = [name for name in FILES if (path / name).exists()]
    if (path / "tensorboard").exists():
        there.append("tensorboard")
    if there and not is_run(path):
        raise Stop(f"{path} has files that are of no run ({', '.join(there)}): give another --out; nothing "
                   "was changed", 2)


def is_run(path: Path) -> bool:
    """Whether a run has written into a folder: its settings, its result or its checkpoint say so."""
    with contextlib.suppress(OSError, *DAMAGED):
        settings = json.loads((path / "settings.json").read_text())
        return isinstance(settings["code"], list) and bool(settings["settings"]["dataset"]["value"])
    if read_result(path):
        return True
    with contextlib.suppress(Stop):
        return bool(read_state(path / "checkpoint.pt", ""))
    return False


def refuse_another(path: Path, saved: dict, args: Args, key: dict) -> None:
    """Stop if the folder's run has other arguments, and say which. A run of fewer rounds goes on to more."""
    theirs = saved["identity"]
    different = [name for name in sorted(theirs | key) if theirs.get(name) != key.get(name)]
    if not different:
        return
    words = ", ".join(f"{name} {theirs.get(name)}, not {key.get(name)}" for name in different[:3])
    if len(different) > 3:
        words += ", ..."
    advice = "give another --out, or --no-resume to replace it"
    if different == ["rounds"] and theirs["rounds"] < key["rounds"]:
        why = args.depends_on_rounds()
        if saved["round"] % args.eval_every or args.test_rounds == "best":
            why = why or "its last round was evaluated, and that of a longer run would not be"
        if not why:
            return
        advice = f"it cannot go on to more rounds, because {why}: {advice}"
    raise Stop(f"{path} holds a run of other arguments ({words}): {advice}", 2)


def refuse_other_code(path: Path, parts: list[dict], now: dict) -> None:
    """Stop if a part of the folder's run was computed by other bytes than those of now."""
    for part in parts:
        if part["sha256"] == now["sha256"]:
            continue
        names = sorted(part["files"] | now["files"])
        changed = [name for name in names if part["files"].get(name) != now["files"].get(name)]
        raise Stop(f"{path} holds a run by other code ({', '.join(changed[:3])}): --no-resume runs it anew, "
                   "--any-code goes on with it", 2)
