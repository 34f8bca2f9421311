"""The accuracy on a left-out domain with other flags that act at test time alone, such as FDSE's adaptation
(Algorithm 3, Table 2).

The flags are those that a method's `Args` marks with `at_test`. They touch neither the training nor the
validation, so with --record the result is that of a run with these flags, without its training. Of the
target's curve such a record has the best and the last round, and no time of training.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
import time
from pathlib import Path

import common
from plumbing.run.errors import UserError
from plumbing.run.provenance import git
from plumbing.run.results import check_record_file, id_of, record
from plumbing.run.settings import Args, Parser, add_flag, check_settings, flag_of
from reproduce.measures.finished import Rebuilt, finished, rebuilt

import torch
from tabulate import tabulate


def flags_at_test(args: Args) -> dict:
    """{field: value} of those that act on the tested network of a left-out domain alone."""
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.metadata["at_test"]}


def tested_with(result: dict, runs: dict[str, Rebuilt], changed: dict) -> dict:
    """The result that a finished run would have had with `changed` flags; `runs`: as it was after its best
    and its last round. Stop if the adaptation diverges."""
    key = result["args"] | changed
    adapted = result | {"id": id_of(key), "args": key, "trained_by": result["id"], "logs": {},
                      "tested_by": git("rev-parse", "HEAD")}
    began = time.perf_counter()
    for which, run in runs.items():
        client = run.federation.clients[run.federation.K]
        client.args = dataclasses.replace(run.args, **changed)
        model, test = common.tested_model(run.federation, run.federation.K, run.round), client.data.test
        adapted[which] = result[which] | {"target": common.correct(model, test, client.args) / len(test)}
    targets = {adapted[which]["round"]: adapted[which]["target"] for which in runs}
    kept = [i for i, t in enumerate(result["curve"]["round"]) if t in targets]
    curve = {name: [values[i] for i in kept] for name, values in result["curve"].items()}
    adapted["curve"] = curve | {"target": [round(targets[t], 5) for t in curve["round"]]}
    adapted["seconds"] = dict.fromkeys(result["seconds"], 0.0)
    adapted["seconds"]["evaluate"] = round(time.perf_counter() - began, 3)
    adapted["command"] = f"{result['command']} {in_words(changed)}"  # of a flag given twice the last counts
    adapted["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return adapted


def in_words(changed: dict) -> str:
    """--adapt-epochs 5 --adapt-lr 0.0"""
    return " ".join(f"{flag_of(name)} {value}" for name, value in changed.items())


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flags", action="append", default=[], type=shlex.split, metavar="'--FLAG ...'",
                        help="flags of the method for the test; may be given several times [the run's own]")
    parser.add_argument("--record", default="", metavar="FILE", help="JSONL file to which a record of each "
                                                                     "test is appended [none]")


def changed_flags(words: list[str], run: Rebuilt) -> dict:
    """["--adapt-lr", "0"] -> {"adapt_lr": 0.0}."""
    own = flags_at_test(run.args)
    if run.args.protocol != "lodo" or not own:
        raise UserError(f"{run.folder} has no flags that act on a left-out domain alone: give a run of fdse "
                        "or fedbn with --protocol lodo", 2)
    parser = Parser(prog="adaptation --flags", allow_abbrev=False, add_help=False)
    for f in dataclasses.fields(run.args):
        if f.metadata["at_test"]:
            add_flag(parser, f, ())
    given = vars(parser.parse_args(words))
    check_settings(dataclasses.replace(run.args, **given), {"seed": ""})
    return given or own


def show(flags) -> list[dict]:
    """A row for each run and its flags, and a record of each if one is wanted."""
    if flags.record:
        check_record_file(Path(flags.record))
    rows, numbers = [], []
    for folder in flags.folders:
        result = finished(folder)
        torch.set_num_threads(result["hardware"]["threads"])  # the bytes of the adaptation depend on them
        places = flags.data, flags.archives, flags.any_code
        runs = {which: rebuilt(folder, which, *places) for which in ("best", "last")}
        args, name = runs["last"].args, runs["last"].label
        if args.device.split(":")[0] != result["args"]["device"]:
            raise UserError(f"{folder} is a run on {result['args']['device']}: test it again on one", 2)
        for words in flags.flags or [[]]:
            changed, accuracy = changed_flags(words, runs["last"]), None
            with contextlib.suppress(UserError):  # the adaptation diverges
                adapted = tested_with(result, runs, changed)
                record(dataclasses.replace(args, record=flags.record), adapted)
                accuracy = adapted[flags.which]["target"]
            numbers.append({"folder": folder, "target": args.target, "flags": changed, "accuracy": accuracy})
            shown = "diverges" if accuracy is None else f"{100 * accuracy:.2f}"
            rows.append([name, args.target, in_words(changed), shown])
    print(tabulate(rows, ["method", "target", "flags", "accuracy (%)"], disable_numparse=True))
    return numbers
