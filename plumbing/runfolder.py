"""The output folder of one run: settings, metrics, checkpoints and result; and what it needs to go on after
an interruption.

    settings.json     every setting with its origin, written before round 1
    metrics.jsonl     a line for each round, deterministic
    timing.jsonl      seconds so far, a line for each round
    checkpoint.pt     the state after the last round that was kept: server, clients, history
    before.pt         the checkpoint before it, until the run is finished: for the case that one is damaged
    best.pt           the state of the best validation round; if that is the last one, checkpoint.pt itself
    result.json       the finished run: accuracies, curves, bytes, seconds, code, versions, hardware
    curves.png        accuracy and training loss over the rounds
    tensorboard/      with --tensorboard the same numbers as scalars

Everything is written to a temporary name and renamed, except the two .jsonl files, which grow by a line each
round and are made again from the checkpoint on a resume. With torchrun process 0 alone writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path

from plumbing.catalog import short_name
from plumbing.disk import STATES, bytes_of, described, in_place_of, refuse_small_disk
from plumbing.errors import Stop
from plumbing.files import load_file, locked, save, write_json, write_whole
from plumbing.processes import from_server, merged, process
from plumbing.provenance import forget_peak_memory, peak_memory, provenance, start
from plumbing.results import draw_curves, record, refuse_record, result_of, summary
from plumbing.scalars import Scalars, events_in
from plumbing.settings import Args, as_now, differences, identity, method_name, settings_of
from plumbing.signals import AfterTheRound, Interrupted, handled
from plumbing.sources import equivalent_to, hash_of, method_file
from plumbing.tensors import copied

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

KEPT = {"identity": str, "round": int, "history": str, "seconds": dict, "images": int, "best": dict,
        "server": dict, "clients": dict}  # the entries of a checkpoint and their types
FILES = ("result.json", "checkpoint.pt", "before.pt", "best.pt", "metrics.jsonl", "timing.jsonl",
         "curves.png", "settings.json")
PARTS = ("train", "server", "evaluate", "write")  # of a round, whose seconds are counted
AT_ONCE = "stopping after this round, to keep it; once more: at once, and what was kept before is kept"


# Which folder


def several_runs(args: Args) -> bool:
    """Whether `--target all` stands for a run on each target, not for one run or for one that evaluates
    several."""
    return args.protocol != "indomain" and args.target == "all" and not args.sources


def of_target(args: Args, target: str) -> Args:
    """The arguments of one of the runs of `--target all`; its output is a folder in `--out`."""
    out = args.out
    if out and several_runs(args):
        out = str(Path(out) / target)
    of_one = dataclasses.replace(args, target=target, out=out)
    of_one.origins = args.origins
    return of_one


def folder_of(args: Args) -> Path:
    """The output folder of a run on one target."""
    if args.out:
        return Path(args.out)
    key = identity(args)
    protocol = args.protocol
    if protocol != "indomain":
        protocol = f"{protocol}-{args.target}"
    name = f"{key['method']}-{short_name(args.dataset)}-{protocol}-{args.scale}-s{args.seed}-{digest_of(key)}"
    return Path("runs") / name


def digest_of(key: dict) -> str:
    """Eight hexadecimal digits for an identity, in the names of folders."""
    return hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=4).hexdigest()


def beginning(args: Args) -> str:
    """What a command starts, before any data is read, on two lines: method, data, machine, folder."""
    about = f"{method_name(args)} on {args.dataset}, {args.protocol}"
    if args.protocol != "indomain":
        about += f", target {args.target}"
    machine = f"{args.device}, {args.precision}, threads: {torch.get_num_threads()}"
    place = f"output in {folder_of(args)}"
    if several_runs(args):
        place = f"output in a folder for each target in {args.out or 'runs'}"
    return f"{about}, seed {args.seed}\n{machine}; {place}"


# What is in it


def resumed(path: Path, key: dict, args: Args) -> tuple[dict | None, dict | None]:
    """What the folder holds of this run: its checkpoint, and its result if it is finished. Stop if it holds
    another run."""
    if not args.resume:
        return None, None
    saved = newest_checkpoint(path, key, args)
    result = read_result(path / "result.json")
    if saved:
        refuse_another(path, as_now(json.loads(saved["identity"]), args), key)
    elif result:
        refuse_another(path, as_now(result["args"], args), key)
    if result is None or as_now(result["args"], args) != key or (saved and saved["round"] != args.rounds):
        result = None
    if saved:
        refuse_other_code(path, json.loads(saved.get("code", "[]")), args)
    elif result:
        refuse_other_code(path, result.get("code", []), args)
    return saved, result


def newest_checkpoint(path: Path, key: dict, args: Args) -> dict | None:
    """The checkpoint, or the one before it if it is damaged; None if there is none. Stop if nothing whole is
    there."""
    damage = None
    try:
        newest = read_checkpoint(path / "checkpoint.pt", key, args)
        if newest:
            return newest
    except Stop as stop:
        damage = stop
    before = None
    with contextlib.suppress(Stop):
        before = read_checkpoint(path / "before.pt", key, args)
    if before:  # the process was killed between two renamings, or the newest one is damaged
        if damage:
            print(f"{damage}; going on from the one before", file=sys.stderr)
        os.replace(path / "before.pt", path / "checkpoint.pt")  # so that the next one does not take its place
    elif damage:
        raise Stop(f"{damage}: give another --out, or --no-resume to replace it")
    return before


def read_checkpoint(path: Path, key: dict, args: Args) -> dict | None:
    """A whole checkpoint, or None if there is none. Stop if it is damaged."""
    if not path.exists():
        return None
    saved = load_file(path, "checkpoint")
    try:
        theirs = as_now(dict(json.loads(saved["identity"])), args)
        whole = all(isinstance(saved[entry], kind) for entry, kind in KEPT.items())
        if not whole or (theirs == key and not 0 < saved["round"] <= args.rounds):
            raise ValueError
        check_progress(saved)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError):
        raise Stop(f"{path} is no whole checkpoint")
    if has_nan([saved["server"], saved["clients"]]):
        raise Stop(f"{path} has numbers that are not finite")
    return saved


def check_progress(saved: dict) -> None:
    """ValueError, TypeError or KeyError unless a checkpoint's history and seconds are those of its rounds,
    and its code is known."""
    code_of(json.loads(saved.get("code", "[]")))
    history = json.loads(saved["history"])
    if [entry["round"] for entry in history] != list(range(1, saved["round"] + 1)):
        raise ValueError
    for entry in history:
        for log in entry["clients"].values():
            if type(log["bytes_up"]) is not int or type(log["bytes_down"]) is not int:
                raise ValueError
    seconds = [saved["seconds"][part] for part in PARTS]
    if not all(type(value) is float and 0 <= value < math.inf for value in seconds):
        raise ValueError


def code_of(parts) -> list[str]:
    """The sources of each part of a run; ValueError, TypeError or KeyError if they are none."""
    if not isinstance(parts, list):
        raise TypeError("code is no list")
    sources = [part["sources"] for part in parts]
    if not all(isinstance(one, str) for one in sources):
        raise TypeError("sources are no text")
    return sources


def has_nan(value) -> bool:
    """Whether a tensor in nested dicts and lists has a NaN."""
    if isinstance(value, dict):
        return any(has_nan(inner) for inner in value.values())
    if isinstance(value, list):
        return any(has_nan(inner) for inner in value)
    return isinstance(value, Tensor) and bool(torch.isnan(value).any())


def read_result(path: Path) -> dict | None:
    """A finished run's result; None if there is none, or if it is damaged: then it is made again from the
    checkpoint."""
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError,
                             RecursionError):
        result = json.loads(path.read_text())
        code_of(result.get("code", []))
        if summary(result) and isinstance(result["args"], dict):
            return result
    return None


def refuse_foreign(path: Path) -> None:
    """Stop if the folder has files of a run's names that no run has written: they would be lost."""
    if path.exists() and not path.is_dir():
        raise Stop(f"{path} is a file; expected a folder for the output: give another --out", 2)
    there = [name for name in FILES if (path / name).exists()]
    there += [str(file.relative_to(path)) for file in events_in(path)]
    if not there or is_run(path):
        return
    raise Stop(f"{path} has files that are of no run ({', '.join(there)}): give another --out; nothing was "
               "changed", 2)


