"""Several runs of one command: those of its seeds and targets, and what is said of their accuracies."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from plumbing.data.catalog import composed, named, source_of
from plumbing.data.mnist import ANGLES
from plumbing.run.errors import UserError
from plumbing.run.settings import Args, seed_numbers

from tabulate import tabulate


def known_domains(dataset: str) -> list[str]:
    """The names of a dataset's domains, as far as they are known before it is read: else none."""
    if dataset == "digits":
        return [f"d{angle}" for angle in ANGLES]
    if dataset.startswith("rotatedmnist"):
        return [f"m{angle}" for angle in ANGLES]
    own = named(dataset)
    if own.folder:  # <domain>/<class>/
        return sorted({composed(path.parent.name) for path in own.folder.glob("[!.]*/[!.]*/")})
    return [] if own.file else list(source_of(dataset).domains)


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


BySeed = dict[int, float]  # {seed: value}


def by_seed(results: list[dict], numbers: Callable[[dict], dict[str, float]]) -> dict[str, BySeed]:
    """{name: {seed: percent}} of the numbers of each run."""
    columns = {}
    for result in results:
        for name, value in numbers(result).items():
            columns.setdefault(name, {})[result["args"]["seed"]] = 100 * value
    return columns


def means_over_columns(columns: list[BySeed]) -> BySeed:
    """The mean of several columns for each seed that has all of them."""
    shared = set.intersection(*(set(values) for values in columns))
    return {seed: statistics.mean(values[seed] for values in columns) for seed in sorted(shared)}


def with_means(columns: dict[str, BySeed]) -> dict[str, BySeed]:
    """The columns of targets, of labels' shares each for itself, and their mean. A target alone keeps ALL and
    AVG beside it, which are other networks' with each target."""
    targets = {}
    for name in columns:
        if name not in ("ALL", "AVG"):
            targets.setdefault(name.partition(",")[2], []).append(name)
    means = {}
    for share, names in targets.items():
        if len(names) > 1:
            columns = {name: of for name, of in columns.items() if name not in ("ALL", "AVG")}
            means[f"mean,{share}" if share else "mean"] = means_over_columns([columns[n] for n in names])
    return columns | means


def accuracies_of(result: dict, which: str) -> dict[str, float]:
    """The accuracies of a run after its `best` or `last` round, by name: the target if there is one, ALL and
    AVG; without labels those of each target and share of labels."""
    of = result[which]
    if "linear" in of:
        return {f"{target}, {100 * float(ratio):g}% of the labels": accuracy
                for target, by_ratio in of["linear"].items() for ratio, accuracy in by_ratio.items()}
    target = {result["args"]["target"]: of["target"]} if "target" in of else {}
    return target | {"ALL": of["ALL"], "AVG": of["AVG"]}


def columns_of(results: list[dict], which: str) -> dict[str, BySeed]:
    """All accuracies of several runs, and their means over the targets."""
    return with_means(by_seed(results, lambda result: accuracies_of(result, which)))


def show_means(method: str, dataset: str, results: list[dict]) -> None:
    """A table of the accuracies, if there are several runs: a row for each name, a column for the best and
    the last round. Without labels there is no best round."""
    if len(results) < 2:
        return
    heads = {"best": "best validation round", "last": "last round"}
    if "linear" in results[0]["last"]:
        del heads["best"]
    columns = [columns_of(results, which) for which in heads]
    rows = [[name, *(mean_and_deviation([*of[name].values()]) for of in columns)] for name in columns[0]]
    seeds = dict.fromkeys(result["args"]["seed"] for result in results)
    what = "mean +- sample deviation over the seeds" if len(seeds) > 1 else "of one seed"
    print(f"{method} on {dataset}, seeds {', '.join(map(str, seeds))}: accuracy (%), {what}")
    print(tabulate(rows, ["", *heads.values()], tablefmt="plain", disable_numparse=True))


def mean_and_deviation(values: list[float], digits: int = 2) -> str:
    """96.12 +- 0.31, or 96.12 of one seed. The deviation is the sample's, n - 1."""
    shown = f"{statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        shown += f" +- {statistics.stdev(values):.{digits}f}"
    return shown
