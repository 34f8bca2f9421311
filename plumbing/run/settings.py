"""Flags and settings: every value of a run, where it may come from, and where it came from.

A value comes from the first of these layers that has one:

    flag             what stands on the command line
    laptop, smoke    with --scale: the method's own table for the dataset, then SCALES below
    variant NAME     with --variant: the method's VARIANTS table for the dataset
    <dataset>        the method's PAPER table for the dataset; folder:PATH has that of pacs, here and above
    derived          what follows from other values, such as the optimizer that goes with a learner
    default          the default of the flag

`Args` has what every run has; a method file extends it. `parse` makes one of a command line, which is fixed
from then on. `origins` has the layer of each value, and who says it, see `source`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import operator
import os
import re
import signal
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

from plumbing.data.augment import AUGMENTATIONS
from plumbing.data.catalog import FOLDERS, OWN, composed, named
from plumbing.run.devices import choose_device, choose_precision
from plumbing.run.errors import UserError
from plumbing.run.networks import ELSEWHERE, canonical_network, hash_of, near, network_file
from plumbing.run.provenance import ROOT, version_line
from plumbing.run.scores import METRICS


LARGEST = (1 << 63) - 1  # a whole number that torch takes
LARGEST_FLOAT = 3.4e38  # about what a float32 takes
LIKE_OWN = "pacs"  # whose settings images of one's own have: every method has some for it
USUAL = ("dataset", "protocol", "target", "augment", "image_size", "backbone", "rounds", "epochs",
         "batch_size", "lr", "scale", "seed", "seeds", "out", "archives")  # in --help
SHOWN_ANYWAY = ("dataset", "protocol", "device", "precision", "out")  # in the first lines of a run
ELSEWHERE_CALLED = {"--learning-rate": "--lr", "--model": "--backbone", "--local-epochs": "--epochs"}
LIMITS = {"low": ("at least", operator.ge), "above": ("above", operator.gt), "high": ("at most", operator.le)}


class Sourced(NamedTuple):
    """A value of a method's table, and who says it."""

    value: object
    source: str


def source(of: str, **values) -> dict[str, Sourced]:
    """Values of a table from one source: "text, Sec. 5.1", "code dd266a2, algorithm/fdse.py", "ours".

    A table's values follow one rule: what the text says; where it is silent, what the released code did (its
    first version, if there are several), else the code that the paper cites; else ours.
    """
    return {name: Sourced(value, of) for name, value in values.items()}


def sourced(rows: dict[str, dict], says: dict[str, str]) -> dict[str, dict[str, Sourced]]:
    """Rows of a table, dataset -> values, with who says each: `says` has for each source the settings, the
    datasets, or `dataset.setting`, whose values it gives."""
    source_of = {}
    for of, names in says.items():
        source_of |= dict.fromkeys(names.split(), of)
    table = {}
    for dataset, row in rows.items():
        table[dataset] = {}
        for name, value in row.items():
            keys = (f"{dataset}.{name}", dataset, name)
            of = next(source_of[key] for key in keys if key in source_of)
            table[dataset][name] = Sourced(value, of)
    return table


def arg(default, text: str, *, choices=None, low=None, high=None, above=None, numbers=True, at_test=False,
        hidden=False, source=""):
    """A field of `Args`: its default, its help text, its limits, and who says the default.

    `low` and `high` are included limits, `above` an excluded one. `numbers=False` marks what cannot change a
    number of a run (folders, checkpoint interval): it may differ when a run is resumed. `at_test=True` marks
    what acts on the tested network of a left-out domain alone: one training serves all its values.
    `hidden=True` is for the programs around a run (bench, deploy, reproduce): no help names it.
    """
    if high is None and type(default) is int:
        high = LARGEST
    meta = dict(text=text, choices=choices, low=low, high=high, above=above, numbers=numbers, at_test=at_test,
                hidden=hidden, source=source)
    return field(default=default, metadata=meta)