def is_run(path: Path) -> bool:
    """Whether a run has written into a folder: its settings, its result or its checkpoint say so."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        settings = json.loads((path / "settings.json").read_text())
        return isinstance(settings["code"], list) and bool(settings["settings"]["dataset"]["value"])
    if read_result(path / "result.json"):
        return True
    return any(holds_a_run(path / name) for name in ("checkpoint.pt", "before.pt", "best.pt"))


def holds_a_run(path: Path) -> bool:
    """Whether a file is a state of a run."""
    with contextlib.suppress(Stop, KeyError, TypeError, IndexError):
        return isinstance(load_file(path, "checkpoint")["identity"], str)
    return False


def refuse_another(path: Path, theirs: dict, key: dict) -> None:
    """Stop if the folder's run has other arguments, and say which."""
    different = different_arguments(theirs, key)
    if different:
        advice = "give another --out, or --no-resume to replace it"
        if set(theirs) == set(key) and {name for name in key if theirs[name] != key[name]} == {"rounds"}:
            advice += f"; a finished run goes on to more rounds in another --out with --extend {path}"
        raise Stop(f"{path} holds a run of other arguments ({different}): {advice}", 2)


def different_arguments(theirs: dict, key: dict) -> str:
    """lr 0.05, not 0.2: the first three arguments in which two identities differ; empty if in none."""
    different = [name for name in sorted(theirs | key) if theirs.get(name) != key.get(name)]
    shown = ", ".join(f"{name} {theirs.get(name)}, not {key.get(name)}" for name in different[:3])
    if len(different) > 3:
        shown += ", ..."
    return shown


