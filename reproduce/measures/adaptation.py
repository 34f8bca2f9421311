"""What each part of FDSE's adaptation without labels gains on a left-out domain (Algorithm 3, Table 2)."""

from __future__ import annotations

import math

from plumbing.errors import Stop
from plumbing.settings import method_name
from reproduce.measures.finished import Rebuilt, labels, rebuilt
from reproduce.retest import accuracy_on_target

from tabulate import tabulate


def adaptation(run: Rebuilt, rates: list[float]) -> dict[str, float | None]:
    """The accuracy on the left-out domain of one trained run: without adaptation, with BN_DSE's statistics
    estimated anew (rate 0), and with gradient steps of each other rate; None where they diverge."""
    args = run.args
    if method_name(args) != "fdse" or args.protocol != "lodo":
        raise Stop(f"{run.folder} is a run of {method_name(args)} with --protocol {args.protocol}; "
                   "adaptation needs one of fdse with --protocol lodo", 2)
    ways = {"none": dict(adapt_epochs=0)}
    for rate in rates:
        name = f"lr {rate:g}" if rate else "statistics"
        ways[name] = dict(adapt_epochs=args.adapt_epochs or 5, adapt_lr=rate)
    accuracies = {}
    for name, how in ways.items():
        try:
            accuracies[name] = accuracy_on_target(run, **how)
        except Stop:
            accuracies[name] = None
    return accuracies


def rates_of(text: str) -> list[float]:
    """The learning rates in 0/1/1000."""
    try:
        rates = [float(part) for part in text.split("/")]
    except ValueError:
        rates = [-1.0]
    if not all(0 <= rate < math.inf for rate in rates):
        raise Stop(f"--rates is {text!r}; expected learning rates such as 0/1/1000", 2)
    return rates


def show_adaptation(flags) -> dict:
    """The command `adaptation`: a table and the numbers."""
    runs, table, head = [], [], []
    rates = rates_of(flags.rates)
    for folder, name in zip(flags.folders, labels(flags.folders)):
        run = rebuilt(folder, flags.which, flags.data, flags.archives)
        accuracies = adaptation(run, rates)
        target = run.args.target
        runs.append(run.heading() | {"target": target, "seed": run.args.seed, "accuracy": accuracies})
        percent = [None if value is None else 100 * value for value in accuracies.values()]
        table.append([name, target, *percent])
        head = ["method", "target", *accuracies]
    print(tabulate(table, head, floatfmt=".2f", missingval="diverges"))
    return {"runs": runs}
