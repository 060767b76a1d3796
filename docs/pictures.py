"""The pictures of the documentation, as plain SVG for a dark and a light page: ``make pictures`` writes them beside this file.

A picture is 480 units wide with letters of 15, so that it can be read on a telephone. Its colours follow
``prefers-color-scheme``, which a browser takes from the ``color-scheme`` of the page that shows it. The state diagrams are laid
out by Graphviz (``apt-get install graphviz``); without its program ``dot`` they stay as they are.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from enum import Enum
from html import escape
from pathlib import Path
from typing import Any

from dualwrite.protocol import batches, lives, members
from dualwrite.units import records

WIDTH = 480
STYLE = """<style>
text { font: 15px system-ui, sans-serif; fill: #1f2328; }
.head { font-weight: 600; }
.soft { fill: #57606a; }
.middle { text-anchor: middle; }
.box { fill: #f6f8fa; stroke: #8c959f; stroke-width: 1.5; }
.good { fill: #d3f2dc; stroke: #1a7f37; stroke-width: 1.5; }
.bad { fill: #ffe2e0; stroke: #cf222e; stroke-width: 1.5; }
.wait { fill: #fff2c5; stroke: #9a6700; stroke-width: 1.5; }
.line { stroke: #57606a; stroke-width: 1.5; fill: none; }
.ground { fill: #ffffff; }
.point { fill: #57606a; }
.cut { stroke: #0969da; stroke-width: 2.5; stroke-dasharray: 7 5; }
.decision { fill: #0969da; }
.node path { fill: #f6f8fa; stroke: #8c959f; }
.edge path, .edge polygon { stroke: #57606a; }
.first ellipse, .edge polygon { fill: #57606a; }
text.on { fill: #ffffff; font-weight: 600; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.soft { fill: #9ea7b3; }
.box { fill: #1c2430; stroke: #768390; }
.good { fill: #123d20; stroke: #3fb950; }
.bad { fill: #4c1a1a; stroke: #f85149; }
.wait { fill: #41310a; stroke: #d29922; }
.line { stroke: #9ea7b3; }
.ground { fill: #131416; }
.point { fill: #9ea7b3; }
.cut { stroke: #58a6ff; }
.decision { fill: #1f6feb; }
.node path { fill: #1c2430; stroke: #768390; }
.edge path, .edge polygon { stroke: #9ea7b3; }
.first ellipse, .edge polygon { fill: #9ea7b3; }
}
</style>"""


class Picture:
    """A drawing that grows downwards."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """One line of text; ``kind`` adds classes of the style."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, lines: list[str], kind: str = "box") -> None:
        """A box as high as its lines, which stand in its middle."""
        height = 14 + 20 * len(lines)
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="6" class="{kind}"/>')
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + 22 + 20 * number, line, "middle on" if kind == "decision" else "middle")

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A straight arrow, across or downwards."""
        across = y1 == y2
        back = 9 if (x2 > x1 if across else y2 > y1) else -9
        wings = (
            f"{x2 - back:g},{y2 - 5:g} {x2 - back:g},{y2 + 5:g}"
            if across
            else f"{x2 - 5:g},{y2 - back:g} {x2 + 5:g},{y2 - back:g}"
        )
        self.parts += [
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="line"/>',
            f'<polygon points="{x2:g},{y2:g} {wings}" class="point"/>',
        ]

    def cut(self, y: float) -> None:
        """The line of the decision."""
        self.parts.append(f'<line x1="8" y1="{y:g}" x2="{WIDTH - 8}" y2="{y:g}" class="cut"/>')

    def svg(self, height: float) -> str:
        """The whole file."""
        return "\n".join(
            [
                (
                    f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}"'
                    f' viewBox="0 0 {WIDTH} {height:g}" role="img">'
                ),
                f"<title>{escape(self.title)}</title>",
                STYLE,
                *self.parts,
                "</svg>",
                "",
            ]
        )


def dual_write() -> str:
    """The front page: one decision, and what a crash on each side of it leaves."""
    picture = Picture("One block writes rows and messages; COMMIT in the database decides both")
    picture.box(125, 8, 230, ["with writer.transaction():"])
    picture.arrow(150, 42, 150, 82)
    picture.arrow(330, 42, 330, 82)
    picture.box(8, 84, 210, ["database", "rows, not committed"])
    picture.box(262, 84, 210, ["Kafka", "messages, not visible"])
    picture.text(240, 168, "A crash above this line: neither side has it.", "middle head")
    picture.cut(206)
    picture.box(90, 189, 300, ["COMMIT: the database decides"], "decision")
    picture.text(240, 252, "A crash below it: both sides have it.", "middle head")
    picture.box(8, 272, 210, ["database", "rows, committed"], "good")
    picture.box(262, 272, 210, ["Kafka", "messages, visible"], "good")
    picture.arrow(218, 299, 260, 299)
    picture.text(240, 350, "Kafka follows, even if another process must finish it.", "middle soft")
    return picture.svg(364)


STEPS = (
    ("the transaction has begun", "neither"),
    ("the id is still ours", "neither"),
    ("messages are handed to Kafka", "neither"),
    ("your code is done", "neither"),
    ("Kafka has every message", "neither"),
    ("the row says so, not committed", "neither"),
    ("the database has committed", "both"),
    ("Kafka has committed", "both"),
)


def crash() -> str:
    """What is there after a kill at each step, and one recovery."""
    picture = Picture("A process is killed after each step; what both sides have after recovery")
    picture.text(8, 22, "killed when ...", "soft")
    picture.text(412, 22, "recovered", "soft middle")
    y = 34.0
    for number, (words, left) in enumerate(STEPS):
        if left == "both" and STEPS[number - 1][1] == "neither":
            picture.cut(y + 21)
            picture.box(90, y + 4, 300, ["COMMIT: the database decides"], "decision")
            y += 50
        picture.text(8, y + 23, f"{number + 1}. {words}")
        picture.box(
            352, y, 120, [f"{left} side" + ("s" if left == "both" else "")], "good" if left == "both" else "box"
        )
        y += 40
    return picture.svg(y + 4)


def bands(picture: Picture, y: float, name: str, parts: list[tuple[float, list[str], str]]) -> float:
    """A lane of a timeline: its name, and what happens, in shares of the width. Returns where the next may begin."""
    picture.text(8, y + 14, name, "head")
    x, most = 8.0, max(len(lines) for _, lines, _ in parts)
    for share, lines, kind in parts:
        width = share * (WIDTH - 16)
        picture.box(x, y + 24, width - 4, [*lines, *[""] * (most - len(lines))], kind)
        x += width
    return y + 24 + 14 + 20 * most + 18


def outage() -> str:
    """Kafka is away for a while: what the blocks of a writer do."""
    picture = Picture("While Kafka is away: blocks are refused, or their messages wait in the database")
    y = bands(
        picture, 4, "Kafka", [(0.28, ["answers"], "good"), (0.36, ["silent"], "bad"), (0.36, ["answers again"], "good")]
    )
    y = bands(
        picture,
        y,
        'outbox="never", the default',
        [
            (0.28, ["commit on", "both sides"], "good"),
            (0.36, ["refused at once:", "nothing is written"], "bad"),
            (0.36, ["commit on", "both sides"], "good"),
        ],
    )
    y = bands(
        picture,
        y,
        'outbox="fallback"',
        [
            (0.28, ["commit on", "both sides"], "good"),
            (0.36, ["commit; messages", "wait as rows"], "wait"),
            (0.36, ["first what waits,", "then directly again"], "good"),
        ],
    )
    picture.text(8, y + 10, "time", "soft")
    picture.arrow(46, y + 5, WIDTH - 8, y + 5)
    return picture.svg(y + 24)


def fleet() -> str:
    """A member of a fleet dies inside a block, and another one settles what it left."""
    picture = Picture("A member of a fleet is killed inside a block; another one settles what it left")
    y = bands(
        picture,
        4,
        "the member with id shop-0",
        [
            (0.34, ["works under", "its lease"], "good"),
            (0.66, ["killed inside a block:", "its transaction is open"], "bad"),
        ],
    )
    y = bands(
        picture,
        y,
        "another process",
        [
            (0.34, ["works, as shop-1"], "good"),
            (0.3, ["sees it dead, or", "its lease expire"], "wait"),
            (0.36, ["settles shop-0:", "both, or neither"], "good"),
        ],
    )
    y = bands(
        picture,
        y,
        "read_committed consumers of its partitions",
        [(0.34, ["read on"], "good"), (0.3, ["wait"], "wait"), (0.36, ["read on"], "good")],
    )
    picture.text(8, y + 10, "They wait about 1 s beside a living process of the fleet,")
    picture.text(8, y + 30, "about 30 s if a container or a machine dies as a whole.")
    return picture.svg(y + 42)


def spark() -> str:
    """The two ways of the Spark sink."""
    picture = Picture('Spark: format("dualwrite") decides a batch once, write_batch decides each partition')
    picture.text(8, 20, 'format("dualwrite"): the batch at once', "head")
    for number in range(3):
        x = 8 + number * 158
        picture.box(x, 32, 148, [f"task {number + 1}", "rows staged,", "messages unseen"])
        picture.arrow(x + 74, 106, x + 74, 134)
    picture.box(8, 136, 464, ["one COMMIT by the driver decides all tasks"], "decision")
    picture.arrow(240, 170, 240, 196)
    picture.box(8, 198, 464, ["the whole batch is on both sides, or nothing of it"], "good")
    picture.text(8, 272, "write_batch, foreach_batch: partition by partition", "head")
    for number, (words, kind) in enumerate((("both sides", "good"), ("both sides", "good"), ("not yet", "wait"))):
        x = 8 + number * 158
        picture.box(x, 284, 148, [f"task {number + 1}", "a dual write"])
        picture.arrow(x + 74, 338, x + 74, 366)
        picture.box(
            x, 368, 148, ["COMMIT" if kind == "good" else "runs again"], "decision" if kind == "good" else "box"
        )
        picture.arrow(x + 74, 402, x + 74, 428)
        picture.box(x, 430, 148, [words], kind)
    return picture.svg(472)


def sequence(title: str, lanes: dict[str, tuple[float, str]], steps: list[tuple[str, list[str]]]) -> str:
    """What passes between lanes, downwards.

    A step is the lanes of an arrow, as ``"ab"``, or ``"!"`` for the decision, or ``""`` for words alone.
    """
    picture = Picture(title)
    y = 62.0
    for way, lines in steps:
        if way == "!":
            picture.box(60, y, WIDTH - 120, lines, "decision")
            y += 48
            continue
        # Words that a line of a lane would cross stand on a ground of their own.
        middle = sum(lanes[one][0] for one in way) / 2 if way else WIDTH / 2
        for number, line in enumerate(lines):
            half = 4 + 4.1 * len(line)
            x = min(max(middle, half), WIDTH - half)
            picture.parts.append(
                f'<rect x="{x - half:g}" y="{y + 20 * number:g}" width="{2 * half:g}" height="20" class="ground"/>'
            )
            picture.text(x, y + 15 + 20 * number, line, "middle" if way else "middle soft")
        y += 20 * len(lines) + 6
        if way:
            picture.arrow(lanes[way[0]][0], y, lanes[way[1]][0], y)
            y += 12
    behind = Picture(title)
    for x, name in lanes.values():
        behind.parts.append(f'<line x1="{x:g}" y1="42" x2="{x:g}" y2="{y:g}" class="line"/>')
        behind.box(x - 4.5 * len(name) - 8, 8, 9 * len(name) + 16, [name])
    picture.parts[:0] = behind.parts
    return picture.svg(y + 8)


def steps() -> str:
    """One dual write, step by step."""
    return sequence(
        "One dual write: BEGIN, messages, your statements, flush, the state, COMMIT, which decides, and Kafka's commit",
        {"a": (70, "your process"), "d": (252, "database"), "k": (420, "Kafka")},
        [
            ("ad", ["BEGIN, am I still the", "owner of this id?"]),
            ("ak", ["messages, in a Kafka transaction"]),
            ("ad", ["your statements"]),
            ("ak", ["flush: every message is acknowledged"]),
            ("ad", ["UPDATE kafka_transaction_state", "SET prepared = S WHERE I am still the owner"]),
            ("ad", ["COMMIT"]),
            ("!", ["the decision"]),
            ("ak", ["commit"]),
            ("", ["A crash before the decision: recovery aborts.", "A crash after it: recovery commits."]),
        ],
    )


def waiting() -> str:
    """A block while Kafka is silent, and what its messages become."""
    return sequence(
        "Kafka is silent: a block's messages become rows, and the sender sends them when Kafka answers again",
        {"a": (48, "a block"), "d": (180, "database"), "s": (310, "the sender"), "k": (432, "Kafka")},
        [
            ("ak", ["messages"]),
            ("", ["no answer for fallback_after_s"]),
            ("ad", ["mode = later, INSERT the messages,", "count the decision WHERE I am still the owner"]),
            ("ad", ["COMMIT"]),
            ("!", ["the decision: rows and messages"]),
            ("", ["Kafka answers again"]),
            ("sd", ["BEGIN, read what waits, in order"]),
            ("sk", ["the messages, in a Kafka transaction"]),
            ("sd", ["DELETE them, record the transaction, COMMIT"]),
            ("sk", ["commit"]),
            ("", ["The last send locks the mode, sends", "what is left, and makes it direct again."]),
        ],
    )


def states(table: Mapping[Any, Mapping[Any, Enum]], first: Enum) -> str:
    """A state machine for Graphviz: one arrow for each pair of states, with all its events.

    An event that leads from every state, or from every one but the last, to one state has a single arrow.
    """
    arrows: dict[tuple[str, str], list[str]] = {}
    for event in dict.fromkeys(event for moves in table.values() for event in moves):
        moves = {state.value: moves[event].value for state, moves in table.items() if event in moves}
        [target, *others] = set(moves.values())
        left_out = [state.value for state in table if state.value not in moves]
        if not others and (not left_out or (len(left_out) == 1 and left_out[0] == [*table][-1].value)):
            moves = {" but ".join(["any state", *left_out]): target}
        for state, following in moves.items():
            arrows.setdefault((state, following), []).append(event.value)
    lines = [
        "digraph {",
        'graph [bgcolor=transparent, ranksep=0.35, nodesep=0.3, pad="0.05,0.05"];',
        'node [shape=box, style=rounded, fontname=Helvetica, fontsize=15, height=0.4, margin="0.16,0.05"];',
        "edge [fontname=Helvetica, fontsize=15, arrowsize=0.8];",
        'first [shape=point, width=0.14, class=first, label=""];',
        f'first -> "{first.value}";',
        *(f'"{one}" [shape=plaintext];' for one, _ in arrows if one.startswith("any state")),
        *('"{}" -> "{}" [label=" {}"];'.format(*pair, " \\n ".join(events)) for pair, events in arrows.items()),
        "}",
    ]
    return "\n".join(lines)


def laid_out(graph: str, title: str) -> str:
    """The graph as Graphviz lays it out, in the colours of the other pictures. The file begins with what it was made from."""
    dot = [shutil.which("dot") or "dot", "-Tsvg"]
    done = subprocess.run(dot, input=graph, capture_output=True, text=True, check=True)  # noqa: S603 - our own words
    text = re.sub(r"<!--.*?-->\n?", "", done.stdout[done.stdout.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(<svg [^>]*?) xmlns:xlink="[^"]*"', r'\1 role="img"', text).replace('pt"', '"')
    text = re.sub(r' (?:font-family|font-size)="[^"]*"', "", text)
    text = re.sub("<title>.*?</title>", lambda _: f"<title>{escape(title)}</title>\n{STYLE}", text, count=1)
    return f"<!--\n{graph}\n-->\n{text}"


PICTURES = {
    "picture-dual-write": dual_write,
    "picture-crash": crash,
    "picture-outage": outage,
    "picture-fleet": fleet,
    "picture-spark": spark,
    "picture-steps": steps,
    "picture-waiting": waiting,
}

STATES: dict[str, tuple[str, Mapping[Any, Mapping[Any, Enum]], Enum]] = {
    "states-write": ("One dual write", lives.WRITE_LIFE, lives.WriteState.BEGUN),
    "states-producer": ("One producer", lives.PRODUCER_LIFE, lives.ProducerState.CREATED),
    "states-lane": ("One lane", lives.LANE_LIFE, lives.LaneState.UNCLAIMED),
    "states-lease": ("One lease of a numbered id, as its holder knows it", members.LEASE_LIFE, members.LeaseState.FREE),
    "states-batch": (
        "One batch that many participants write, and that is decided at once",
        batches.BATCH_LIFE,
        batches.BatchState.PREPARED,
    ),
    "states-unit": ("Units, as a reader of their partition sees them", records.UNIT_LIFE, records.UnitState.START),
    "states-unit-writer": (
        "Units, as the writer of their partition sees them",
        records.UNIT_WRITER_LIFE,
        records.UnitWriterState.CLAIMED,
    ),
}

if __name__ == "__main__":
    here = Path(__file__).parent
    for name, draw in PICTURES.items():
        (here / f"{name}.svg").write_text(draw(), encoding="utf-8")
    if shutil.which("dot"):
        for name, (title, table, first) in STATES.items():
            (here / f"{name}.svg").write_text(laid_out(states(table, first), title), encoding="utf-8")
