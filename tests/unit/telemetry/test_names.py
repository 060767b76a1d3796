"""The page's tables hold what the code records."""

import pytest
from harness.places import ROOT

from dualwrite.protocol.lives import Phase, WriteOutcome
from dualwrite.telemetry import names

PAGE = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")


def row(*cells):
    return f"| {' | '.join(cells)} |"


def ticked(found):
    return ", ".join(f"`{name}`" for name in found)


def table(heading):
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| `")]


def test_the_page_has_every_span_with_its_kind_and_attributes():
    assert table("Spans") == [
        row(f"`{span.name}`", span.kind, span.stands_for, ticked(span.attributes)) for span in names.SPANS
    ]


def test_the_page_has_every_metric_with_its_instrument_unit_and_attributes():
    assert table("Metrics") == [
        row(f"`{one.name}`", one.instrument.value, f"`{one.unit}`", one.description, ticked(one.attributes))
        for one in names.METRICS
    ]


def test_the_page_has_every_attribute():
    assert table("Attributes") == [row(f"`{name}`", meaning) for name, meaning in names.ATTRIBUTES.items()]


@pytest.mark.parametrize("used", [one.attributes for one in (*names.SPANS, *names.METRICS)])
def test_every_attribute_is_explained(used):
    assert set(used) <= names.ATTRIBUTES.keys()


def test_attributes_name_every_outcome_and_phase():
    for name, kinds in ((names.OUTCOME, WriteOutcome), (names.PHASE, Phase)):
        shown = names.ATTRIBUTES[name].replace("`", "").split(", ")
        assert set(shown) == {kind.value for kind in kinds} - {"handed over"}
