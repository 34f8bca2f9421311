"""What answers in a hospital: the code that is installed there, whatever app a run brings.

    python -m deploy.node --secret node.secret

Beside `flower-supernode --isolation process`, which by itself starts nothing. Flower's own executor would
unpack the app of whoever started the run and import it; this one never opens it. Each message has a copy of
this process, which has imported torch; so one that fails or is killed takes no other along.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path

from deploy.flower import client_app
from plumbing.run.errors import one_line_on_failure

from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor,
                                         SuperExecAuthHttpInterceptor)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output


def connected(address: str, interceptor) -> RuntimeHttpClient:
    """A connection to the SuperNode on this machine."""
    version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
    return RuntimeHttpClient.from_server_address(address, True, None, [version, interceptor],
                                                 retry_invoker=make_simple_http_retry_invoker())


def answer(address: str, token: str) -> None:
    """One message. Of what comes with it the app is left as it is: packed bytes."""
    client = connected(address, RuntimeTokenHttpInterceptor(token))
    HeartbeatSender(make_task_heartbeat_fn_http(client)).start()
    message, context, _, _ = pull_task_input(client)
    push_message(client, client_app(message, context), context)
    push_task_output(client, context, SubStatus.COMPLETED, "")


def main() -> None:
    parser = argparse.ArgumentParser(prog="deploy.node", description=__doc__)
    parser.add_argument("--supernode", default="127.0.0.1:9094", help="the SuperNode [127.0.0.1:9094]")
    parser.add_argument("--secret", type=Path, required=True,
                        help="the file of its --superexec-auth-secret-file, which others cannot read")
    args = parser.parse_args()
    signed = SuperExecAuthHttpInterceptor(master_secret=args.secret.read_bytes(),
                                          protected_methods=frozenset(["/flwr.proto.Runtime/AcquireTask"]))
    supernode, copies = connected(args.supernode, signed), multiprocessing.get_context("fork")
    while True:
        task = supernode.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if task.token:
            copy = copies.Process(target=answer, args=(args.supernode, task.token))
            copy.start()
            copy.join()
        else:
            time.sleep(0.5)


if __name__ == "__main__":
    with one_line_on_failure("deploy.node"):
        main()
