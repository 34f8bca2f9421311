"""Behind reproduce_tables.py: published numbers and records become cells, pages and figures; what is missing
is run; what is recorded is checked. Commands of their own: compare, predict and measures."""
