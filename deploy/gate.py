"""The one open port of the server's machine: it lets nodes through to the SuperLink, and nobody else.

    SSL_CERT_FILE=ca.crt uvicorn --factory deploy.gate:gate --host 0.0.0.0 --port 8443 \\
        --ssl-certfile server.pem --ssl-keyfile server.key

Flower's SuperLink has one port for nodes, for those who start runs, and for the run itself, and asks the last
two for no credentials. So it listens on 127.0.0.1 alone, and this passes on what is below /v1/fleet/, where
`--enable-supernode-auth` admits registered keys. All else is not found.
"""

from __future__ import annotations

import os

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


def gate() -> Starlette:
    """An application that has the paths of nodes alone. The variable SUPERLINK has another address."""
    superlink = httpx.AsyncClient(base_url=os.environ.get("SUPERLINK", "https://127.0.0.1:8000"), timeout=60)

    async def to_superlink(request: Request) -> Response:
        headers = request.headers.mutablecopy()
        del headers["host"]
        try:
            answer = await superlink.post(f"/v1/fleet/{request.path_params['question']}", headers=headers,
                                          content=request.stream())
        except httpx.TransportError:
            return Response(status_code=502)  # with which a SuperNode tries again
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
    return Starlette(routes=[Route("/v1/fleet/{question}", to_superlink, methods=["POST"])])
