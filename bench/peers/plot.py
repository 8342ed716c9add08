"""The plot of a comparison: a dot for every mechanism, largest error and distance, on logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from bench.peers.results import Result, ordered

COLOURS = {"anamorph": "#0b6e99", "peer": "#d1662a"}
SHAPES = {
    "rows": "circle",
    "the model's answers": "M-0.15,-1.4H0.15V1.4H-0.15Z",
}  # a dot, and a thin bar that is seen behind it
ROW_HEIGHT = 20
PANEL_WIDTH = 330
MARGIN = 1.3
"""How far the axes go beyond the outermost dots."""


def points(found: Sequence[Result]) -> list[dict[str, Any]]:
    """Returns a record for every dot: name, whose it is, what is scored, and the figure."""
    records = []
    for item in ordered(found):
        whose = "peer" if item.peer else "anamorph"
        for scored, prefix in zip(SHAPES, ("rows", "model"), strict=True):
            for measure in ("max", "tv"):
                value = getattr(item, f"{prefix}_{measure}")
                if value:  # zero has no place on a logarithmic axis
                    record = {"name": item.name, "whose": whose, "scored": scored, "measure": measure, "value": value}
                    records.append(record)
    return records


def ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 times the powers of ten between two numbers."""
    return [
        tick for power in range(-9, 10) for tick in (10.0**power * step for step in (1, 2, 5)) if low <= tick <= high
    ]


def panel(records: Sequence[dict[str, Any]], measure: str, title: str, names: Sequence[str]) -> alt.Chart:
    """Returns the dots of one measure."""
    chosen = [record for record in records if record["measure"] == measure]
    values = [record["value"] for record in chosen] or [1.0]
    low, high = min(values) / MARGIN, max(values) * MARGIN
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    across = alt.Axis(format="~g", values=ticks(low, high), gridColor="#e4e4e4")
    down = alt.Axis(labelLimit=240, title=None, grid=True, gridColor="#eee", labels=measure == "max", ticks=False)
    colours = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    shapes = alt.Scale(domain=list(SHAPES), range=list(SHAPES.values()))
    dots = alt.Chart(alt.InlineData(values=chosen)).mark_point(size=100, filled=True, opacity=1)
    return dots.encode(
        x=alt.X("value:Q", title=title, scale=scale, axis=across),
        y=alt.Y("name:N", sort=list(names), axis=down),
        color=alt.Color("whose:N", title=None, scale=colours),
        shape=alt.Shape("scored:N", title=None, scale=shapes),
    ).properties(width=PANEL_WIDTH, height=ROW_HEIGHT * len(names))


def chart(found: Sequence[Result], title: str) -> alt.HConcatChart:
    """Returns both measures side by side, the mechanisms in the order of their distance."""
    records = points(found)
    names = list(dict.fromkeys(record["name"] for record in records))
    missing = sorted({item.name for item in found} - set(names))
    panels = [
        panel(records, "max", "largest error", names),
        panel(records, "tv", "total variation distance, average over marginals", names),
    ]
    heading = alt.TitleParams(title, subtitle=[f"no result: {', '.join(missing)}"] * bool(missing), anchor="start")
    return alt.hconcat(*panels, spacing=25).properties(title=heading).configure_view(stroke="#ddd")


def save(found: Sequence[Result], title: str, path: Path) -> None:
    """Writes the plot as SVG or PNG, by the name's ending."""
    made = chart(found, title)
    if path.suffix == ".png":
        made.save(str(path), scale_factor=2)
    else:
        made.save(str(path))
