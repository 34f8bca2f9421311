"""Flags and settings: where a value comes from, what is shown of it, and every kind of bad flag."""

import dataclasses
import json
import re
import subprocess
import sys

import common
from plumbing.settings import SCALES, Args, LinearArgs, as_now, identity, settings_of
from tests.conftest import METHODS, MODULES, ROOT, fails, parsed, run_here, start

import pytest

SOURCES = ["common.py", *(f"plumbing/{path.name}" for path in (ROOT / "plumbing").glob("*.py"))]


def shown(capsys, method, *flags) -> str:
    """What a command prints that ends with 0 before anything is run."""
    with pytest.raises(SystemExit) as end:
        parsed(method, *flags)
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("method", METHODS)
def test_help_explains_every_flag(capsys, method):
    module = MODULES[method]
    text = shown(capsys, method, "--help")
    assert module.__doc__.splitlines()[0] in text
    assert max(map(len, text.splitlines())) <= 110 and len(text.splitlines()) < 120
    for f in dataclasses.fields(module.Args):
        assert "--" + f.name.strip("_").replace("_", "-") in text
        assert len(f.metadata["text"]) > 10


def test_help_comes_in_groups_the_methods_own_flags_first(capsys):
    text = shown(capsys, "fdse", "--help")
    heads = ["this method's own:", "data:", "training:", "the run:"]
    places = [text.index(head) for head in heads]
    assert places == sorted(places)
    assert places[0] < text.index("--tau") < places[1] < text.index("--split") < places[2]
    assert places[2] < text.index("--lr ") < places[3] < text.index("--seed")
    own = shown(capsys, "fedgala", "--help").split("views and linear evaluation:")[0]
    assert "--ssl" in own and "--lr " not in own  # a flag whose default the method changes stays in its group


def help_of(text: str, flag: str) -> str:
    """The help of one flag, in one line."""
    after = text.split(f"  {flag} ", 1)[1]
    return " ".join(re.split(r"\n  -|\n\n", after)[0].split())


def test_help_shows_the_values_of_its_command_line(capsys):
    plain = shown(capsys, "fdse", "--help")
    assert help_of(plain, "--lr").endswith("[0.05; digits]") and help_of(plain, "--momentum").endswith("[0.0]")
    pacs = shown(capsys, "fdse", "--dataset", "pacs", "--scale", "laptop", "--tau", "0.1", "--help")
    assert help_of(pacs, "--rounds").endswith("[15; laptop]") and help_of(pacs, "--tau").endswith("[0.1; flag]")
    assert help_of(pacs, "--lr").endswith("[0.05; pacs]")
    official = shown(capsys, "fdse", "--dataset", "pacs", "--variant", "official", "--help")
    assert help_of(official, "--lambda").endswith("[0.5; variant official]")
    simsiam = shown(capsys, "fedgala", "--ssl", "byol", "--help")
    assert help_of(simsiam, "--lr").endswith("[0.03; derived]")


def test_show_settings_prints_each_and_stops(capsys, tmp_path):
    text = shown(capsys, "fedavg", "--scale", "smoke", "--lr", "0.3", "--out", tmp_path / "run", "--show-settings")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:]}
    assert len(rows) == len(dataclasses.fields(MODULES["fedavg"].Args))
    assert rows["--lr"] == ["0.3", "flag"] and rows["--rounds"] == ["2", "smoke"]
    assert rows["--clip"] == ["0.0", "default"]
    assert rows["--dataset"] == ["digits", "default"] and rows["--batch-size"] == ["16", "smoke"]
    assert not (tmp_path / "run").exists()


def test_every_field_is_read_somewhere():
    common_sources = "".join((ROOT / name).read_text() for name in SOURCES)
    for method, module in MODULES.items():
        source = common_sources + (ROOT / module.__file__).read_text()
        if method == "baselines.fedema":
            source += (ROOT / "fedgala.py").read_text()  # its learner
        for f in dataclasses.fields(module.Args):
            assert re.search(rf"\b(args|self|cls)\.{f.name}\b", source) or f.name == "variant", f.name


def test_where_a_value_comes_from():
    assert parsed("fedavg").dataset == "digits"
    args = parsed("fedavg", "--dataset", "officecaltech10")
    assert (args.dataset, args.image_size, args.rounds, args.lr_decay) == ("officecaltech", 224, 500, 0.998)
    laptop = parsed("fedavg", "--dataset", "officecaltech", "--scale", "laptop")
    assert laptop.image_size < 224 and laptop.rounds < 500 and laptop.lr_decay == 0.998
    assert parsed("fedavg", "--dataset", "officecaltech", "--scale", "laptop", "--rounds", "7").rounds == 7
    assert parsed("fedavg", "--dataset=officecaltech10", "--data", "officecaltech10").data == "officecaltech10"


def test_each_value_remembers_its_origin():
    args = parsed("fdse", "--dataset", "pacs", "--scale", "laptop", "--variant", "official", "--beta", "0.2")
    expected = {"beta": "flag", "dataset": "flag", "scale": "flag", "rounds": "laptop", "lambda_": "variant official",
                "lr": "pacs", "G": "default", "momentum": "default"}
    assert {name: args.origins[name] for name in expected} == expected
    assert args.image_size == 160 and args.origins["image_size"] == "laptop"  # over the variant's 256
    moco = parsed("fedgala", "--ssl", "moco", "--momentum", "0.5")
    assert (moco.lr, moco.origins["lr"]) == (0.025, "derived")
    assert (moco.momentum, moco.origins["momentum"]) == (0.5, "flag")
    assert Args.origins == {}  # those of a command line are its own