# What every run has, in the groups of --help


@dataclass
class DataArgs:
    group: ClassVar[str] = "data"

    dataset: str = arg("digits", "dataset; digits needs no download")
    protocol: str = arg("indomain", "indomain: each client is tested on its own test part; lodo: leave one "
                                    "domain out", choices=("indomain", "lodo"))
    target: str = arg("all", "lodo, linear: name of the left-out domain; all: each domain in turn")
    target_part: str = arg("all", "lodo, linear: images of the target domain to use: all, test (its test "
                                  "part by --split), or heldout (validation and test part)",
                           choices=("all", "test", "heldout"))
    split: str = arg("0.8/0.1/0.1", "shares of training, validation and test images in each client")
    clients_per_domain: int = arg(1, "number of clients that share one domain", low=1, high=10_000)
    dirichlet: float = arg(0.0, "concentration of the label skew between a domain's clients; 0: no skew",
                           low=0, high=1e6)
    skip_broken: bool = arg(False, "leave out images that cannot be decoded instead of ending the run")
    limit: int = arg(0, "number of images to use from each domain, drawn by the seed; 0: all", low=0)
    normalize: str = arg("unit", "pixel values: unit ([0,1]) or imagenet (ImageNet's mean and deviation)",
                         choices=("unit", "imagenet"))
    augment: str = arg("none", "augmentation of the training images, drawn again for each image and batch",
                       choices=("none", *AUGMENTATIONS))
    image_size: int = arg(28, "height and width of the images, in pixels", low=8, high=4096)


@dataclass
class TrainingArgs:
    group: ClassVar[str] = "training"

    backbone: str = arg("smallcnn_bn", "network to train",
                        choices=("smallcnn", "smallcnn3", "smallcnn3_linear", "smallcnn_bn", "alexnet_bn",
                                 "alexnet", "resnet18", "resnet50", "resnet18_3x3", "vit_b8"))
    weights: str = arg("none", "initial weights: none (random), imagenet (of torchvision or timm), or a file")
    rounds: int = arg(100, "communication rounds T", low=1)
    epochs: int = arg(1, "local epochs E in a round", low=1)
    steps: int = arg(0, "local steps in a round, instead of epochs; 0: use epochs", low=0)
    participation: float = arg(1.0, "share of the clients that train in a round", above=0, high=1)
    batch_size: int = arg(50, "images in a batch B", low=2, high=1_000_000)
    lr: float = arg(0.1, "learning rate of the first round", above=0)
    lr_decay: float = arg(1.0, "factor on the learning rate after each round", above=0, high=1)
    momentum: float = arg(0.0, "momentum of the local SGD", low=0, high=1)
    weight_decay: float = arg(0.0, "weight decay of the local SGD", low=0)
    clip: float = arg(0.0, "largest norm of the gradient over all parameters; 0: no clipping", low=0)


