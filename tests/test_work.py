"""What a run computes: images, steps and evaluations by hand, FLOPs beside those of a step that is taken,
states; and throughput fitted to times."""

import dataclasses
import importlib

import common
import fdse
from reproduce import throughput
from reproduce.measures.overhead import counter
from reproduce.methods import arguments
from reproduce.work import Counted, Parts, Work, counts_of, images_of, size_of_state, work_of
from tests.small_table import record

import pytest
import torch


def of(module: str, *flags: str):
    return arguments(module, flags)


def flops_of(module: str, *flags: str) -> tuple[float, float]:
    """FLOPs of training and of evaluation of a whole run."""
    run = work_of(module, of(module, *flags), Counted())
    return run.train.flops, run.evaluate.flops


def test_images_of_a_run():
    images = images_of(of("fedavg", "--dataset", "officecaltech"))  # 0.8 of 958, 1123, 157, 295
    assert images.train == [766, 898, 125, 236] and abs(images.val + images.test - 0.2 * 2533) < 8
    shared = images_of(of("fedcir", "--dataset", "pacs", "--clients-per-domain", "13"))
    assert len(shared.train) == 52 and sum(shared.train) == pytest.approx(0.8 * 9991, rel=0.02)
    linear = images_of(of("fedgala", "--dataset", "pacs", "--target", "photo"))
    assert sorted(linear.train) == [2048, 2344, 3929] and linear.targets == [1670] and not linear.val
    tenth = images_of(of("fdse", "--dataset", "officecaltech", "--protocol", "lodo", "--target", "dslr"))
    assert tenth.targets == [15]


def test_work_on_images_of_ones_own_is_not_counted():
    assert work_of("fedavg", of("fedavg", "--dataset", "folder:/somewhere"), Counted()) is None


def test_counts_of_every_dataset_are_known_or_said_to_be_a_guess():
    assert sum(counts_of("pacs")[0].values()) == 9991 and not counts_of("pacs")[1]
    assert sum(counts_of("terrainc")[0].values()) == 24788 and counts_of("terrainc")[1]
    assert counts_of("domainnet10")[1] and counts_of("iwildcam")[1]


def test_steps_and_evaluations_by_hand(monkeypatch):
    """Steps of all clients and rounds; every image of an evaluation every --eval-every rounds."""
    parts = Parts(Work(1.0), Work(1.0), Work(0.01), Work(), 0, 0, 0, 0, 0)
    monkeypatch.setattr(Counted, "of", lambda counted, module, args: parts)
    train, evaluate = flops_of("fedavg", "--dataset", "officecaltech", "--eval-every", "3")
    assert train == 500 * (16 + 18 + 3 + 5)
    images = images_of(of("fedavg", "--dataset", "officecaltech"))
    assert evaluate == pytest.approx(0.01 * 167 * (images.val + images.test))
    half, _ = flops_of("fedcir", "--dataset", "pacs", "--clients-per-domain", "13", "--participation", "0.5")
    assert half == 300 * 20 * 26  # 20 steps each


def test_a_step_has_the_flops_of_one_that_is_taken():
    """Also of a method with several passes in a step."""
    for module, flags in (("fedavg", []), ("fedadg", ["--E0", "0"])):
        args = dataclasses.replace(of(module, "--dataset", "digits", *flags), steps=1, epochs=1, device="cpu",
                                   precision="fp32")
        method = importlib.import_module(module)
        net = getattr(method, "build", common.backbone)(args, 1, 10)
        x = torch.zeros(args.batch_size, 1, 28, 28, dtype=torch.uint8)
        part = common.Data(x, torch.arange(len(x)), torch.zeros(len(x)).long(), "cpu", "unit")
        client = method.Client(args, net, 0, common.ClientData("a", part, part, part))
        with counter() as taken:
            client.train(method.Server(args, net, 1).download(0), 0)
        assert Counted().of(module, args).step.flops == taken.get_total_flops()


def test_fedadg_trains_f_and_c_alone_in_the_first_part_of_a_round():
    flags = ["--dataset", "digits", "--steps", "10", "--rounds", "1"]
    whole, _ = flops_of("fedadg", *flags, "--E0", "0")
    none, _ = flops_of("fedadg", *flags, "--E0", "10")
    some, _ = flops_of("fedadg", *flags, "--E0", "4")
    assert none < whole and some == pytest.approx(0.4 * none + 0.6 * whole)


