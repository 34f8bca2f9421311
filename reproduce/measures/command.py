"""The command line of reproduce.measures; see the package."""

from __future__ import annotations

import argparse
from pathlib import Path

from plumbing.run.errors import one_line_on_failure
from plumbing.run.files import output_file, write_json
from plumbing.run.settings import Parser
from reproduce import measures
from reproduce.commands import about, add_run_flags
from reproduce.measures import adaptation, confusion, overhead

# Of each command the module that has its flags and shows its numbers.
COMMANDS = {"cost": overhead, "adaptation": adaptation, "confusion": confusion}


def main(argv: list[str] | None = None) -> None:
    flags = parsed(argv)
    with one_line_on_failure("measures", "the runs are as they were"):
        if flags.json:
            output_file(Path(flags.json), lambda start: start.split(None, 2)[1:2] == [b'"runs":'])
        numbers = COMMANDS[flags.what].show(flags)
        if flags.json:
            write_json(Path(flags.json), {"runs": numbers})


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The flags of the command, and those that all commands have."""
    parser = Parser(prog="measures", allow_abbrev=False, description=about(measures.__doc__))
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, module in COMMANDS.items():
        text = about(module.__doc__).replace("\n", " ")
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("folders", nargs="+", metavar="FOLDER", help="output folder of a finished run")
        command.add_argument("--json", default="", metavar="FILE",
                             help="file for the numbers, as JSON [none]")
        add_run_flags(command)
        module.add_flags(command)
    return parser.parse_args(argv)