@dataclass
class RunArgs:
    group: ClassVar[str] = "the run"

    scale: str = arg("paper", "paper: the paper's setting; laptop: minutes on two cores; smoke: seconds",
                     choices=("paper", "laptop", "smoke"))
    seed: int = arg(0, "seed of the split, the initial weights, the batches and all other randomness", low=0)
    seeds: str = arg("", "several seeds instead of --seed, such as 0,1,2: one run for each, then mean and "
                         "deviation over the seeds", numbers=False)
    device: str = arg("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, ...")
    precision: str = arg("auto", "fp32, tf32 (GPU), bf16 (autocast), or auto: bf16 if the processor supports "
                                 "it, else fp32", choices=("auto", "fp32", "tf32", "bf16"))
    threads: int = arg(0, "number of CPU threads; the last digits of a run depend on it; 0: torch's choice, "
                          "limited by OMP_NUM_THREADS", low=0, high=1024, numbers=False)
    deterministic: bool = arg(False, "on a GPU: use PyTorch's deterministic algorithms where they exist; "
                                     "otherwise the last digits of two runs may differ", numbers=False)
    # It adds a second reading and changes nothing in the first, so it is not of a run's identity: a run with
    # it serves where one without it is asked for. Where the second reading is asked for, a folder or a record
    # without it does not serve: plumbing.run.runfolder.Run.read, reproduce.records.Records.
    after_training: bool = arg(False, "at each evaluation also test each client's network as it is right "
                                      "after its local training", numbers=False)
    eval_every: int = arg(1, "rounds between evaluations; the last round is always evaluated", low=1)
    metric: str = arg("accuracy", "measure on all validation images for the best round: accuracy, balanced "
                                  "(accuracy), f1 (macro-F1), auc (one class against the rest)",
                      choices=METRICS)
    test_rounds: str = arg("all", "when to evaluate the test parts: all: at every evaluation; best: only "
                                  "after a better validation, and at the end", choices=("all", "best"),
                           numbers=False, hidden=True)
    figures: bool = arg(True, "draw curves.png at the end", numbers=False)
    tensorboard: bool = arg(False, "also write the logged numbers for TensorBoard into the output folder; "
                                   "needs pip install tensorboard", numbers=False)
    data: str = arg("data", "folder of the datasets, the downloads and the decoded cache", numbers=False)
    archives: str = arg("", "folder with downloaded archives; they are used before any download",
                        numbers=False)
    out: str = arg("", "output folder; empty: runs/<method>-<dataset>-...-<hash of the arguments>",
                   numbers=False)
    resume: bool = arg(True, "resume the run in the output folder; --no-resume starts it again",
                       numbers=False)
    any_code: bool = arg(False, "resume a run that other code began, or show its result", numbers=False)
    stop_after: int = arg(0, "end after this round and save it; the same command without this flag resumes; "
                             "0: never", low=0, numbers=False)
    checkpoint_every: float = arg(30.0, "shortest time between checkpoints, in seconds; 0: after each round",
                                  low=0, numbers=False, hidden=True)
    record: str = arg("", "JSONL file to which the finished run is appended as one line", numbers=False)


@dataclass
class Args(RunArgs, TrainingArgs, DataArgs):
    """What every run has. Method files extend it; `parse` turns it into a command line."""

    group: ClassVar[str] = "this method's own"
    origins: ClassVar[dict[str, str]] = {}  # of each value its layer; `parse` sets it on what it returns
    # Flags of methods without labels, see LinearArgs; here what they are for the others.
    views: ClassVar[int] = 1
    crop: ClassVar[int] = 0
    drop_last: ClassVar[bool] = False
    sources: ClassVar[str] = ""

    def __setattr__(self, name: str, value) -> None:
        if "origins" in self.__dict__:
            raise dataclasses.FrozenInstanceError(f"settings are fixed once parsed, and so is {name}")
        super().__setattr__(name, value)

    def validate(self) -> None:
        """Stop if values do not go together, before any data is read; a method's own rule."""

    def depends_on_rounds(self) -> str:
        """Why a round's numbers depend on --rounds; empty: they do not. A method's own rule."""
        return ""


