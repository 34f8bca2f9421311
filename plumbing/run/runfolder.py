"""The output folder of one run, whose files docs/runs.md lists, and what it needs to resume after an
interruption.

Everything is written to a temporary name and renamed, except the two .jsonl files, which grow by a line each
round and are cut to the checkpoint on a resume.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from copy import deepcopy as copied
from pathlib import Path

from plumbing.data.catalog import named, shortlist
from plumbing.data.splits import Placed, faults_of_parts, table_of_parts
from plumbing.run.errors import AfterTheRound, Interrupted, UserError, handled, in_one_line, tell
from plumbing.run.files import (check_regular, in_units, load_file, locked, save, write_csv, write_json,
                                write_text, write_whole)
from plumbing.run.payloads import nbytes
from plumbing.run.provenance import code, hardware
from plumbing.run.results import (ARGS, FILES, best_of, check_record_file, check_result, draw_curves, id_of,
                                  next_step, numbers_in, numbers_of, outcome, record, result_of, summary,
                                  untrained)
from plumbing.run.settings import Args, differences, settings_of

import numpy as np
from tqdm import tqdm

PLACED = ("file", "client", "part", "class", "group", "pixels")  # the heads of parts.csv
STATE = {"identity": dict, "round": int, "seconds": dict, "images": int, "code": list, "server": dict,
         "clients": dict}  # what a checkpoint has
CODE = {"sha256": str, "commit": str, "dirty": bool | None, "from": int}  # and each part of its code
TIMES = ("train", "server", "evaluate", "write")
OTHER_OUT = "give another --out, or --no-resume to replace it"
DAMAGED = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError)


def folder_of(args: Args, key: dict) -> Path:
    """The output folder of a run with the identity `key`."""
    if args.out:
        return Path(args.out)
    protocol = args.protocol
    if protocol != "indomain":
        protocol = f"{protocol}-{args.target}"
    name = f"{key['method']}-{named(args.dataset).short}-{protocol}-{args.scale}-s{args.seed}-{id_of(key, 4)}"
    return Path("runs") / name


class Run:
    """One run's folder and its progress: `t` rounds are done, `history` has a line of metrics for each."""

    def __init__(self, args: Args, key: dict, method_file: Path, stack: contextlib.ExitStack):
        self.args, self.key, self.path, self.stack = args, key, folder_of(args, key), stack
        self.code, self.method_file = code(method_file), method_file
        self.t, self.history, self.images, self.parts = 0, [], 0, []
        self.saved, self.result, self.best_state = None, None, None
        self.seconds = dict.fromkeys(TIMES, 0.0)
        self.shown, self.scalars = {}, None
        self.unsaved = 0  # rounds that were logged here before the first checkpoint

    @classmethod
    @contextlib.contextmanager
    def open(cls, args: Args, key: dict, method_file: Path) -> Iterator[Run]:
        """A run whose folder is locked and read; of a finished one with its `result`."""
        with contextlib.ExitStack() as stack:
            run = cls(args, key, method_file, stack)
            check_foreign_files(run.path)
            if os.access(run.path, os.W_OK) or not (run.path / "result.json").exists():
                stack.enter_context(locked(run.path / ".lock", wait=False))  # else it can only be shown
            if args.resume:
                run.read()
            yield run

    def read(self) -> None:
        """What the folder holds of this run: its checkpoint with the metrics up to there, and its result."""
        result, file = read_result(self.path), self.path / "checkpoint.pt"
        if file.exists():
            self.saved = read_state(file, OTHER_OUT)
            check_same_settings(self.path, self.saved, self.args, self.key)
            self.history = read_history(self.path, self.saved["round"])
        elif result:
            theirs = {"identity": result["args"], "round": None}
            check_same_settings(self.path, theirs, self.args, self.key)
        if result and result["args"] == self.key:
            self.result = result
        state, log = self.saved or self.result, self.path / "metrics.jsonl"
        if not state and log.exists():
            self.unsaved = len(log.read_bytes().splitlines())
        if state and not self.args.any_code:
            check_same_code(self.path, state["code"], self.code)
        if self.args.after_training and self.lacks_after_training():
            raise UserError(f"{self.path} holds this run without --after-training, which cannot be made up "
                            f"for: {OTHER_OUT}", 2)

    def lacks_after_training(self) -> bool:
        """Whether a round of the folder's run was evaluated without --after-training: the clients' networks
        of that round are gone."""
        if self.result and "after_training" not in self.result:
            return True
        return any("val" in entry and "after_training" not in entry for entry in self.history)

    def start(self, federation) -> None:
        """Restore what was saved; tell the user what starts; write the settings."""
        if self.saved:
            self.restore(federation)
        self.parts.append({"from": self.t + 1, **self.code})
        self.saved_at = time.monotonic()
        names, K = federation.names, federation.K  # enough to build the networks again without any image
        data = {"clients": names[:K], "targets": names[K:], "classes": list(federation.dataset.classes),
                "channels": federation.channels}
        settings = {"method": self.key["method"], "identity": self.key, "code": self.parts,
                    "settings": settings_of(self.args), "data": data}
        write_json(self.path / "settings.json", settings)
        self.clean()
        self.announce(data, sum(federation.sizes), federation.tested)
        if federation.placed:
            self.show_parts(federation.placed, tuple(data["classes"]))
            if not self.args.steps and max(federation.sizes) <= self.args.batch_size > 8:
                print(f"each local epoch is one step, as --batch-size {self.args.batch_size} is more than a "
                      "client's training images: a smaller one trains further")
        wide = sys.stderr.isatty()
        bar = tqdm(total=self.args.rounds, initial=self.t, unit="round", dynamic_ncols=wide,
                   desc=f"{self.key['method']} {named(self.args.dataset).short}",
                   mininterval=0.2 if wide else 30)
        self.bar = self.stack.enter_context(bar)
        if self.args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(self.path / "tensorboard", purge_step=self.t + 1)
            self.scalars = self.stack.enter_context(contextlib.closing(writer))
        self.ending = AfterTheRound()
        self.stack.enter_context(handled(self.ending))
        federation.lap = self.lap
        self.since = time.perf_counter()

    def show_parts(self, placed: list[Placed], classes: tuple[str, ...]) -> None:
        """The table of the parts and what is wrong with them, printed and kept in split.txt; which image is
        in which part, in parts.csv."""
        lines = [table_of_parts(placed, classes), *faults_of_parts(placed, classes)]
        print("\n".join(lines), flush=True)
        write_text(self.path / "split.txt", "\n".join(lines) + "\n")
        rows = [[*image[:3], classes[image.label], *image[4:]] for image in placed]
        write_csv(self.path / "parts.csv", [list(PLACED), *rows])

    def restore(self, federation) -> None:
        """The states of server and clients, and the progress, from the checkpoint."""
        try:
            self.t, self.seconds = self.saved["round"], dict(self.saved["seconds"])
            self.images, self.parts = self.saved["images"], list(self.saved["code"])
            federation.restore(self.saved)
        except DAMAGED as e:
            raise UserError(f"{self.path / 'checkpoint.pt'} does not fit this method ({in_one_line(e)}): "
                            f"{OTHER_OUT}")
        self.saved = None  # its memory is free again

    def clean(self) -> None:
        """Remove temporary files, the files of a run that starts afresh, and lines of rounds to come."""
        check_regular(self.path / "timing.jsonl")
        stale = [file for name in FILES for file in self.path.glob(f"{name}.*.tmp")]  # of killed writes
        if self.t:
            stale.append(self.path / "result.json")
            for file in (self.path / "metrics.jsonl", self.path / "timing.jsonl"):
                if file.exists():  # nothing needs the times
                    lines = file.read_bytes().splitlines(keepends=True)[:self.t]
                    write_whole(file, lambda opened, lines=lines: opened.write(b"".join(lines)))
        elif not self.result:
            stale += [self.path / name for name in FILES if name != "settings.json"]
            shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        for file in stale:
            file.unlink(missing_ok=True)

    def announce(self, data: dict, trained: int, tested: int) -> None:
        """Who takes part and what the images show, on a line, and each setting that differs from its
        default."""
        clients, targets, classes = data["clients"], data["targets"], data["classes"]
        who = (f"{len(clients)} clients ({shortlist(clients)}), {len(classes)} classes "
               f"({shortlist(classes)}), {trained:,} training images")
        if targets:
            who += f", tested on {shortlist(targets)} ({tested:,} images), which no client has"
        print(f"output in {self.path}\n{who}\nsettings that differ from the defaults, by origin (all: "
              "settings.json or --show-settings):")
        print("\n".join(differences(self.args)))
        if self.t:
            print(f"resumed after round {self.t} of {self.args.rounds}")
        if self.unsaved:
            print(f"rounds that are run again: {self.unsaved}, as there was no checkpoint yet")
        sys.stdout.flush()

    def lap(self, part: str) -> None:
        """Count the seconds since the last call for a part of the round: train, server, evaluate or write."""
        now = time.perf_counter()
        self.seconds[part] += now - self.since
        self.since = now

    def log(self, entry: dict, images: int) -> None:
        """A round is done, in which clients were trained on so many images: append its metrics and times to
        their files and show them."""
        self.t += 1
        self.images += images
        self.history.append(entry)
        times = {"round": entry["round"], "seconds": self.seconds}
        for name, line in (("metrics.jsonl", entry), ("timing.jsonl", times)):
            with open(self.path / name, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if self.scalars:
            for tag, value in numbers_in(entry):
                self.scalars.add_scalar(tag, value, entry["round"])
            self.scalars.flush()
        losses = [log["loss"] for log in entry["clients"].values() if "loss" in log]
        loss = {"loss": f"{np.mean(losses):.3f}"} if losses else {}
        if "val" in entry or "linear" in entry:
            numbers = outcome(entry)
            names = [name for name in ("val", "ALL", "AVG", "target") if name in numbers]
            self.shown = {name: f"{100 * numbers[name]:.1f}" for name in names}  # until the next evaluation
        self.bar.set_postfix(loss | self.shown, refresh=False)
        self.bar.update()

    def save(self, federation) -> None:
        """Keep the state of the best validation round (see best_of); write it and the last state when
        it is time. After a signal, or --stop-after, end the program."""
        last = self.t == self.args.rounds
        better = best_of(self.history)["round"] == self.t
        stopped = self.t == self.args.stop_after
        number = self.ending.number  # of a signal
        due = last or stopped or number or time.monotonic() - self.saved_at >= self.args.checkpoint_every
        if better or due:
            state = {"identity": self.key, "round": self.t, "seconds": self.seconds, "images": self.images,
                     "code": self.parts, **federation.state()}
            if better:
                self.best_state = copied(state)
            if due:
                self.write(state)
                self.saved_at = time.monotonic()
        self.lap("write")
        if (number or stopped) and not last:
            if number:
                raise Interrupted(number, f"round {self.t} of {self.args.rounds} is kept in {self.path}: the "
                                          "same command without --no-resume resumes from there")
            raise Interrupted(0, f"stopped after round {self.t} of {self.args.rounds}, as --stop-after asks; "
                                 f"it is kept in {self.path}: the same command without --stop-after resumes")

    def write(self, state: dict) -> None:
        """best.pt, if there is a better state than the one in it, and checkpoint.pt."""
        if not (self.path / "checkpoint.pt").exists():
            size, free = 3 * nbytes(state), shutil.disk_usage(self.path).free  # two are kept, one is written
            if size > free:
                raise UserError(f"checkpoints need up to {in_units(size)} of disk, {in_units(free)} are free "
                                f"in {self.path}: make room there, or give another --out")
        with open(self.path / "metrics.jsonl", "rb") as lines:
            os.fsync(lines.fileno())  # a checkpoint never knows of more rounds than they do
        if self.best_state:
            write_whole(self.path / "best.pt", lambda file: save(self.best_state, file))
            self.best_state = None
        write_whole(self.path / "checkpoint.pt", lambda file: save(state, file))

    def best(self) -> dict:
        """The state after the best validation round."""
        return read_state(self.path / "best.pt", OTHER_OUT)

    def finish(self, of_classes: list[int], measures: dict, content: str) -> dict:
        """The finished run's result, in result.json, curves.png and `--record`. `of_classes`: the tested
        images of each class; `measures`, `content`: see common.py."""
        self.bar.close()
        seconds = {part: round(value, 3) for part, value in self.seconds.items()}
        first = self.parts[0]
        dirty = [part["dirty"] for part in self.parts]
        self.result = result_of(self.args, self.key, self.history) | {
            "seconds": seconds, "images_per_second": round(self.images / max(seconds["train"], 1e-9), 1),
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            "commit": first["commit"], "sha256": first["sha256"],
            "dirty": None if None in dirty else any(dirty),  # None: without git nobody knows
            **hardware(self.args), "code": self.parts, "content": content}
        if measures:
            self.result["measures"] = measures
        write_json(self.path / "result.json", self.result)
        record(self.args, self.result)
        print(f"{self.path}: {summary(self.result)}")
        warning = untrained(self.args, self.result["best"], of_classes, measures.get("best"))
        if warning:
            print(warning)
        self.draw()
        if self.args.figures:
            print(next_step(self.args, self.path, self.method_file))
        if self.ending.number:  # there may be other targets to come
            raise Interrupted(self.ending.number, f"the run in {self.path} is finished")
        return self.result

    def show(self) -> dict:
        """The result of a run that was finished when it was started again."""
        self.clean()
        print(f"{self.path} holds this run, finished: {summary(self.result)}")
        record(self.args, self.result)
        self.draw()
        return self.result

    def draw(self) -> None:
        """curves.png, if it is not there. The result is written: a figure that fails is only told."""
        file = self.path / "curves.png"
        if not self.args.figures or file.exists():
            return
        try:
            import matplotlib
            history = self.history or read_history(self.path)
            with matplotlib.rc_context():  # what a notebook has set stays for its own figures
                draw_curves(file, history, self.key["method"], self.args)
        except Exception as e:  # whatever matplotlib, LaTeX or the disk has
            tell(self.key["method"], f"{file} is not drawn ({in_one_line(e)})")


# What is in a folder


def read_state(file: Path, advice: str) -> dict:
    """A checkpoint. Stop if it is no whole one."""
    saved = load_file(file, "checkpoint", advice)
    if not has_types(saved, STATE) or not all(has_types(part, CODE) for part in saved["code"]):
        raise UserError(f"{file} is no whole checkpoint: {advice}")
    identity, seconds = saved["identity"], saved["seconds"]
    whole = has_types(identity, ARGS) and has_types(seconds, dict.fromkeys(TIMES, float))
    if not saved["code"] or not whole or len(seconds) > len(TIMES) or not {*map(type, identity)} <= {str}:
        raise UserError(f"{file} is no whole checkpoint: {advice}")
    return saved


def has_types(value, types: dict) -> bool:
    """Whether it is a dict with values of these types, and maybe others."""
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in types.items())


