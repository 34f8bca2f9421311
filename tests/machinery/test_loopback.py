"""Flower's own programs by the commands of deploy/README.md, on loopback, with TLS: who is let in, and whose
code runs where."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import ROOT, write_files

import pytest

pytest.importorskip("flwr", reason="needs pip install -r requirements-deploy.txt")
pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(not shutil.which("nginx"), reason="needs nginx: apt install nginx")]
APP = '''
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client_app = ClientApp()
server_app = ServerApp()


@client_app.query()
def listed(message, context):
    Path("FOLDER/on_node").touch()
    return Message(RecordDict(), reply_to=message)


@server_app.main()
def main(grid, context):
    asked = RecordDict({"asked": ConfigRecord({"what": "tell", "words": ["fedavg"]})})
    messages = [Message(asked, node, "query") for node in grid.get_node_ids()]
    replies = list(grid.send_and_receive(messages, timeout=90))
    Path("FOLDER/on_server").write_text(" ".join(str(reply.error.reason) for reply in replies))
'''
PATHS = {"runtime/acquire-task": 404, "control/start-run": 404, "fleet/../control/start-run": 404,
         "../docs": 404, "fleet/%00": 400, "fleet/push-object": 404, "fleet/push-object -T big": 413,
         "fleet/push-object -T big -H Transfer-Encoding:chunked": 404}  # what a stranger gets


class Machines:
    """Programs that are ended together, in a folder with the ports of this test."""

    def __init__(self, folder: Path):
        self.folder, self.started = folder, []
        text = (ROOT / "deploy" / "README.md").read_text()
        self.blocks = re.findall(r"```(?:toml)?\n(.*?)```", text, re.DOTALL)
        with socket.socket() as a, socket.socket() as b, socket.socket() as c:
            for one in (a, b, c):
                one.bind(("127.0.0.1", 0))
            link, gate, self.node = (one.getsockname()[1] for one in (a, b, c))
        self.link, self.gate = f"127.0.0.1:{link}", f"127.0.0.1:{gate}"
        self.here = {"server.example.org:8443": self.gate, "8443": str(gate), "8000": str(link),
                     "/srv/flower": str(folder), "/srv/": f"{folder}/",
                     "nginx -p": "nginx -g 'user root;' -p",  # where root runs the tests
                     "flower-supernode ": f"flower-supernode --port {self.node} ",
                     "deploy.node ": f"deploy.node --supernode 127.0.0.1:{self.node} "}

    def command(self, words: str) -> str:
        """The one block of the README that begins with these words, for the ports and folders of here."""
        (found,) = [block for block in self.blocks if block.startswith(words)]
        return self.here_and_now(found)

    def here_and_now(self, text: str) -> str:
        for theirs, ours in self.here.items():
            text = text.replace(theirs, ours)
        return text

    def env(self, home: str) -> dict:
        more = {"HOME": str(self.folder / home), "OMP_NUM_THREADS": "1",
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        return {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")} | more

    def start(self, command: str) -> None:
        with open(self.folder / f"{len(self.started)}.log", "w") as log:
            self.started.append(subprocess.Popen(self.words(command), cwd=self.folder, env=self.env("home"),
                                                 stdout=log, stderr=log, start_new_session=True))

    def words(self, command: str) -> list[str]:
        """It begins as each terminal does."""
        return ["bash", "-c", self.command("umask") + command]

    def do(self, command: str, home: str = "home") -> subprocess.CompletedProcess:
        return subprocess.run(self.words(command), cwd=self.folder, env=self.env(home), text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)

    def config(self, home: str, address: str) -> None:
        """Flower's configuration, whole, with an address."""
        content = self.command("[superlink]").replace(self.link, address)
        write_files(self.folder, {f"{home}/.flwr/config.toml": content})


@pytest.fixture
def machines(tmp_path):
    made = Machines(tmp_path)
    yield made
    for process in made.started:
        os.killpg(process.pid, 9)
        process.wait()


def wait_for(done, seconds: int = 90) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(1)


def test_without_a_login_nothing_is_started_and_a_node_runs_its_own_code(machines, tmp_path):
    machines.config("home", machines.link)
    machines.config("stranger", machines.gate)
    for words in ("openssl", "ssh-keygen"):
        assert machines.do(machines.command(words)).returncode == 0
    machines.start(machines.command("flower-superlink"))
    write_files(tmp_path, {"nginx.conf": machines.here_and_now((ROOT / "deploy" / "nginx.conf").read_text())})
    machines.start(machines.command("nginx"))
    register = machines.command("flwr supernode register")
    wait_for(lambda: "registered successfully" in machines.do(register).stdout)

    app, ours = tmp_path / "app", (ROOT / "deploy" / "app" / "pyproject.toml").read_text()
    write_files(app, {"app.py": APP.replace("FOLDER", str(tmp_path)),
                      "pyproject.toml": ours.replace("deploy.flower:", "app:")})
    stranger = [f"flwr run {app} server", f"flwr run {ROOT}/deploy/app server --run-config 'run=\"fedavg\"'",
                register.splitlines()[0], "flwr ls server", "flwr supernode list server"]
    for command in stranger:
        refused = machines.do(command, "stranger")
        assert refused.returncode and "404 Not Found" in refused.stdout, refused.stdout
    (tmp_path / "big").touch()
    os.truncate(tmp_path / "big", 3 << 29)
    idle = [socket.create_connection(machines.gate.split(":")) for _ in range(150)]  # they shut out nobody
    for path, code in PATHS.items():
        asked = machines.do(f"curl --path-as-is -s -o /dev/null -w '%{{http_code}}' --cacert ca.crt -X POST "
                            f"https://{machines.gate}/v1/{path}")
        assert asked.stdout == str(code), (path, asked.stdout)
    unknown = machines.command("flower-supernode").replace("hospital_a.key", "other.key")
    machines.do("ssh-keygen -q -t ecdsa -b 384 -N '' -f other.key")
    assert machines.do(f"timeout 60 {unknown}").returncode not in (0, 124)

    machines.start(machines.command("flower-supernode"))
    machines.start(machines.command("python -m deploy.node"))
    wait_for(lambda: "online" in machines.do("flwr supernode list server").stdout)
    assert idle and (tmp_path / "superlink.db").stat().st_mode & 0o777 == 0o600
    assert "FLWR_TELEMETRY_ENABLED=0" in machines.command("umask")
    assert machines.do(f"flwr run {app} server").returncode == 0  # by who has a login on the server
    wait_for((tmp_path / "on_server").exists)
    assert "its log says why" in (tmp_path / "on_server").read_text()
    assert not (tmp_path / "on_node").exists()
