"""Plots that people read figures off."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from risk_plot import HEIGHT, MARGIN, plot_tradeoff, svg, ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        (149.0, [0, 20, 40, 60, 80, 100, 120, 140]),
        (6.0, [0, 1, 2, 3, 4, 5, 6]),
        (0.3, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]),
    ],
)
def test_ticks_are_round_numbers(right: float, expected: list[float]) -> None:
    assert ticks(right) == pytest.approx(expected)


def test_a_level_is_drawn_where_there_is_one() -> None:
    line = {"score": [(0.0, 0.0), (10.0, 100.0)]}
    assert "stroke-dasharray" not in svg("t", line, (), None)
    assert f"M{MARGIN} {HEIGHT / 2:.1f}H" in svg("t", line, (), 50.0)


def test_detectors_stand_where_their_figures_are(tmp_path: Path) -> None:
    path = tmp_path / "t.svg"
    plot_tradeoff(path, [(3.0, 99.0, "50"), (1.0, 95.0, "85")], [(1.0, 90.0, "usage>0.90"), (4.0, 50.0, "c")], "85")
    root = ElementTree.parse(path).getroot()
    spots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in root.iter(f"{SVG}circle")]
    score, usage, other = spots
    assert score[0] == usage[0] < other[0]
    assert score[1] < usage[1] < other[1] == HEIGHT / 2
    below = {text.text: float(text.attrib["y"]) for text in root.iter(f"{SVG}text")}
    assert below["score at 85"] < score[1] < usage[1] < below["usage>0.90"]  # so that names do not lie on each other
