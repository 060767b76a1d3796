"""The pictures of the documentation, as plain SVG for a dark and a light page: ``make pictures`` writes them beside this file.

A picture is 480 units wide with letters of 15, so that it can be read on a telephone. Its colours follow
``prefers-color-scheme``, which a browser takes from the ``color-scheme`` of the page that shows it.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

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
.point { fill: #57606a; }
.cut { stroke: #0969da; stroke-width: 2.5; stroke-dasharray: 7 5; }
.decision { fill: #0969da; }
text.on { fill: #ffffff; font-weight: 600; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.soft { fill: #9ea7b3; }
.box { fill: #1c2430; stroke: #768390; }
.good { fill: #123d20; stroke: #3fb950; }
.bad { fill: #4c1a1a; stroke: #f85149; }
.wait { fill: #41310a; stroke: #d29922; }
.line { stroke: #9ea7b3; }
.point { fill: #9ea7b3; }
.cut { stroke: #58a6ff; }
.decision { fill: #1f6feb; }
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


PICTURES = {
    "picture-dual-write": dual_write,
    "picture-crash": crash,
    "picture-outage": outage,
    "picture-fleet": fleet,
    "picture-spark": spark,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(draw(), encoding="utf-8")
