"""More rounds of a run: --extend gives a longer run the state of a shorter one, in a folder of its own, and
the longer one goes on to the numbers that it would have had from the start."""

from __future__ import annotations

import json
from pathlib import Path

from plumbing.errors import Stop
from plumbing.files import load_file, locked, save, write_whole
from plumbing.runfolder import (
    different_arguments,
    folder_of,
    read_checkpoint,
    refuse_foreign,
    refuse_other_code,
    several_runs,
)
from plumbing.settings import Args, as_now, identity

import torch

EVALUATED = ("val", "test", "target", "linear")  # what an evaluation adds to a round's line of metrics


def extend(args: Args) -> None:
    """Write the state of the run in `--extend` into this run's folder, unless that has one. Stop if this run
    would not have come to that state itself. The other run stays as it is."""
    key, path, shorter = identity(args), folder_of(args), Path(args.extend)
    refuse_inexact(args)
    if path.resolve() == shorter.resolve():
        raise Stop(f"--extend {shorter} is the output folder too: give another --out, or none", 2)
    refuse_foreign(path)
    if has_progress(path):
        return
    saved = shorter_run(shorter, key, args)
    history, best = as_if_longer(json.loads(saved["history"]), args, shorter)
    best_state = state_of_best(shorter, saved["identity"], best["round"])
    of_longer = {"identity": json.dumps(key), "history": json.dumps(history), "best": best}
    with locked(path / ".lock", wait=False):
        if has_progress(path):
            return
        if best_state:
            # The file may be a whole checkpoint, whose history is not that of this run.
            state = {"identity": json.dumps(key), **best, "server": best_state["server"],
                     "clients": best_state["clients"]}
            write_whole(path / "best.pt", lambda file: save(state, file))
        write_whole(path / "checkpoint.pt", lambda file: save(saved | of_longer, file))
        times = shorter / "timing.jsonl"
        if times.exists():  # behind the checkpoint: a folder with times alone is of no run
            content = times.read_bytes()
            write_whole(path / "timing.jsonl", lambda file: file.write(content))
    print(f"the {saved['round']} rounds of {shorter} are the first of this run", flush=True)


def has_progress(path: Path) -> bool:
    """Whether a folder has a run's state or result: that goes on, or is shown."""
    return any((path / name).exists() for name in ("checkpoint.pt", "before.pt", "result.json"))


def refuse_inexact(args: Args) -> None:
    """Stop if the flags stand for several runs, or if the number of rounds decides the numbers of each."""
    if args.seeds or several_runs(args):
        raise Stop("--extend goes on with one run: give its --seed, and with a left-out domain its --target",
                   2)
    why = args.depends_on_rounds()
    if why:
        raise Stop(f"--extend is not exact here: {why}, so that a longer run differs from its first round "
                   "on; run it without --extend", 2)


def shorter_run(shorter: Path, key: dict, args: Args) -> dict:
    """The checkpoint of the run in `shorter`. Stop if it differs in more than the number of rounds."""
    saved = read_checkpoint(shorter / "checkpoint.pt", key, args)
    if saved is None:
        raise Stop(f"--extend {shorter} has no checkpoint.pt: give the output folder of a run; if it was "
                   "deleted, the run cannot go on", 2)
    theirs = as_now(json.loads(saved["identity"]), args) | {"rounds": key["rounds"]}
    different = different_arguments(theirs, key)
    if different:
        raise Stop(f"--extend {shorter} is a run of other arguments ({different}): --rounds alone may "
                   "differ", 2)
    if saved["round"] >= args.rounds:
        raise Stop(f"--extend {shorter} has {saved['round']} rounds, and --rounds is {args.rounds}: give "
                   "more", 2)
    code = json.loads(saved.get("code", "[]"))
    refuse_other_code(shorter, code, args, "run it without --extend")
    threads = torch.get_num_threads()
    for part in code:
        if args.device == "cpu" and part.get("threads", threads) != threads:
            raise Stop(f"--extend {shorter} ran on {part['threads']} threads, and the last digits depend on "
                       f"them; here are {threads}: give --threads {part['threads']}", 2)
    return saved


def as_if_longer(history: list[dict], args: Args, shorter: Path) -> tuple[list[dict], dict]:
    """A run's rounds, and round and accuracy of the best one, as a longer run has them: there the last round
    of the shorter one is evaluated only where every other round would be."""
    entries, best = [], {"round": 0, "val": -1.0}
    for entry in history:
        wanted = evaluated_parts(entry, args, best["val"])
        if wanted and wanted[-1] not in entry:
            raise Stop(f"--extend {shorter} was not tested after round {entry['round']}: give the "
                       "--test-rounds best that it ran with", 2)
        kept = {}
        for name, value in entry.items():
            if name not in EVALUATED or name in wanted or (name == "target" and "test" in wanted):
                kept[name] = value
        if "val" in kept and kept["val"]["ALL"] > best["val"]:
            best = {"round": kept["round"], "val": kept["val"]["ALL"]}
        entries.append(kept)
    return entries, best


def evaluated_parts(entry: dict, args: Args, best: float) -> tuple[str, ...]:
    """What is evaluated after a round that is not the last one; `best` is the best validation accuracy of the
    rounds before. `target` goes with `test`."""
    if entry["round"] % args.eval_every:
        return ()
    if args.protocol == "linear":
        return () if args.test_rounds == "best" else ("target", "linear")
    better = "val" in entry and entry["val"]["ALL"] > best
    if args.test_rounds == "best" and not better:
        return ("val",)
    return ("val", "test")


def state_of_best(shorter: Path, key: str, best_round: int) -> dict | None:
    """The state of the best round, if the shorter run has kept that one; `key` is its identity as text."""
    path = shorter / "best.pt"
    if not best_round or not path.exists():
        return None
    saved = load_file(path, "checkpoint")
    whole = isinstance(saved, dict) and {"server", "clients"} <= saved.keys()
    if whole and saved.get("identity") == key and saved.get("round") == best_round:
        return saved
    return None
