"""What several tests of the machinery begin with."""

from pathlib import Path

from tests.finished_runs import labelled_runs
from tests.own_images import write_images
from tests.small_datasets import write_vlcs

import pytest


@pytest.fixture
def runs(tmp_path_factory) -> Path:
    """Finished runs of FedAvg and FDSE."""
    return labelled_runs(tmp_path_factory)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Images of one's own: two domains, two classes."""
    return write_images(tmp_path / "images")


@pytest.fixture
def archive(tmp_path, monkeypatch) -> Path:
    """The archive of the small VLCS."""
    return write_vlcs(tmp_path, monkeypatch)