def read_result(path: Path) -> dict | None:
    """A finished run's result, its accuracies and curves by the history; None without one, or if it is
    damaged: a checkpoint makes it again."""
    with contextlib.suppress(OSError, UserError, *DAMAGED):
        check_regular(path / "result.json")
        result = json.loads((path / "result.json").read_bytes())
        result |= numbers_of(result["args"]["protocol"], read_history(path, result["last"]["round"]))
        check_result(result)
        return result
    return None


def read_history(path: Path, rounds: int | None = None) -> list[dict]:
    """The metrics of a run's first rounds, or of all. Stop if they are not all there."""
    file = path / "metrics.jsonl"
    check_regular(file)
    with contextlib.suppress(OSError, *DAMAGED):
        history = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:rounds]]
        numbers = [entry["round"] for entry in history]
        if numbers == list(range(1, len(history) + 1)) and rounds in (None, len(history)):
            return history
    words = f"the {rounds} rounds of checkpoint.pt" if rounds else "a line for each round"
    raise UserError(f"{file} is damaged: it has not {words}: {OTHER_OUT}")


def check_outputs(args: Args) -> None:
    """Stop if a run cannot write to `--out` or `--record`."""
    if args.record:
        check_record_file(Path(args.record))
    if Path(args.out).is_file():
        raise UserError(f"--out {args.out} is a file; expected a folder, or the name of a new one", 2)


