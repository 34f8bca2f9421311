"""Data of one's own, --dataset FILE.py: tables, a torch Dataset, and text as token ids."""

import common
from plumbing.data.domains import Domain, in_memory, scaled
from plumbing.run.errors import UserError
from reproduce.loading import load_run
from tests.conftest import parsed, run_here
from tests.docs.test_own_page import FILES

import pytest
import torch

TEXT = '''
import torch
from torch import nn

from common import Domain, Net


def load(args):
    generator = torch.Generator().manual_seed(0)
    domains = []
    for name in ("news", "mail"):
        labels = torch.arange(60) % 2
        tokens = torch.randint(0, 10, (60, 12), generator=generator) + 10 * labels[:, None]
        domains.append(Domain(name, tokens, labels))
    return domains, ["short", "long"]


def prepare(tokens):
    return tokens


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)

    def forward(self, tokens):
        return self.words(tokens).mean(1)


def build(args, channels, classes):
    return Net(Bag(), 8, classes)
'''
SHORT = ("--rounds", 8, "--batch-size", 16, "--lr", 0.1, "--limit", 0, "--weight-decay", 0, "--lr-decay", 1,
         "--image-size", 16)


def trained(folder, method: str, text: str):
    """The result of a run on the data and the network of a file with this text, and the file."""
    file = folder / "mine.py"
    file.write_text(text)
    return run_here(method, folder / "run", *SHORT, "--dataset", file, "--backbone", f"{file}:build"), file


def test_a_table(tmp_path):
    """Floats stay as they are: divided by 255 this network would learn next to nothing."""
    result, file = trained(tmp_path, "fedavg", FILES["wine.py"])
    assert result["last"]["ALL"] > 0.8
    assert result["args"]["dataset"].startswith(f"{file} ")
    backbone = f"{file}:build"
    with pytest.raises(UserError, match="dataset= of load_run names them again"):  # it is code
        load_run(tmp_path / "run", "little", "last", backbone=backbone)
    net = load_run(tmp_path / "run", "little", "last", backbone=backbone, dataset=str(file))
    x = torch.randn(5, 13)
    assert torch.equal(net.run.inputs(x), x) and net(x).shape == (5, 3)


def test_text_as_token_ids(tmp_path):
    """Other values, and another text of the file, are another dataset; its settings are those of pacs without
    augmentation."""
    result, file = trained(tmp_path, "fedavg", TEXT)
    assert result["last"]["ALL"] > 0.85
    fingerprint = result["args"]["dataset"].split()[-1]
    settings = parsed("fedavg", "--dataset", str(file))
    assert common.open_dataset(settings).content == fingerprint
    for text in (TEXT.replace("manual_seed(0)", "manual_seed(1)"), TEXT + "# as before\n"):
        file.write_text(text)
        assert common.open_dataset(settings).content != fingerprint
    pacs = parsed("fedavg", "--dataset", "pacs")
    assert (settings.lr, settings.rounds, settings.augment) == (pacs.lr, pacs.rounds, "none")


def test_what_networks_get():
    assert scaled(torch.tensor([0, 51], dtype=torch.uint8)).tolist() == pytest.approx([0, 0.2])
    assert scaled(torch.tensor([0.5, 300.0], dtype=torch.float64)).tolist() == [0.5, 300.0]


def test_the_content_is_of_all_that_is_given():
    """Names, images, labels, classes, and the text of the file that loads them."""
    x, y = torch.arange(8.0).view(2, 4), torch.tensor([0, 1])
    parts = [("a", x, y), ("b", x, y), ("a", x + 1, y), ("a", x, y.flip(0)), ("a", x.view(2, 2, 2), y)]
    given = [(part, ("p", "q"), b"text") for part in parts]
    given += [(parts[0], ("p", "r"), b"text"), (parts[0], ("p", "q"), b"other"), given[0]]
    found = [in_memory([Domain(*part)], classes, file=file).content for part, classes, file in given]
    assert len(set(found)) == 7 and found[-1] == found[0]
