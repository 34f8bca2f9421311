"""A finished run's result: what result.json says, its summary in a line, the record of it, and its curves."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from plumbing.data.catalog import named
from plumbing.run.errors import UserError
from plumbing.run.files import lock_of, locked, output_file, write_whole
from plumbing.run.provenance import ROOT
from plumbing.run.settings import Args, flag_with

import numpy as np
import torch


# The files of a run's folder.
FILES = ("settings.json", "metrics.jsonl", "timing.jsonl", "checkpoint.pt", "best.pt", "result.json",
         "curves.png", "split.txt", "parts.csv")
# The fields for which the benchmark has flags of its own.
OF_BENCHMARK = ("dataset", "scale", "protocol", "target", "seed")
NAMED = 10  # clients in curves.png that have a colour and a name, at most
RESULT = {"id": str, "method": str, "args": dict, "command": str, "best": dict, "last": dict, "curve": dict,
          "seconds": dict, "finished": str, "commit": str | None, "versions": dict, "hardware": dict}

# What everything that reads results needs of a run's arguments.
ARGS = {"method": str, "dataset": str, "scale": str, "protocol": str, "target": str, "precision": str,
        "backbone": str, "weights": str, "seed": int, "rounds": int, "epochs": int, "steps": int,
        "batch_size": int, "image_size": int, "eval_every": int, "lr": float}


def best_of(history: list[dict]) -> dict:
    """Round and validation score of the best round; round 0 if none was validated. Of equal accuracies the
    first counts. Of equals by another --metric, which soon reaches 1, the one with the lower validation loss
    counts, and then the later one."""
    best, best_loss = {"round": 0, "val": -1.0}, math.inf
    for entry in history:
        if "val" not in entry:
            continue
        score, loss = score_of(entry), entry["val"].get("loss", math.inf)
        is_metric = "metric" in entry["val"]
        if score > best["val"] or is_metric and score == best["val"] and loss <= best_loss:
            best, best_loss = {"round": entry["round"], "val": score}, loss
    return best


def score_of(entry: dict) -> float:
    """What chooses the best round: the accuracy on all validation images, or what --metric says."""
    return entry["val"].get("metric", entry["val"]["ALL"])


def result_of(args: Args, key: dict, history: list[dict]) -> dict:
    """What result.json says of the rounds in `history`. `key`: the run's identity."""
    return {"id": id_of(key), "method": key["method"], "args": key, "command": command(args),
            **numbers_of(args.protocol, history),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def numbers_of(protocol: str, history: list[dict]) -> dict:
    """Accuracies, curves and bytes of the rounds in `history`."""
    evaluated = [entry for entry in history if "val" in entry or "linear" in entry]
    last = evaluated[-1]
    best, logged = last, history
    if protocol != "linear":  # without labels there is no best round
        best_round = best_of(history)["round"]
        best = next(entry for entry in evaluated if entry["round"] == best_round)
        logged = evaluated  # the rounds of the curve alone
    result = {"best": outcome(best), "last": outcome(last), "curve": curves(evaluated),
             "logs": mean_logs(logged)}
    trained = numbers_after_training(history)
    if trained:
        result["after_training"] = trained
    if "start" in history[0]:
        result["start"] = history[0]["start"]
    result["bytes"] = {}
    logs = [log for entry in history for log in entry["clients"].values()]
    for direction in ("up", "down"):
        total = sum(log[f"bytes_{direction}"] for log in logs)
        result["bytes"][direction] = total
        result["bytes"][f"{direction}_per_round"] = total / len(history)
    return result


def numbers_after_training(history: list[dict]) -> dict:
    """With --after-training: best, last and curve of the clients' networks right after their local training.
    The best round is that of their own validation accuracy. A domain that is left out has no number, because
    no client trains on it. Empty if a round was evaluated without the flag."""
    rounds = []
    for entry in history:
        if "val" in entry and "after_training" not in entry:
            return {}
        if "val" in entry.get("after_training", {}):  # a node may not have answered
            rounds.append({"round": entry["round"]} | entry["after_training"])
    if not rounds:
        return {}
    best_round = best_of(rounds)["round"]
    best = next(entry for entry in rounds if entry["round"] == best_round)
    return {"best": outcome(best), "last": outcome(rounds[-1]), "curve": curves(rounds)}


def check_result(result: dict) -> None:
    """ValueError if a result or a record lacks something. Records of runs that tested the clients' networks
    after their local training alone have these numbers alone."""
    for name, kind in RESULT.items():
        if not isinstance(result.get(name), kind):
            raise ValueError(f"{name}: missing")
    for name, kind in ARGS.items():
        if not isinstance(result["args"].get(name), kind):
            raise ValueError(f"args.{name} is {str(result['args'].get(name))[:40]}, expected {kind.__name__}")
    trained = result.get("after_training", {"curve": {}})
    for reading in (result, trained):
        rounds = reading["curve"].get("round", [])
        for which in ("best", "last"):
            of = reading.get(which, {})
            check_fractions(which, of)
            if any(isinstance(of.get(name), dict) for name in ("ALL", "AVG", "target", "val")):
                raise ValueError(f"{which}: expected numbers as ALL, AVG, target and val")
        for name, values in reading["curve"].items():
            if not isinstance(values, list) or len(values) != len(rounds):
                raise ValueError(f"curve.{name}: expected a value for each of its rounds")
            if name == "round" and not all(type(value) is int for value in values):
                raise ValueError("curve.round: expected numbers of rounds")
            if name != "round":
                known = {t: value for t, value in zip(rounds, values) if value is not None}
                check_fractions(f"curve.{name}, round", known)
    for name, values in result.get("logs", {}).items():
        if not all(value is None or type(value) in (int, float) for value in [*values]):
            raise ValueError(f"logs.{name}: expected numbers")
    for part in ("bytes", "seconds"):
        if not all(is_number(value) for value in result.get(part, {}).values()):
            raise ValueError(f"{part}: expected numbers")
    if not result["curve"].get("round") and not trained["curve"].get("round"):
        raise ValueError("curve: no rounds")


def is_number(value, most: float = math.inf) -> bool:
    """Whether it is a finite number from 0 to `most`; True is none."""
    return type(value) in (int, float) and 0 <= value <= most and math.isfinite(value)


def check_fractions(where: str, values: dict) -> None:
    """ValueError if one of these accuracies, which may be of clients or shares of labels, is no fraction."""
    for name, value in values.items():
        if isinstance(value, dict):
            check_fractions(f"{where}.{name}", value)
        elif name == "round" and not isinstance(value, int):
            raise ValueError(f"{where}.round is {str(value)[:40]}, expected a number of rounds")
        elif name != "round" and not is_number(value, most=1):
            raise ValueError(f"{where}.{name} is {str(value)[:40]}, expected a fraction from 0 to 1")


def id_of(key: dict, size: int = 8) -> str:
    """A run's id, by its identity; of 4 bytes in the names of folders."""
    return hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=size).hexdigest()