@dataclass
class LinearArgs(Args):
    """What every run of a method without labels has: it trains on views of the images, and a linear
    classifier on the frozen network says how good the representation of a domain is that it has not seen
    (FedGaLA, Sec. 4, App. B.3)."""

    group: ClassVar[str] = "views and linear evaluation"

    protocol: str = arg("linear", "linear: train without labels, then fit a linear classifier to a part of "
                                  "the target's labels", choices=("linear",))
    sources: str = arg("", "domains of the clients, such as painting,real,sketch; empty: all but the target. "
                           "With --target all, one run evaluates all the other domains")
    crop: int = arg(32, "height and width of the views, and of the images in the evaluation, in pixels",
                    low=8, high=4096, source="text of FedGaLA, App. B.1")
    augment: str = arg("simclr", "augmentation of the views, drawn again for each view and batch",
                       choices=("none", *AUGMENTATIONS), source="text of FedGaLA, App. B.1, grey as its code")
    drop_last: bool = arg(True, "leave out the last batch of an epoch if it is smaller than the others",
                          source="code of FedGaLA f3ec1e1, main.py")
    label_ratio: str = arg("0.1/0.3", "shares of the target's labels for fitting classifiers, one classifier "
                                      "for each share; they are tested on the other images",
                           source="text of FedGaLA, Table 1")
    probe: str = arg("encoder", "input of the classifier: the encoder's output or the projector's",
                     choices=("encoder", "projector"), source="text of FedGaLA, App. B.3")
    linear_lr: float = arg(3e-3, "learning rate of the classifier's Adam", above=0,
                           source="text of FedGaLA, App. B.3")
    linear_epochs: int = arg(100, "epochs of the classifier", low=1, source="text of FedGaLA, App. B.3")
    linear_batch: int = arg(512, "images in a batch when the classifier is fitted", low=1,
                            source="code of FedGaLA f3ec1e1, main.py")
    linear_views: str = arg("plain", "images for fitting the classifier: plain, or augmented (new views by "
                                     "--augment in each epoch); the test uses plain images",
                            choices=("augmented", "plain"), source="ours")

    views: ClassVar[int] = 2  # of each image, stacked in a batch


# Settings by dataset for the smaller scales; a method's own go over them, see the layers above.
SCALES = {"paper": {}}
WITH_LABELS = {}  # the same, of methods that train with labels alone
SCALES_FILE = Path(__file__).with_name("scales.toml")
for scale, tables in tomllib.loads(SCALES_FILE.read_text(encoding="utf-8")).items():
    WITH_LABELS[scale] = tables.pop("with_labels", {})
    SCALES[scale] = dict.fromkeys(FOLDERS, tables.pop("images")) | tables


# From a command line to settings


def parse(cls: type[Args], paper: dict[str, dict], argv: list[str] | None = None, *,
          variants: dict[str, dict[str, dict]] | None = None, laptop: dict[str, dict] | None = None,
          smoke: dict[str, dict] | None = None, follows: Callable[[dict], dict] | None = None) -> Args:
    """The settings of a run from the command line, by the layers above.

    `paper`, `laptop` and `smoke` are tables dataset -> values, `variants` one more level; `follows(values)`
    gives the derived values. Bad usage ends the program with one line on stderr and exit code 2; --help,
    --help-all and --show-settings end it with 0.
    """
    parser = parser_of(cls, tuple(paper))
    # Of a file that takes its flags from another method: its own name.
    parser.prog = Path(sys.argv[0] if argv is None else sys.modules[cls.__module__].__file__).stem
    given = vars(parser.parse_args(argv))
    for name in given.keys() & {"sources", "target"}:  # of domains, whose names have composed letters
        given[name] = composed(given[name])
    show = given.pop("show_settings", False)
    dataset = given.get("dataset", cls.dataset)
    custom_data = dataset if named(dataset).custom else ""
    if custom_data:
        dataset = LIKE_OWN
    scale = given.get("scale", cls.scale)
    variant = given.get("variant", getattr(cls, "variant", ""))

    defaults = {f.name: Sourced(f.default, f.metadata["source"]) for f in dataclasses.fields(cls)}
    layers = [("default", defaults)]  # the weakest first
    layers.append((dataset, paper[dataset]))
    if variant in (variants or {}):
        if dataset not in variants[variant]:
            there = ", ".join(variants[variant])
            parser.error(f"--variant {variant} has no settings for {dataset}; it has for {there}")
        layers.append((f"variant {variant}", variants[variant][dataset]))
    if scale != "paper":
        own = laptop if scale == "laptop" else smoke
        layers.append((scale, SCALES[scale].get(dataset, {})))
        if not issubclass(cls, LinearArgs):
            layers.append((scale, WITH_LABELS[scale].get(dataset, {})))
        layers.append((scale, (own or {}).get(dataset, {})))
    if custom_data:
        layers.append(("own data", {"target_part": "all"}))  # on PACS it is as its paper has it
    if named(custom_data).file:
        layers.append(("own data", {"augment": "none", "normalize": "unit"}))
    if network_file(given.get("backbone", "")):  # it has whatever weights its file gives it
        layers.append(("own network", {"weights": "none"}))
    layers.append(("flag", given))
    if follows:
        values, _ = merge(layers)
        layers.insert(1, ("derived", follows(values | {"dataset": dataset})))
    values, origins = merge(layers)

    for name in ("device", "precision"):
        if values[name] == "auto":
            origins[name] = "this machine"
    try:
        values["device"] = choose_device(values["device"])
        values["precision"] = choose_precision(values["precision"], values["device"])
        args = cls(**values)
        for f in dataclasses.fields(cls):
            if getattr(args, f.name) != values[f.name]:  # derived by the class itself
                origins[f.name] = f"derived: {f.metadata['source']}" if f.metadata["source"] else "derived"
        check_settings(args, origins)
    except UserError as stop:
        parser.error(str(stop))
    args.origins = origins
    if show:
        print_and_exit(settings_table(args, parser.prog))
    return args


