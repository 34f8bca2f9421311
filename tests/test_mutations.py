"""The lists of broken copies are in order; that each copy is noticed is a long test."""

from tests.mutations.__main__ import ROOT, mutations_of, names, noticed

import pytest


@pytest.mark.parametrize("name", names())
def test_each_mutation_has_its_line(name):
    mutations = mutations_of(name)  # an error if a line is not there once
    assert len(mutations) >= 5
    assert len({mutation.what for mutation in mutations}) == len(mutations)
    assert all((ROOT / test).exists() for test in mutations[0].tests)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_each_broken_copy_is_noticed(name):
    survived = [mutation.what for mutation in mutations_of(name) if not noticed(mutation)]
    assert not survived
