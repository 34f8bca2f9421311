"""A finished run tested again on its left-out domain with other values of the flags that act there alone,
such as FDSE's adaptation: the record that a run with these flags would have, without its training.

    python -m reproduce.retest runs/fdse-... --adapt-epochs 0 --record results/runs.jsonl

The flags are those that a method's `Args` marks with `at_test`. They touch neither the training nor the
validation, so the best round is the same one. Of the target's curve the record has the best and the last
round, and no time of training.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path

import common
from plumbing.errors import Stop, ending
from plumbing.provenance import start
from plumbing.results import id_of, record, refuse_record
from plumbing.settings import Args, Parser, add_flag, flag_of, violation
from plumbing.sources import equivalent_to, hash_of, method_file
from reproduce.measures.finished import Rebuilt, arguments_of, finished, rebuilt
from reproduce.methods import method
from reproduce.records import sources_of

import torch


def flags_at_test(cls: type[Args]) -> list[dataclasses.Field]:
    """The fields that act on the tested network of a left-out domain alone."""
    return [f for f in dataclasses.fields(cls) if f.metadata["at_test"]]


def accuracy_on_target(run: Rebuilt, **changed) -> float:
    """The accuracy of a trained run on its left-out domain with other values of flags that act at test time.
    Stop if the adaptation to it diverges."""
    fed = run.federation
    client = fed.clients[fed.K]
    own = client.args
    client.args = dataclasses.replace(run.args, **changed)
    common.seed_all(run.args.seed, "evaluate", run.round, fed.K)  # as common.tested_model
    try:
        model = client.model(fed.server.download(fed.K))
        (right,) = common.correct(model, [client.data.test], client.args)
        return right / len(client.data.test)
    finally:
        client.args = own


def retested(folder, data: str = "data", archives: str = "", **changed) -> dict:
    """The result that the finished run in `folder` would have had with `changed` flags that act at test time;
    Stop if it cannot be known from there."""
    result = finished(folder)
    args = arguments_of(folder, data, archives)
    refuse(folder, result, args, changed)
    again = dataclasses.replace(args, **changed)
    key = result["args"] | {name: getattr(again, name) for name in changed}
    found = result | {"id": id_of(key), "args": key, "trained_by": result["id"], "logs": {}}
    began = time.perf_counter()
    for which in ("best", "last"):
        run = rebuilt(folder, which, data, archives)
        found[which] = result[which] | {"target": accuracy_on_target(run, **changed)}
    found["curve"] = two_rounds(result["curve"], found["best"], found["last"])
    found["seconds"] = dict.fromkeys(result["seconds"], 0.0)
    found["seconds"]["evaluate"] = round(time.perf_counter() - began, 3)
    found["command"] = command_with(result["command"], changed)
    found["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    part = {"from": args.rounds + 1, **start(again)}
    found["code"] = [*result.get("code", []), part]
    found["uncommitted_changes"] = bool(result["uncommitted_changes"] or part["uncommitted_changes"])
    return found


def refuse(folder, result: dict, args: Args, changed: dict) -> None:
    """Stop if what a finished run would have had with `changed` flags cannot be known from its folder."""
    allowed = [f.name for f in flags_at_test(type(args))]
    if args.protocol != "lodo" or not set(changed) <= set(allowed):
        raise Stop(f"{folder} is a run of {result['method']} with --protocol {args.protocol}; expected one "
                   "with --protocol lodo of a method with flags that act on the target alone "
                   f"({', '.join(map(flag_of, allowed)) or 'it has none'})", 2)
    if all(getattr(args, name) == value for name, value in changed.items()):
        raise Stop(f"{folder} was tested with these values; give others of "
                   f"{', '.join(map(flag_of, allowed))}", 2)
    if args.device.split(":")[0] != result["args"]["device"]:
        raise Stop(f"{folder} is a run on {result['args']['device']}, and here is {args.device} alone: test "
                   "it again where it was trained", 2)
    theirs = set(sources_of(result))
    if not theirs <= equivalent_to(hash_of(method_file(args))):
        raise Stop(f"{folder} was computed by other code ({', '.join(sorted(theirs))}): run it anew", 2)


def two_rounds(curve: dict[str, list], best: dict, last: dict) -> dict[str, list]:
    """Of a curve the best and the last round, with the target's accuracies of now."""
    targets = {best["round"]: best["target"], last["round"]: last["target"]}
    kept = [i for i, t in enumerate(curve["round"]) if t in targets]
    short = {name: [values[i] for i in kept] for name, values in curve.items()}
    short["target"] = [round(targets[t], 5) for t in short["round"]]
    return short


