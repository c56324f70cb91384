"""All Prometheus metrics of all processes: base units, closed label sets, prefix baton_.

There is no global registry: each process creates and serves its own. docs/metrics.md lists them.
"""
