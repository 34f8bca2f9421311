"""Who takes part in a run, and what is looked at before and after each of their steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from plumbing.data.domains import Dataset
from plumbing.data.splits import Placed
from plumbing.run.errors import UserError
from plumbing.run.files import tensors_of
from plumbing.run.payloads import (check_answer, check_upload, copy_kept, expected_layout, guarded, kept,
                                   logged, nbytes, restore, to_device)
from plumbing.run.seeding import seed_all
from plumbing.run.settings import Args

from torch import nn

LARGEST = 1e18  # of a number that a server may keep; float32 ends at 3.4e38


def uncounted(part: str) -> None:
    """Instead of `Run.lap`, where nobody counts seconds."""


@dataclass
class Federation:
    """Who takes part in a run. Clients 0..K-1 train; the numbers behind are the targets', who never do.

    Clients are trained by `train` and tested by `test` alone, here one after the other. On separate machines
    deploy/flower.py has its own two, which ask all nodes at once. Payloads and replies are those of
    common.py.
    """

    settings: Args
    dataset: Dataset
    net: nn.Module  # which all clients train, one after the other
    server: Any  # a ServerProtocol of common.py
    clients: dict[int, Any]  # each a ClientProtocol
    names: list[str]  # of all clients and then the targets
    K: int
    sizes: list[int]  # training images of the K clients
    channels: int
    tested: int  # images of the targets that are tested
    of_classes: list[int]  # images of each class on which the accuracy is measured: the targets', or all
    expected: dict[str, str] | None = None  # the layout of uploads, by the first one
    placed: list[Placed] = field(default_factory=list)  # of one's own data: which image is where
    lap: Callable[[str], None] = uncounted  # counts the seconds of a part of the round: `Run.lap`

    def train(self, of_client: Callable, S_t: list[int],
              t: int) -> tuple[dict[int, dict], dict[int, dict[str, float]]]:
        """Download, local training (train_client) and upload of each client of S_t: the uploads, and what was
        logged."""
        uploads, logs = {}, {}
        for k in S_t:
            down = self.server.download(k)
            uploads[k], logs[k] = of_client(self, k, t, down)
            self.check(k, t, down, uploads[k], logs[k])
        self.lap("train")
        return uploads, logs

    @contextlib.contextmanager
    def watching(self, k: int, t: int, down: dict):
        """Around client k's training. Stop if it changes its download, or a resume would differ."""
        copy_kept(self.clients[k])
        what = f"round {t + 1}, client {self.names[k]}: its train"
        with guarded(self.clients[k], self.net, t, what, down, "its download"):
            yield

    def log_of(self, k: int, t: int, down: dict, up: dict) -> dict[str, float]:
        """The bytes both ways and what client k has logged. Stop if its upload is a network's own tensors."""
        whose = f"round {t + 1}, client {self.names[k]}"
        check_upload(whose, up, self.clients[k])
        return {"bytes_down": nbytes(down), "bytes_up": nbytes(up)} | logged(whose, self.clients[k])

    def update(self, uploads: dict[int, dict], t: int) -> dict:
        """The server's step from the uploads of round t, if there are any; they are forgotten. Returns what
        it has logged."""
        log = {}
        if uploads:
            seed_all(self.settings.seed, "server", t)
            what, of_others = f"round {t + 1}: the server's update", self.state()["clients"]
            with guarded(self.server, self.net, t, what, of_others, "what a client keeps"):
                self.server.update(to_device(uploads, self.settings.device), t)
            self.check_state(what)
            log = logged(what, self.server)
        uploads.clear()  # else they are still there when the next round's come
        self.lap("server")
        return {"server": log} if log else {}

    def who_trained(self, S_t: list[int], logs: dict[int, dict[str, float]]) -> dict:
        """What each client of S_t has logged, by name; and whose upload is missing, as nodes' may be."""
        entry = {"clients": {self.names[k]: log for k, log in logs.items()}}
        missing = [self.names[k] for k in S_t if k not in logs]
        return entry | {"dropped": missing} if missing else entry

    def test(self, of_client: Callable, who: Iterable[int], t: int,
             also: dict | None = None) -> dict[int, tuple[dict, dict]]:
        """What validate_client, test_client, fit_client or start_client gives for each of these; `also` goes
        with the downloads."""
        return {k: of_client(self, k, t, self.tested_with(k) | (also or {})) for k in who}

    def tested_with(self, k: int) -> dict:
        """What client k is tested with: `server.tested(k)` if there is one, else its next download."""
        return getattr(self.server, "tested", self.server.download)(k)

    def check(self, k: int, t: int, down: dict, up: dict, numbers: dict) -> None:
        """Stop if an upload does not fit. A client whose images another one has sends nothing."""
        expected = {}
        if k == 0 or not getattr(self.clients[k], "pooled", False):
            if self.expected is None:
                self.expected = expected_layout(down, up)
            expected = self.expected
        check_answer(f"round {t + 1}, client {self.names[k]}", up, numbers, expected)

    def check_state(self, what: str) -> None:
        """Stop, before it is kept, if what the server keeps has numbers with which no training can go on, as
        from one upload of 3e38: their squares are not finite. The checkpoint before stays."""
        for v in tensors_of(kept(self.server)):
            if v.is_floating_point() and v.numel() and not v.abs().max() < LARGEST:
                raise UserError(f"{what} gives numbers that are not finite or above {LARGEST:g}: this round "
                                "is not kept; the same command resumes from the last checkpoint; look at "
                                "who sent them, or lower --lr")

    def state(self) -> dict:
        """{"server": what it keeps, "clients": {k: what that client keeps}}."""
        clients = {k: kept(client) for k, client in self.clients.items()}
        return {"server": kept(self.server), "clients": clients}

    def restore(self, saved: dict) -> None:
        """The server and the clients as `state` gave them. An error if the tensors do not fit the network."""
        device = self.settings.device
        restore(self.server, saved["server"], device)
        for k, client in self.clients.items():
            restore(client, saved["clients"].get(k, {}), device)  # without: they are on nodes
        if self.clients:  # one is enough to see whether the tensors fit
            self.clients[0].model(self.server.download(0))
