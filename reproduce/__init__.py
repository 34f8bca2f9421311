"""Behind reproduce_tables.py: published numbers and records become cells, pages, figures and the scoreboard; what
is missing is planned and run; what is recorded is checked. Commands of their own: compare draws several runs'
curves, predict asks a trained network, measures has what the papers measure of a run's folder."""