def check_foreign_files(path: Path) -> None:
    """Stop if the folder has files of a run's names that no run has written: they would be lost. A run writes
    its settings first."""
    check_regular(path / "settings.json")
    with contextlib.suppress(OSError, *DAMAGED):
        if "identity" in json.loads((path / "settings.json").read_bytes()):
            return
    there = [name for name in (*FILES, "tensorboard") if (path / name).exists()]
    if there:
        raise UserError(f"{path} has files that are of no run ({', '.join(there)}): give another --out; "
                        "nothing was changed", 2)


def check_same_settings(path: Path, saved: dict, args: Args, key: dict) -> None:
    """Stop if the folder's run has other arguments, and say which. Fewer rounds are resumed with more, unless
    the checkpoint is gone (round None)."""
    theirs = saved["identity"]
    different = [name for name in sorted(theirs | key) if theirs.get(name) != key.get(name)]
    if not different:
        return
    words = ", ".join(f"{name} {theirs.get(name)}, not {key.get(name)}" for name in different[:3])
    if len(different) > 3:
        words += ", ..."
    advice = OTHER_OUT
    if different == ["rounds"] and theirs["rounds"] < key["rounds"]:
        why = args.depends_on_rounds()
        if saved["round"] is None:
            why = "its checkpoint.pt is gone"
        elif saved["round"] % args.eval_every or args.test_rounds == "best":
            why = why or "its last round was evaluated, and that of a longer run would not be"
        if not why:
            return
        advice = f"it cannot be resumed with more rounds, because {why}: {advice}"
    raise UserError(f"{path} holds a run of other arguments ({words}): {advice}", 2)


def check_same_code(path: Path, parts: list[dict], now: dict) -> None:
    """Stop if a part of the folder's run was computed by other code than that of now."""
    for part in parts:
        if part["sha256"] == now["sha256"]:
            continue
        changes = ", with changes" if part["dirty"] else ""
        commit = part["commit"][:12] + changes
        raise UserError(f"{path} holds a run by other code (commit {commit}): a training with --no-resume "
                        "makes it anew, --any-code takes it as it is", 2)
