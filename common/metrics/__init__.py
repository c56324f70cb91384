"""All Prometheus metrics of all programs: base units, closed labels, prefix baton_.

No global registry: each program makes its own object and serves it. docs/metrics.md lists them.
"""