def command_with(command: str, changed: dict) -> str:
    """A run's command with other values of some flags."""
    words, kept = iter(shlex.split(command)), []
    for word in words:
        if word in map(flag_of, changed):
            next(words, None)  # its value
        else:
            kept.append(word)
    for name, value in changed.items():
        kept += [flag_of(name), str(value)]
    return shlex.join(kept)


def main(argv: list[str] | None = None) -> None:
    """The command line. Exit code 2 with one line on stderr for bad usage."""
    try:
        flags, changed = parsed(argv)
        refuse_record(flags.record)
        threads = finished(flags.folder).get("hardware", {}).get("threads")
        if not isinstance(threads, int):
            raise Stop(f"{flags.folder}/result.json does not say how many threads its run had: make it anew",
                       2)
        torch.set_num_threads(threads)  # the bytes of the adaptation depend on them
        result = retested(flags.folder, flags.data, flags.archives, **changed)
        args = arguments_of(flags.folder, flags.data, flags.archives)
        record(dataclasses.replace(args, record=flags.record), result)
        print(json.dumps(result) if flags.json else shown(flags.folder, result, changed))
        return
    except (Stop, OSError, KeyboardInterrupt, MemoryError, RuntimeError) as e:
        message, code = ending(e, "the run is as it was")
    print(f"retest: {message}", file=sys.stderr)
    sys.exit(code)


def parsed(argv: list[str] | None) -> tuple[argparse.Namespace, dict]:
    """The flags, and the changed ones of the method of the run in the folder."""
    parser = Parser(prog="retest", allow_abbrev=False, description=__doc__.split("\n\n")[0],
                    epilog="Further flags: those of the run's method that act on the left-out domain alone.")
    parser.add_argument("folder", help="output folder of a finished run with --protocol lodo")
    parser.add_argument("--record", default="", help="JSONL file to which the result is added; empty: none")
    parser.add_argument("--json", action="store_true", help="print the whole result, for a program")
    parser.add_argument("--data", default="data", help="folder of the datasets and of the decoded cache")
    parser.add_argument("--archives", default="", help="folder with archives downloaded before; looked at "
                                                       "before the network")
    words = sys.argv[1:] if argv is None else argv
    known, _ = parser.parse_known_args(words)  # of an unknown flag's value it may think that it is the folder
    runs = [word for word in words if (Path(word) / "result.json").is_file()]
    of_method = parser.add_argument_group("of the method")
    names = []
    cls = method(finished(runs[0] if runs else known.folder)["method"]).Args
    for f in flags_at_test(cls):
        add_flag(of_method, f, ())
        names.append(f.name)
    flags = parser.parse_args(words)
    changed = {name: value for name, value in vars(flags).items() if name in names}
    for f in dataclasses.fields(cls):
        wrong = violation(changed[f.name], f.metadata) if f.name in changed else ""
        if wrong:
            parser.error(f"{flag_of(f.name)} is {changed[f.name]}; it must be a finite number {wrong}")
    return flags, changed


def shown(folder, result: dict, changed: dict) -> str:
    """One line: the accuracies on the target."""
    values = ", ".join(f"{flag_of(name)} {value}" for name, value in changed.items())
    best, last = result["best"], result["last"]
    return (f"{folder} with {values or 'its own flags'}: target {100 * best['target']:.2f}% in the best "
            f"validation round {best['round']}, {100 * last['target']:.2f}% in the last")


if __name__ == "__main__":
    main()
