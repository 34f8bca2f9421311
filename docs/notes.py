"""What docs/methods/*.md have from docs/equations/*.toml: the section of equations, between two marks, and
the diagram of who keeps and sends what, beside the note; and docs/round.svg, what every method does in a
round. `python docs/build.py` writes them."""

from html import escape
from pathlib import Path

from docs import equations
from docs.equations import ROOT, Table

NOTES = ROOT / "docs" / "methods"
BEGIN = "<!-- equations: written by docs/build.py from docs/equations -->"
END = "<!-- end of equations -->"


# The section of equations


def section(of: Table) -> str:
    """Every equation and line of a method as GitHub shows it."""
    used, whole, unused = equations.counts(of)
    blocks = [f"{whole} of {used} equations and lines are located in [{of.file}](../../{of.file}) or in "
              "[common.py](../../common.py), and tested."]
    if of.says:
        blocks.append(of.says)
    blocks += [entry_block(entry) for entry in of.entries]
    if of.parts:
        rows = ["| Without a number | What | In the code | Tests |", "|---|---|---|---|"]
        for part in of.parts:
            says = part["says"].replace("|", "\\|")  # a cell of a table
            rows.append(f"| {part['tag']} | {says} | {names(part['place'])} | {tests(part['tests'])} |")
        blocks.append("\n".join(rows))
    if of.unused:
        rows = ["| Not computed | Why |", "|---|---|"]
        rows += [f"| {entry['tag']} | {entry['why']} |" for entry in of.unused]
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


def entry_block(entry: dict) -> str:
    says = entry["says"]
    for heading, text in equations.remarks(entry).items():
        says += f"\n\n*{heading}:* {text}"
    math = "\n".join(["```math", entry["latex"].strip(), "```"])
    where = f"In {names(entry['place'])}. Tests: {tests(entry['tests'])}."
    return "\n\n".join([f"### {entry['tag']}: {entry['name']}", math, says, where])


def names(places: list[str]) -> str:
    return ", ".join(f"`{place}`" for place in places)


def tests(of: list[str]) -> str:
    """Tests by their files: "[test_fdse](...): `test_a`, `test_b`; [test_common](...): `test_c`"."""
    files: dict[str, list[str]] = {}
    for test in of:
        file, _, name = test.partition("::")
        files.setdefault(file, []).append(f"`{name}`")
    return "; ".join(f"[{file}](../../tests/{file}.py): {', '.join(found)}" for file, found in files.items())


