"""Behind reproduce_tables.py. A module imports from those above it.

    methods      the method files by name, and the arguments of their commands
    published    the published numbers, tables/published/*.csv
    tables       tables/*.toml, read and checked
    records      runs, and the records of finished ones in results/runs.jsonl
    statistics   what is said of several seeds
    drawing      what all figures share
    measures/    what the papers measure of a finished run's folder; python -m reproduce.measures
    cells        the run and the numbers behind each cell, and the runs that are missing
    figures      the figures that are drawn from the records
    scoreboard   the state of all published cells in a picture, a table and a sentence
    rendering    pages, csv, the terminal, the README's block
    measuring    what tables and figures need of the runs' folders
    origins      the runs behind the cells, and those of an earlier version of the code
    short_runs   whether changed sources give the same numbers
    work         how much a run computes, counted on tensors without values
    throughput   how fast a device computes, by recorded times or a guess
    cost         what missing runs would take
    runner       runs them, on this machine or a cluster
"""
