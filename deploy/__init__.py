"""A method on separate machines."""

import os
from importlib.metadata import version

from plumbing.run.errors import UserError

TRIED = "1.42"  # of Flower, as requirements-deploy.txt has it
# Flower tells its makers of each start, and asks them for news, unless it is told not to.
os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")


def check_flower() -> None:
    """Stop unless Flower is one with which this was tried: parts of it are used that others may not have."""
    if not version("flwr").startswith(f"{TRIED}."):
        raise UserError(f"expected Flower {TRIED}, with which this was tried; found {version('flwr')}: "
                        "pip install -r requirements-deploy.txt", 2)