def merge(layers: list[tuple[str, dict]]) -> tuple[dict, dict[str, str]]:
    """Of each setting the value and the origin, with its source, in the last layer that has it."""
    values, origins = {}, {}
    for origin, of_layer in layers:
        for name, value in of_layer.items():
            values[name], origins[name] = value, origin
            if isinstance(value, Sourced):
                values[name] = value.value
                origins[name] = f"{origin}: {value.source}" if value.source else origin
    return values, origins


def check_settings(args: Args, origins: dict[str, str]) -> None:
    """Stop if a value is outside its limits, or if values do not go together."""
    for f in dataclasses.fields(args):
        value = getattr(args, f.name)
        limits = violation(value, f.metadata)
        if limits:
            raise UserError(f"{flag_of(f.name)} is {value}; it must be a finite number {limits}", 2)
    if args.seeds and seed_numbers(args.seeds) and origins["seed"] == "flag":
        raise UserError("--seed and --seeds do not go together: give one of them", 2)
    if args.dirichlet and args.clients_per_domain == 1:
        raise UserError(f"--dirichlet {args.dirichlet} needs several clients in a domain: set "
                        "--clients-per-domain", 2)
    own = named(args.dataset).folder
    for flag, folder in (("--out", args.out or "runs"), ("--data", args.data)) if own else ():
        if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(own)):
            raise UserError(f"{flag}, the folder {folder}, is inside {own}, where it would be taken for "
                            "images of a domain: give another one", 2)
    if args.weights == "imagenet" and network_file(args.backbone):
        raise UserError(f"--weights imagenet is of known networks, not of --backbone {args.backbone}: load "
                        "weights in that file, or give --weights FILE", 2)
    shares(args.split)
    if args.protocol == "linear" and ratios(args.label_ratio) and args.metric != "accuracy":
        raise UserError(f"--metric {args.metric} chooses a round by labels, which --protocol linear has "
                        "not", 2)
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError("--tensorboard needs a package that is not installed: pip install tensorboard", 2)
    if args.after_training:
        check_after_training(args)
    args.validate()


def check_after_training(args: Args) -> None:
    """Stop if clients' networks after local training cannot be tested."""
    why = ""
    if args.protocol == "linear":
        why = "clients without labels have no accuracy: it does not go with --protocol linear"
    elif args.participation < 1:
        why = f"all clients must train in a round: --participation is {args.participation:g}, not 1"
    if why:
        raise UserError(f"--after-training tests every client after its training; {why}", 2)


