"""Several runs of one command: those of its seeds and targets, and what is said of their accuracies."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path

from plumbing.catalog import is_custom, source_of
from plumbing.errors import UserError
from plumbing.mnist import ANGLES
from plumbing.settings import Args, seed_numbers

from tabulate import tabulate


def known_domains(dataset: str) -> list[str]:
    """The names of a dataset's domains, as far as they are known before it is read: else none."""
    if dataset == "digits":
        return [f"d{angle}" for angle in ANGLES]
    if dataset.startswith("rotatedmnist"):
        return [f"m{angle}" for angle in ANGLES]
    return [] if is_custom(dataset) else list(source_of(dataset).domains)


def targets_of(settings: Args, names: list[str]) -> list[str]:
    """The domains that are evaluated and not trained on; none without `names`. Stop at an unknown one."""
    if not names:
        return []
    sources = settings.sources.split(",") if settings.sources else []
    named = [("--sources", name) for name in sources]
    if settings.target != "all":
        named.append(("--target", settings.target))
    for flag, name in named:
        if name not in names:
            raise UserError(f"{flag} {name} is not a domain of {settings.dataset}; its domains are "
                            f"{', '.join(names)}", 2)
    if settings.protocol == "indomain":
        if settings.target != "all":
            raise UserError(f"--target {settings.target} goes with --protocol lodo; the protocol is "
                            "indomain", 2)
        return []
    if len(names) < 2:
        raise UserError(f"{settings.dataset} has one domain, {names[0]}: with --protocol {settings.protocol} "
                        "no client would be left to train", 2)
    rest = [name for name in names if not sources or name not in sources]
    if not rest or len(set(sources)) < len(sources) or settings.target in sources:
        raise UserError(f"--sources {settings.sources} leaves no target: expected some of "
                        f"{', '.join(names)}, each once, and a --target that is none of them", 2)
    return rest if settings.target == "all" else [settings.target]


def expand_seeds(settings: Args) -> Iterator[Args]:
    """The settings of each of `--seeds`, those of `--seed`; its output is a folder in `--out`."""
    if not settings.seeds:
        yield settings
        return
    for seed in seed_numbers(settings.seeds):
        yield with_value(settings, f"s{seed}", seed=seed, seeds="")


def expand_targets(settings: Args, names: list[str]) -> Iterator[Args]:
    """The settings of each run of `--target all`, a folder in `--out`; with --sources there is one run."""
    targets = targets_of(settings, names)
    if settings.protocol == "indomain" or settings.target != "all" or settings.sources:
        yield settings
        return
    for target in targets:
        yield with_value(settings, target, target=target)


def with_value(settings: Args, folder: str, **values) -> Args:
    """The settings of one of several runs, as if its values were flags of its recorded command."""
    out = str(Path(settings.out) / folder) if settings.out else ""
    changed = dataclasses.replace(settings, out=out, **values)
    changed.origins = settings.origins | dict.fromkeys(values, "flag") | {"seeds": "default"}
    return changed


def accuracies_of(results: list[dict], which: str) -> dict[str, float]:
    """The accuracies of one seed's runs after their `best` or `last` round, by name: ALL and AVG, and the
    target if there is one; of several targets each and their mean."""
    if "linear" in results[0][which]:
        return accuracies_of_linear(results, which)
    accuracies = {result["args"]["target"]: result[which]["target"] for result in results
             if "target" in result[which]}
    if len(results) > 1:
        return accuracies | {"mean": statistics.mean(accuracies.values())}
    return accuracies | {"ALL": results[0][which]["ALL"], "AVG": results[0][which]["AVG"]}


def accuracies_of_linear(results: list[dict], which: str) -> dict[str, float]:
    """The same of runs without labels: of each target and share of labels, and the means over targets."""
    by_column, by_share = {}, {}
    for result in results:
        for target, accuracies in result[which]["linear"].items():
            for ratio, accuracy in accuracies.items():
                share = f"{100 * float(ratio):g}% of the labels"
                by_column[f"{target}, {share}"] = accuracy
                by_share.setdefault(share, []).append(accuracy)
    for share, accuracies in by_share.items():
        if len(accuracies) > 1:
            by_column[f"mean, {share}"] = statistics.mean(accuracies)
    return by_column


def show_means(method: str, dataset: str, results_by_seed: dict[int, list[dict]]) -> None:
    """A table of the accuracies, {seed: the results of its runs}, if there are several runs: a row for each
    name, a column for the best and the last round. Without labels there is no best round."""
    runs = sum(results_by_seed.values(), [])
    if len(runs) < 2:
        return
    columns = {"best": "best validation round", "last": "last round"}
    if "linear" in runs[0]["last"]:
        del columns["best"]
    rows = {}
    for which in columns:
        of_each = [accuracies_of(results, which) for results in results_by_seed.values()]
        for name in of_each[0]:
            shown = mean_and_deviation([100 * accuracies[name] for accuracies in of_each])
            rows.setdefault(name, [name]).append(shown)
    what = "mean +- sample deviation over the seeds" if len(results_by_seed) > 1 else "of one seed"
    print(f"{method} on {dataset}, seeds {', '.join(map(str, results_by_seed))}: accuracy (%), {what}")
    print(tabulate(rows.values(), ["", *columns.values()], tablefmt="plain", disable_numparse=True))


def mean_and_deviation(values: list[float], digits: int = 2) -> str:
    """96.12 +- 0.31, or 96.12 of one seed. The deviation is the sample's, n - 1."""
    shown = f"{statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        shown += f" +- {statistics.stdev(values):.{digits}f}"
    return shown