def with_section(text: str, made: str) -> str:
    """A note with this section between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


# The diagram


STYLE = """<style>
    text { font: 14px Helvetica, Arial, sans-serif; fill: #1f2328 }
    .small { font-size: 13px } .head { font-weight: bold }
    .server { fill: #eef2f6 } .client { fill: #fff8ec } .server, .client { stroke: #56616c }
    .down { stroke: #1f6fb2; fill: #1f6fb2 } .up { stroke: #b4480f; fill: #b4480f }
    text.down, text.up { stroke: none }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 }
      .server { fill: #1c2733 } .client { fill: #2d2516 } .server, .client { stroke: #8b949e }
      .down { stroke: #79b8ff; fill: #79b8ff } .up { stroke: #ffab70; fill: #ffab70 }
    }
  </style>"""
LINE = 19  # pixels of a line of text


def diagram(of: Table) -> str:
    """An SVG: what the server keeps, what travels, what the client keeps."""
    server, client = of.travels["server"], of.travels["client"]
    between = LINE * (max(len(of.travels["down"]), len(of.travels["up"])) + 1) + 22
    top = 10
    bottom_of_server = top + LINE * (len(server) + 1) + 14
    top_of_client = bottom_of_server + between
    height = top_of_client + LINE * (len(client) + 1) + 24
    words = [f"Server keeps {'; '.join(server)}.", f"Client k keeps {'; '.join(client)}.",
             f"Down: {', '.join(of.travels['down'])}.", f"Up: {', '.join(of.travels['up'])}."]
    size = f'viewBox="0 0 420 {height}" width="420" height="{height}"'
    drawn = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
             f"  <title>{escape(' '.join(words))}</title>", f"  {STYLE}"]
    drawn += box("server", "Server", top, server)
    drawn += arrow("down", 40, bottom_of_server + 4, top_of_client - 4, of.travels["down"])
    drawn += arrow("up", 235, top_of_client - 4, bottom_of_server + 4, of.travels["up"])
    drawn += box("client", "Client k", top_of_client, client)
    return "\n".join([*drawn, "</svg>", ""])


def box(kind: str, head: str, y: int, lines: list[str]) -> list[str]:
    height = LINE * (len(lines) + 1) + 14
    drawn = [f'  <rect class="{kind}" x="10" y="{y}" width="400" height="{height}" rx="8"/>',
             f'  <text class="head" x="24" y="{y + 22}">{head}</text>']
    for i, line in enumerate(lines):
        drawn.append(f'  <text class="small" x="24" y="{y + 22 + LINE * (i + 1)}">{escape(line)}</text>')
    return drawn


def arrow(kind: str, x: int, start: int, end: int, lines: list[str]) -> list[str]:
    way = 1 if end > start else -1
    tip = f"M{x - 5} {end - 10 * way} L{x} {end} L{x + 5} {end - 10 * way} Z"
    drawn = [f'  <path class="{kind}" d="M{x} {start} V{end - 10 * way}" stroke-width="2"/>',
             f'  <path class="{kind}" d="{tip}"/>',
             f'  <text class="head {kind}" x="{x + 14}" y="{min(start, end) + 20}">{kind}</text>']
    for i, line in enumerate(lines):
        y = min(start, end) + 20 + LINE * (i + 1)
        drawn.append(f'  <text class="small" x="{x + 14}" y="{y}">{escape(line)}</text>')
    return drawn


# The round, for docs/start.md


WIDTH, LOOP = 470, 440  # of the picture; where the way back runs
ROUND = [  # a box each: its kind, its head, its lines
    ("server", "Server: download(k)", ["what client k gets: the global model w"]),
    ("client", "Client k: train(down, t)",
     ["a copy of w, its own images alone", "for each batch of E epochs: loss, gradient, a step",
      "what goes back: w_k, and n_k, its number of images"]),
    ("server", "Server: update(uploads, t)", ["the new w: the mean of the w_k, by n_k"]),
    ("client", "Evaluation", ["each client's test images, or the domain left out"]),
]
BETWEEN = [("down", "w"), ("up", "w_k, n_k"), ("down", "w")]  # the arrows, and what they carry


def round_loop() -> str:
    """An SVG: one round, the same for all methods, and the way back to the next."""
    gap = 38
    y, places, drawn = 10, [], []
    for kind, head, lines in ROUND:
        if head.startswith("Client k"):
            for behind in (12, 6):  # the other clients
                size = f'width="400" height="{LINE * (len(lines) + 1) + 14}" rx="8"'
                drawn.append(f'  <rect class="{kind}" x="{10 + behind}" y="{y + behind}" {size}/>')
        drawn += box(kind, head, y, lines)
        places.append((y, y + LINE * (len(lines) + 1) + 14))
        y = places[-1][1] + gap + 12 * head.startswith("Client k")
    for i, (kind, carried) in enumerate(BETWEEN):
        start, end = places[i][1] + 4 + 12 * (i == 1), places[i + 1][0] - 4
        drawn.append(f'  <path class="{kind}" d="M60 {start} V{end - 10}" stroke-width="2"/>')
        drawn.append(f'  <path class="{kind}" d="M55 {end - 10} L60 {end} L65 {end - 10} Z"/>')
        drawn.append(f'  <text class="{kind}" x="74" y="{(start + end) // 2 + 5}">{carried}</text>')
    top, bottom = places[0][0] + 26, places[2][0] + 26
    back = f"M410 {bottom} H{LOOP} V{top} H422"
    drawn.append(f'  <path class="down" style="fill: none" d="{back}" stroke-width="2"/>')
    drawn.append(f'  <path class="down" d="M422 {top - 5} L412 {top} L422 {top + 5} Z"/>')
    middle = (top + bottom) // 2
    drawn.append(f'  <text class="small" transform="translate({LOOP + 18} {middle}) rotate(-90)" '
                 'text-anchor="middle">next round, T times</text>')
    height = places[-1][1] + 10
    words = "; ".join(f"{head}: {', '.join(lines)}" for _, head, lines in ROUND)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                      f"  <title>A round. {escape(words)}</title>", f"  {STYLE}", *drawn, "</svg>", ""])


# Files


def written() -> dict[Path, str]:
    """{file: what it should have} of all notes and diagrams that are made from the tables."""
    files = {ROOT / "docs" / "round.svg": round_loop()}
    for method in equations.METHODS:
        of = equations.table(method)
        note = NOTES / f"{method}.md"
        files[note] = with_section(note.read_text(), section(of))
        files[NOTES / f"{method}.svg"] = diagram(of)
    return files


def write() -> list[Path]:
    """Write what has changed; returns these files."""
    changed = []
    for path, text in written().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            changed.append(path)
    return changed
