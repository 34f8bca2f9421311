"""The network of a run, from its output folder: of any method, finished or not."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import common
from common import Args, ClientData, Data, Dataset, Federation, UserError
from plumbing.data.catalog import named
from plumbing.data.custom_data import module_in, one_line_of
from plumbing.data.domains import scaled
from plumbing.run.devices import prepare
from plumbing.run.files import load_file
from plumbing.run.settings import method_name
from plumbing.run.trained import read_run, settings_from
from reproduce.methods import builder_of

import torch
from torch import Tensor, nn


@dataclass
class Trained:
    """What is known of a network that `load_run` returns, as `net.run`."""

    args: Args  # of the run; `args.image_size` and `args.normalize` say how images are prepared
    client: str
    round: int
    classes: tuple[str, ...]  # in the order of the outputs
    channels: int  # 1: gray, 3: RGB
    prepare: Callable[[Tensor], Tensor] = scaled  # of data of one's own

    def data(self, pixels: Tensor) -> Data:
        """uint8 [N, C, S, S] of the run's image size, or values of one's own data, as the run has them. Stop
        if they are others."""
        expected = (self.channels, self.args.image_size, self.args.image_size)
        own = named(self.args.dataset).file
        if not own and (pixels.dtype != torch.uint8 or pixels.shape[1:] != expected):
            raise UserError(f"expected pixels uint8 of the shape (N, {', '.join(map(str, expected))}), as "
                            f"this run's images are; found {pixels.dtype} of the shape "
                            f"{tuple(pixels.shape)}", 2)
        rows = torch.arange(len(pixels))
        return Data(pixels, rows, rows, self.args.device, self.args.normalize, self.prepare)

    def inputs(self, pixels: Tensor) -> Tensor:
        """These pixels as x float32 [N, C, S, S]."""
        return self.data(pixels).batch(slice(None))[0]


def load_run(folder, client: str | int | None = None, which: str = "best", *, device: str = "cpu",
             data: str = "data", archives: str = "", any_code: bool = False,
             script: str | Path = "", backbone: str = "", dataset: str = "",
             state: str | Path = "") -> nn.Module:
    """The network that a client is tested with, in eval mode, from the output folder of a run of any method,
    finished or not; what is known of it is in `net.run`, see `Trained`.

    `client` is its name or number; None is the left-out domain, or the first client where none is left out.
    `which` is best (validation round) or last; without labels it is the last, and the outputs are
    representations. Images are needed only for a network that adapts to those of the left-out domain; `data`
    and `archives` are flags of a run. `script` is the file of a method that is not of this repository, and
    `backbone` the FILE.py:FUNCTION of a network, `dataset` the file of the data: files of one's own are code,
    which a run's folder cannot name. After a run on separate machines `state` is the file in which the
    client's node keeps its own part of the network. Stop if there is no run, or one by other code without
    `any_code`.
    """
    fed, saved = rebuilt(folder, which, client, device, data, archives, any_code, script=script,
                         backbone=backbone, dataset=dataset, state=state)
    k = number_of(client, fed.names, fed.K)
    net = common.tested_model(fed, k, saved["round"]).eval()
    net.run = Trained(fed.settings, fed.names[k], saved["round"], fed.dataset.classes, fed.channels,
                      fed.clients[k].data.test.prepare)
    return net


def rebuilt(folder, which: str, client: str | int | None, device: str, data: str, archives: str,
            any_code: bool, images: bool = False, script: str | Path = "",
            backbone: str = "", dataset: str = "", state: str | Path = "") -> tuple[Federation, dict]:
    """Server and clients of a finished run, for what `load_run` says, and the state they have. Without
    `images` they have some only where the network of `client` needs them."""
    saved = read_run(folder, which)
    own = method_in(script, saved["identity"]["method"]) if script else None
    module, settings = settings_from(saved, device, data, archives, any_code, own, backbone, dataset)
    prepare(settings)
    build, told = builder_of(module), saved["data"]
    try:
        names = told["clients"] + told["targets"]
        k = number_of(client, names, len(told["clients"]))
        adapts = any(f.metadata["at_test"] for f in dataclasses.fields(settings))
        if images or named(settings.dataset).file or (k >= len(told["clients"]) and adapts):
            dataset = common.open_dataset(settings)
            if named(settings.dataset).custom and not saved["identity"]["dataset"].endswith(dataset.content):
                raise UserError(f"the images in {settings.dataset} are not those of the run in {folder}: put "
                                "those back, or run it anew", 2)
            fed = common.federation(module.Server, module.Client, settings, build, dataset)
        else:
            fed = without_images(module, settings, build, **told)
        if fed.clients[k].keeps and not saved["clients"]:  # they were on nodes
            saved["clients"] = fed.state()["clients"]
            if k < fed.K:
                saved["clients"][k] = of_node(state, saved)
        fed.restore(saved)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as e:
        why = f"{type(e).__name__}: {str(e)[:80]}".splitlines()[0]
        raise UserError(f"the state in {folder} does not fit {module.__name__} as it is now ({why})", 2)
    return fed, saved


def of_node(file: str | Path, run: dict) -> dict:
    """What a client had kept at the state of a run, from the file of its node, which has the two newest."""
    if not str(file):
        raise UserError(f"the clients of the run in {run['folder']} were on separate machines, and each has "
                        "a part of its network there: give the client's file in the folder of its --state, "
                        "as --state of predict or state= of load_run", 2)
    saved = load_file(Path(file), "kept state")
    ahead = saved["round"] - run["round"]
    if ahead > 1:
        raise UserError(f"{file} is of round {saved['round']} and the state of the run of round "
                        f"{run['round']}: take the run's last state, --which last", 2)
    return saved["before" if ahead == 1 else "after"]


def method_in(script: str | Path, name: str) -> SimpleNamespace:
    """The method in a file of one's own: it has Server, Client, arguments and perhaps build, its own or
    imported ones. Stop if it is not the method `name`, or none."""
    path = Path(script).resolve()
    if not path.is_file() or method_name(path) != name:
        raise UserError(f"script is {script}; expected the file {name}.py, whose run this is", 2)
    sys.path.append(str(path.parent))  # of the files that it imports
    with one_line_of(f"script {script}"):
        names = vars(module_in(path))
        missing = [part for part in ("Server", "Client", "arguments") if part not in names]
        if missing:
            raise UserError(f"script {script} is no method: expected Server, Client and arguments in it; "
                            f"there is no {', '.join(missing)}", 2)
        args = names["arguments"]([])
    return SimpleNamespace(**{"build": common.backbone} | names | {"Args": type(args)})


def without_images(module, settings: Args, build, clients: list[str], targets: list[str], classes: list[str],
                   channels: int, here: ClientData | None = None) -> Federation:
    """Server and clients without any image, for what needs none, or without any but those of one client."""
    example = torch.zeros(2, channels, settings.image_size, settings.image_size)
    images, none = example[:0].to(torch.uint8), torch.zeros(0, dtype=torch.long)
    part = Data(images, none, none, settings.device, settings.normalize)
    known = {here.name: here} if here else {}
    sources = [known.get(name) or ClientData(name, part, part, part) for name in clients]
    unseen = [known.get(name) or ClientData(name, part, part, part, unseen=True) for name in targets]
    return common.federation_of(module.Server, module.Client, settings, build, Dataset([], tuple(classes)),
                                sources, unseen, example)


def number_of(client: str | int | None, names: list[str], K: int) -> int:
    """The number of a client by its name or number; None: the left-out domain's, or else the first one's."""
    if client is None:
        return K if len(names) > K else 0
    if client in names:
        return names.index(client)
    if str(client).isdecimal() and int(client) < len(names):
        return int(client)
    raise UserError(f"{client!r} is no client of this run; it has {', '.join(names)} (or their numbers, 0 to "
                    f"{len(names) - 1})", 2)
