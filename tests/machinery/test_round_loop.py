"""The round loop by a second computation: a method that records all that `common.run` does with it, against
plain Python. Who is drawn, what each has and sees, from which random numbers, and which round is reported."""

import collections
import dataclasses
import itertools
import math
import re
import time

import common
from plumbing.data.catalog import named
from tests.conftest import fails, metrics, parsed, read_json, run_here, saved_in
from tests.recording import SIZES, by_hand, numbers_of, recording, settings_of, write_data

import pytest
import torch


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Of one's own, with the splits of the papers' data sets, which have no strata."""
    monkeypatch.setattr(common, "named",
                        lambda dataset: dataclasses.replace(named(dataset), custom=False))
    return write_data(tmp_path / "data.py")


def mostly(image: int, t: int) -> bool:
    """Which images the model of round t classifies correctly: some, other ones in each round."""
    return image * (2 * t + 1) % 11 < 4 + t % 3


def recorded(settings, right=mostly) -> tuple[dict, list[dict]]:
    """What is recorded of a run, and its results."""
    log = {}
    Server, Client, build = recording(log, right)
    return log, common.run(Server, Client, settings, build)


def assert_same(log: dict, lines: list[dict], expected) -> None:
    """What was recorded and written is what was computed by hand."""
    for key, value in expected.log.items():
        if key[0] == "w":
            assert log[key]["x"].tolist() == pytest.approx(value[0], rel=1e-5)
            assert log[key]["count"].dtype == torch.int64 and int(log[key]["count"]) == value[1]
        else:
            assert log[key] == value, key
    seeds = {key[1] for key in expected.log}
    found = {key for key in log if key[1] in seeds and key[0] not in ("start", "build")}
    assert found == set(expected.log)
    assert len(lines) == len(expected.lines)
    for line, by_hand_ in zip(lines, expected.lines):
        assert_close(line, by_hand_)


def assert_close(found, expected) -> None:
    """Nested dicts of numbers are the same but for the last digits."""
    if not isinstance(expected, dict):
        assert found == pytest.approx(expected, rel=1e-12)
        return
    assert list(found) == list(expected)
    for name in expected:
        assert_close(found[name], expected[name])


@pytest.mark.parametrize("flags, images", [
    (["--batch-size", "20"], 2 * 6 * 32), (["--epochs", "3"], 2 * 6 * 96),
    (["--steps", "3", "--batch-size", "20"], 2 * 6 * 52)])
def test_images_a_second_are_those_that_were_trained_on(tmp_path, monkeypatch, flags, images):
    """All images of a client count, whatever the batches and steps."""
    finish, counted = common.Run.finish, []
    monkeypatch.setattr(common.Run, "finish", lambda run, *of: counted.append(run.images) or finish(run, *of))
    result = run_here("fedavg", tmp_path, "--rounds", "2", *flags)
    assert counted == [images]
    assert result["images_per_second"] == pytest.approx(images / result["seconds"]["train"], rel=0.05)


def test_a_dropped_batch_is_no_image_that_was_trained_on():
    args = parsed("fedgala", "--batch-size", "20", "--epochs", "2")
    assert [common.images_in_round(n, args) for n in (32, 41, 7)] == [40, 80, 14]


SKEWED = dict(clients_per_domain=3, dirichlet=0.5)
RUNS = {
    "all clients": dict(epochs=2),
    "skewed clients, some of them": dict(**SKEWED, participation=0.4, lr_decay=0.5),
    "clients that had too few images at first": dict(clients_per_domain=3, dirichlet=0.3, limit=40,
                                                    participation=0.2),
    "steps": dict(clients_per_domain=3, participation=0.375, steps=7, batch_size=10, eval_every=2, seed=1),
    "a last batch of one": dict(batch_size=53, split="0.6/0.1/0.3", epochs=2),
    "an unseen domain": dict(protocol="lodo", target="south", participation=0.7, seed=2),
    "the unseen domain's test part": dict(protocol="lodo", target="north", target_part="test",
                                           participation=0.1),  # at least one
    "what its sources' training leaves": dict(protocol="lodo", target="north", target_part="heldout"),
}


@pytest.mark.parametrize("values", RUNS.values(), ids=RUNS)
def test_a_run_is_that_of_the_second_computation(tmp_path, data, values):
    """Who trains in each round, on which batches and from which random numbers, the averages, what is tested,
    and every number that is written."""
    settings = settings_of(data, tmp_path / "run", **values)
    log, (result,) = recorded(settings)
    start = log["start", settings.seed, settings.target]
    expected = by_hand(settings, mostly, begin=tuple(start))
    assert_same(log, metrics(tmp_path / "run"), expected)
    assert log["build", settings.seed] == numbers_of(settings.seed, "init")  # whoever takes part
    saved = saved_in(tmp_path / "run" / "checkpoint.pt")
    assert saved["images"] == expected.images
    trained = [key[3] for key in expected.log if key[0] == "train"]
    assert {k: kept["rounds"] for k, kept in saved["clients"].items()} == {
        k: trained.count(k) for k in range(len(expected.clients) + len(expected.targets))}
    written = read_json(tmp_path / "run" / "settings.json")["data"]
    assert (written["clients"], written["targets"]) == ([*expected.clients], [*expected.targets])
    assert result["bytes"]["up"] == 28 * len(trained) and result["bytes"]["down"] == 29 * len(trained)
    assert result["bytes"]["up_per_round"] == 28 * len(trained) / settings.rounds
    losses = [[log["loss"] for log in line["clients"].values()] for line in expected.lines if "val" in line]
    assert result["logs"]["loss"] == pytest.approx([sum(of) / len(of) for of in losses], abs=1e-5)


def test_every_seed_and_target_has_a_run_of_its_own(tmp_path, data, capsys):
    """--seeds and --target all: a folder for each run, and a table of their means and sample deviations."""
    settings = settings_of(data, tmp_path / "run", protocol="lodo", rounds=2, seeds="0,3")
    log, results = recorded(settings)
    said, remaining, shown = capsys.readouterr().out, iter(results), collections.defaultdict(list)
    for seed in (0, 3):
        for target in SIZES:
            expected = by_hand(dataclasses.replace(settings, seed=seed, target=target), mostly)
            folder, result = tmp_path / "run" / f"s{seed}" / target, next(remaining)
            assert read_json(folder / "result.json") == result
            assert log["start", seed, target] == log["start", seed, "north"]
            for line, by_hand_ in zip(metrics(folder), expected.lines, strict=True):
                assert_close(line, by_hand_)
            best = max(expected.lines, key=lambda line: line["val"]["ALL"])["target"]
            assert result["best"]["target"] == pytest.approx(best)
            shown[target].append((best, expected.lines[-1]["target"]))
    assert "seeds 0, 3: accuracy (%), mean +- sample deviation over the seeds" in said
    for target, of_seeds in shown.items():
        words = target
        for first, second in zip(*of_seeds):  # the best rounds, and the last
            words += f" {50 * (first + second):.2f} +- {100 * abs(first - second) / 2 ** 0.5:.2f}"
        assert f"\n{words}\n" in re.sub(" +", " ", said)
    assert next(remaining, None) is None


def test_the_first_round_with_the_best_pooled_validation_is_reported(tmp_path, data):
    """Not that of the best mean over the clients, nor of the best test accuracy, nor a later one as good."""
    def right(image: int, t: int) -> bool:
        return image * (31 if t in (2, 4) else 29) % 97 < 82
    settings = settings_of(data, tmp_path / "run", rounds=4, **SKEWED)
    worse, best = by_hand(settings, right).lines[:2]
    assert best["val"]["ALL"] > worse["val"]["ALL"] and best["val"]["AVG"] < worse["val"]["AVG"]
    assert best["test"]["ALL"] < worse["test"]["ALL"]
    log, (result,) = recorded(settings, right)
    assert result["best"]["round"] == 2 and result["last"]["round"] == 4
    assert result["best"]["val"] == pytest.approx(best["val"]["ALL"])
    for name in ("ALL", "AVG"):
        assert result["best"][name] == pytest.approx(best["test"][name])
        assert result["curve"][name][0] == pytest.approx(worse["test"][name], abs=1e-5)
    kept = saved_in(tmp_path / "run" / "best.pt")
    assert kept["round"] == kept["server"]["t"] == 2
    assert torch.equal(kept["server"]["w"]["x"], log["w", 0, 1]["x"])


def test_rounds_that_are_not_better_are_not_tested(tmp_path, data):
    """--test-rounds best: the numbers are those of a run that tests everywhere."""
    skill = [30, 60, 60, 40, 80, 10]

    def right(image: int, t: int) -> bool:
        return image * 7 % 97 < skill[t - 1]
    whole = by_hand(settings_of(data, tmp_path, rounds=6, protocol="lodo", target="east"), right).lines
    best = settings_of(data, tmp_path / "b", rounds=6, protocol="lodo", target="east", test_rounds="best")
    log, (result,) = recorded(best, right)
    for line, expected in zip(metrics(tmp_path / "b"), whole):
        tested = expected["round"] in (1, 2, 5, 6)
        left_out = set() if tested else {"test", "target"}
        assert_close(line, {name: value for name, value in expected.items() if name not in left_out})
        assert (("tested", 0, expected["round"], 3) in log) == tested  # the target's model
    assert (result["best"]["round"], result["last"]["round"]) == (5, 6)


@pytest.fixture
def ends(tmp_path, data, capsys):
    """A run of a method ends with this code and one line that matches these words."""
    def ended(code: int, words: str, method: tuple, **values) -> None:
        Server, Client, build = method
        fails(capsys, code, words, common.run, Server, Client, settings_of(data, tmp_path / "run", **values),
              build)
    return ended


def careless(act, **attributes) -> tuple:
    """The recording method, with these attributes of its client, that does something before it trains."""
    Server, Client, build = recording({}, mostly)
    train = Client.train

    def acts(self, down, t):
        act(self, down)
        return train(self, down, t)
    for name, value in ({"train": acts} | attributes).items():
        setattr(Client, name, value)
    return Server, Client, build


def bad_answer(value, where: str):
    """A client of the recording method, of whose second round one value is another."""
    Server, Client, build = recording({}, mostly)

    class Mistaken(Client):
        def train(self, down, t):
            up = super().train(down, t)
            if t == 1 and self.k == 2:
                self.log = {"loss": value} if where == "log" else self.log
                x = {"x": torch.tensor([value] * 3)} if where == "x" else {}
                up = value if where == "upload" else up | {"w": up["w"] | x}
            return up
    return Server, Mistaken, build


@pytest.mark.parametrize("value, where, words", [
    *((value, where, "the loss or the weights are no longer finite.*lower --lr")
      for value, where in ((math.nan, "log"), (-math.inf, "log"), (math.nan, "x"), (math.inf, "x"))),
    (None, "upload", "expected a dict of tensors from its train; found NoneType"),
    ({"n": torch.tensor(1)}, "upload", "expected torch.* of the upload; found nothing: mend the client"),
    (torch.ones(2), "log", "expected a number in its log as 'loss'; only one element"),
])
def test_a_bad_answer_ends_the_run(tmp_path, ends, value, where, words):
    """The last good round is kept."""
    method = bad_answer(value, where)
    ends(1, f"round 2, client west: {words}", method, checkpoint_every=0)
    assert saved_in(tmp_path / "run" / "checkpoint.pt")["round"] == 1


def test_a_server_that_turns_a_counter_into_a_float_stops(ends):
    """A run with it could not resume; the line names the entry, not a client."""
    Server, Client, build = recording({}, mostly)

    class Careless(Server):
        def update(self, uploads, t):
            super().update(uploads, t)
            self.w = {name: v + 0.5 for name, v in self.w.items()}
    words = r"round 1: the server's update leaves torch.float32 \(\) in w.count; expected torch.int64 \(\)"
    ends(1, words, (Careless, Client, build))


@pytest.mark.parametrize("who, words", [("server", "round 1: the server's update"),
                                        ("client", "round 1, client north: its train")])
@pytest.mark.parametrize("value, later", [(torch.zeros(2), torch.ones(2)), (None, torch.ones(2)),
                                          ([0], [0, 1]), ({"a": [torch.zeros(2)]}, {"a": [torch.ones(2)]})])
def test_what_keeps_forgets_stops_the_run(tmp_path, data, ends, who, words, value, later):
    """A tensor, one in a dict, one that was not there, or numbers. The network that all train may change."""
    Server, Client, build = method = recording({}, mostly)
    changing, step = (Server, "update") if who == "server" else (Client, "train")
    start, original = changing.__init__, getattr(changing, step)

    def started(self, *args):
        start(self, *args)
        self.velocity, self.network = value, args[1]
        self.weights = list(self.network.parameters())

    def changes(self, *args):
        self.weights[0].data += 1
        self.velocity = later
        return original(self, *args)
    changing.__init__ = started
    setattr(changing, step, changes)
    ends(1, f"{words} changes velocity, which `keeps` does not name", method)
    changing.keeps += ("velocity",)
    assert len(common.run(Server, Client, settings_of(data, tmp_path / "run"), build)) == 1


@pytest.mark.parametrize("change, words", [
    (lambda client, _: vars(client).update(own=client.net.state_dict()), "gives or keeps .*by state.model."),
    (lambda client, _: client.net.weight.data.add_(1), "changes net, which `keeps` does not .*of a network"),
    (lambda client, _: client.others[0].weight.data.add_(1), "changes others, which `keeps` does not name")])
def test_a_networks_own_tensors_are_neither_sent_nor_kept(ends, change, words):
    """The next client's training would change them; and a network of a client's own is not kept either."""
    Server, Client, build = method = careless(change, keeps=("own", "rounds"), own={})
    start = Client.__init__

    def started(self, *args):
        start(self, *args)
        self.net = torch.nn.Linear(2, 2)
        self.others, self.kind = [torch.nn.Linear(2, 2)], torch.optim.Adam
    Client.__init__ = started
    ends(1, "client north: its train " + words, method)


def test_each_client_has_tensors_of_its_own(tmp_path, data):
    """What it keeps may be changed in place, although all start with the same tensors."""
    method = careless(lambda client, down: client.trained["rounds"].add_(1), keeps=("rounds", "trained"),
                      trained={"rounds": torch.zeros(2)})
    Server, Client, build = method
    common.run(Server, Client, settings_of(data, tmp_path / "run"), build)
    clients = saved_in(tmp_path / "run" / "checkpoint.pt")["clients"]
    rounds = [client["trained"]["rounds"].tolist() for client in clients.values()]
    assert rounds == [[3, 3]] * len(SIZES)


def changes_its_download(client, down) -> None:
    next(iter(down["w"].values())).add_(0)


def keeps_its_download(client, down) -> None:
    """Which the server changes in place."""
    client.received = down


def keeps_an_optimizer(client, down) -> None:
    """Its moments would be lost where a run is resumed."""
    client.opt = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)


KEPT = {"keeps": ("rounds", "received"), "received": {}}


@pytest.mark.parametrize("act, words, attributes", [
    (changes_its_download, "round 1, client north: its train changes its download in place: make a n", {}),
    (keeps_its_download, "round 1: the server's update changes what a client keeps in place: make", KEPT),
    (keeps_an_optimizer, "round 1, client north: its train changes opt, which .*optimizer_state", {}),
])
def test_what_a_client_must_not_do(ends, act, words, attributes):
    ends(1, words, careless(act, **attributes))


@pytest.mark.parametrize("keeps, made, words", [
    ("rounds", None, "`keeps` of the client is 'rounds'; expected a tuple of names"),
    (("lost",), None, "`keeps` of the client names lost, which its __init__ does not set"),
    (("own",), torch.nn.Linear(2, 2), "own in `keeps` of the client has a Linear; expected tensors, numbers"),
])
def test_what_a_checkpoint_cannot_hold_is_refused_before_training(tmp_path, ends, keeps, made, words):
    ends(2, words, careless(None, keeps=keeps, own=made))
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_each_second_is_counted_once(tmp_path, data, monkeypatch):
    """By a clock that goes on by one whenever it is read; the measures at the end are an evaluation."""
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    _, (result,) = recorded(settings_of(data, tmp_path / "run"))
    assert result["seconds"] == {"train": 3, "server": 3, "evaluate": 4, "write": 3}