def violation(value, limits) -> str:
    """What a number must be, if it is not; else nothing. `limits`: low, high (included), above (excluded)."""
    words = []
    fits = not isinstance(value, float) or abs(value) <= LARGEST_FLOAT
    for name, (relation, holds) in LIMITS.items():
        if limits[name] is not None:
            words.append(f"{relation} {limits[name]}")
            fits = fits and holds(value, limits[name])
    return "" if fits else " and ".join(words)


class Parser(argparse.ArgumentParser):
    """argparse with errors in one line: what is wrong, the nearest flag, where the help is; exit code 2.
    --help leaves out the flags in `rare`, which --help-all explains too."""

    rare = frozenset()

    def error(self, message):
        if message.startswith("unrecognized arguments: "):
            flag = re.split("[ =]", message.partition(": ")[2])[0]
            flags = [option for action in self._actions for option in action.option_strings]
            message = f"{flag} is not a flag of {self.prog}"
            meant = difflib.get_close_matches(flag, flags, n=1, cutoff=0.75)
            if flag in ELSEWHERE_CALLED:
                meant = [ELSEWHERE_CALLED[flag]]
            if meant:
                message += f"; did you mean {meant[0]}?"
        every = "--help-all" if self.rare else "--help"
        self.exit(2, f"{self.prog}: {message} ({every} explains every flag)\n")

    def print_help(self, file=None):
        texts = {action: action.help for action in self._actions}
        for action in texts:
            if action.dest in self.rare:
                action.help = argparse.SUPPRESS
        short = self.format_help()
        for action, text in texts.items():
            action.help = text
        print_and_exit(short)


@functools.cache
def parser_of(cls: type[Args], datasets: tuple[str, ...]) -> Parser:
    """The command line of a method: its own flags first, then those of data, training and the run."""
    about = sys.modules[cls.__module__].__doc__ or ""
    parser = Parser(allow_abbrev=False, usage="%(prog)s [flags]",
                    description=re.split(r"\n.*  This file\n", about)[0],
                    formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter,
                                                      max_help_position=32, width=110),
                    epilog="In brackets: the value if nothing else sets it. Each dataset, scale and variant "
                           "sets values of its\nown: --show-settings prints what a command uses, and where "
                           "it comes from. --help-all explains every flag.")
    groups = {}
    for base in (Args, LinearArgs, DataArgs, TrainingArgs, RunArgs):
        if issubclass(cls, base):
            groups[base] = parser.add_argument_group(base.group)
    for f in dataclasses.fields(cls):
        if "text" not in f.metadata:
            parser.error(f"{f.name} of Args is no flag: give it as arg(default, text)")
        owners = [base for base in (DataArgs, TrainingArgs, RunArgs, LinearArgs) if hasattr(base, f.name)]
        add_flag(groups[owners[0] if owners else Args], f, datasets)
    names = [f.name for base in (DataArgs, TrainingArgs, RunArgs) for f in dataclasses.fields(base)]
    parser.rare = {*names} - {*USUAL}
    groups[RunArgs].add_argument("--help-all", action=ShowLine, nargs=0, default=argparse.SUPPRESS,
                                 const=Parser.format_help, help="explain every flag, and stop")
    groups[RunArgs].add_argument("--show-settings", action="store_true", default=argparse.SUPPRESS,
                                 help="print every setting with its origin, and stop")
    add_version(groups[RunArgs])
    return parser


class ShowLine(argparse.Action):
    """Prints what its function makes of the parser, as soon as it is read: what else stands on the command
    line does not matter."""

    def __call__(self, parser, namespace, values, option_string=None):
        print_and_exit(self.const(parser))


def add_version(group) -> None:
    """--version, which ends the program after one line. git is asked only then."""
    group.add_argument("--version", action=ShowLine, nargs=0, default=argparse.SUPPRESS,
                       const=lambda parser: f"{parser.prog}: {version_line()}",
                       help="print version, commit, torch and Python, and stop")


