"""The command line of reproduce.measures; see the package."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from plumbing.errors import Stop, ending
from plumbing.files import write_json
from plumbing.settings import Parser, with_default
from reproduce import measures
from reproduce.drawing import figure_format
from reproduce.measures.adaptation import show_adaptation
from reproduce.measures.curves import show_curve
from reproduce.measures.gradients import show_gradients
from reproduce.measures.overhead import show_cost
from reproduce.measures.pad import show_pad
from reproduce.measures.risks import show_risk
from reproduce.measures.tsne import show_tsne

# Each command: the function that does it, and what it shows.
COMMANDS = {
    "tsne": (show_tsne, "representations of two domains, a row for each run"),
    "pad": (show_pad, "proxy A-distances between clients"),
    "risk": (show_risk, "cross-entropy on the clients' images"),
    "cost": (show_cost, "what a client spends to reach an accuracy"),
    "gradients": (show_gradients, "covariance of the domains' gradients and mutual information of their "
                  "images"),
    "curve": (show_curve, "what a run logs, over the rounds"),
    "adaptation": (show_adaptation, "FDSE's accuracy on the left-out domain by what Algorithm 3 does there"),
}


@dataclass(frozen=True)
class Flag:
    commands: str  # those that have it
    default: str | int | float
    text: str
    choices: tuple[str, ...] | None = None


FLAGS = {
    "out": Flag("tsne pad risk gradients curve", "", "file of the figure, .png, .pdf or .svg; pad draws two "
                "folders, the first on the y axis; empty: tsne.png in the first folder for tsne, else no "
                "figure"),
    "source": Flag("tsne", "", "domain of the left panels; empty: the run's first client; all: every domain "
                   "in one panel, a shape for each (FDSE, Fig. 4)"),
    "target": Flag("tsne", "", "domain of the right panels; empty: the run's left-out domain"),
    "images": Flag("tsne", 1000, "most images of a domain in a panel, drawn by the run's seed"),
    "part": Flag("tsne pad", "", "images that are represented: test (the clients' test parts) or all; empty: "
                 "all for tsne, test for pad", ("test", "all")),
    "which": Flag("tsne pad risk gradients adaptation", "best", "state of the run: best (validation round) "
                  "or last", ("best", "last")),
    "accuracy": Flag("cost", 0.6, "accuracy to reach, above 0 and at most 1"),
    "by": Flag("cost", "AVG", "accuracy that is meant: AVG, ALL or target", ("AVG", "ALL", "target")),
    "batches": Flag("gradients", 16, "batches behind the gradient of a domain"),
    "of": Flag("curve", "target", "what is drawn over the rounds: target, ALL, AVG, loss, discarded, ..."),
    "rates": Flag("adaptation", "0/1/1000", "learning rates of Algorithm 3, one after the other; 0 estimates "
                  "BN_DSE's statistics and does nothing else"),
    "flops": Flag("cost", 0.0, "FLOPs of training for each image; 0: counted in one more round of a client"),
    "data": Flag("tsne pad risk cost gradients adaptation", "data", "folder of the datasets and of the "
                 "decoded cache"),
    "archives": Flag("tsne pad risk cost gradients adaptation", "", "folder with archives downloaded before; "
                     "looked at before the network"),
    "json": Flag("tsne pad risk cost gradients curve adaptation", "", "file for the numbers behind the table "
                 "and the figure; empty: none"),
}


def main(argv: list[str] | None = None) -> None:
    """The command line. Bad usage or a folder that is no run ends it with one line on stderr and exit code
    2."""
    flags = parsed(argv)
    try:
        check(flags)
        show, _ = COMMANDS[flags.what]
        numbers = show(flags)
        if flags.json:
            write_json(Path(flags.json), numbers)
        return
    except (Stop, OSError, KeyboardInterrupt, MemoryError, RuntimeError) as e:
        message, code = ending(e, "the runs are as they were")
    print(f"measures: {message}", file=sys.stderr)
    sys.exit(code)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The flags; those that are not given have their defaults."""
    parser = Parser(prog="measures", allow_abbrev=False, description=measures.__doc__.split("\n\n")[0],
                    epilog="In brackets: the default. A run is changed by none of these. Numbers are from "
                           "the networks that the run tested.")
    shown = "; ".join(f"{name}: {text}" for name, (_, text) in COMMANDS.items())
    parser.add_argument("what", choices=tuple(COMMANDS), help=shown)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="output folder of a finished run")
    for name, flag in FLAGS.items():
        kind = type(flag.default)
        text = with_default(f"{', '.join(flag.commands.split())}: {flag.text}", flag.default)
        parser.add_argument(f"--{name}", help=text, default=None, type=kind, choices=flag.choices,
                            metavar=None if flag.choices else kind.__name__)
    flags = parser.parse_args(argv)
    for name, flag in FLAGS.items():
        if getattr(flags, name) is None:
            setattr(flags, name, flag.default)
        elif flags.what not in flag.commands.split():
            parser.error(f"--{name} goes with {' or '.join(flag.commands.split())}, not with {flags.what}")
    if not flags.part:
        flags.part = "all" if flags.what == "tsne" else "test"
    if flags.what == "tsne" and not flags.out:
        flags.out = str(Path(flags.folders[0]) / "tsne.png")
    return flags


def check(flags: argparse.Namespace) -> None:
    """Stop if a value cannot be meant, before minutes of work and not after."""
    if flags.images < 4:
        raise Stop(f"--images is {flags.images}; it must be at least 4", 2)
    if not 0 <= flags.flops < math.inf:
        raise Stop(f"--flops is {flags.flops}; it must be a finite number, at least 0", 2)
    if not 0 < flags.accuracy <= 1:
        raise Stop(f"--accuracy is {flags.accuracy}; it must be above 0 and at most 1, such as 0.6", 2)
    if flags.batches < 1:
        raise Stop(f"--batches is {flags.batches}; it must be at least 1", 2)
    count = len(flags.folders)
    if flags.what == "pad" and flags.out and count != 2:
        raise Stop(f"--out of pad draws one run against another: give two folders, not {count}", 2)
    if flags.out:
        figure_format(flags.out)
