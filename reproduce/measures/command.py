"""The command line of reproduce.measures; see the package."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from plumbing.errors import Stop, ending
from plumbing.files import write_json
from plumbing.settings import Parser
from reproduce import measures
from reproduce.drawing import figure_format
from reproduce.measures import adaptation, gradients, overhead, pad, risks, tsne

# Of each command the module that has its flags and shows its numbers.
COMMANDS = {"tsne": tsne, "pad": pad, "risk": risks, "cost": overhead, "gradients": gradients,
            "adaptation": adaptation}


def main(argv: list[str] | None = None) -> None:
    """The command line. Bad usage or a folder that is no run ends it with one line and exit code 2."""
    flags = parsed(argv)
    try:
        if flags.out:
            figure_format(flags.out)
        numbers = COMMANDS[flags.what].show(flags)
        if flags.json:
            write_json(Path(flags.json), {"runs": numbers})
        return
    except (Stop, OSError, KeyboardInterrupt, MemoryError, RuntimeError) as e:
        message, code = ending(e, "the runs are as they were")
    print(f"measures: {message}", file=sys.stderr)
    sys.exit(code)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The flags of the command, and those that all commands have."""
    parser = Parser(prog="measures", allow_abbrev=False, description=measures.__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, module in COMMANDS.items():
        about = module.__doc__.partition("\n\n")[0].replace("\n", " ")
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        command.add_argument("folders", nargs="+", metavar="FOLDER", help="output folder of a finished run")
        command.add_argument("--which", default="best", choices=("best", "last"),
                             help="state of the runs: best (validation round) or last [best]")
        command.add_argument("--out", default="", metavar="FILE", help="file of the figure [none]")
        command.add_argument("--json", default="", metavar="FILE", help="file for the numbers [none]")
        command.add_argument("--data", default="data", help="folder of the datasets and their cache [data]")
        command.add_argument("--archives", default="", help="folder with archives downloaded before [none]")
        command.add_argument("--any-code", action="store_true", help="also runs that other code has trained")
        module.add_flags(command)
    return parser.parse_args(argv)
