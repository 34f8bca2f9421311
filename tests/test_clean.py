"""plumbing.clean: it lists what runs and decodings have written, and deletes that alone, when it is told
to."""

import json
import shutil
from pathlib import Path

from plumbing import clean
from plumbing.files import locked
from tests.conftest import fails

import pytest

RESULT = {"args": {}, "best": {"round": 1, "ALL": 0.5, "AVG": 0.5}, "last": {"ALL": 0.5, "AVG": 0.5},
          "seconds": {"train": 1, "server": 0, "evaluate": 0}, "images_per_second": 1, "peak_memory_mib": 1}
SETTINGS = {"dataset": ("digits", "default"), "rounds": (60, "digits"), "lr": (0.2, "flag"),
            "out": ("x", "flag")}


def a_run(folder: Path, finished: bool) -> Path:
    """A run of 60 rounds, of which one is done if it is not finished."""
    folder.mkdir(parents=True)
    settings = {name: {"value": value, "origin": origin} for name, (value, origin) in SETTINGS.items()}
    content = {"method": "fedavg", "code": [], "settings": settings}
    (folder / "settings.json").write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text("{}\n" * (60 if finished else 1))
    for name in ("checkpoint.pt", "best.pt"):
        (folder / name).write_bytes(bytes(1 << 20))
    (folder / ".lock").write_text("")
    if finished:
        (folder / "result.json").write_text(json.dumps(RESULT))
    return folder


def a_cache(data: Path, name: str, index: str = "") -> Path:
    folder = data / "cache" / name
    folder.mkdir(parents=True)
    content = {"left_out": [], "classes": ["a"], "domains": {"photo": {"labels": [0]}}}
    (folder / "index.json").write_text(index or json.dumps(content))
    (folder / "files.json").write_text("{}")
    (folder / "photo.npy").write_bytes(bytes(2 << 20))
    return folder


@pytest.fixture
def place(tmp_path):
    a_run(tmp_path / "runs" / "done", finished=True)
    a_run(tmp_path / "runs" / "seeds" / "s0", finished=False)
    (tmp_path / "runs" / "mine").mkdir()
    (tmp_path / "runs" / "mine" / "checkpoint.pt").write_text("a file of mine")
    a_cache(tmp_path / "data", "pacs-224-0123456789ab")
    a_cache(tmp_path / "data", "officecaltech-64-0123456789ab")
    a_cache(tmp_path / "data", "notes", index='{"pages": 3}')
    return tmp_path


def cleaned(place: Path, capsys, *flags) -> list[str]:
    """The lines that it prints."""
    clean.main(["--runs", str(place / "runs"), "--data", str(place / "data"), *flags])
    return capsys.readouterr().out.splitlines()


