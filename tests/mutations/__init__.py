"""Broken copies of the method files: each must be noticed by its method's quick tests.

    python -m tests.mutations fdse fedsr        # all methods without a name; --list shows them

tests/mutations/NAME.toml lists one-line mistakes: a term dropped, a coefficient ignored, a state forgotten.
Each is put into a copy of the repository, in which the tests that the list names must then fail.
"""
