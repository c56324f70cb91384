"""Generate the dashboards for Grafana from their short forms in deploy/grafana.

    python -m docs.generate.dashboards

writes a file into deploy/kubernetes/components/monitoring/dashboards for each of them. A short form
has rows of panels, and the queries of each panel by legend. Panels fill a row from left to right.
The variables of the dashboard restrict every selector that does not name a namespace itself.
"""

import json
import re
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

_DEPLOY = Path(__file__).parents[2] / "deploy"
SHORT_FORMS = sorted((_DEPLOY / "grafana").glob("*.yaml"))
DASHBOARDS = _DEPLOY / "kubernetes" / "components" / "monitoring" / "dashboards"

_COLUMNS, _HEIGHT = 24, 8  # of the grid, and of a panel
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SELECTOR = re.compile(r"\b((?:baton|process)_\w+)(?:\{([^}]*)\})?")
_SETTINGS = {
    "tags": ["baton"],
    "schemaVersion": 39,
    "version": 1,
    "editable": True,
    "graphTooltip": 1,
    "refresh": "30s",
    "time": {"from": "now-1h", "to": "now"},
    "timezone": "browser",
    "links": [
        {
            "type": "dashboards",
            "tags": ["baton"],
            "title": "Baton",
            "asDropdown": False,
            "includeVars": True,
            "keepTime": True,
        }
    ],
    "annotations": {"list": []},
}
_SOURCES = {
    "name": "datasource",
    "type": "datasource",
    "query": "prometheus",
    "label": "Data source",
    "hide": 0,
    "refresh": 1,
}
_STAT: dict[str, Any] = {
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    "colorMode": "value",
    "graphMode": "area",
    "textMode": "auto",
}
_HEATMAP: dict[str, Any] = {
    "calculate": False,
    "cellGap": 1,
    "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
}
_TIME_SERIES: dict[str, Any] = {
    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
    "tooltip": {"mode": "multi", "sort": "desc"},
}


class ShortPanel(msgspec.Struct, forbid_unknown_fields=True):
    """The short form of a panel.

    Attributes:
        queries: query by legend.
        width: columns of the grid, which has 24.
        stacked: the series are added up, and the areas below them are filled.
        filled: the areas below the series are filled.
        from_zero: the axis begins at 0.
        units: other units of series, by regular expressions for their legends.
        thresholds: value from which a color applies, by color. null: from the start.
    """

    title: str
    queries: dict[str, str]
    description: str = ""
    type: Literal["timeseries", "stat", "heatmap"] = "timeseries"
    unit: str = "short"
    width: int = 8
    stacked: bool = False
    filled: bool = False
    from_zero: bool = True
    units: dict[str, str] = {}
    thresholds: dict[str, float | None] = {}


class ShortDashboard(msgspec.Struct, forbid_unknown_fields=True):
    """The short form of a dashboard.

    Attributes:
        rows: panels by the title of their row.
        instances_of: metric whose instances can be selected. Empty: none can.
    """

    title: str
    description: str
    rows: dict[str, list[ShortPanel]]
    instances_of: str = ""

    @classmethod
    def read(cls, file: Path) -> "ShortDashboard":
        return msgspec.convert(yaml.safe_load(file.read_text()), cls)


def dashboard(name: str, short: ShortDashboard) -> str:
    """Return the JSON of a dashboard, one line for each field and each panel."""
    variables = [_SOURCES, _variable("namespace", "Namespace", "baton_info")]
    matchers = 'namespace=~"$namespace"'
    if short.instances_of:
        series = f"{short.instances_of}{{{matchers}}}"
        variables.append(_variable("instance", "Program", series))
        matchers += ',instance=~"$instance"'
    head = {
        "uid": f"baton-{name}",
        "title": short.title,
        "description": short.description,
        **_SETTINGS,
        "templating": {"list": variables},
    }
    panels: list[dict[str, Any]] = []
    y = -_HEIGHT
    for title, row in short.rows.items():
        x, y = 0, y + _HEIGHT
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": []})
        panels[-1] |= {"gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": y}}
        y += 1
        for each in row:
            if x + each.width > _COLUMNS:
                x, y = 0, y + _HEIGHT
            place = {"h": _HEIGHT, "w": each.width, "x": x, "y": y}
            panels.append(_panel(each, matchers) | {"gridPos": place})
            x += each.width
    lines = [json.dumps({"id": number, **each}) for number, each in enumerate(panels, 1)]
    fields = [f"{json.dumps(field)}: {json.dumps(value)}" for field, value in head.items()]
    fields.append('"panels": [\n' + ",\n".join(lines) + "\n]")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _variable(name: str, label: str, series: str) -> dict[str, Any]:
    """Return a variable with the values of the label `name` of these series."""
    query = f"label_values({series}, {name})"
    return {
        "name": name,
        "type": "query",
        "label": label,
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "A"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(short: ShortPanel, matchers: str) -> dict[str, Any]:
    """Return a panel without its place."""
    defaults: dict[str, Any] = {"unit": short.unit}
    if short.type != "heatmap" and short.from_zero:
        defaults["min"] = 0
    if short.thresholds:
        colors = [{"color": color, "value": value} for color, value in short.thresholds.items()]
        defaults["thresholds"] = {"mode": "absolute", "steps": colors}
        defaults["color"] = {"mode": "thresholds"}
    match short.type:
        case "stat":
            options = _STAT
        case "heatmap":
            options = _HEATMAP | {"yAxis": {"unit": short.unit}}
        case _:
            options = _TIME_SERIES
            defaults["custom"] = {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 25 if short.stacked or short.filled else 5,
                "showPoints": "never",
                "stacking": {"mode": "normal" if short.stacked else "none", "group": "A"},
            }
    overrides = [
        {
            "matcher": {"id": "byRegexp", "options": legends},
            "properties": [{"id": "unit", "value": value}],
        }
        for legends, value in short.units.items()
    ]
    return {
        "type": short.type,
        "title": short.title,
        "description": short.description,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "targets": [
            {
                "refId": "ABCDEFGH"[number],
                "datasource": _SOURCE,
                "expr": _restricted(query, matchers),
                "legendFormat": legend,
                "editorMode": "code",
                "range": True,
                **({"format": "heatmap"} if short.type == "heatmap" else {}),
            }
            for number, (legend, query) in enumerate(short.queries.items())
        ],
        "options": options,
    }


def _restricted(query: str, matchers: str) -> str:
    """Add the matchers to each selector without a namespace."""

    def selector(found: re.Match[str]) -> str:
        own = found[2] or ""
        if "namespace=" in own:
            return found[0]
        return f"{found[1]}{{{matchers}{',' if own else ''}{own}}}"

    return _SELECTOR.sub(selector, query)


def main() -> None:
    for file in SHORT_FORMS:
        text = dashboard(file.stem, ShortDashboard.read(file))
        (DASHBOARDS / f"baton-{file.stem}.json").write_text(text)


if __name__ == "__main__":
    main()
