"""Any method on separate machines, under Flower: the same Client and Server, the same bytes.

    python -m deploy.flower fdse --dataset digits --rounds 5 --out runs/flower

This simulates the nodes, with Ray. On real machines: deploy/README.md. A node is one domain; it builds its
client anew for each message. The server has no image: `Remote` is a `Federation` (plumbing/run/federation.py)
that asks all its nodes at once, and signs what it asks (deploy/signing.py). It believes a reply after the
checks of plumbing/run/payloads.py; one that fails them leaves out its node alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy as copied
from functools import partial
from pathlib import Path
from types import ModuleType

import common
from common import Args, Payload, Reply, UserError
from deploy import check_flower
from deploy.domain import open_domain
from deploy.signing import key_of, sign
from plumbing.run.devices import prepare
from plumbing.run.errors import one_line_on_failure, printable
from plumbing.run.files import in_units, load_file, save, write_whole
from plumbing.run.payloads import (agreed, check_answer, check_told, checked_numbers, expected_layout,
                                   kept, nbytes, restore, to_device)
from plumbing.run.provenance import code
from plumbing.run.results import id_of
from plumbing.run.runfolder import Run, check_outputs
from plumbing.run.settings import Parser, identity, method_file, method_name
from plumbing.run.several import targets_of
from plumbing.run.trained import method
from reproduce.loading import without_images
from reproduce.methods import arguments, builder_of

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

MOST = 1 << 20  # bytes of an answer, beside eight times those of the network
PAUSE = 1  # seconds between two looks for answers, or for nodes that are away
ANSWERS = {"train": common.train_client, "validate": common.validate_client, "test": common.test_client,
           "fit": common.fit_client, "start": common.start_client}  # what a node may be asked


def parsed(words: list[str]) -> tuple[ModuleType, Args, argparse.Namespace]:
    """The method, its settings and the flags of this file. Stop if the command is for one machine only."""
    names = partial(str.split, sep=",")
    parser = Parser(prog="deploy.flower", allow_abbrev=False, description=__doc__)
    parser.add_argument("method", help="a method's name, fdse or fedprox; its own flags may follow")
    parser.add_argument("--nodes", type=names, required=True, help="all domains, in the order of the clients")
    parser.add_argument("--classes", type=names, required=True, help="in the order of the labels")
    parser.add_argument("--min-clients", type=int, default=1, help="fewest answers of a round [1]")
    parser.add_argument("--patience", type=float, default=3600, help="seconds to wait for answers [3600]")
    parser.add_argument("--sign", type=Path, help="the private key that signs what nodes are asked")
    parser.add_argument("--only", default="", help="of a node: its domain")
    parser.add_argument("--state", default="state", help="of a node: folder of what its client keeps [state]")
    own, flags = parser.parse_known_args(words)
    module = method(own.method)
    # A checkpoint after each round: the nodes can go back by one.
    settings = arguments(module.__name__, ("--checkpoint-every", "0", *flags))
    why = ""
    if getattr(module.Client, "pooled", False):
        why = f"{own.method} has the images of all clients in one place"
    elif settings.seeds or settings.clients_per_domain > 1:
        why = "a node is one client with one domain, without --seeds and --clients-per-domain"
    elif settings.metric != "accuracy":
        why = f"--metric {settings.metric} is of the validation images of all clients together"
    elif settings.protocol != "indomain" and settings.target == "all" and not settings.sources:
        why = "a run has one --target, the node that never trains"
    if why:
        raise UserError(f"{why}; on one machine: python -m {module.__name__}", 2)
    return module, settings, own


def records(payload: Payload) -> RecordDict:
    """An ArrayRecord for each part of a payload; in that of a plain tensor the name is empty."""
    parts = {part: v if isinstance(v, dict) else {"": v} for part, v in payload.items()}
    return RecordDict({part: ArrayRecord(torch_state_dict=tensors) for part, tensors in parts.items()})


def payload_of(content: RecordDict, device: str = "cpu") -> Payload:
    """The payload in a message, on the device; channels last, as networks are: sums keep their order."""
    payload = {}
    for part, record in content.array_records.items():
        tensors = to_device(dict(record.to_torch_state_dict()), device)
        for name, v in tensors.items():
            tensors[name] = v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v
        payload[part] = tensors[""] if list(tensors) == [""] else tensors
    return payload


def fixed(module: ModuleType, settings: Args) -> dict:
    """What must be the same on all machines: the code, and the settings that decide numbers."""
    file = method_file(module.Server, module.Client)
    key = identity(settings, method_name(file)) | {"code": code(file)["sha256"][:12]}
    del key["dataset"], key["device"]  # of which a node has its own
    return key


# A node

client_app = ClientApp()


@client_app.query()
def on_node(message: Message, context: Context) -> Message:
    """The answer of a simulated node, which knows its server; another one's is deploy/node.py's."""
    return reply(message, lambda: answered(message.content, context.node_config))


def reply(message: Message, answer: Callable[[], RecordDict]) -> Message:
    """The answer to the server. Why there is none stays in the node's log, since it may name a patient's
    file; the server gets the number under which it stands there."""
    try:
        return Message(answer(), reply_to=message)
    except (Exception, SystemExit) as stop:
        number = secrets.token_hex(4)
        why = str(stop) if isinstance(stop, UserError) else traceback.format_exc()
        print(f"{number}: {why}", flush=True)
        return Message(Error(0, f"its log says why, under {number}"), reply_to=message)


def answered(content: RecordDict, node: dict) -> RecordDict:
    """What this node's client answers; it is built, restored, asked and forgotten. `node` has `flags` of its
    own, which replace those of the run."""
    asked = content["asked"]
    module, settings, own = parsed([*asked["words"], *shlex.split(str(node.get("flags", "")))])
    prepare(settings)
    name = own.only or own.nodes[int(node["partition-id"])]
    dataset = open_domain(settings, name, tuple(own.classes))
    sources, targets = common.clients_of(dataset, settings, targets_of(settings, own.nodes))
    (data,) = sources + targets
    channels = dataset.domains[0].images.shape[1]
    if asked["what"] == "tell":
        tested = data.test.labels.bincount(minlength=len(dataset.classes)).tolist()
        told = {"name": name, "unseen": data.unseen, "size": len(data.train), "validated": len(data.val),
                "tested": tested, "channels": channels, "content": dataset.content,
                "fixed": fixed(module, settings)}
        return RecordDict({"told": ConfigRecord({"json": json.dumps(told)})})
    fed = without_images(module, settings, builder_of(module), asked["clients"], asked["targets"],
                         dataset.classes, channels, data)
    fed.dataset.same_images = dataset.same_images
    what, t, k = asked["what"], int(asked["t"]), fed.names.index(name)
    client, last = fed.clients[k], asked["last"][k]
    if not 0 <= last <= t <= settings.rounds - (what == "train"):
        raise UserError(f"asked to {what} after round {t} of {settings.rounds}, of which the server has this "
                        f"node's round {last}; that cannot be: look who sends it")

    # The file has what the client keeps before and after its last training: that is asked for once more if
    # its answer, or the server, was lost. A client of which the server has no answer begins anew.
    file = Path(own.state) / f"{name}-{id_of(fixed(module, settings), 4)}.pt"
    if client.keeps and last:
        saved = load_file(file, "kept state", "put the folder of --state back, or start with --no-resume")
        if not last <= saved["round"] <= t + 1:
            raise UserError(f"{file} is of round {saved['round']}, the server has its round {last}: put that "
                            "file back, or start with --no-resume")
        again = what == "train" and saved["round"] == t + 1
        restore(client, saved["before" if again else "after"], settings.device)
    before = copied(kept(client))
    up, numbers = ANSWERS[what](fed, k, t, payload_of(content, settings.device))
    if what == "train":
        saved = {"round": t + 1, "before": before, "after": kept(client)}
        write_whole(file, lambda opened: save(saved, opened))
    return RecordDict({**records(up), "numbers": MetricRecord(numbers)})


# The server


@contextlib.contextmanager
def left_out(name: str) -> Iterator[None]:
    """Whatever is wrong with an answer costs the node its place in this round, and nobody else. What it sends
    is written out, and short, in the log."""
    try:
        yield
    except Exception as e:
        print(printable(f"{name} is left out: {e!r}"[:400]), flush=True)


@contextlib.contextmanager
def bounded(grid: Grid, most: int) -> Iterator[None]:
    """Within this Flower fetches an answer, in pieces of 5 MiB; ValueError as soon as they have more bytes
    than `most`. In the simulation the answers are here already."""
    client, sizes = getattr(grid, "_runtime_client", None), []
    if client is None:
        yield
        return
    pull = client.PullObject

    def pulled(request):
        piece = pull(request)
        sizes.append(len(piece.object_content))
        if sum(sizes) > most:
            raise ValueError(f"its answer has more than {in_units(most)}")
        return piece
    client.PullObject = pulled
    try:
        yield
    finally:
        client.PullObject = pull


class Remote(common.Federation):
    """A federation whose clients are on nodes. `ids` has those that are there, by the names of their domains,
    `told` what each has told of itself, `last` of each client its last round that the server has, `layouts`
    what each client's answers to a question look like."""

    def __init__(self, grid: Grid, words: list[str]):
        self.grid = grid
        self.module, settings, self.own = parsed(words)
        self.words = [*words, "--precision", settings.precision]  # what "auto" has become on this machine
        self.key = self.own.sign and key_of(self.own.sign, private=True)
        prepare(settings)
        self.settings, self.same = settings, fixed(self.module, settings)
        self.ids, self.told, self.layouts, self.most = {}, {}, {}, MOST
        while missing := self.meet():
            print(f"waiting for {', '.join(missing)}", flush=True)
            time.sleep(10 * PAUSE)
        told, targets = self.told, targets_of(settings, self.own.nodes)
        sources = [name for name in self.own.nodes if name not in targets]
        channels, *others = {node["channels"] for node in told.values()}
        if others:
            raise UserError("some nodes have images in colour and some have gray ones: convert them", 2)
        fed = without_images(self.module, settings, builder_of(self.module), sources, targets,
                             self.own.classes, channels)
        self.most = MOST + 8 * nbytes(fed.net.state_dict())
        counts = torch.tensor([told[name]["tested"] for name in targets or sources])
        vars(self).update(vars(fed), clients={}, sizes=[told[name]["size"] for name in sources],
                          tested=int(counts.sum()) if targets else 0, of_classes=counts.sum(0).tolist())
        self.last = [0] * len(told)

    def meet(self) -> list[str]:
        """Forget who has gone, and ask who is new to tell of itself. Returns the names that are missing."""
        there = {node.node_id: node.name for node in self.grid.get_nodes()}  # as whom it is registered
        for name in [name for name, node in self.ids.items() if node not in there]:
            print(f"{name} has gone", flush=True)
            del self.ids[name]
        new = {f"node {node}": node for node in there.keys() - self.ids.values()}
        for node, content in self.send("tell", dict.fromkeys(new, {}), new).items():
            with left_out(node):
                told = json.loads(content["told"]["json"])
                name, theirs = check_told(told, self.settings, self.own.nodes, self.own.classes)
                other = [what for what in self.same | theirs if theirs.get(what) != self.same.get(what)]
                if other or name in self.ids or there[new[node]] not in ("", name):
                    raise ValueError(f"{name} is another node's, or has another {other}")
                if told != self.told.setdefault(name, told):
                    raise ValueError(f"{name} has other images than before")
                self.ids[name] = new[node]
        return [name for name in self.own.nodes if name not in self.ids]

    def send(self, what: str, downs: dict[str, Payload], ids: dict[str, int], **more) -> dict:
        """What is answered, by name. Each answer is fetched by itself, so that a broken one hides no other.
        Who has none to give gets a line; who is late is left out."""
        waiting, answers, end = {}, {}, time.monotonic() + self.own.patience
        for name, down in downs.items():
            asked = ConfigRecord({"what": what, "words": self.words, **more})
            content = RecordDict({**records(down), "asked": asked})
            message = Message(content, ids[name], "query", ttl=self.own.patience)
            if self.key:
                sign(message, self.key)
            waiting[name] = self.grid.push_messages([message])
        while waiting and time.monotonic() < end:
            for name, asked in list(waiting.items()):
                replies = [None]
                with left_out(name), bounded(self.grid, self.most):
                    replies = list(self.grid.pull_messages(asked))
                    for reply in replies:
                        if reply.has_error():
                            raise ValueError(reply.error.reason)
                        answers[name] = reply.content
                if replies:
                    del waiting[name]
            time.sleep(PAUSE if waiting else 0)
        for name in waiting:
            print(f"{name} has not answered within --patience", flush=True)
        return answers

    def train(self, of_client: Callable, S_t: list[int],
              t: int) -> tuple[dict[int, Payload], dict[int, dict[str, float]]]:
        answers = self.ask("train", {k: self.server.download(k) for k in S_t}, t)
        self.last = [t + 1 if k in answers else last for k, last in enumerate(self.last)]
        self.lap("train")
        if len(answers) < self.own.min_clients:
            raise UserError(f"round {t + 1}: {len(answers)} of {len(S_t)} clients have answered, and "
                            f"--min-clients is {self.own.min_clients}: the same command resumes from here")
        return {k: up for k, (up, _) in answers.items()}, {k: log for k, (_, log) in answers.items()}

    def test(self, of_client: Callable, who: Iterable[int], t: int,
             also: Payload | None = None) -> dict[int, Reply]:
        what = of_client.__name__.removesuffix("_client")
        return self.ask(what, {k: self.tested_with(k) | (also or {}) for k in who}, t)

    def ask(self, what: str, downs: dict[int, Payload], t: int) -> dict[int, Reply]:
        """The answers that come and fit. All are waited for before the first and after the last round."""
        answers, layouts = {}, self.layouts.setdefault(what, {})
        while True:
            self.meet()
            read, asked = {}, {self.names[k]: down for k, down in downs.items()
                               if k not in answers and self.names[k] in self.ids}
            replies = self.send(what, asked, self.ids, t=t, last=self.last, clients=self.names[:self.K],
                                targets=self.names[self.K:])
            for name, content in replies.items():
                k = self.names.index(name)
                with left_out(name):
                    down, up = downs[k], payload_of(content)
                    sent = content["numbers"]
                    read[k] = up, checked_numbers(what, self.told[name], self.settings, down, up, sent)
                    layouts[k] = expected_layout(down, up)
            for k, (up, numbers) in read.items():
                with left_out(self.names[k]):
                    check_answer(f"round {t + (what == 'train')}", up, numbers, agreed(layouts.values()))
                    answers[k] = up, numbers
            if len(answers) == len(downs) or what == "train" or 0 < t < self.settings.rounds:
                break
            time.sleep(PAUSE)
        return dict(sorted(answers.items()))


