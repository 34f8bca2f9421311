"""A FedAvg round of other frameworks beside ours: the same images, network, batches and rate, one machine.

    python -m bench.peers --archives FOLDER                            # ours and the usual pipeline
    python -m bench.peers --archives FOLDER --with flower,flgo         # and frameworks that are installed
    python -m bench.peers --archives FOLDER --with pfllib --pfllib CLONE --device cuda

Office-Caltech10 as at paper scale: AlexNet with BN, batch 50, one local epoch, SGD at 0.1. Each row is the
second round of a process of its own, in seconds: what the framework does between two rounds, without its
evaluation. They train in fp32, as they ship, on images that were resized beforehand; none clips gradients.
What each needs:

    flower   pip install "flwr[simulation]"    measured with 1.41.0
    flgo     pip install flgo                  measured with 0.4.4
    pfllib   git clone of github.com/TsingZ0/PFLlib, and pip install h5py; measured at d832e76

Best in an environment of its own, into which requirements.txt is installed first. Nothing of them is part of
this repository.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import types
import zipfile
from pathlib import Path

import common
import fedavg
from bench.bench import add_office_flags, described, now, office_clients, office_words, ours, write
from plumbing.archives import find_archive
from plumbing.catalog import FOLDERS
from plumbing.errors import Stop
from plumbing.results import command
from plumbing.settings import choose_device
from reproduce.commands import one_line_on_stop

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 2  # of which the second counts
CLASSES = 10


# What all of them train


def arguments(flags):
    """The arguments of our run of the same training."""
    return fedavg.arguments(office_words(flags, "fp32", Path("unused")))


def network(flags) -> nn.Module:
    common.seed_all(0)
    return common.backbone(arguments(flags), 3, CLASSES)


def write_clients(folder: Path, clients: list[common.ClientData]) -> None:
    """The images of each client, uint8 [n, 3, H, W], and its labels, in FOLDER/k.npz."""
    for k, client in enumerate(clients):
        x = client.train.images[client.train.index].cpu().contiguous().numpy()
        np.savez(folder / f"{k}.npz", x=x, y=client.train.labels.cpu().numpy())


def read_client(folder: Path, k: int) -> tuple[Tensor, Tensor]:
    """Client k's images float32 [n, 3, H, W] in [0, 1] and labels int64 [n]."""
    with np.load(folder / f"{k}.npz") as file:
        return torch.from_numpy(file["x"]).float().div_(255), torch.from_numpy(file["y"])


def usual(args, clients: list[common.ClientData], folder: Path) -> float:
    """Seconds of a round of the usual pipeline: four ImageFolders, DataLoaders with two workers, fp32."""
    from torchvision import datasets, transforms
    resize = transforms.Resize((args.image_size, args.image_size))
    transform = transforms.Compose([resize, transforms.ToTensor()])
    images = {}
    for domain, (name, _) in FOLDERS["officecaltech"].domains.items():
        images[domain] = datasets.ImageFolder(next(folder.rglob(name)), transform)
    net = common.backbone(args, 3, CLASSES).to(args.device)
    started = now(args.device)
    for client in clients:
        subset = torch.utils.data.Subset(images[client.name], client.train.index.tolist())
        train_epoch(net, subset, args, workers=2)
    return now(args.device) - started


def train_epoch(net: nn.Module, data, args, workers: int = 0) -> None:
    """An epoch of plain SGD on a data set of pairs."""
    net.train()
    loader = torch.utils.data.DataLoader(data, args.batch_size, shuffle=True, num_workers=workers)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(net(images.to(args.device)), labels.to(args.device))
        opt.zero_grad()
        loss.backward()
        opt.step()


# One framework each: the seconds of the second round. They run in processes of their own