def test_a_run_shows_and_writes_its_settings(capsys, tmp_path):
    done = start("fedavg.py", "--scale", "smoke", "--lr", "0.2", "--out", tmp_path / "run")
    said = done.communicate()[0].splitlines()
    assert said[0].startswith("fedavg on digits, indomain: 6 clients (d0, d15, d30, d45, d60, d75), 192 training")
    assert said[1].startswith("cpu, ") and f"threads: 1; output in {tmp_path / 'run'}" in said[1]
    assert "  smoke: limit 40, rounds 2, batch_size 16" in said and "  flag: lr 0.2, scale smoke" in said
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert settings["method"] == "fedavg"
    assert settings["settings"]["lr"] == {"value": 0.2, "origin": "flag"}
    assert settings["settings"]["rounds"] == {"value": 2, "origin": "smoke"}
    assert settings["settings"].keys() == {f.name for f in dataclasses.fields(MODULES["fedavg"].Args)}


def test_settings_of_arguments_that_no_command_line_made():
    assert settings_of(Args(lr=0.3))["lr"] == {"value": 0.3, "origin": "set directly"}


@pytest.mark.parametrize("method", METHODS)
def test_an_older_identity_is_todays(method):
    """Through the class, so that a value that was recorded as "derived later" stands for what it became."""
    args = parsed(method)
    assert as_now(identity(args), args) == identity(args)
    assert as_now(identity(args) | {"lr": 7.0}, args) != identity(args)


def test_scales_and_backbones_are_those_of_common():
    assert tuple(common.BACKBONES) == next(f for f in dataclasses.fields(Args) if f.name == "backbone").metadata["choices"]
    assert set(SCALES) == {"paper", "laptop", "smoke"} and issubclass(LinearArgs, Args)


def test_a_usage_error_loads_neither_torchvision_nor_the_plotting():
    """Two seconds are torch's own; what else is slow is loaded where it is needed."""
    slow = ("torchvision", "matplotlib", "sklearn", "scipy")
    code = ("import sys, runpy; sys.argv = ['fdse.py', '--tua', '1']\n"
            "try: runpy.run_path('fdse.py', run_name='__main__')\n"
            f"except SystemExit as end: print(end.code, [m for m in {slow} if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "2 []" and done.stderr.count("\n") == 1


@pytest.mark.parametrize("method,flags,words", [
    ("fedavg", ["--dataset", "officehome2"], "officehome2.*officecaltech"),
    ("fedavg", ["--tau", "1"], "--tau is not a flag of fedavg"),
    ("fdse", ["--lamda", "1"], "did you mean --lambda"),
    ("fedavg", ["--rounds", "0"], "--rounds is 0.*at least 1"),
    ("fedavg", ["--rounds", "ten"], "--rounds.*ten"),
    ("fedavg", ["--lr", "nan"], "--lr is nan.*finite"),
    ("fedavg", ["--lr", "-1"], "--lr is -1.0.*above 0"),
    ("fedavg", ["--batch-size", "1"], "--batch-size is 1.*at least 2"),
    ("fedavg", ["--participation", "1.5"], "--participation is 1.5.*above 0 and at most 1"),
    ("fedavg", ["--split", "0.5/0.5"], "--split is 0.5/0.5.*three"),
    ("fedavg", ["--split", "0.9/0.1/0.1"], "sum to 1"),
    ("fedavg", ["--split", "nan/0.5/0.5"], "--split is nan"),
    ("fedavg", ["--device", "meta"], "--device is meta; expected"),
    ("fedavg", ["--device", "cuda:99"], "--device cuda:99 cannot be used"),
    ("fedavg", ["--device", "cpu", "--precision", "tf32"], "tf32 needs a GPU"),
    ("fdse", ["--tau", "0"], "--tau is 0.0.*at least 0.0001"),
    ("fedavg", ["--augment", "cutout"], "--augment.*cutout.*fedsr.*jigen"),
    ("fedavg", ["--variant", "fedcir"], "--variant fedcir has no settings for digits; it has for officecaltech"),
    ("fedsr", ["--variant", "fedprox"], "--variant.*fedprox.*fedl2r"),
    ("fedsr", ["--alpha-l2r", "-1"], "--alpha-l2r is -1.0.*at least 0"),
    ("fedsr", ["--dataset", "vlcs"], "vlcs.*officehome"),
    ("fedadg", ["--g-loss", "wgan"], "--g-loss.*wgan.*opposite"),
    ("fedadg", ["--smoothing", "2"], "--smoothing is 2.0.*at most 1"),
    ("fedadg", ["--projection-size", "0"], "--projection-size is 0.*at least 1"),
    ("fedcir", ["--generator-lr", "0"], "--generator-lr is 0.0.*above 0"),
    ("fedcir", ["--mle-samples", "1"], "--mle-samples is 1.*at least 2"),
    ("fedcir", ["--lambda-align", "inf"], "--lambda-align is inf.*finite"),
])
def test_bad_flags(capsys, method, flags, words):
    fails(capsys, 2, words, parsed, method, *flags)
