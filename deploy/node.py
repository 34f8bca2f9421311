"""What answers in a hospital: the code that is installed there, whatever app a run brings.

    python -m deploy.node --secret node.secret --server-key instructions.pub --only hospital_a --state state

Beside `flower-supernode --isolation process`, which by itself starts nothing. Flower's own executor would
unpack the app of whoever started the run and import it; this one never opens it. It answers what the server
of the run has signed, and nothing else. Each message has a copy of this process, which has imported torch; so
one that fails or is killed takes no other along.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import time
from pathlib import Path

from deploy import check_flower
from plumbing.run.errors import one_line_on_failure

with one_line_on_failure("deploy.node"):
    check_flower()  # before its inner parts are imported, which another version may not have

from deploy.flower import answered, reply
from deploy.signing import check_signed, key_of

from flwr.app import Context, Message, RecordDict
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor,
                                         SuperExecAuthHttpInterceptor)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The flags of this program; in `flags` those of the method, which replace the run's on this node."""
    parser = argparse.ArgumentParser(prog="deploy.node", description=__doc__, allow_abbrev=False,
                                     epilog="Other flags are the method's, and replace those of the run.")
    parser.add_argument("--supernode", default="127.0.0.1:9094", help="the SuperNode [127.0.0.1:9094]")
    parser.add_argument("--secret", type=Path, required=True,
                        help="the file of its --superexec-auth-secret-file, which others cannot read")
    parser.add_argument("--server-key", type=Path, required=True,
                        help="the server's public key: what it has not signed is not obeyed")
    parser.add_argument("--only", required=True, help="the domain of this node")
    parser.add_argument("--state", type=Path, required=True, help="folder of what its client keeps")
    args, args.flags = parser.parse_known_args(words)
    args.flags += ["--only", args.only, "--state", str(args.state)]
    return args


def connected(address: str, interceptor) -> RuntimeHttpClient:
    """A connection to the SuperNode on this machine."""
    version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
    return RuntimeHttpClient.from_server_address(address, True, None, [version, interceptor],
                                                 retry_invoker=make_simple_http_retry_invoker())


def obeyed(message: Message, context: Context, args: argparse.Namespace, key) -> RecordDict:
    """The answer to what the server has signed. Stop before the rest of a message is read that it has not."""
    check_signed(message, context, key, args.state / f"{args.only}.newest")
    return answered(message.content, {"flags": shlex.join(args.flags)})


def answer(args: argparse.Namespace, key, token: str) -> None:
    """One message. Of what comes with it the app is left as it is: packed bytes."""
    client = connected(args.supernode, RuntimeTokenHttpInterceptor(token))
    HeartbeatSender(make_task_heartbeat_fn_http(client)).start()
    message, context, _, _ = pull_task_input(client)
    push_message(client, reply(message, lambda: obeyed(message, context, args, key)), context)
    push_task_output(client, context, SubStatus.COMPLETED, "")


def main() -> None:
    args = arguments()
    key = key_of(args.server_key, private=False)
    signed = SuperExecAuthHttpInterceptor(master_secret=args.secret.read_bytes(),
                                          protected_methods=frozenset(["/flwr.proto.Runtime/AcquireTask"]))
    supernode, copies = connected(args.supernode, signed), multiprocessing.get_context("fork")
    while True:
        task = supernode.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if task.token:
            copy = copies.Process(target=answer, args=(args, key, task.token))
            copy.start()
            copy.join()
        else:
            time.sleep(0.5)


if __name__ == "__main__":
    with one_line_on_failure("deploy.node"):
        main()
