"""A finished run's result: what result.json says, its summary in a line, the record of it, and its curves."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shlex
import sys
import time
from pathlib import Path

from plumbing.errors import Stop
from plumbing.files import locked, write_whole
from plumbing.settings import Args, flag_of

import numpy as np
import torch

LONGEST = 1 << 26  # bytes of a line of records


def best_of(history: list[dict]) -> dict:
    """Round and validation accuracy of the best round, the first of equals; round 0 if none was validated."""
    best = {"round": 0, "val": -1.0}
    for entry in history:
        if "val" in entry and entry["val"]["ALL"] > best["val"]:
            best = {"round": entry["round"], "val": entry["val"]["ALL"]}
    return best


def result_of(args: Args, key: dict, history: list[dict]) -> dict:
    """Accuracies, curves and bytes of the rounds in `history`, for result.json. `key`: the run's identity."""
    evaluated = [entry for entry in history if "val" in entry or "linear" in entry]
    last = evaluated[-1]
    if args.protocol == "linear":  # no labels to choose a round by
        best = last
        curve = curves_of_linear(evaluated)
    else:
        best_round = best_of(history)["round"]
        best = next(entry for entry in evaluated if entry["round"] == best_round)
        curve = curves_of_parts(evaluated)
    result = {
        "id": id_of(key), "method": key["method"], "args": key, "command": command(args),
        "best": outcome(best), "last": outcome(last), "curve": curve,
    }
    if args.protocol == "linear":
        result["logs"] = mean_logs(history)
        result["start"] = history[0]["start"]
    else:
        result["logs"] = mean_logs(evaluated)  # at the rounds of the curve alone
    up, down = bytes_in_rounds(history, "bytes_up"), bytes_in_rounds(history, "bytes_down")
    result["bytes"] = {"up": sum(up), "down": sum(down),
                       "up_per_round": sum(up) / len(up), "down_per_round": sum(down) / len(down)}
    result["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return result


def id_of(key: dict) -> str:
    """A run's id, by its identity."""
    return hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=8).hexdigest()


def bytes_in_rounds(history: list[dict], direction: str) -> list[int]:
    """Of each round the bytes of all its clients, `bytes_up` or `bytes_down`."""
    return [sum(log[direction] for log in entry["clients"].values()) for entry in history]


def outcome(entry: dict) -> dict:
    """The accuracies of a round, as result.json has them."""
    if "linear" in entry:
        return {"round": entry["round"], "target": entry["target"], "linear": entry["linear"]}
    found = {"round": entry["round"], "val": entry["val"]["ALL"], **entry["test"]}
    if "target" in entry:
        found["target"] = entry["target"]
    return found


def curves_of_parts(evaluated: list[dict]) -> dict[str, list]:
    """The curves of a run with labels: validation, test ALL and AVG, and the target if there is one; None
    where the test parts were not evaluated."""
    curve = {"round": [entry["round"] for entry in evaluated]}
    curve["val"] = [round(entry["val"]["ALL"], 5) for entry in evaluated]
    for name in ("ALL", "AVG"):
        curve[name] = [round(entry["test"][name], 5) if "test" in entry else None for entry in evaluated]
    if "target" in evaluated[-1]:
        curve["target"] = [round(entry["target"], 5) if "test" in entry else None for entry in evaluated]
    return curve


def curves_of_linear(evaluated: list[dict]) -> dict[str, list]:
    """The curves of a run without labels: of each target and share of labels, and of what `target` is."""
    curve = {"round": [entry["round"] for entry in evaluated]}
    for name, accuracies in evaluated[-1]["linear"].items():
        for ratio in accuracies:
            curve[f"{name} {ratio}"] = [round(entry["linear"][name][ratio], 5) for entry in evaluated]
    curve["target"] = [round(entry["target"], 5) for entry in evaluated]
    return curve


def mean_logs(history: list[dict]) -> dict[str, list]:
    """What the clients log, such as the share of discarded gradients: for each round the mean over the
    clients that logged it, or None."""
    names = set()
    for entry in history:
        for log in entry["clients"].values():
            names |= log.keys()
    means = {}
    for name in sorted(names - {"bytes_up", "bytes_down"}):
        means[name] = []
        for entry in history:
            values = [log[name] for log in entry["clients"].values() if name in log]
            means[name].append(round(float(np.mean(values)), 5) if values else None)
    return means


def summary(result: dict) -> str:
    """One line: the model of the best validation round, and the cost."""
    best, last, seconds = result["best"], result["last"], result["seconds"]
    if "linear" in last:
        accuracies = "last round, linear classifier: " + "; ".join(
            f"{name} {shown_shares(of_target)}" for name, of_target in last["linear"].items())
        if "start" in result:
            accuracies += "; untrained: " + "; ".join(
                f"{name} {shown_shares(of_target)}" for name, of_target in result["start"]["linear"].items())
    else:
        accuracies = f"best validation round {best['round']}: {in_words(best)}; last round: {in_words(last)}"
    return (f"{accuracies}; {seconds['train']:.0f} s training, {seconds['server']:.0f} s server, "
            f"{seconds['evaluate']:.0f} s evaluation, {result['images_per_second']:.0f} images/s, "
            f"{result['peak_memory_mib']} MiB")


def in_words(outcome: dict) -> str:
    """target 61.02%, ALL 95.48%, AVG 95.50%"""
    shown = []
    for name in ("target", "ALL", "AVG"):
        if name in outcome:
            shown.append(f"{name} {100 * outcome[name]:.2f}%")
    return ", ".join(shown)


