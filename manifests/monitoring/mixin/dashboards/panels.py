"""Panels in the house style, and what all dashboards share: data source, variables, links.

A query is `(PromQL, legend)`. Queries of a panel that shows what is now ask for an instant, the others for a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from grafana_foundation_sdk.builders import bargauge, gauge, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus as prometheus_builders
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models import prometheus as prometheus_models

SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="$datasource")
TAG = "ullage"
WIDTH = 24
"""Columns of Grafana's grid."""
HEIGHT = 8
MANY = 20
"""Most series that a table or a ranking shows."""

Query = tuple[str, str]
Steps = Sequence[tuple[float | None, str]]
"""Colours from a value on; None is the colour below the first."""

CALM: Steps = ((None, "green"),)
RISK: Steps = ((None, "green"), (60, "yellow"), (85, "red"))
USAGE: Steps = ((None, "green"), (0.9, "orange"), (0.95, "red"))
WASTE: Steps = ((None, "green"), (0.3, "orange"), (0.5, "red"))
NEAR: Steps = ((None, "red"), (120, "orange"), (600, "green"))
NONE_WANTED: Steps = ((None, "green"), (1, "red"))
ONE_WANTED: Steps = ((None, "red"), (1, "green"))

P = TypeVar("P", timeseries.Panel, stat.Panel, gauge.Panel, heatmap.Panel, bargauge.Panel, table.Panel)


def lines(
    title: str,
    about: str,
    unit: str,
    *queries: Query,
    width: int = 12,
    stacked: bool = False,
    top: float | None = None,
    steps: Steps | None = None,
    right: tuple[str, str] | None = None,
) -> timeseries.Panel:
    """Series over time. `right` puts series whose name matches a pattern on an axis of their own, with its unit."""
    legend = common_builders.VizLegendOptions().show_legend(True)
    legend.display_mode(common.LegendDisplayMode.LIST).placement(common.LegendPlacement.BOTTOM)
    panel = _common(timeseries.Panel(), title, about, unit, queries, width).legend(legend).min(0)
    panel.fill_opacity(30 if stacked else 8).show_points(common.VisibilityMode.NEVER).line_width(1)
    panel.tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    if stacked:
        panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if top is not None:
        panel.max(top)
    if steps is not None:
        style = common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        panel.thresholds(_thresholds(steps)).thresholds_style(style)
    if right is not None:
        pattern, other = right
        axis = dashboard.DynamicConfigValue(id_val="custom.axisPlacement", value="right")
        free = dashboard.DynamicConfigValue(id_val="max", value=None)
        panel.override_by_regexp(pattern, [dashboard.DynamicConfigValue(id_val="unit", value=other), axis, free])
    return panel


def number(title: str, about: str, unit: str, *queries: Query, steps: Steps = CALM, absent: str = "–") -> stat.Panel:
    """One figure for now. `absent` stands there when there is none."""
    panel = _common(stat.Panel(), title, about, unit, queries, 4, instant=True).height(5)
    panel.thresholds(_thresholds(steps)).no_value(absent).graph_mode(common.BigValueGraphMode.NONE)
    return panel.reduce_options(_last())


def dial(title: str, about: str, *queries: Query, steps: Steps, width: int = 4) -> gauge.Panel:
    """A share of 0 to 1 on a dial."""
    panel = _common(gauge.Panel(), title, about, "percentunit", queries, width, instant=True).height(5)
    return panel.min(0).max(1).thresholds(_thresholds(steps)).reduce_options(_last())


def ranking(title: str, about: str, unit: str, query: Query, *, steps: Steps, top: float) -> bargauge.Panel:
    """The greatest values now, as bars."""
    panel = _common(bargauge.Panel(), title, about, unit, (query,), 12, instant=True)
    panel.min(0).max(top).thresholds(_thresholds(steps)).reduce_options(_last())
    return panel.orientation(common.VizOrientation.HORIZONTAL).display_mode(common.BarGaugeDisplayMode.BASIC)


def heat(title: str, about: str, unit: str, expr: str, *, width: int = 12) -> heatmap.Panel:
    """Buckets of a Prometheus histogram over time; `expr` keeps the label `le`."""
    panel = _common(heatmap.Panel(), title, about, unit, (), width)
    panel.with_target(_query(expr, "{{le}}").format(prometheus_models.PromQueryFormat.HEATMAP))
    panel.y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(common.AxisPlacement.LEFT)).show_legend()
    return panel.mode(common.TooltipDisplayMode.SINGLE)


def rows(title: str, about: str, *queries: Query, width: int = WIDTH) -> table.Panel:
    """A table of what is now: one row for each set of labels, one column for each query."""
    panel = _common(table.Panel(), title, about, "short", (), width)
    for index, (expr, legend) in enumerate(queries):
        letter = chr(ord("A") + index)
        panel.with_target(_query(expr, legend).instant().format(prometheus_models.PromQueryFormat.TABLE).ref_id(letter))
        name = dashboard.DynamicConfigValue(id_val="displayName", value=legend)
        panel.override_by_name(f"Value #{letter}" if len(queries) > 1 else "Value", [name])
    panel.with_transformation(dashboard.DataTransformerConfig(id_val="merge", options={}))
    hidden = {"excludeByName": {"Time": True}}
    return panel.with_transformation(dashboard.DataTransformerConfig(id_val="organize", options=hidden))


def row(title: str) -> build.Row:
    """A heading."""
    return build.Row(title)


def frame(uid: str, title: str, about: str) -> build.Dashboard:
    """An empty dashboard with its data source variable and links to the others."""
    board = build.Dashboard(title).uid(uid).description(about).tags([TAG]).readonly().timezone("browser")
    board.time("now-1h", "now").refresh("30s").tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    others = build.DashboardLink("Ullage").type(dashboard.DashboardLinkType.DASHBOARDS).tags([TAG])
    board.link(others.include_vars(True).keep_time(True).as_dropdown(True))
    return board.with_variable(build.DatasourceVariable("datasource").label("Data source").type("prometheus"))


def choice(name: str, label: str, query: str, *, everything: bool) -> build.QueryVariable:
    """A variable filled by `label_values(…)`. All of it matches series without the label, too."""
    made = build.QueryVariable(name).label(label).query(query).datasource(SOURCE).multi(everything)
    made.refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    if not everything:
        return made
    current = dashboard.VariableOption(selected=True, text="All", value="$__all")
    return made.include_all(True).all_value(".*").current(current)


def note(name: str, expr: str, colour: str) -> build.AnnotationQuery:
    """Marks on all panels where a query has a value."""
    return build.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour).expr(expr)


def _common(
    panel: P, title: str, about: str, unit: str, queries: Sequence[Query], width: int, *, instant: bool = False
) -> P:
    panel.title(title).description(about).unit(unit).datasource(SOURCE).span(width).height(HEIGHT)
    for index, (expr, legend) in enumerate(queries):
        query = _query(expr, legend).ref_id(chr(ord("A") + index))
        panel.with_target(query.instant() if instant else query.range())
    return panel


def _query(expr: str, legend: str) -> prometheus_builders.Dataquery:
    return prometheus_builders.Dataquery().expr(expr).legend_format(legend).datasource(SOURCE)


def _thresholds(steps: Steps) -> build.ThresholdsConfig:
    made = [dashboard.Threshold(value=value, color=colour) for value, colour in steps]
    return build.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(made)


def _last() -> common_builders.ReduceDataOptions:
    return common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
