"""The one domain that a node has: nothing else of a folder is opened, or even listed."""

from __future__ import annotations

import common
from common import Args, Dataset, UserError
from plumbing.data.catalog import named
from plumbing.data.decoding import open_images


def open_domain(settings: Args, name: str, classes: tuple[str, ...]) -> Dataset:
    """The dataset of a run with this domain alone. Stop unless it has the classes on which the nodes have
    agreed."""
    if named(settings.dataset).folder:
        dataset = open_images(settings.dataset, settings.image_size, settings.data, settings.archives,
                              settings.skip_broken, name, classes)
    else:
        dataset = common.read_dataset(settings)
    if name not in dataset.names or tuple(dataset.classes) != classes:
        raise UserError(f"expected the domain {name} and the classes {', '.join(classes)}; found "
                        f"{', '.join(dataset.names)} and {', '.join(dataset.classes)}", 2)
    dataset.domains = [d for d in dataset.domains if d.name == name]
    return common.limited(dataset, settings)
