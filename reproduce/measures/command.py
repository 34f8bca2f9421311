"""The command line of reproduce.measures; see the package."""

from __future__ import annotations

import argparse
from pathlib import Path

from plumbing.files import write_json
from plumbing.settings import Parser
from reproduce import measures
from reproduce.commands import add_run_flags, one_line_on_stop
from reproduce.drawing import figure_format
from reproduce.measures import adaptation, gradients, overhead, pad, risks, tsne

# Of each command the module that has its flags and shows its numbers.
COMMANDS = {"tsne": tsne, "pad": pad, "risk": risks, "cost": overhead, "gradients": gradients,
            "adaptation": adaptation}


def main(argv: list[str] | None = None) -> None:
    flags = parsed(argv)
    with one_line_on_stop("measures", "the runs are as they were"):
        if flags.out:
            figure_format(flags.out)
        numbers = COMMANDS[flags.what].show(flags)
        if flags.json:
            write_json(Path(flags.json), {"runs": numbers})


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The flags of the command, and those that all commands have."""
    parser = Parser(prog="measures", allow_abbrev=False, description=measures.__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, module in COMMANDS.items():
        about = module.__doc__.partition("\n\n")[0].replace("\n", " ")
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        command.add_argument("folders", nargs="+", metavar="FOLDER", help="output folder of a finished run")
        command.add_argument("--out", default="", metavar="FILE", help="file of the figure [none]")
        command.add_argument("--json", default="", metavar="FILE", help="file for the numbers [none]")
        add_run_flags(command)
        module.add_flags(command)
    return parser.parse_args(argv)