def add_flag(group, f: dataclasses.Field, datasets: tuple[str, ...]) -> None:
    """A flag for one field of `Args`; it is not in the result unless it stands on the command line."""
    text = f"{f.metadata['text']} [{shown_value(f.default)}]".replace("%", "%%")
    how = dict(dest=f.name, help=text, default=argparse.SUPPRESS)
    if f.metadata["hidden"]:
        how["help"] = argparse.SUPPRESS
    if isinstance(f.default, bool):
        group.add_argument(flag_of(f.name), action=argparse.BooleanOptionalAction, **how)
        return
    how["type"] = existing_folder if f.name == "archives" else type(f.default)
    if f.name == "backbone":
        how["type"] = lambda name: canonical_network(name, f.metadata["choices"])
        how["metavar"] = "name"
        how["help"] += (f": {', '.join(f.metadata['choices'])}, {ELSEWHERE}, a function (args, channels, "
                        "classes) -> common.Net")
    elif f.metadata["choices"]:
        how["choices"] = f.metadata["choices"]
    else:
        how["metavar"] = type(f.default).__name__
    if f.name == "dataset":
        how["type"] = lambda name: canonical(name, datasets)
        how["metavar"] = "name"  # all of them in braces are wider than a terminal
        how["help"] += (f": {', '.join(datasets)}, {OWN}PATH (images in PATH/domain/class/), or a file.py "
                        "with load(args)")
    group.add_argument(flag_of(f.name), **how)


def existing_folder(path: str) -> str:
    """A value of --archives: empty, or a folder."""
    if path and not os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{path} is not a folder")
    return path


def canonical(dataset: str, datasets: tuple[str, ...]) -> str:
    """The name of a dataset; officecaltech10 is another name of officecaltech. A folder or file is the same
    one from wherever a command is given."""
    path = dataset.removeprefix(OWN)
    if dataset.startswith(OWN) and path:
        return OWN + os.path.abspath(os.path.expanduser(path))
    if named(dataset).file:
        return os.path.abspath(os.path.expanduser(dataset))
    if dataset == "officecaltech10":
        return "officecaltech"
    if dataset not in datasets:
        meant = near(dataset.lower(), list(datasets))
        if os.path.isdir(dataset):
            meant = f"; did you mean {OWN}{dataset}?"
        raise argparse.ArgumentTypeError(f"there are no settings for {dataset!r} here; choose from "
                                         f"{', '.join(datasets)}, {OWN}PATH, or a file.py{meant}")
    return dataset


def flag_of(name: str) -> str:
    """The flag of a field: lambda_ is --lambda."""
    return "--" + name.strip("_").replace("_", "-")


def flag_with(name: str, value) -> list[str]:
    """A field and its value as words of a command."""
    if isinstance(value, bool):
        return [flag_of(name) if value else flag_of(name).replace("--", "--no-", 1)]
    return [flag_of(name), str(value)]


def shown_value(value) -> str:
    """A value for a person: 0.035, not 0.034999999999999996."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return "empty" if value == "" else str(value)


def print_and_exit(text: str) -> None:
    """Print and end with 0. A reader that has gone, as `head` has after ten lines, ends it too."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(text, flush=True)
    sys.exit(0)


# Settings shown


def settings_of(args: Args) -> dict[str, dict]:
    """Of each setting its value and its origin: the content of settings.json."""
    return {f.name: {"value": getattr(args, f.name), "origin": args.origins.get(f.name, "set directly")}
            for f in dataclasses.fields(args)}


def settings_table(args: Args, method: str) -> str:
    """Every setting, a line each: name, value, origin."""
    lines = [f"{method}: every setting, its value, and where that comes from"]
    lines += [f"  {flag_of(name):23} {shown_value(setting['value']):23} {setting['origin']}"
              for name, setting in settings_of(args).items()]
    return "\n".join(lines)