def refuse_other_code(path: Path, parts: list[dict], args: Args,
                      remedy: str = "give another --out, --no-resume to run it anew") -> None:
    """Stop if a part of the folder's run was computed by other sources than those of now, unless these are
    known to give the same numbers. `remedy` says what else than --any-code there is to do."""
    now = hash_of(method_file(args))
    same = equivalent_to(now)
    others = [sources for sources in code_of(parts) if sources not in same]
    if not parts:
        others = ["unknown"]
    if others and not args.any_code:
        raise Stop(f"{path} holds a run by other code (sources {', '.join(others)}; here {now}): {remedy}, "
                   "or --any-code to go on with it", 2)


class RunFolder:
    """One run's folder and its progress: `t` rounds are done, `history` has a line of metrics for each.

        with RunFolder(args) as folder:     # locked; what is there of this run is read
            folder.begin(federation)        # states restored, settings printed and written
            ...                             # after each part of a round: folder.lap("train"), and then
            folder.log(entry)               # the round's line of metrics
            folder.checkpoint(entry, federation)
            folder.finish()                 # result.json
    """

    def __init__(self, args: Args):
        self.args, self.key, self.path = args, identity(args), folder_of(args)
        self.rank = process()[0]
        self.t, self.history, self.images = 0, [], 0
        self.best, self.best_state = {"round": 0, "val": -1.0}, None
        self.state_bytes = 0  # of the states of server and clients when they were last looked at
        self.seconds = {"train": 0.0, "server": 0.0, "evaluate": 0.0, "write": 0.0}
        self.bar, self.shown, self.scalars = None, {}, None
        self.code = []  # a part for each start: from which round on, and what `start` says

    def __enter__(self) -> RunFolder:
        self.stack = contextlib.ExitStack()
        forget_peak_memory(self.args)
        try:
            here = None
            if self.rank == 0:
                refuse_foreign(self.path)
                refuse_record(self.args.record)
                self.lock()
                here = resumed(self.path, self.key, self.args)
            self.saved, self.result = from_server(here)
        except BaseException:
            self.stack.close()
            raise
        return self

    def lock(self) -> None:
        """Keep other processes out of the folder; a finished run in a folder that cannot be written is only
        shown and needs no lock."""
        try:
            self.stack.enter_context(locked(self.path / ".lock", wait=False))
        except OSError as e:
            if e.errno not in (errno.EACCES, errno.EROFS, errno.EPERM) or not self.args.resume:
                raise
            if not read_result(self.path / "result.json"):
                raise

    def __exit__(self, *error) -> None:
        self.stack.close()

    # Before the first round

    def begin(self, federation) -> None:
        """Restore what was saved; tell the user what starts; write the settings."""
        if self.saved:
            self.restore(federation)
            self.look_at_best()
        self.code.append({"from": self.t + 1, **start(self.args)})
        self.saved_at = time.monotonic()
        self.look_at_disk(federation)
        if self.rank == 0:
            self.clean()
            self.announce(federation)
            settings = {"method": self.key["method"], "identity": self.key, "code": self.code,
                        "settings": settings_of(self.args), "data": federation.data()}
            write_json(self.path / "settings.json", settings)
            lines = "".join(json.dumps(entry) + "\n" for entry in self.history)
            write_whole(self.path / "metrics.jsonl", lambda file: file.write(lines.encode()))
            wide = bool(sys.stderr and sys.stderr.isatty())
            title = f"{self.key['method']} {short_name(self.args.dataset)}"
            bar = tqdm(total=self.args.rounds, initial=self.t, unit="round", dynamic_ncols=wide, desc=title,
                       mininterval=0.2 if wide else 30)
            self.bar = self.stack.enter_context(bar)
            if self.args.tensorboard:
                self.scalars = self.stack.enter_context(contextlib.closing(Scalars(self.path, self.history)))
        self.ending = AfterTheRound(AT_ONCE if self.rank == 0 else "", process()[1] > 1)
        self.stack.enter_context(handled(self.ending))
        self.since = time.perf_counter()

    def look_at_disk(self, federation) -> None:
        """Say how much disk the states need if that is much, and more than was said. Stop if there is less.
        """
        state = federation.state()
        states = [*state["clients"].values()]
        if self.rank == 0:
            states.append(state["server"])
        size = sum(merged({self.rank: bytes_of(states)}).values())
        if self.rank or size <= self.state_bytes:
            return
        self.state_bytes = size
        refuse_small_disk(size, self.args.protocol, self.path)
        words = described(size, self.args.protocol, self.path)
        if words:
            tqdm.write(words)

    def look_at_best(self) -> None:
        """Say so if the state of the best round is not there: the run goes on to the same numbers, and has
        such a state again when a round is better."""
        if self.rank or not self.best["round"]:
            return
        with contextlib.suppress(Stop, KeyError, TypeError):
            saved = load_file(self.path / "best.pt", "checkpoint")
            if saved["identity"] == self.saved["identity"] and saved["round"] >= self.best["round"]:
                return
        print(f"{self.path / 'best.pt'} is damaged, missing or of another run: the network of round "
              f"{self.best['round']} is lost, the numbers are not; --no-resume makes both anew",
              file=sys.stderr)

    def restore(self, federation) -> None:
        """The states of server and clients, and the progress, from the checkpoint."""
        saved = self.saved
        try:
            self.t, self.history = saved["round"], json.loads(saved["history"])
            self.seconds, self.images = saved["seconds"], saved["images"]
            self.code = json.loads(saved.get("code", "[]"))
            self.best = {name: saved["best"][name] for name in ("round", "val")}
            states = {"server": saved["server"], "clients": saved["clients"]}
            federation.load_state_dict(states)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as e:
            why = " ".join(f"{type(e).__name__}: {e}".split())[:100]  # torch names tensors on many lines
            raise Stop(f"{self.path / 'checkpoint.pt'} does not fit this method ({why}): give another --out, "
                       "or --no-resume to replace it")

    def clean(self) -> None:
        """Remove what earlier processes left: temporary files, the files of a run that starts afresh, times
        to come."""
        if not self.saved:
            for name in FILES:
                (self.path / name).unlink(missing_ok=True)
            for file in events_in(self.path):
                file.unlink()
        for name in FILES:
            for leftover in self.path.glob(f"{name}.*.tmp"):  # of a write that was killed
                leftover.unlink()
        times = self.path / "timing.jsonl"
        if times.exists():
            kept = []
            for line in times.read_text(errors="replace").splitlines():
                # A write that was killed.
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    if json.loads(line)["round"] <= self.t:
                        kept.append(line + "\n")
            write_whole(times, lambda file: file.write("".join(kept).encode()))

    def announce(self, federation) -> None:
        """Who takes part, on a line, and each setting that differs from its default."""
        args = self.args
        print(federation.described())
        lines = differences(args)
        if lines:
            print("settings that differ from the defaults, by origin (all: settings.json or "
                  "--show-settings):")
            print("\n".join(lines))
        if self.t:
            print(f"going on after round {self.t} of {args.rounds}")
        sys.stdout.flush()

    # In a round

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
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")
        with open(self.path / "timing.jsonl", "a") as file:
            file.write(json.dumps({"round": entry["round"], "seconds": self.seconds}) + "\n")
        if self.scalars:
            self.scalars.add(entry, self.seconds)
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

    def checkpoint(self, entry: dict, federation) -> None:
        """Keep the state of the best validation round (the first of equals); write it and the last state when
        it is time."""
        if self.t == self.code[-1]["from"]:  # many clients keep more once they have trained
            self.look_at_disk(federation)
        last = self.t == self.args.rounds
        better = "val" in entry and entry["val"]["ALL"] > self.best["val"]
        number = self.told_to_end()
        due = last or number or time.monotonic() - self.saved_at >= self.args.checkpoint_every
        better, due = from_server((better, due))
        if better or due:
            state = federation.state()
            state["clients"] = merged(state["clients"])
            if better and self.rank == 0:
                self.best = {"round": self.t, "val": entry["val"]["ALL"]}
                self.best_state = {"identity": json.dumps(self.key), **self.best, **copied(state)}
            if due and self.rank == 0:
                self.write_checkpoints(state)
            if due:
                self.saved_at = time.monotonic()
        self.lap("write")
        if number and not last:
            from_server(None)  # no process leaves before the state is written
            raise Interrupted(number, f"round {self.t} of {self.args.rounds} is kept in {self.path}: the "
                                      "same command without --no-resume goes on from there")

    def told_to_end(self) -> int:
        """The number of the signal that any process has had; 0: none."""
        numbers = merged({self.rank: self.ending.number})
        return from_server(max(numbers.values(), default=0))

    def write_checkpoints(self, state: dict) -> None:
        """best.pt, if there is a better state than the one in it, and checkpoint.pt. With the one that is
        written there are never more than three of them."""
        newest, before, best = (self.path / name for name in STATES)
        before.unlink(missing_ok=True)
        if self.best_state:
            write_whole(best, lambda file: save(self.best_state, file))
            self.best_state = None
        progress = {"identity": json.dumps(self.key), "round": self.t, "history": json.dumps(self.history),
                    "seconds": self.seconds, "images": self.images, "best": self.best,
                    "code": json.dumps(self.code)}
        last = self.t == self.args.rounds
        write_whole(newest, lambda file: save(progress | state, file), None if last else before)
        if last and self.best["round"] == self.t:
            in_place_of(best, newest)

    # After the last round

    def finish(self) -> dict:
        """The finished run's result, in result.json, curves.png and `--record`, and for every process."""
        result = {}
        if self.rank == 0:
            self.bar.close()
            result = result_of(self.args, self.key, self.history, self.best["round"])
            seconds = {part: round(value, 3) for part, value in self.seconds.items()}
            result["seconds"] = seconds
            result["images_per_second"] = round(self.images / max(seconds["train"], 1e-9), 1)
            result["peak_memory_mib"] = peak_memory()
            result |= provenance(self.args) | self.begun_by()
            title = f"{result['method']}, {short_name(self.args.dataset)}, {self.args.scale}"
            if self.args.figures:
                draw_curves(self.path / "curves.png", self.history, title)
            write_json(self.path / "result.json", result)
            record(self.args, result)
            print(f"{self.path}: {summary(result)}")
        result = from_server(result)
        number = self.told_to_end()
        if number:  # there may be other targets to come
            raise Interrupted(number, f"the run in {self.path} is finished")
        return result

    def begun_by(self) -> dict:
        """`code`, a part for each time that the run was started, and the commit of the first of them."""
        first = self.code[0]
        changed = any(part["uncommitted_changes"] for part in self.code)
        return {"code": self.code, "sources": self.code[-1]["sources"], "commit": first["commit"],
                "uncommitted_changes": changed}

    def finished_before(self) -> dict:
        """The result of a run that was finished when it was started again."""
        if self.rank == 0:
            print(f"{self.path} holds this run, finished: {summary(self.result)}")
            self.add_missing_scalars()
            record(self.args, self.result)
        return self.result

    def add_missing_scalars(self) -> None:
        """With `--tensorboard` the scalars of a run that was finished without it."""
        path = self.path / "metrics.jsonl"
        if self.args.tensorboard and path.exists() and not events_in(self.path):
            try:
                entries = [json.loads(line) for line in path.read_text().splitlines()]
            except (ValueError, RecursionError) as e:
                raise Stop(f"{path} is damaged ({e}), so there are no scalars of this run: leave out "
                           "--tensorboard, or make it anew with --no-resume")
            Scalars(self.path, entries).close()