def test_test_parts_where_tables_need_them():
    flags = ["--dataset", "digits", "--rounds", "100"]
    whole = of("fedavg", *flags)
    best = dataclasses.replace(whole, test_rounds="best")
    counted, images = Counted(), images_of(whole)
    evaluate = [work_of("fedavg", args, counted).evaluate.flops for args in (whole, best)]
    assert evaluate[1] / evaluate[0] == pytest.approx(
        (100 * images.val + 20 * images.test) / (100 * (images.val + images.test)))


def test_adaptation_counts_its_epochs():
    flags = ["--dataset", "digits", "--protocol", "lodo", "--target", "d0"]
    of_epochs = [flops_of("fdse", *flags, "--adapt-epochs", n)[1] for n in ("0", "1", "5")]
    assert of_epochs[0] < of_epochs[1] < of_epochs[2]
    assert of_epochs[2] - of_epochs[0] == pytest.approx(5 * (of_epochs[1] - of_epochs[0]))


def test_states_are_those_that_a_checkpoint_has():
    """FedEMA's client keeps three networks, momentum and all; FDSE's server a part for each client."""
    args = of("baselines.fedema", "--dataset", "digits")
    parts = Counted().of("baselines.fedema", args)
    assert parts.client > 3 * parts.server
    args = of("fdse", "--dataset", "digits")
    server = fdse.Server(args, fdse.build(args, 1, 10), 6)
    parts = Counted().of("fdse", args)
    assert size_of_state(common.kept(server)) == parts.server + 5 * parts.more


def test_runs_that_agree_in_what_is_read_are_counted_once():
    counted = Counted()
    flags = ["--dataset", "digits", "--ssl", "simclr"]
    first = counted.of("fedgala", of("fedgala", *flags, "--ga-unit", "model"))
    assert counted.of("fedgala", of("fedgala", *flags, "--lr", "0.5", "--ga-unit", "layer")) is first
    assert counted.of("fedgala", of("fedgala", *flags, "--hidden", "64")) is not first
    assert counted.of("fedgala", of("fedgala", *flags, "--batch-size", "32")) is not first


def test_torch_is_as_before_after_counting():
    step, autocast, tolist = torch.optim.SGD.step, torch.autocast, torch.Tensor.tolist
    Counted().of("fedavg", of("fedavg", "--dataset", "digits"))
    assert torch.optim.SGD.step is step and torch.autocast is autocast and torch.Tensor.tolist is tolist


def test_a_method_that_validates_while_it_trains_can_be_counted():
    """Local reads how many images are right, a number that is not there."""
    counted = Counted()
    assert counted.of("baselines.local", of("baselines.local", "--dataset", "digits")) and not counted.failed


def test_throughput_is_fitted_to_the_times():
    """Times that are made of FLOPs and operators are explained exactly; the error is of other methods."""
    counted, records = Counted(), []
    for name, rounds in (("fedavg", "5"), ("fedavg", "50"), ("fedsr", "20"), ("fdse", "10"), ("fdse", "30")):
        flags = ["--dataset", "digits", "--rounds", rounds]
        work = work_of(name, of(name, *flags), counted).total
        seconds = work.flops * 3e-11 + work.operators * 4e-5
        records.append(record(name, flags, seconds={"train": seconds}, hardware={"gpu": None, "cpu": "x"}))
    device, error = throughput.fitted(records, (None, "x", 1, "fp32", 1), counted)
    assert device.flop == pytest.approx(3e-11, rel=1e-3) and device.operator == pytest.approx(4e-5, rel=1e-3)
    assert error.runs == 5 and error.of_nine_in_ten < 1.2
    assert device.seconds(Work(1e12)) == pytest.approx(throughput.STARTUP + 30, rel=1e-3)


def test_times_of_ones_own_images_say_nothing_of_other_runs():
    """Their number is not known to the plan."""
    hardware = {"gpu": None, "cpu": throughput.cpu_name()}
    made = []
    for seed in range(6):
        one = record("fedavg", ["--dataset", "pacs", "--seed", str(seed)], hardware=hardware)
        one["args"]["dataset"] = "folder:/images 0123456789ab"
        made.append(one)
    device, error = throughput.measured_here(made, Counted())
    assert error is None and "a guess" in device.described


def test_without_records_of_a_machine_its_times_are_a_guess():
    device, error = throughput.measured_here([], Counted())
    assert error is None and "a guess" in device.described
    assert device.with_tflops(4).flop == 0.25e-12
