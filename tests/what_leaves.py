"""What leaves a client, measured: `python -m tests.what_leaves` writes the table of deploy/README.md.

With a module's name, fdse or baselines.fedbn, it prints every tensor of an upload. A method needs a sum alone
if its server comes to the same state when each upload is replaced by the mean of all: what secure aggregation
would show it.
"""

import argparse
import re
from copy import deepcopy

import common
from plumbing.run.files import tensors_of
from plumbing.run.payloads import kept, nbytes
from tests.conftest import METHODS, ROOT, one_run, parsed

import torch

PAGE = ROOT / "deploy" / "README.md"
BETWEEN = re.compile(r"(<!-- what leaves: .* -->\n).*(<!-- end of what leaves -->)", re.DOTALL)


def after_two_rounds(method: str) -> tuple[common.Federation, dict, dict]:
    """The server after two rounds of all clients, on small digits; the uploads and logs of a third round."""
    module, build = METHODS[method]
    args = parsed(method, "--scale", "smoke", "--precision", "fp32", *one_run(method))
    fed = common.federation(module.Server, module.Client, args, build, common.open_dataset(args))
    for t in range(3):
        uploads, logs = fed.train(common.train_client, range(fed.K), t)
        if t < 2:
            fed.server.update(uploads, t)
    return fed, uploads, logs


def alike(values: list, first: bool):
    """The mean of several payloads, or of what is in them; the first has what is left of a sum of counts."""
    if isinstance(values[0], dict):
        return {name: alike([value[name] for value in values], first) for name in values[0]}
    together = torch.stack(values)
    if together.is_floating_point():
        return together.mean(0)
    share = together.sum(0) // len(values)
    return share + (together.sum(0) % len(values) if first else 0)


def needs_a_sum_alone(fed: common.Federation, uploads: dict) -> bool:
    """Whether the server's next state is a function of the mean of the uploads."""
    states, values = [], list(uploads.values())
    for given in (uploads, {k: alike(values, first=k == 0) for k in uploads}):
        server = deepcopy(fed.server)
        common.seed_all(0, "server", 2)
        server.update(deepcopy(given), 2)
        states.append(tensors_of(kept(server)))
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(*states, strict=True))


def row(method: str) -> str:
    """A line of the table."""
    if method == "baselines.centralized":
        return "| centralized | the images, once | | | pools images: no nodes |"
    fed, uploads, logs = after_two_rounds(method)
    parts = []
    for part, value in uploads[0].items():
        count = f"{len(value)} tensors, " if isinstance(value, dict) else ""
        parts.append(f"`{part}` ({count}{nbytes({part: value}):,})")
    logged = ", ".join(name for name in logs[0] if not name.startswith("bytes_"))
    alone = "-" if not uploads[0] else "yes" if needs_a_sum_alone(fed, uploads) else "no"
    name = method.removeprefix("baselines.")
    return f"| {name} | {', '.join(parts) or 'nothing'} | {logs[0]['bytes_down']:,} | {logged} | {alone} |"


def table() -> str:
    """The table, a row for each method."""
    lines = ["| method | up: part (bytes) | down (bytes) | numbers | needs the sum alone |",
             "|---|---|---|---|---|"]
    return "\n".join(lines + [row(method) for method in METHODS]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", nargs="?", choices=METHODS)
    method = parser.parse_args().method
    torch.set_num_threads(1)
    if method:
        _, uploads, _ = after_two_rounds(method)
        for name, what in common.layout(uploads[0]).items():
            print(name, what)
    else:
        content = table()
        PAGE.write_text(BETWEEN.sub(lambda found: found[1] + content + found[2], PAGE.read_text()))


if __name__ == "__main__":
    main()
