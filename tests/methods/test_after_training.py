"""--after-training: which network is tested, of each method; and that nothing else knows of it."""

import json
import re

import common
from plumbing.run.results import numbers_of, summary
from reproduce.cells import cells_of, missing
from reproduce.records import moved
from reproduce.tables import Block, Column, Row, Table
from tests.conftest import (METHODS, OFFICIAL, PROGRAMS, TESTED, fails, interrupted, metrics, parsed,
                            quick_for, run_here, same_metrics, saved_in)
from tests.small_table import record, recorded, records_in

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

WITHOUT_LABELS = ("fedgala", "official.fedgala", "baselines.fedema")
REFUSED = (*WITHOUT_LABELS, "baselines.centralized")
TESTABLE = [method for method in (*METHODS, *OFFICIAL) if method not in REFUSED]


def flags_of(method: str) -> list[str]:
    """Flags with which a method keeps all that it can, and all clients train."""
    keeping = re.sub(r"--participation \S+", "", TESTED[method.removeprefix("official.")].keeping).split()
    last = ["--select", "last"] if method == "baselines.local" else []
    return [*keeping, *last, "--eval-every", "2"]


def federation_of(method: str) -> common.Federation:
    """A federation of the smallest digits."""
    args = parsed(method, "--scale", "smoke", "--precision", "fp32", "--image-size", 8, *flags_of(method),
                  "--after-training")
    module, dataset = PROGRAMS[method], common.open_dataset(args)
    build = getattr(module, "build", common.backbone)
    return common.federation(module.Server, module.Client, args, build, dataset)


def counted(fed, module, state, data) -> int:
    """How many images of a part the network of this state gets right, in plain torch."""
    module.load_state_dict(state)
    module.eval()
    with torch.no_grad():
        x, y = data.batch(torch.arange(len(data)))
        return int((module(x).argmax(1) == y).sum())


# FDSE keeps a part, FedSR draws z, Local and PartialFed keep whole networks: the others go the same way.
KEEPERS = ("fdse", "fedsr", "baselines.local", "baselines.partialfed")


@pytest.mark.parametrize("method", quick_for(KEEPERS, TESTABLE))
def test_it_is_the_network_at_the_end_of_the_training(method, monkeypatch, four_domains):
    """The state of the common network after the last step of an optimizer, in a round with an evaluation; it
    is what is tested, and its counts, computed again, are those of the answer."""
    fed = federation_of(method)
    after_step, tested, correct = {}, [], common.correct

    def remember(*_) -> None:
        after_step.update(common.state(fed.net))

    def watching(model, data, settings) -> int:
        tested.append((model, common.state(model)))
        return correct(model, data, settings)
    monkeypatch.setattr(common, "correct", watching)
    for t in range(2):
        uploads, answers, states = {}, {}, {}
        for k in range(fed.K):
            tested.clear()
            hook = register_optimizer_step_post_hook(remember)
            uploads[k], answers[k] = common.train_client(fed, k, t, fed.server.download(k))
            hook.remove()
            states[k] = [*tested], dict(after_step)
        for k, ((*_, of_validation, of_test), trained) in states.items() if t else ():
            inside = [name for name in trained if name.removeprefix("model.") in of_test[1]]
            trained = {name.removeprefix("model."): trained[name] for name in inside}
            for model, state in (of_validation, of_test):
                assert state.keys() == trained.keys()
                assert all(torch.equal(state[name], trained[name]) for name in state)
                assert not model.training
            common.seed_all(fed.settings.seed, "evaluate", t + 1, k)  # FedSR and FedCiR draw z
            for part in ("val", "test"):
                data = getattr(fed.clients[k].data, part)
                assert answers[k][f"after_training/{part}_of"] == len(data)
                assert answers[k][f"after_training/{part}"] == counted(fed, of_test[0], trained, data)
        assert t or not any(name.startswith("after_training") for name in answers[0])  # no evaluation
        fed.server.update(uploads, t)


