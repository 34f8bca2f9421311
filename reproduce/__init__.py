"""Behind reproduce_tables.py. A module imports from those above it.

    methods      the method files by name, and the arguments of their commands
    published    the published numbers, tables/published/*.csv
    tables       tables/*.toml, read
    records      runs, the records of finished ones in results/runs.jsonl, and what --check has found of them
    statistics   what is said of several seeds
    drawing      what all figures share
    measures/    what the papers measure of a finished run's folder; python -m reproduce.measures
    cells        the run and the numbers behind each cell, and the runs that are missing
    figures      the figures that are drawn from the records
    scoreboard   the state of all published cells in a picture, a table and a sentence
    rendering    pages, csv, the terminal, the README's block
    measuring    what tables and figures need of the runs' folders
    plan         what missing runs would take, and which cannot start here
    runner       runs them, on this machine or a cluster
    check        whether the code of now still gives the recorded numbers

Commands of their own: compare draws several runs' curves, predict asks a trained network.
"""