def outcome(entry: dict) -> dict:
    """The accuracies of a round, as result.json has them."""
    if "linear" in entry:
        return {"round": entry["round"], "target": entry["target"], "linear": entry["linear"]}
    numbers = {"round": entry["round"], "val": entry["val"]["ALL"], **entry.get("test", {})}
    if "metric" in entry["val"]:
        numbers["metric"] = entry["val"]["metric"]
    if "target" in entry:
        numbers["target"] = entry["target"]
    return numbers


def curves(evaluated: list[dict]) -> dict[str, list]:
    """The accuracies of each round: validation, test ALL and AVG, and the target if there is one; of linear
    classifiers each target and share of labels. None where the test parts were not evaluated."""
    accuracies = []
    for entry in evaluated:
        of_round = {}
        for name, of_target in entry.get("linear", {}).items():
            of_round |= {f"{name} {ratio}": accuracy for ratio, accuracy in of_target.items()}
        accuracies.append(of_round | outcome(entry))
    curve_of = {"round": [entry["round"] for entry in evaluated]}
    for name in accuracies[-1]:
        if name not in ("round", "clients", "linear"):
            values = [of_round.get(name) for of_round in accuracies]
            curve_of[name] = [None if value is None else round(value, 5) for value in values]
    return curve_of


def mean_logs(history: list[dict]) -> dict[str, list]:
    """What clients and server log, such as the share of discarded gradients: for each round the mean over
    those that logged it, or None."""
    logs = [[*entry["clients"].values(), entry.get("server", {})] for entry in history]
    names, means = set().union(*(log for of_round in logs for log in of_round)), {}
    for name in sorted(names - {"bytes_up", "bytes_down"}):
        means[name] = []
        for of_round in logs:
            values = [log[name] for log in of_round if name in log]
            means[name].append(round(float(np.mean(values)), 5) if values else None)
    return means


