"""Behind reproduce_tables.py: tables, records, cells, statistics, rendering, runner, costs, measures,
figures."""
