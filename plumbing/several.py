"""Several runs of one command: those of its seeds and targets, and what is said of their accuracies."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path

from plumbing.catalog import is_custom, short_name, source_of
from plumbing.errors import UserError
from plumbing.files import output_file, write_json
from plumbing.mnist import ANGLES
from plumbing.results import SEEDS, id_of
from plumbing.settings import Args, identity, seed_numbers

from tabulate import tabulate

HEADS = {"best": "best validation round", "last": "last round"}


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
    rest = [name for name in names if not sources or name not in sources]
    if not rest or len(set(sources)) < len(sources) or settings.target in sources:
        raise UserError(f"--sources {settings.sources} leaves no target: expected some of "
                        f"{', '.join(names)}, each once, and a --target that is none of them", 2)
    return rest if settings.target == "all" else [settings.target]


def expand_seeds(settings: Args, method: str) -> Iterator[Args]:
    """The settings of each of `--seeds`, those of `--seed`; its output is a folder in `--out`."""
    if not settings.seeds:
        yield settings
        return
    output_file(summary_file(settings, method), lambda start: b'"accuracies"' in start)
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


def show_targets(method: str, settings: Args, results: list[dict]) -> None:
    """A line with the accuracy on each left-out domain, if there are several."""
    if len(results) < 2:
        return
    accuracies = {result["args"]["target"]: 100 * result["best"]["target"] for result in results}
    each = "  ".join(f"{name} {accuracy:.2f}" for name, accuracy in accuracies.items())
    print(f"{method} on {settings.dataset}, accuracy on each left-out domain (%): {each}  "
          f"mean {statistics.mean(accuracies.values()):.2f}")


def summary_file(args: Args, method: str) -> Path:
    """The file of the means over `--seeds`, in `--out` or else beside the runs' folders."""
    if args.out:
        return Path(args.out) / SEEDS
    key = identity(args, method) | {"seed": seed_numbers(args.seeds)}
    dataset = short_name(args.dataset)
    name = f"{key['method']}-{dataset}-{args.protocol}-{args.scale}-seeds-{id_of(key, 4)}.json"
    return Path("runs") / name


def accuracies_of(results: list[dict], which: str) -> dict[str, float]:
    """The accuracies of one seed's runs after their `best` or `last` round, by name: ALL and AVG, and the
    target if there is one; of several targets each and their mean."""
    if "linear" in results[0][which]:
        return accuracies_of_linear(results, which)
    found = {result["args"]["target"]: result[which]["target"] for result in results
             if "target" in result[which]}
    if len(results) > 1:
        return found | {"mean": statistics.mean(found.values())}
    return found | {"ALL": results[0][which]["ALL"], "AVG": results[0][which]["AVG"]}


def accuracies_of_linear(results: list[dict], which: str) -> dict[str, float]:
    """The same of runs without labels: of each target and share of labels, and the means over targets."""
    found, by_share = {}, {}
    for result in results:
        for target, accuracies in result[which]["linear"].items():
            for ratio, accuracy in accuracies.items():
                share = f"{100 * float(ratio):g}% of the labels"
                found[f"{target}, {share}"] = accuracy
                by_share.setdefault(share, []).append(accuracy)
    for share, accuracies in by_share.items():
        if len(accuracies) > 1:
            found[f"mean, {share}"] = statistics.mean(accuracies)
    return found


def over_seeds(of_seeds: dict[int, list[dict]]) -> dict[str, dict]:
    """{name: {"best" and "last": the values of the seeds in their order, mean, sample deviation (n - 1)}}.
    The deviation of one seed is None. Without labels there is no best round."""
    first, *_ = of_seeds.values()
    moments = ["last"] if "linear" in first[0]["last"] else ["best", "last"]
    found = {}
    for which in moments:
        of_each = [accuracies_of(results, which) for results in of_seeds.values()]
        for name in of_each[0]:
            values = [accuracies[name] for accuracies in of_each]
            deviation = statistics.stdev(values) if len(values) > 1 else None
            found.setdefault(name, {})[which] = {"values": values, "mean": statistics.mean(values),
                                                 "deviation": deviation}
    return found


def percent(numbers: dict) -> str:
    """96.12 +- 0.31, or 96.12 of one seed."""
    shown = f"{100 * numbers['mean']:.2f}"
    if numbers["deviation"] is not None:
        shown += f" +- {100 * numbers['deviation']:.2f}"
    return shown


def show_seeds(args: Args, method: str, of_seeds: dict[int, list[dict]], folders: list[str]) -> None:
    """Print the accuracies over the seeds, {seed: the results of its runs}, and write them to a file."""
    accuracies, path = over_seeds(of_seeds), summary_file(args, method)
    summary = {"method": method, "dataset": args.dataset, "protocol": args.protocol, "scale": args.scale,
               "seeds": list(of_seeds), "folders": folders, "accuracies": accuracies}
    write_json(path, summary)
    first, *_ = accuracies.values()
    rows = [[name, *map(percent, by_moment.values())] for name, by_moment in accuracies.items()]
    heads = ["", *(HEADS[which] for which in first)]
    seeds = ", ".join(map(str, of_seeds))
    what = "mean +- sample deviation over the seeds" if len(of_seeds) > 1 else "of one seed"
    print(f"{method} on {args.dataset}, seeds {seeds}: accuracy (%), {what}; in {path}")
    print(tabulate(rows, heads, tablefmt="plain", disable_numparse=True))