def summary(result: dict) -> str:
    """One line: the model of the best validation round, and the cost."""
    best, last, seconds = result["best"], result["last"], result["seconds"]
    if "linear" in last:
        accuracies = f"last round, linear classifier: {in_words_of_linear(last['linear'])}"
        if "start" in result:
            accuracies += f"; untrained: {in_words_of_linear(result['start']['linear'])}"
    else:
        chosen = f" (validation {result['args']['metric']} {best['metric']:.3f})" if "metric" in best else ""
        accuracies = (f"best validation round {best['round']}{chosen}: {in_words(best)}; last round: "
                      f"{in_words(last)}")
    if "after_training" in result:
        trained = result["after_training"]
        accuracies += (f"; after local training: best validation round {trained['best']['round']}: "
                       f"{in_words(trained['best'])}; last round: {in_words(trained['last'])}")
    return (f"{accuracies}; {seconds['train']:.0f} s training, {seconds['server']:.0f} s server, "
            f"{seconds['evaluate']:.0f} s evaluation, {result['images_per_second']:.0f} images/s, "
            f"{result['peak_memory_mib']} MiB")


def next_step(args: Args, folder: Path, method_file: Path) -> str:
    """Where the figure is, and the command that compares the method with FedAvg."""
    name = method_file.stem
    if method_file.parent not in (ROOT, ROOT / "baselines"):
        name = os.path.relpath(method_file)
    other = "local" if name == "fedavg" else "fedavg"
    words = ["python", "-m", "reproduce.benchmark", "--methods", f"{name},{other}", "--dataset", args.dataset]
    if args.scale != "paper":
        words += ["--scale", args.scale]
    if args.protocol == "lodo":
        words += ["--targets", args.target]
    given = []  # what all methods understand of the flags of this run
    for f in dataclasses.fields(Args):
        if args.origins.get(f.name) == "flag" and f.metadata["numbers"] and f.name not in OF_BENCHMARK:
            given += flag_with(f.name, getattr(args, f.name))
    if given:
        words += ["--flags", shlex.join(given)]
    return f"curves: {folder / 'curves.png'}; beside {other}, with three seeds each: {shlex.join(words)}"


def untrained(args: Args, best: dict, of_classes: list[int], measures: dict[str, dict] | None = None) -> str:
    """A line if the tested accuracy is within the 95% binomial interval of chance, or below it, or if so few
    images are tested that any accuracy would be; else nothing.
    Chance is the share of the largest class, which a network without a clue may always name. Another
    --metric is judged by `measures`, those of the test parts; if the clients' are better than chance while a
    target is not, it is no fault of the training."""
    if args.protocol == "linear":
        return ""
    left_out, tested = "target" in best, measures or {}
    name = f"target {args.target}" if left_out else "ALL"
    sites = [of for site, of in tested.items() if left_out == (site == args.target)]
    if args.metric == "accuracy":
        n, largest = sum(of_classes), max(of_classes)
        said = against_chance(name, round(best.get("target", best["ALL"]) * n), n, largest)
    else:
        said = metric_against_chance(args.metric, name, sites)
    if not said.startswith("untrained"):
        return said
    of_clients = [of["confusion"] for site, of in tested.items() if site != args.target]
    if left_out and of_clients and learned(of_clients):
        return (f"domain gap: {said.removeprefix('untrained: ')}, while ALL is {100 * best['ALL']:.2f}%: the "
                "clients' images are learned, those of the left-out domain are not recognized")
    why = f"look at --lr {args.lr:g} and at the loss"
    if args.scale == "smoke":
        why = "--scale smoke only shows that a method runs"
    elif args.rounds < 10:
        why = f"--rounds {args.rounds} may be too few, or --lr {args.lr:g} does not fit"
    return f"{said}; {why}"


def against_chance(name: str, hits: int, n: int, largest: int) -> str:
    """A line on an accuracy that is not above chance, `largest` of n images; empty if it is."""
    from scipy.special import bdtrc
    chance = f"{100 * largest / n:.2f}%"
    if bdtrc(n - 1, n, largest / n) >= 0.025:
        return f"{n} tested images are too few to tell {name} from chance ({chance})"
    if bdtrc(hits - 1, n, largest / n) < 0.025:  # the probability that chance has as many hits, or more
        return ""
    return (f"untrained: {name} {100 * hits / n:.2f}% of {n} images is no better than chance ({chance}, the "
            "largest class)")