# FDSE has a target, FedSR draws z, Local tests each client's own network.
@pytest.mark.parametrize("method", ["fdse", "fedsr", "baselines.local"])
def test_all_else_is_the_same_to_the_byte(tmp_path, method, four_domains):
    """Metrics, states and results with the flag and without it."""
    flags = [*flags_of(method)[:-2], "--rounds", 2, "--checkpoint-every", 0]
    plain = run_here(method, tmp_path / "plain", *flags)
    result = run_here(method, tmp_path / "both", *flags, "--after-training")
    lines = metrics(tmp_path / "both")
    assert all(entry.pop("after_training")["val"] for entry in lines)
    assert json.dumps(lines) == json.dumps(metrics(tmp_path / "plain"))
    for file in ("best.pt", "checkpoint.pt"):
        one, other = (saved_in(tmp_path / name / file) for name in ("plain", "both"))
        for part in ("server", "clients", "identity", "round"):
            assert equal(one[part], other[part])
    own = {"after_training", "seconds", "images_per_second", "finished", "peak_memory_mib", "command"}
    assert plain.keys() | {"after_training"} == result.keys()
    assert all(plain[name] == result[name] for name in plain if name not in own)
    if method == "baselines.local":  # each client is tested with its own network anyway
        for which in ("best", "last"):
            main = {name: value for name, value in result[which].items() if name != "target"}
            assert result["after_training"][which] == main


def equal(one, other) -> bool:
    """Whether nested dicts have the same tensors and values."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# The result


def entry(t: int, val: float, trained: float, **more) -> dict:
    """A line of metrics whose accuracies are `val` of what is sent and `trained` of the clients' networks."""
    def of(accuracy):
        part = {"ALL": accuracy, "AVG": accuracy, "clients": {"a": accuracy}}
        return {"val": part, "test": part}
    return {"round": t, "clients": {"a": {"bytes_up": 1, "bytes_down": 1}}, **of(val),
            "after_training": of(trained), **more}


def test_it_has_its_own_best_round():
    """The first of equals, by its own validation accuracy; the target of a left-out domain is not in it."""
    history = [entry(1, 0.9, 0.2), entry(2, 0.5, 0.75, target=0.4), entry(3, 0.6, 0.75), entry(4, 0.7, 0.5)]
    result = numbers_of("indomain", history)
    trained = result["after_training"]
    assert (result["best"]["round"], trained["best"]["round"], trained["last"]["round"]) == (1, 2, 4)
    assert trained["best"] == {"round": 2, "val": 0.75, "ALL": 0.75, "AVG": 0.75, "clients": {"a": 0.75}}
    assert trained["curve"] == {"round": [1, 2, 3, 4], "val": [0.2, 0.75, 0.75, 0.5],
                                "ALL": [0.2, 0.75, 0.75, 0.5], "AVG": [0.2, 0.75, 0.75, 0.5]}
    told = result | {"args": {"metric": "accuracy"}, "images_per_second": 0, "peak_memory_mib": 0,
                     "seconds": {"train": 0, "server": 0, "evaluate": 0}}
    assert "; after local training: best validation round 2: ALL 75.00%, AVG 75.00%; last" in summary(told)


def test_a_round_without_it_leaves_no_result_of_it():
    """A run that went on without the flag; but a node that did not answer costs its round alone."""
    history = [entry(1, 0.9, 0.2), entry(2, 0.5, 0.75), entry(3, 0.6, 0.7)]
    history[2]["after_training"] = {"untested": ["a"]}
    assert numbers_of("indomain", history)["after_training"]["curve"]["round"] == [1, 2]
    del history[2]["after_training"]
    assert "after_training" not in numbers_of("indomain", history)


# Runs that go on


def test_an_interrupted_run_goes_on_to_the_same(tmp_path, monkeypatch):
    flags = ["--rounds", 4, "--eval-every", 2, "--checkpoint-every", 0, "--after-training"]
    whole = run_here("fedavg", tmp_path / "whole", *flags)
    interrupted("fedavg", monkeypatch, tmp_path / "run", *flags, after=2)
    resumed = run_here("fedavg", tmp_path / "run", *flags)
    assert resumed["after_training"] == whole["after_training"]
    assert whole["after_training"]["curve"]["round"] == [2, 4]
    assert same_metrics(tmp_path / "run", tmp_path / "whole")