def serve(grid: Grid, words: list[str]) -> dict:
    """A run whose clients are on nodes; it resumes from its folder. Returns its result."""
    check_flower()
    fed = Remote(grid, words)
    check_outputs(fed.settings)
    fed.dataset.content = id_of({"images": [fed.told[name]["content"] for name in fed.own.nodes]}, 4)
    file = method_file(fed.module.Server, fed.module.Client)
    key = identity(fed.settings, method_name(file), fed.dataset.content)
    with Run.open(fed.settings, key, file) as progress:
        for entry in progress.history:
            for client in entry["clients"]:
                fed.last[fed.names.index(client)] = entry["round"]
        return progress.show() if progress.result else common.rounds(fed, progress)


server_app = ServerApp()


@server_app.main()
def on_server(grid: Grid, context: Context) -> None:
    words = shlex.split(str(context.run_config["run"]))
    if not parsed(words)[2].sign:
        raise UserError("expected --sign FILE in `run`, the key of step 2 of deploy/README.md: nodes answer "
                        "nothing that it has not signed", 2)
    serve(grid, words)


def main() -> None:
    """Simulate the nodes on this machine, with Ray: one for each domain, which opens its own alone."""
    from flwr.simulation import run_simulation  # seconds, which a node would wait for with each message

    with one_line_on_failure("deploy.flower"):
        _, settings, _ = parsed(["--nodes", "-", "--classes", "-", *sys.argv[1:]])
        check_outputs(settings)
        dataset = common.open_dataset(settings)
        words = [*sys.argv[1:], "--nodes", ",".join(dataset.names), "--classes", ",".join(dataset.classes),
                 "--state", str(Path(settings.out or "runs", "nodes").resolve())]
        app = ServerApp()
        app.main()(lambda grid, _: serve(grid, words))
        resources = {"num_cpus": settings.threads or 1, "num_gpus": int(settings.device != "cpu")}
        run_simulation(app, client_app, len(dataset.names), backend_config={"client_resources": resources})


if __name__ == "__main__":
    main()
