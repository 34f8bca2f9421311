"""What answers in a hospital: the code that is installed there, whatever app a run brings.

    python -m deploy.node --secret node.secret

Beside `flower-supernode --isolation process`, which by itself starts nothing. Flower's own executor would
unpack the app of whoever started the run and import it; this one never opens it. It also imports torch once,
where that one starts a process for each message.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from deploy.flower import client_app

from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor,
                                         SuperExecAuthHttpInterceptor)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

PAUSE = 0.5  # seconds between two looks for a message


def connected(address: str, interceptor) -> RuntimeHttpClient:
    """A connection to the SuperNode on this machine."""
    version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
    return RuntimeHttpClient.from_server_address(
        server_address=address, insecure=True, root_certificates=None, interceptors=[version, interceptor],
        retry_invoker=make_simple_http_retry_invoker())


def answer(client: RuntimeHttpClient) -> None:
    """One message. Of what comes with it the app is left as it is: packed bytes."""
    alive = HeartbeatSender(make_task_heartbeat_fn_http(client))
    alive.start()
    message, context, _, _ = pull_task_input(client)
    push_message(client, client_app(message, context), context)
    push_task_output(client, context, SubStatus.COMPLETED, "")
    alive.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="deploy.node", description=__doc__)
    parser.add_argument("--supernode", default="127.0.0.1:9094", help="the SuperNode [127.0.0.1:9094]")
    parser.add_argument("--secret", type=Path, required=True,
                        help="the file of its --superexec-auth-secret-file, which others cannot read")
    args = parser.parse_args()
    methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
    of_node = SuperExecAuthHttpInterceptor(master_secret=args.secret.read_bytes(), protected_methods=methods)
    supernode, wanted = connected(args.supernode, of_node), [TaskType.CLIENT_APP]
    while True:
        task = supernode.AcquireTask(AcquireTaskRequest(supported_task_types=wanted))
        if task.token:
            answer(connected(args.supernode, RuntimeTokenHttpInterceptor(task.token)))
        time.sleep(0 if task.token else PAUSE)


if __name__ == "__main__":
    main()