def pfllib(flags, folder: Path) -> float:
    """Its FedAvg, on files in its own layout. What is not named below is switched off there by 0."""
    sys.path.insert(0, str(Path(flags.pfllib).resolve() / "system"))
    from flcore.servers.serveravg import FedAvg
    there = folder / "pfllib"
    for part in ("train", "test"):
        (there / "dataset" / "office" / part).mkdir(parents=True)
    (there / "system").mkdir()
    for k in range(flags.clients):
        x, y = read_client(folder, k)
        for part, count in (("train", len(y)), ("test", 20)):
            np.savez(there / "dataset" / "office" / part / f"{k}.npz",
                     data={"x": x[:count].numpy(), "y": y[:count].numpy()})
    os.chdir(there / "system")  # its paths are relative to that

    class Settings(argparse.Namespace):
        def __getattr__(self, name: str) -> int:
            if name.startswith("__"):
                raise AttributeError(name)
            return 0

    args = arguments(flags)
    settings = Settings(
        model=network(flags).to(flags.device), device=flags.device, dataset="office", algorithm="FedAvg",
        num_classes=CLASSES, num_clients=flags.clients, global_rounds=ROUNDS, local_epochs=1,
        batch_size=args.batch_size, local_learning_rate=args.lr, learning_rate_decay_gamma=1.0,
        join_ratio=1.0, eval_gap=1000, time_threthold=1e9, goal="peers", save_folder_name="items",
    )
    server = FedAvg(settings, 0)
    server.train()
    return server.Budget[1]


def flower(flags, folder: Path) -> float:
    """Its simulation, one client at a time with all cores (or the GPU), as there is one machine."""
    from flwr.client import ClientApp, NumPyClient
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation
    args = arguments(flags)
    ends = []

    class Timed(FedAvg):
        def aggregate_fit(self, *rest):
            found = super().aggregate_fit(*rest)
            ends.append(time.perf_counter())
            return found

    class Client(NumPyClient):
        def __init__(self, k: int):
            self.x, self.y = read_client(folder, k)
            self.net = network(flags).to(flags.device)

        def fit(self, parameters, config):
            arrays = [torch.from_numpy(array.copy()) for array in parameters]
            self.net.load_state_dict(dict(zip(self.net.state_dict(), arrays)))
            train_epoch(self.net, torch.utils.data.TensorDataset(self.x, self.y), args)
            return [value.cpu().numpy() for value in self.net.state_dict().values()], len(self.y), {}

    def server_of(context):
        first = [value.numpy() for value in network(flags).state_dict().values()]
        strategy = Timed(fraction_fit=1.0, fraction_evaluate=0.0, min_fit_clients=flags.clients,
                         min_available_clients=flags.clients,
                         initial_parameters=ndarrays_to_parameters(first))
        return ServerAppComponents(config=ServerConfig(num_rounds=ROUNDS), strategy=strategy)

    def client_of(context):
        return Client(int(context.node_config["partition-id"])).to_client()

    resources = {"num_cpus": os.cpu_count() or 1, "num_gpus": float(flags.device.startswith("cuda"))}
    run_simulation(ServerApp(server_fn=server_of), ClientApp(client_fn=client_of), flags.clients,
                   backend_config={"client_resources": resources})
    return ends[1] - ends[0]


def flgo(flags, folder: Path) -> float:
    """Its FedAvg on a task whose clients are the four domains."""
    sys.argv = ["peers"]  # it reads the command line
    os.chdir(folder)
    import flgo
    from flgo.algorithm import fedavg as algorithm
    from flgo.benchmark.partition import BasicPartitioner
    from flgo.benchmark.toolkits.cv import classification
    from flgo.utils.fmodule import FModule
    args = arguments(flags)
    parts = [read_client(folder, k) for k in range(flags.clients)]
    images, labels = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    train = torch.utils.data.TensorDataset(images, labels)
    test = torch.utils.data.TensorDataset(images[:20], labels[:20])
    ends = list(np.cumsum([len(y) for _, y in parts]))

    class Domains(BasicPartitioner):
        num_clients = flags.clients

        def __call__(self, data):
            return [list(range(start, end)) for start, end in zip([0, *ends], map(int, ends))]

        def __str__(self):
            return "domains"

    class TaskGenerator(classification.FromDatasetGenerator):
        def __init__(self):
            super().__init__(benchmark="office_task", train_data=train, val_data=None, test_data=test)

    class Part(torch.utils.data.Subset):
        """In the place of its own, which newer versions of torch refuse."""

        def __init__(self, dataset, indices, perturbation=None):
            super().__init__(dataset, indices)

    class TaskPipe(classification.FromDatasetPipe):
        TaskDataset = Part

        def __init__(self, task_path):
            super().__init__(task_path, train_data=train, val_data=None, test_data=test)

    class Model(FModule):
        def __init__(self):
            super().__init__()
            self.net = network(flags)

        def forward(self, x):
            return self.net(x)

    def init_global_module(owner) -> None:
        if "Server" in type(owner).__name__:
            owner.model = Model().to(owner.device)

    task, core, model = (types.ModuleType(name) for name in ("office_task", "office_task.core", "model"))
    TaskGenerator.__module__ = "office_task.core"  # by this it finds the task again
    core.TaskGenerator, core.TaskPipe = TaskGenerator, TaskPipe
    core.TaskCalculator = classification.GeneralCalculator
    task.core, task.__file__ = core, str(folder / "office_task.py")
    model.init_local_module, model.init_global_module = (lambda owner: None), init_global_module
    sys.modules |= {"office_task": task, "office_task.core": core}
    seconds = []
    iterate = algorithm.Server.iterate

    def timed(server):
        began = now(flags.device)
        updated = iterate(server)
        seconds.append(now(flags.device) - began)
        return updated
    algorithm.Server.iterate = timed
    flgo.gen_task_by_(task, Domains(), "office")
    number = flags.device.partition(":")[2]
    option = dict(num_rounds=ROUNDS, num_epochs=1, batch_size=args.batch_size, learning_rate=args.lr,
                  proportion=1.0, gpu=[int(number)] if number else [], eval_interval=1000, train_holdout=0.0)
    flgo.init("office", algorithm, option, model=model).run()
    return seconds[1]