def learned(confusions: list[list[list[int]]]) -> bool:
    """Whether the accuracy of these matrices together is above chance."""
    matrix = np.sum(confusions, 0)
    return not against_chance("ALL", int(matrix.trace()), int(matrix.sum()), int(matrix.sum(1).max()))


def metric_against_chance(metric: str, name: str, sites: list[dict]) -> str:
    """A line if the test parts `sites`, together, are no better than chance, or are all taken for one class;
    empty if they are better. By --metric auc with two classes the ranks are tested (Mann and Whitney), else
    the balanced accuracy: a network without a clue names each class as often whatever it sees."""
    if not sites:
        return ""
    matrix = np.sum([of["confusion"] for of in sites], 0)
    of_classes, named_as = matrix.sum(1), matrix.sum(0) / matrix.sum()
    shown = of_classes > 0
    recall = matrix.diagonal()[shown] / of_classes[shown]
    z = standardized(recall.mean() - named_as[shown].mean(),
                     (named_as * (1 - named_as))[shown] / of_classes[shown] / shown.sum() ** 2)
    value, chance = f"balanced accuracy {100 * recall.mean():.2f}%", f"{100 * named_as[shown].mean():.2f}%"
    ranked = [of for of in sites if of["auc"] is not None]
    if metric == "auc" and len(matrix) == 2 and ranked:
        pairs = np.array([np.prod(np.sum(of["confusion"], 1)) for of in ranked])
        images = np.array([np.sum(of["confusion"]) for of in ranked])
        areas = np.array([of["auc"] for of in ranked])
        z = standardized(((areas - 0.5) * pairs).sum(), pairs * (images + 1) / 12)
        value, chance = f"AUC {(areas * pairs).sum() / pairs.sum():.3f}", "0.500"
    if z < 1.96:
        return f"untrained: {name} {value} of {matrix.sum()} images is no better than chance ({chance})"
    if named_as.max() == 1:
        return (f"one class: {name} {value}, yet all {matrix.sum()} images are called the same class: train "
                "longer, or choose another threshold than 1/2")
    return ""


def standardized(difference: float, variances: np.ndarray) -> float:
    """A sum in units of its deviation; 0 without one."""
    return difference / variances.sum() ** 0.5 if variances.sum() > 0 else 0.0


def in_words(outcome: dict) -> str:
    """target 61.02%, ALL 95.48%, AVG 95.50%"""
    names = [name for name in ("target", "ALL", "AVG") if name in outcome]
    return ", ".join(f"{name} {100 * outcome[name]:.2f}%" for name in names)


def in_words_of_linear(linear: dict[str, dict[str, float]]) -> str:
    """d0 49.60% with 10% of the labels, d0 53.60% with 30% of the labels"""
    return ", ".join(f"{name} {100 * accuracy:.2f}% with {100 * float(ratio):g}% of the labels"
                     for name, of_ratios in linear.items() for ratio, accuracy in of_ratios.items())


def numbers_in(value, name: str = "") -> Iterator[tuple[str, float]]:
    """(tag, number) of each number in nested dicts: clients/amazon/loss, test/ALL."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers_in(inner, f"{name}/{key}".strip("/"))
    elif name not in ("round", "dropped", "untested", "after_training/untested"):
        yield name, value


def check_record_file(path: Path) -> None:
    """Stop, before anything is trained, if `--record` is no file of records that can be added to, or has the
    name of one that runs write."""
    if Path(os.path.realpath(path)).name in FILES:
        raise UserError(f"--record {path} has the name of a file of runs: give another one", 2)
    output_file(path, is_records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab"):
        pass


def is_records(start: bytes) -> bool:
    """Whether a file begins with a record; a damaged line is passed over."""
    for line in start.splitlines():
        with contextlib.suppress(ValueError, AttributeError):
            return {"id", "method", "args"} <= json.loads(line).keys()
    return False


def record(args: Args, result: dict) -> None:
    """Append the result to `--record`, under a lock, unless the same run by the same code is there."""
    if not args.record:
        return
    path = Path(args.record)
    result = {name: value for name, value in result.items() if name != "measures"}  # it may have MiB
    names = ["id", "sha256", "curve"]
    if "after_training" in result:  # a record without it is not the same
        names.append("after_training")
    with locked(lock_of(path)), open(path, "a+b") as file:
        file.seek(0)
        content = file.read()
        for line in content.splitlines():
            with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
                there = json.loads(line)  # a damaged line is nobody's record
                same = [there.get(name) == result.get(name) for name in names]
                if all(same) and "trained_by" not in there:
                    return
        start = b"\n" if content and not content.endswith(b"\n") else b""
        file.write(start + json.dumps(result).encode() + b"\n")


def command(args: Args) -> str:
    """The command of this process: the flags that can change a number or add one, and what its bytes depend
    on and this machine chose: precision and threads."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    start = ["python", Path(sys.argv[0]).name]
    if spec and spec.name != "__main__":
        start = ["python", "-m", spec.name]
    flags = []
    for f in dataclasses.fields(args):
        told = f.metadata["numbers"] or f.name == "after_training"
        if args.origins.get(f.name) == "flag" and told and f.name != "precision":
            flags += flag_with(f.name, getattr(args, f.name))
    flags += ["--precision", args.precision, "--threads", str(torch.get_num_threads())]
    return shlex.join(start + flags)


