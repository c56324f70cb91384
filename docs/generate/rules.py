"""Generate alert rules for a Prometheus without the operator from the manifest for the operator.

    python -m docs.generate.rules [--site https://docs.example.com/baton]

writes deploy/prometheus/rules.yaml. --site sets the address of the runbook in both files, because
the project has no site of its own.
"""

import argparse
import re
from pathlib import Path
from textwrap import dedent

_DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFEST = _DEPLOY / "kubernetes" / "components" / "monitoring" / "alerts.yaml"
FILE = _DEPLOY / "prometheus" / "rules.yaml"
_HEAD = """\
# Generated from kubernetes/components/monitoring/alerts.yaml by `python -m docs.generate.rules`.
# docs/runbook.md has a section for each alert. Adapt the thresholds to your SLOs.
"""
_URL = re.compile(r"(runbook_url: )https?://\S+(/runbook\.html#)")


def rules(manifest: str) -> str:
    """Return the rules as a file that Prometheus loads.

    Args:
        manifest: of a PrometheusRule, whose `spec` comes last.
    """
    return _HEAD + dedent(manifest.partition("\nspec:\n")[2])


def with_site(manifest: str, site: str) -> str:
    """Return the manifest with the runbook below `site`, an absolute URL."""
    return _URL.sub(rf"\g<1>{site.rstrip('/')}\g<2>", manifest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--site", metavar="URL", help="address of your copy of the site that `make docs` builds"
    )
    site = parser.parse_args().site
    if site:
        MANIFEST.write_text(with_site(MANIFEST.read_text(), site))
    FILE.write_text(rules(MANIFEST.read_text()))


if __name__ == "__main__":
    main()
