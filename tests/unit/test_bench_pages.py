"""The page about sizing is what its command makes of the figures in the repository."""

import json

from bench import sizing


def test_the_page_and_its_picture_are_those_of_the_figures():
    figures = json.loads(sizing.FIGURES.read_text(encoding="utf-8"))
    assert sizing.PAGE.read_text(encoding="utf-8") == sizing.render(figures)
    assert sizing.PICTURE.read_text(encoding="utf-8") == sizing.picture(figures)


def test_the_arithmetic_is_proportional():
    figures = json.loads(sizing.FIGURES.read_text(encoding="utf-8"))
    small = sizing.arithmetic(sizing.Cluster(10), figures)
    assert small["tasks at a time"] == 40
    assert small["slots, whole batches"] == 80
    assert small["connections to brokers, at most"] == 40 * 8
    great = sizing.arithmetic(sizing.Cluster(1000), figures)
    sessions = "sessions of PostgreSQL"
    assert great[sessions] - 2 == 100 * (small[sessions] - 2)
    other = {
        name: value for name, value in small.items() if name not in {sessions, "the longest transaction of a batch, s"}
    }
    for name, value in other.items():
        assert abs(great[name] / value - 100) < 1e-9, name