def shown_shares(accuracies: dict[str, float]) -> str:
    """49.60% with 10% of the labels, 53.60% with 30% of the labels."""
    shown = []
    for ratio, accuracy in accuracies.items():
        shown.append(f"{100 * accuracy:.2f}% with {100 * float(ratio):g}% of the labels")
    return ", ".join(shown)


def is_object(line: bytes) -> bool:
    """Whether a line is a JSON object."""
    with contextlib.suppress(ValueError, RecursionError):
        return isinstance(json.loads(line), dict)
    return False


def refuse_record(name: str) -> None:
    """Stop, before anything is trained, if `--record` is no file of records that can be added to."""
    if not name:
        return
    path = Path(name)
    if path.is_dir():
        raise Stop(f"--record {path} is a folder; expected a JSONL file such as runs.jsonl", 2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"), open(path, "rb") as file:
            first = file.readline(LONGEST)
            if first.strip() and not is_object(first):
                raise Stop(f"--record {path} is no JSONL file (it begins with {first[:20]!r}): give another "
                           "file; nothing was changed", 2)
    except OSError as e:
        raise Stop(f"--record {path} cannot be written ({e.strerror}): give another file", 2)


def record(args: Args, result: dict) -> None:
    """Append the result to `--record` unless the same run by the same code is there; one line, one write,
    under a lock."""
    if not args.record:
        return
    path = Path(args.record)
    with locked(path.with_name(f".{path.name}.lock")), open(path, "a+b") as file:
        file.seek(0)
        content = file.read()
        for line in content.splitlines():
            with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
                there = json.loads(line)  # a damaged line is nobody's record
                same = all(there.get(name) == result.get(name) for name in ("id", "sha256", "curve"))
                if same and "trained_by" not in there:
                    return
        start = b"\n" if content and not content.endswith(b"\n") else b""
        file.write(start + json.dumps(result).encode() + b"\n")


def command(args: Args | None = None) -> str:
    """The command of this process, as typed from the repository's folder, without the flags that change no
    number: the folders are this machine's. Of a run also what its bytes depend on and this machine chose:
    precision and threads."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec and spec.name != "__main__":
        start = ["python", "-m", spec.name]
    else:
        start = ["python", Path(sys.argv[0]).name]
    left_out = {flag_of(f.name): f.default for f in dataclasses.fields(Args) if not f.metadata["numbers"]}
    kept, words = [], iter(sys.argv[1:])
    for word in words:
        flag, has_value, _ = word.replace("--no-", "--").partition("=")
        if args and flag == "--seeds":  # each run is that of one seed
            kept += ["--seed", str(args.seed)]
        if flag not in left_out:
            kept.append(word)
        elif not has_value and not isinstance(left_out[flag], bool):
            next(words, None)  # its value
    if args and "--precision" not in " ".join(kept):
        kept += ["--precision", args.precision]
    if args:
        kept += ["--threads", str(torch.get_num_threads())]
    return shlex.join(start + kept)


def no_formula(text: str) -> str:
    """A text for a figure, in which what stands between two $ is no formula: a folder may be named so."""
    return text.replace("$", r"\$")


def draw_curves(path: Path, history: list[dict], title: str) -> None:
    """Accuracy of validation, ALL, AVG and each client, or of the linear classifiers, and the mean training
    loss, over the rounds."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    evaluated = [entry for entry in history if "val" in entry or "linear" in entry]

    def line(label: str, *path: str, **style) -> None:
        """The line of what stands at this path in the entries that have it."""
        rounds, accuracies = [], []
        for entry in evaluated:
            if path[0] not in entry:
                continue
            rounds.append(entry["round"])
            for key in path:
                entry = entry[key]
            accuracies.append(100 * entry)
        left.plot(rounds, accuracies, label=no_formula(label), **style)

    if "linear" in evaluated[0]:
        for name, accuracies in evaluated[0]["linear"].items():
            for ratio in accuracies:
                line(f"{name}, {100 * float(ratio):g}% of the labels", "linear", name, ratio, marker=".")
        if "start" in history[0]:
            for accuracies in history[0]["start"]["linear"].values():
                for accuracy in accuracies.values():
                    left.axhline(100 * accuracy, color="0.6", linestyle=":")  # the untrained network
    else:
        for name in evaluated[-1]["test"]["clients"]:
            line(name, "test", "clients", name, linewidth=0.8, alpha=0.6)
        line("test ALL", "test", "ALL", color="k")
        line("test AVG", "test", "AVG", color="k", linestyle="--")
        line("validation ALL", "val", "ALL", color="r", linestyle=":")
        if "target" in evaluated[-1]:
            line("left-out domain", "target", color="b", linewidth=2)
    left.set(xlabel="round", ylabel="accuracy (%)", title=no_formula(title))
    left.legend(fontsize=7, ncols=2, loc="lower right")

    losses = {}  # of each client: rounds and mean training losses
    for entry in history:
        for name, log in entry["clients"].items():
            if "loss" in log:
                losses.setdefault(name, []).append((entry["round"], log["loss"]))
    for name in sorted(losses):
        right.plot(*zip(*losses[name]), linewidth=0.8, label=no_formula(name))
    right.set(xlabel="round", ylabel="mean training loss", title="training")
    if losses:
        right.legend(fontsize=7, loc="upper right")
    write_whole(path, lambda file: figure.savefig(file, dpi=130, format="png"))