def test_what_is_there_serves_if_it_has_what_is_asked_for(tmp_path, monkeypatch, capsys):
    """A run with the flag where one without is asked for. The other way round it is refused, finished or not;
    made again it is recorded beside the one without, which is the same in all else."""
    out, records = tmp_path / "run", tmp_path / "r.jsonl"
    flags = ["--rounds", 2, "--checkpoint-every", 0, "--record", records]
    interrupted("fedavg", monkeypatch, out, *flags, after=1)
    first = run_here("fedavg", out, *flags)
    for again in ("--no-resume", "--resume"):
        both = run_here("fedavg", out, *flags, "--after-training", again)
        assert both["curve"] == first["curve"] and both["after_training"]["curve"]["round"] == [1, 2]
    assert run_here("fedavg", out, *flags) == both
    assert ["after_training" in line for line in recorded(records)] == [False, True]
    other = tmp_path / "other"
    interrupted("fedavg", monkeypatch, other, *flags, after=1)
    capsys.readouterr()
    fails(capsys, 2, "holds this run without --after-training", run_here, "fedavg", other, *flags,
          "--after-training")


# Records and cells


DIGITS = ["--dataset", "digits", "--precision", "fp32"]
ALL = [Column("ALL", "best/ALL")]
BLOCK = Block("", "digits", ALL, [], "--precision fp32")
SENT, TRAINED = Row("sent", [[]], "fdse"), Row("trained", [[]], "fdse", "--after-training")


def numbers(all_: float) -> dict:
    return {"best": {"ALL": all_}, "last": {"ALL": all_}, "curve": {"round": [60], "ALL": [all_]}}


def values_of(records, row: Row) -> tuple[dict, list[str]]:
    """What a cell has of seed 0, and the commands that are missing."""
    table = Table("fdse-9", "", "fdse", "", [BLOCK])
    (cell,) = cells_of(table, BLOCK, row, records, "paper", (0,))
    return cell.values, [run.command for run in cell.missing]


def test_a_record_answers_for_the_readings_that_it_has(tmp_path):
    """Also an older one beside a newer one that lacks the reading."""
    plain = record("fdse", DIGITS, finished="2026", **numbers(0.5))
    both = record("fdse", DIGITS, finished="2025", **numbers(0.25), after_training=numbers(0.75))
    alone = both | {part: {} for part in ("best", "last", "curve")}
    lacks = "python fdse.py --dataset digits --precision fp32 --after-training --seed 0 --test-rounds best"
    assert values_of(records_in(tmp_path, [plain]), SENT) == ({0: 50}, [])
    assert values_of(records_in(tmp_path, [plain]), TRAINED) == ({}, [lacks])
    assert values_of(records_in(tmp_path, [both]), SENT) == ({0: 25}, [])
    assert values_of(records_in(tmp_path, [both]), TRAINED) == ({0: 75}, [])
    assert values_of(records_in(tmp_path, [both, plain]), SENT) == ({0: 50}, [])
    assert values_of(records_in(tmp_path, [both, plain]), TRAINED) == ({0: 75}, [])
    assert values_of(records_in(tmp_path, [alone]), SENT)[0] == {}
    assert values_of(records_in(tmp_path, [alone]), SENT)[1] == [lacks.replace(" --after-training", "")]
    assert values_of(records_in(tmp_path, [alone]), TRAINED) == ({0: 75}, [])
    assert [len(records_in(tmp_path, [one]).newest) for one in (plain, both, alone)] == [1, 1, 0]


def test_one_run_is_planned_for_both_readings(tmp_path):
    block = Block("", "digits", ALL, [SENT, TRAINED], "--precision fp32")
    (lacking,) = missing([Table("fdse-9", "", "fdse", "", [block])], records_in(tmp_path, []), "paper", [0])
    assert "--after-training" in lacking.run.command


@pytest.mark.parametrize("method", ["fdse", "official.fdse", "baselines.fedbn", "baselines.moon"])
def test_records_of_the_flag_that_it_replaces(method):
    """`--evaluated aggregated` was the main reading, `trained` the other one; feddyn's flag is another."""
    made = record(method, DIGITS, **numbers(0.5))
    name = method.removeprefix("baselines.")
    made |= {"method": name, "command": f"python {method}.py --seed 0"}
    sent = made | {"args": made["args"] | {"evaluated": "aggregated"}}
    assert moved(sent | {"command": f"{made['command']} --evaluated aggregated"}) == moved(made)
    trained = moved(made | {"args": made["args"] | {"evaluated": "trained"}})
    assert trained["command"] == f"{made['command']} --after-training"
    assert trained["after_training"] == numbers(0.5)
    assert trained["best"] == trained["last"] == trained["curve"] == {}
    other = record("feddyn", DIGITS, **numbers(0.5))
    assert moved(other)["args"]["evaluated"] == "mean"
