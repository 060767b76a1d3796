"""The report in the documentation is what its command makes of the figures in the repository."""

import json

from chaos import page


def test_the_report_and_its_picture_are_those_of_the_figures():
    figures = json.loads(page.FIGURES.read_text(encoding="utf-8"))
    assert page.PAGE.read_text(encoding="utf-8") == page.render(figures)
    assert page.PICTURE.read_text(encoding="utf-8") == page.picture(figures)
