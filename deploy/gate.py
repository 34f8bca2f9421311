"""The one port of the server's machine that is open: it lets nodes through to the SuperLink, and nobody else.

    python -m deploy.gate --certificate server.pem --key server.key --ca ca.crt

Flower's SuperLink has one port for nodes, for those who start runs, and for the run itself, and asks the
last two for no credentials. So it listens on 127.0.0.1 alone, and this passes on what is below /v1/fleet/,
where `--enable-supernode-auth` admits registered keys. All else is not found.
"""

from __future__ import annotations

import argparse
import ssl

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

WAIT = 60  # seconds for an answer of the SuperLink


def gate(superlink: httpx.AsyncClient) -> Starlette:
    """An application that has the questions of nodes, and no other path."""
    async def to_superlink(request: Request) -> Response:
        headers = [(name, value) for name, value in request.headers.raw if name != b"host"]
        answer = await superlink.post(f"/v1/fleet/{request.path_params['question']}", headers=headers,
                                      content=request.stream())
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
    return Starlette(routes=[Route("/v1/fleet/{question}", to_superlink, methods=["POST"])])


def main() -> None:
    parser = argparse.ArgumentParser(prog="deploy.gate", description=__doc__)
    parser.add_argument("--host", default="0.0.0.0", help="address at which nodes come in [0.0.0.0]")
    parser.add_argument("--port", type=int, default=8443, help="its port [8443]")
    parser.add_argument("--superlink", default="127.0.0.1:8000", help="the SuperLink [127.0.0.1:8000]")
    parser.add_argument("--certificate", required=True, help="of the server, for its name and 127.0.0.1")
    parser.add_argument("--key", required=True, help="of the certificate")
    parser.add_argument("--ca", required=True, help="whom the certificate is checked against")
    args = parser.parse_args()
    trusted = ssl.create_default_context(cafile=args.ca)
    superlink = httpx.AsyncClient(base_url=f"https://{args.superlink}", verify=trusted, timeout=WAIT)
    uvicorn.run(gate(superlink), host=args.host, port=args.port, ssl_certfile=args.certificate,
                ssl_keyfile=args.key, access_log=False)


if __name__ == "__main__":
    main()
