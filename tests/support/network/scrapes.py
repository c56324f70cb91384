"""Scrapes a process's metrics and compares them with their declarations."""

import urllib.request
from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

from common.metrics.declared import MetricDeclaration

Scrape = Mapping[str, Metric]


def scraped(port: int) -> Scrape:
    """Return the metrics of a process on this machine, by family name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60.0) as response:
        text = response.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def check_declared(scrape: Scrape, declared: Iterable[MetricDeclaration]) -> None:
    """Assert that exactly these metrics exist, with these label sets and buckets."""
    by_name = {each.name: each for each in declared}
    assert scrape.keys() == by_name.keys()
    for name, family in scrape.items():
        expected = by_name[name]
        assert family.type == expected.kind, name
        assert family.documentation == expected.help, name
        seen = set()
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.endswith("_bucket"):
                bounds = {*map(floatToGoString, expected.bounds), "+Inf"}
                assert labels.pop("le") in bounds, name
            assert labels.keys() == expected.labels.keys(), name
            seen.add(tuple(labels[label] for label in expected.labels))
        if not all(expected.labels.values()):
            continue  # its label values come from a file
        allowed = set(expected.label_sets)
        assert seen <= allowed, f"{name}: nobody declared {seen - allowed}"
        assert expected.sparse or seen == allowed, f"{name}: there is no {allowed - seen}"


def value(scrape: Scrape, name: str, **labels: str) -> float:
    """Return one sample by its name and labels."""
    (found,) = [
        sample.value
        for family in scrape.values()
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    return found


def total(scrape: Scrape, name: str, **labels: str) -> float:
    """Return the sum of the samples of that name whose labels include these."""
    return sum(
        sample.value
        for family in scrape.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def check_only_grew(before: Scrape, after: Scrape) -> None:
    """Assert that no counter and no histogram count has decreased."""
    for name, family in before.items():
        if family.type == "gauge":
            continue
        later = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for sample in after[name].samples
        }
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert later[key] >= sample.value, key
