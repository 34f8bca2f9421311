"""Every cell of the tables has its clients: the split of each run, with stand-ins of the real counts."""

import dataclasses

import common
from plumbing.catalog import FOLDERS
from plumbing.several import expand_targets
from reproduce.cells import run_of
from reproduce.methods import arguments
from reproduce.tables import read_tables

import torch

# Images of each domain where the catalogue does not know them: those of the files, or so.
COUNTS = {
    "digits": [300] * 6,
    "rotatedmnist": [1000] * 6,
    "rotatedmnist-t10k": [1000] * 6,
    "terrainc": [9736, 3970, 5883, 4741],
    "iwildcam": [3000] * 10,
}
OF_REAL = 5000  # the domain `real` of DomainNet's ten and twenty classes
CLASSES = {"digits": 10, "rotatedmnist": 10, "rotatedmnist-t10k": 10, "iwildcam": 10}
# What the clients depend on.
SPLIT = ("dataset", "protocol", "target", "target_part", "sources", "split", "clients_per_domain",
         "dirichlet", "limit", "label_ratio")
SEEDS = (0, 1, 2)


def stand_in(args) -> tuple[list[common.Domain], int]:
    """The domains of a dataset, their classes as large as each other, their images without pixels; and how
    many classes."""
    source = FOLDERS.get(args.dataset)
    if args.dataset in COUNTS:
        counts = dict(zip(names_of(args.dataset), COUNTS[args.dataset]))
    else:
        counts = {name: count or OF_REAL for name, (_, count) in source.domains.items()}
    classes = CLASSES.get(args.dataset) or len(source.classes)
    domains = []
    for name, count in counts.items():
        if args.limit:
            count = min(count, args.limit)
        domains.append(common.Domain(name, torch.zeros(count, 0, 0, 0), torch.arange(count) % classes))
    return domains, classes


def names_of(dataset: str) -> list[str]:
    """The domains of a dataset that is not in folders, or whose cameras are found in its files."""
    if dataset == "iwildcam":
        return [f"camera_{i}" for i in range(10)]
    if dataset in FOLDERS:
        return list(FOLDERS[dataset].domains)
    letter = "d" if dataset == "digits" else "m"
    return [f"{letter}{angle}" for angle in common.ANGLES]


def settings_of_cells() -> dict[tuple, tuple[common.Args, str]]:
    """The different splits that the cells ask for, and the table of one of them."""
    settings = {}
    for table in read_tables():
        for block in table.blocks:
            for row in block.rows:
                for column in block.columns:
                    if not row.implemented or column.value == "mean":
                        continue
                    for scale in ("paper", "laptop"):
                        run = run_of(block, row, column, scale, 0)
                        if run:
                            args = arguments(row.module, run.flags)
                            key = tuple(getattr(args, name, None) for name in SPLIT)
                            where = f"{table.id}, {block.title}, {row.method}, {column.name}"
                            settings[key] = args, where
    return settings


def check_clients(args: common.Args, where: str) -> None:
    """All parts of all clients have images, and every image of a source is in one part of one client."""
    domains, classes = stand_in(args)
    sources, targets = common.split(common.Dataset(domains, tuple(range(classes))), args)
    assert sources, where
    rows = 0
    for client in sources:
        parts = [len(client.train), len(client.val), len(client.test)]
        least = [2, 0, 0] if args.protocol == "linear" else [2, 1, 1]
        assert all(part >= needed for part, needed in zip(parts, least)), (where, client.name, parts)
        rows += sum(parts)
    for target in targets:
        assert target.unseen and len(target.test) >= 2, where
    if not args.sources:
        left_out = {target.name for target in targets}
        assert rows == sum(len(d.labels) for d in domains if d.name not in left_out), where
    assert len({client.name for client in sources}) == len(sources), where


def test_every_cell_has_its_clients():
    """Also those whose label skew would leave a client nearly nothing, as with Dirichlet's beta 0.1."""
    settings = settings_of_cells()
    assert len(settings) > 50
    assert {args.dirichlet for args, _ in settings.values()} >= {0.1, 0.5, 1, 5}
    for args, where in settings.values():
        seeds = SEEDS if args.dirichlet else SEEDS[:1]
        names = [d.name for d in stand_in(args)[0]]
        for seed in seeds:
            for of_target in expand_targets(args, names):
                check_clients(dataclasses.replace(of_target, seed=seed, device="cpu"), where)