def no_formula(text: str) -> str:
    """A text for a figure, in which what stands between two $ is no formula: a folder may be named so."""
    return text.replace("$", r"\$")


def empty_figure(size: tuple[float, float]):
    """A figure, in inches. It needs no window. It looks the same on every machine: from here on this process
    has matplotlib's own settings and font, not those of the user's matplotlibrc."""
    import matplotlib
    from matplotlib.figure import Figure
    matplotlib.rcdefaults()
    return Figure(figsize=size, layout="constrained")


def draw_curves(path: Path, history: list[dict], method: str, args: Args) -> None:
    """The accuracies and the clients' losses over the rounds. A client has one colour in both panels."""
    lines, clients = {}, dict(history[-1].get("test", {}).get("clients", {}))
    for entry in history:
        clients |= entry["clients"]  # some of them, with --participation
        for name, value in numbers_in(entry):
            lines.setdefault(name, []).append((entry["round"], value))
    figure = empty_figure((10, 3.6))
    left, right = figure.subplots(1, 2)
    legend = {}  # a line for each label
    for name, look in looks([*clients], [*lines], args).items():
        if name in lines:
            rounds, values = zip(*lines[name])
            panel, factor = (right, 1) if name.startswith("clients/") else (left, 100)
            line, = panel.plot(rounds, [factor * value for value in values], **look)
            legend[look["label"]] = line
    measure = "accuracy" if args.metric == "accuracy" else f"accuracy, {args.metric}"
    title = no_formula(f"{method}, {named(args.dataset).short}, {args.scale}")
    left.set(xlabel="round", ylabel=f"{measure} (%)", title=title)
    right.set(xlabel="round", ylabel="mean training loss", title="training")
    for panel in (left, right):
        panel.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(legend.values(), legend, fontsize=7, loc="outside right upper")
    write_whole(path, lambda file: figure.savefig(file, dpi=130, format="png"))


def looks(clients: list[str], names: list[str], args: Args) -> dict[str, dict]:
    """Colour, width and label of the lines in curves.png, by the names of their numbers; the last are on
    top. Of many clients all have one colour."""
    style_of = {}
    for i, client in enumerate(clients):
        look = {"color": f"C{i}", "label": no_formula(client), "linewidth": 0.8}
        if len(clients) > NAMED:
            look |= {"color": "0.7", "label": f"{len(clients)} clients"}
        style_of[f"test/clients/{client}"] = style_of[f"clients/{client}/loss"] = look
    for i, name in enumerate(names, len(clients)):
        if name.startswith("linear/"):  # and the share of the labels
            style_of[name] = {"color": f"C{i}", "label": no_formula(name.removeprefix("linear/"))}
    style_of["val/ALL"] = {"color": "red", "linestyle": ":", "label": "validation ALL"}
    style_of["val/metric"] = {"color": "red", "linestyle": "--", "label": f"validation {args.metric}"}
    style_of["test/AVG"] = {"color": "black", "linestyle": "--", "label": "test AVG"}
    style_of["after_training/test/ALL"] = {"color": "black", "linestyle": ":",
                                           "label": "test ALL, after local training"}
    style_of["test/ALL"] = {"color": "black", "linewidth": 2.2, "label": "test ALL"}
    if args.protocol == "lodo":
        style_of["target"] = {"color": "blue", "linewidth": 2.2, "label": f"target {no_formula(args.target)}"}
    return style_of
