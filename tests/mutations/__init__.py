"""Broken copies of the method files and of the ground they stand on: the quick tests must notice each.

    python -m tests.mutations fdse fedsr        # all files without a name

tests/mutations/NAME.toml lists one-line mistakes: a term dropped, a coefficient ignored, a state forgotten.
Each is put into a copy of the repository, in which the tests that the list names must then fail.
"""