def differences(args: Args) -> list[str]:
    """A line for each origin with the settings that differ from the flags' defaults."""
    of_origin = {}
    for f, (name, setting) in zip(dataclasses.fields(args), settings_of(args).items()):
        if setting["value"] != f.default and name not in SHOWN_ANYWAY:
            shown = f"{name.strip('_')} {shown_value(setting['value'])}"
            of_origin.setdefault(setting["origin"], []).append(shown)
    return [f"  {origin}: {', '.join(settings)}" for origin, settings in of_origin.items()]


# What a run is identified by


def method_name(file: str | Path) -> str:
    """The name by which runs of a method's file are known: fdse, official.fdse, fedprox of baselines/.
    Stop if a file elsewhere has the name of a method of this repository: their runs would be mixed."""
    path = Path(file).resolve()
    if path.parent == ROOT / "official":
        return f"official.{path.stem}"
    if path.parent in (ROOT, ROOT / "baselines"):
        return path.stem
    for folder in (ROOT, ROOT / "baselines"):
        if (folder / path.name).exists():
            raise UserError(f"{path} has the name of a method of this repository: give the file another "
                            "name", 2)
    return path.stem


def method_file(Server, Client, build=None) -> Path:
    """The file of a method: the script that runs, if one of these is its own (a `partial` counts as such);
    else that of Client, or of Server if that one takes Client from another method."""
    of_server, of_client = sys.modules[Server.__module__], sys.modules[Client.__module__]
    places = {getattr(part, "__module__", "") for part in (Server, Client, build)}
    if places & {"__main__", "functools"}:
        module = sys.modules["__main__"]
    elif any(value is Client or value is of_client for value in vars(of_server).values()):
        module = of_server
    else:
        module = of_client
    return Path(module.__file__).resolve()


def identity(args: Args, method: str = "", content: str = "") -> dict:
    """The values that decide the numbers of a run; two runs are the same when these are. Without `method` it
    is that of the file of `args`. One's own data are known by their content, wherever their folder lies."""
    key = {"method": method or method_name(sys.modules[type(args).__module__].__file__)}
    for f in dataclasses.fields(args):
        if f.metadata["numbers"]:
            key[f.name] = getattr(args, f.name)
    if content and named(args.dataset).custom:
        start = args.dataset if named(args.dataset).file else OWN + named(args.dataset).folder.name
        key["dataset"] = f"{start} {content}"
    if Path(args.weights).is_file():
        key["weights"] += " " + hash_of(Path(args.weights))
    if network_file(args.backbone):
        key["backbone"] += " " + hash_of(network_file(args.backbone))
    key["device"] = args.device.split(":")[0]
    return key


# Values written as text


def written(flag: str, text: str, separator: str, kind: type, fits: Callable, expected: str) -> list:
    """The numbers that a flag's text has. Stop if they are others than expected."""
    with contextlib.suppress(ValueError):
        numbers = [kind(word) for word in text.split(separator)]
        if fits(numbers):
            return numbers
    raise UserError(f"{flag} is {text}; expected {expected}", 2)


def shares(split: str) -> list[float]:
    """'0.8/0.1/0.1' -> [0.8, 0.1, 0.1]"""
    return written("--split", split, "/", float,
                   lambda s: len(s) == 3 and min(s) > 0 and abs(sum(s) - 1) < 1e-6,
                   "three positive shares that sum to 1, such as 0.8/0.1/0.1")


def ratios(text: str) -> list[float]:
    """'0.1/0.3' -> [0.1, 0.3]"""
    return written("--label-ratio", text, "/", float,
                   lambda parsed: all(0 < r < 1 for r in parsed) and len(set(parsed)) == len(parsed),
                   "shares between 0 and 1, each once, such as 0.1/0.3")


def seed_numbers(text: str) -> list[int]:
    """'0,1,2' -> [0, 1, 2]"""
    return written("--seeds", text, ",", int,
                   lambda seeds: 0 <= min(seeds) <= max(seeds) <= LARGEST and len(set(seeds)) == len(seeds),
                   "whole numbers from 0 on, each once, such as 0,1,2")