def files_in(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def test_the_list(place, capsys):
    before = files_in(place)
    text = "\n".join(cleaned(place, capsys))
    runs, caches = text.split("\n\n")
    done, unfinished = runs.splitlines()[1:]
    words = f"{place}/runs/done finished, 60 of 60 rounds 2.0 0 minutes fedavg --lr 0.2"
    assert " ".join(done.split()) == words
    assert "seeds/s0  unfinished, 1 of 60 rounds" in unfinished
    office, pacs = caches.splitlines()[1:]
    assert "officecaltech-64-0123456789ab  officecaltech" in office and " 2.0 " in office and "pacs" in pacs
    assert files_in(place) == before


def test_a_running_run_is_named_and_kept(place, capsys):
    with locked(place / "runs" / "seeds" / "s0" / ".lock"):
        assert "seeds/s0  running, 1 of 60 rounds" in "\n".join(cleaned(place, capsys))
        said = cleaned(place, capsys, "--unfinished", "--delete")
    assert said[0].startswith("kept, a process is running in it: unfinished run")
    assert (place / "runs" / "seeds" / "s0" / "checkpoint.pt").exists()


@pytest.mark.parametrize("flags, gone, size", [
    (["--unfinished"], {f"runs/seeds/s0{name}" for name in ("", "/settings.json", "/metrics.jsonl", "/.lock",
                                                          "/checkpoint.pt", "/best.pt")}, "2.0"),
    (["--checkpoints"], {"runs/done/checkpoint.pt", "runs/done/best.pt"}, "2.0"),
    (["--caches", "pacs"], {f"data/cache/pacs-224-0123456789ab{name}"
                            for name in ("", "/index.json", "/files.json", "/photo.npy")}, "2.0"),
    (["--caches", "all", "--checkpoints"], None, "6.0"),
])
def test_what_goes(place, capsys, flags, gone, size):
    """Nothing without --delete, and then what was named and nothing else."""
    before = files_in(place)
    said = cleaned(place, capsys, *flags)
    assert said[-1] == f"{size} MiB would be free; nothing was deleted: --delete does it"
    assert files_in(place) == before
    said = cleaned(place, capsys, *flags, "--delete")
    assert said[-1] == f"{size} MiB are free again" and all(" MiB  deleted: " in line for line in said[:-1])
    left = {name for name in files_in(place) if name != "data/cache/.lock"}
    if gone is not None:
        assert before - left == gone
    assert left < before and "data/cache/notes/photo.npy" in left and "runs/mine/checkpoint.pt" in left


def test_a_folder_with_other_files_is_kept(place, capsys):
    (place / "runs" / "seeds" / "s0" / "notes.txt").write_text("mine")
    (place / "data" / "cache" / "pacs-224-0123456789ab" / "more").mkdir()
    before = files_in(place)
    said = cleaned(place, capsys, "--unfinished", "--caches", "pacs", "--delete")
    assert said[0].startswith("kept, it has other files (notes.txt): unfinished run")
    assert said[1].startswith("kept, it has other files (more): decoded images")
    assert files_in(place) == before and said[2] == "0.0 MiB are free again"


def test_links_are_neither_followed_nor_deleted(place, capsys, tmp_path):
    elsewhere = shutil.move(place / "runs" / "seeds" / "s0", tmp_path / "elsewhere")
    (place / "runs" / "link").symlink_to(elsewhere)
    assert "runs/link" not in "\n".join(cleaned(place, capsys))
    run = a_run(place / "runs" / "other", finished=False)
    (run / "best.pt").unlink()
    (run / "best.pt").symlink_to(elsewhere / "best.pt")
    said = cleaned(place, capsys, "--unfinished", "--delete")
    assert said[0].startswith("kept, it has other files (best.pt)")
    assert (elsewhere / "best.pt").exists() and (run / "best.pt").is_symlink()


def test_events_of_tensorboard_go_with_the_run(place, capsys):
    folder = place / "runs" / "seeds" / "s0" / "tensorboard"
    folder.mkdir()
    (folder / "events.out.tfevents.1").write_bytes(bytes(1 << 20))
    said = cleaned(place, capsys, "--unfinished", "--delete")
    assert said[-1] == "3.0 MiB are free again" and not folder.parent.exists()


def test_a_run_that_ends_meanwhile_is_kept(place):
    run = clean.run_on_disk(place / "runs" / "seeds" / "s0")
    shutil.copy(place / "runs" / "done" / "result.json", run.path)
    assert not clean.delete_run(run)
    with locked(place / "runs" / "done" / ".lock"):
        assert not clean.delete_states(clean.run_on_disk(place / "runs" / "done"))
    with locked(place / "data" / "cache" / ".lock"):  # it is being decoded
        assert not clean.delete_cache(clean.find_caches(place / "data")[0])
    assert (run.path / "checkpoint.pt").exists() and (place / "runs" / "done" / "best.pt").exists()


def test_bad_usage(place, capsys):
    fails(capsys, 2, "--delete needs to know what", clean.main, ["--delete"])
    fails(capsys, 2, "--caches vlcs: there are decoded images of officecaltech, pacs in", clean.main,
          ["--data", str(place / "data"), "--caches", "vlcs"])


def test_empty_places(tmp_path, capsys):
    assert cleaned(tmp_path, capsys) == [f"no runs in {tmp_path / 'runs'}", "",
                                         f"no decoded images in {tmp_path / 'data'}/cache"]


@pytest.mark.parametrize("minutes, shown", [(1, "1 minutes"), (119, "119 minutes"), (180, "3 hours"),
                                            (3 * 24 * 60, "3 days")])
def test_age(monkeypatch, minutes, shown):
    monkeypatch.setattr(clean.time, "time", lambda: 1000.0 + 60 * minutes)
    assert clean.age(1000.0) == shown


def test_two_names_of_one_file_count_once(place, capsys):
    """As a run has them whose last round is the best."""
    run = place / "runs" / "done"
    (run / "best.pt").unlink()
    (run / "best.pt").hardlink_to(run / "checkpoint.pt")
    assert " 1.0 " in next(line for line in cleaned(place, capsys) if str(run) in line)
    said = cleaned(place, capsys, "--checkpoints", "--delete")
    assert said[-1] == "1.0 MiB are free again" and not list(run.glob("*.pt"))


def test_states_and_images_behind_links_stay(place, capsys, tmp_path):
    run = place / "runs" / "done"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / "best.pt").rename(elsewhere / "best.pt")
    (run / "best.pt").symlink_to(elsewhere / "best.pt")
    cache = place / "data" / "cache" / "pacs-224-0123456789ab"
    shutil.move(cache, elsewhere / "decoded")
    cache.symlink_to(elsewhere / "decoded")
    assert cache.name not in "\n".join(cleaned(place, capsys))
    said = cleaned(place, capsys, "--checkpoints", "--caches", "all", "--delete")
    assert said[-1] == "3.0 MiB are free again" and not (run / "checkpoint.pt").exists()
    assert (run / "best.pt").is_symlink() and (cache / "photo.npy").exists()


def test_an_index_cannot_name_files_elsewhere(place):
    index = json.dumps({"left_out": [], "classes": ["a"], "domains": {"../notes/photo": {}}})
    cache = a_cache(place / "data", "own-64-0123456789ab", index)
    (cache / "photo.npy").unlink()
    found = next(one for one in clean.find_caches(place / "data") if one.path == cache)
    assert clean.delete_cache(found) and not cache.exists()
    assert (place / "data" / "cache" / "notes" / "photo.npy").exists()


def test_a_cache_that_has_other_files_meanwhile_is_kept(place):
    cache = clean.find_caches(place / "data")[1]
    (cache.path / "notes.txt").write_text("mine")
    assert not clean.delete_cache(cache) and (cache.path / "index.json").exists()
