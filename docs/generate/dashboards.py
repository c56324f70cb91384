"""Generate the dashboards for Grafana from their short forms in deploy/grafana.

    python -m docs.generate.dashboards

writes a file into deploy/kubernetes/components/monitoring/dashboards for each of them. A short form
has rows of panels, and the queries of each panel by legend. Panels fill a row from left to right.
The variables of the dashboard restrict every selector that does not name a namespace itself.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
_STAT = {
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    "colorMode": "value",
    "graphMode": "area",
    "textMode": "auto",
}
_HEATMAP = {
    "calculate": False,
    "cellGap": 1,
    "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
}
_TIME_SERIES = {
    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
    "tooltip": {"mode": "multi", "sort": "desc"},
}


def dashboard(name: str, short: Mapping[str, Any]) -> str:
    """Return the JSON of a dashboard, one line for each field and each panel."""
    variables = [_SOURCES, _variable("namespace", "Namespace", "baton_info")]
    matchers = 'namespace=~"$namespace"'
    if listed := short.get("instances_of"):
        series = f"{listed}{{{matchers}}}"
        variables.append(_variable("instance", "Program", series))
        matchers += ',instance=~"$instance"'
    head = {
        "uid": f"baton-{name}",
        "title": short["title"],
        "description": short["description"],
        **_SETTINGS,
        "templating": {"list": variables},
    }
    panels: list[dict[str, Any]] = []
    y = -_HEIGHT
    for title, row in short["rows"].items():
        x, y = 0, y + _HEIGHT
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": []})
        panels[-1] |= {"gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": y}}
        y += 1
        for each in row:
            width = each.get("width", 8)
            if x + width > _COLUMNS:
                x, y = 0, y + _HEIGHT
            place = {"h": _HEIGHT, "w": width, "x": x, "y": y}
            panels.append(_panel(each, matchers) | {"gridPos": place})
            x += width
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


def _panel(short: Mapping[str, Any], matchers: str) -> dict[str, Any]:
    """Return a panel without its place."""
    kind, unit = short.get("type", "timeseries"), short.get("unit", "short")
    defaults: dict[str, Any] = {"unit": unit}
    if kind != "heatmap" and short.get("from_zero", True):
        defaults["min"] = 0
    if steps := short.get("thresholds"):
        colors = [{"color": color, "value": value} for color, value in steps.items()]
        defaults["thresholds"] = {"mode": "absolute", "steps": colors}
        defaults["color"] = {"mode": "thresholds"}
    match kind:
        case "stat":
            options = _STAT
        case "heatmap":
            options = _HEATMAP | {"yAxis": {"unit": unit}}
        case _:
            options, stacked = _TIME_SERIES, short.get("stacked", False)
            defaults["custom"] = {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 25 if stacked or short.get("filled", False) else 5,
                "showPoints": "never",
                "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
            }
    overrides = [
        {
            "matcher": {"id": "byRegexp", "options": legends},
            "properties": [{"id": "unit", "value": value}],
        }
        for legends, value in short.get("units", {}).items()
    ]
    return {
        "type": kind,
        "title": short["title"],
        "description": short.get("description", ""),
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
                **({"format": "heatmap"} if kind == "heatmap" else {}),
            }
            for number, (legend, query) in enumerate(short["queries"].items())
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
        text = dashboard(file.stem, yaml.safe_load(file.read_text()))
        (DASHBOARDS / f"baton-{file.stem}.json").write_text(text)


if __name__ == "__main__":
    main()