PEERS = {"pfllib": pfllib, "flgo": flgo, "flower": flower}


# The command


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_office_flags(parser)
    add("--with", dest="peers", default="", help=f"frameworks, some of {','.join(PEERS)}")
    add("--pfllib", default="", help="folder of a clone of PFLlib")
    add("--one", default="", help=argparse.SUPPRESS)  # be one of them, on a folder of images
    add("--clients", type=int, default=4, help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    flags.peers = flags.peers.split(",") if flags.peers else []
    for name in set(flags.peers) - set(PEERS):
        parser.error(f"--with {name} is none of {', '.join(PEERS)}")
    return flags


def in_a_process(name: str, flags, folder: Path) -> float:
    """The seconds of a framework's second round. Stop with its last line if it fails."""
    words = [sys.executable, "-m", "bench.peers", "--one", str(folder), "--with", name,
             "--device", flags.device, "--size", str(flags.size), "--clients", str(flags.clients),
             f"--pfllib={flags.pfllib}"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise Stop(f"{name}: {why[:200]} (what it needs: python -m bench.peers --help)")
    return json.loads(done.stdout.strip().splitlines()[-1])["seconds"]


def measure(flags, folder: Path) -> dict[str, float]:
    """{row: the seconds of its second round}."""
    seconds = {}
    for precision in ("auto", "fp32"):
        training, whole = ours(fedavg, office_words(flags, precision, folder / precision), ROUNDS - 1)
        seconds[f"ours, {precision}: training"] = training
        seconds[f"ours, {precision}: whole round"] = whole
    args = arguments(flags)
    clients = office_clients(args)
    flags.clients = len(clients)
    archive = find_archive(FOLDERS["officecaltech"].archive, flags.data, flags.archives)
    if archive is not None:
        zipfile.ZipFile(archive).extractall(folder / "images")
        usual(args, clients, folder / "images")
        seconds["usual pipeline"] = usual(args, clients, folder / "images")
    write_clients(folder, clients)
    for name in flags.peers:
        try:
            seconds[name] = in_a_process(name, flags, folder)
        except Stop as stop:
            print(f"peers: {stop}", file=sys.stderr)
    return seconds


def main(argv: list[str] | None = None) -> None:
    """The command line. Exit code 2 with one line on stderr for bad usage."""
    flags = parsed(argv)
    with one_line_on_stop("peers", "nothing was written"):
        flags.device = choose_device(flags.device)
        if flags.one:
            (name,) = flags.peers
            with contextlib.redirect_stdout(sys.stderr):
                seconds = PEERS[name](flags, Path(flags.one))
            print(json.dumps({"seconds": seconds}))
            return
        print(described(flags.device))
        with tempfile.TemporaryDirectory() as folder:
            seconds = measure(flags, Path(folder))
    first = seconds["ours, auto: training"]
    rows = [[name, f"{spent:.2f}", f"{spent / first:.2f}"] for name, spent in seconds.items()]
    print(tabulate(rows, ["row", "seconds a round", "of ours"], disable_numparse=True))
    if flags.out:
        typed = command().replace(f"--pfllib {flags.pfllib}", "--pfllib CLONE")  # a folder of this machine
        write(flags.out, arguments(flags), {"seconds": seconds, "command": typed})


if __name__ == "__main__":
    main()
