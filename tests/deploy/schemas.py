"""Strict schemas of manifests: those of Kubernetes, and the used fields of custom resources.

A field that is not listed here is valid in a cluster but not in the tests, so that its author looks
it up and adds it.
"""

import functools
import json
from typing import Any

import jsonschema
import kubernetes_validate

Schema = dict[str, Any]

OLDEST_KUBERNETES = "1.30"
OLDEST_WITH_CLAIMS = "1.34"  # the first with resource.k8s.io/v1

_NAME: Schema = {"type": "string", "minLength": 1}
_COUNT: Schema = {"type": "integer", "minimum": 1}


def _fields(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


def _each(of: Schema) -> Schema:
    return {"type": "array", "items": of, "minItems": 1}


_LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_TEMPLATE: Schema = {"type": "object"}  # checked as Kubernetes' own PodTemplateSpec

_LEADER_WORKER_SET = _fields(
    {
        "replicas": _COUNT,
        "leaderWorkerTemplate": _fields(
            {
                "size": _COUNT,
                "restartPolicy": {
                    "enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                },
                "leaderTemplate": _TEMPLATE,
                "workerTemplate": _TEMPLATE,
            }
        ),
    },
    networkConfig=_fields({"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}}),
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
)

_POD_MONITOR = _fields(
    {
        "selector": _fields({"matchLabels": _LABELS}),
        "podMetricsEndpoints": _each(
            _fields(
                {"port": _NAME, "interval": {"type": "string", "pattern": "^[0-9]+s$"}},
                relabelings=_each(
                    _fields({"targetLabel": _NAME}, replacement=_NAME, sourceLabels=_each(_NAME))
                ),
            )
        ),
    }
)

_DURATION: Schema = {"type": "string", "pattern": "^[0-9]+(s|m|h)$"}
_PROMETHEUS_RULE = _fields(
    {
        "groups": _each(
            _fields(
                {
                    "name": _NAME,
                    "rules": _each(
                        _fields(
                            {"alert": _NAME, "expr": _NAME, "labels": _LABELS},
                            annotations=_LABELS,
                            **{"for": _DURATION},
                        )
                    ),
                }
            )
        )
    }
)

_SCALED_OBJECT = _fields(
    {
        "scaleTargetRef": _fields({"apiVersion": _NAME, "kind": _NAME, "name": _NAME}),
        "minReplicaCount": _COUNT,
        "maxReplicaCount": _COUNT,
        "triggers": _each(
            _fields(
                {
                    "type": {"const": "prometheus"},
                    # KEDA takes strings only.
                    "metadata": _fields(
                        {"serverAddress": _NAME, "query": _NAME, "threshold": _NAME}
                    ),
                }
            )
        ),
    },
    # As in Kubernetes' HorizontalPodAutoscaler.
    advanced=_fields(
        {
            "horizontalPodAutoscalerConfig": _fields(
                {
                    "behavior": _fields(
                        {
                            "scaleDown": _fields(
                                {
                                    "stabilizationWindowSeconds": _COUNT,
                                    "policies": _each(
                                        _fields(
                                            {
                                                "type": {"enum": ["Pods", "Percent"]},
                                                "value": _COUNT,
                                                "periodSeconds": _COUNT,
                                            }
                                        )
                                    ),
                                }
                            )
                        }
                    )
                }
            )
        }
    ),
)

_ISSUER = {
    "oneOf": [_fields({"selfSigned": _fields({})}), _fields({"ca": _fields({"secretName": _NAME})})]
}

_HOURS: Schema = {"type": "string", "pattern": "^[0-9]+h$"}
_CERTIFICATE = _fields(
    {
        "secretName": _NAME,
        "issuerRef": _fields(
            {
                "group": {"const": "cert-manager.io"},
                "kind": {"enum": ["Issuer", "ClusterIssuer"]},
                "name": _NAME,
            }
        ),
        "privateKey": _fields(
            {
                "algorithm": {"enum": ["RSA", "ECDSA", "Ed25519"]},
                "size": _COUNT,
                "rotationPolicy": {"enum": ["Always", "Never"]},
            }
        ),
    },
    isCA={"type": "boolean"},
    commonName=_NAME,
    dnsNames=_each(_NAME),
    uris=_each({"type": "string", "pattern": "^urn:baton:(router|node|operator)$"}),
    usages=_each({"enum": ["digital signature", "server auth", "client auth"]}),
    duration=_HOURS,
    renewBefore=_HOURS,
)

_OTHERS = {
    ("cert-manager.io/v1", "Issuer"): _ISSUER,
    ("cert-manager.io/v1", "Certificate"): _CERTIFICATE,
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _LEADER_WORKER_SET,
    ("monitoring.coreos.com/v1", "PodMonitor"): _POD_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): _PROMETHEUS_RULE,
    ("keda.sh/v1alpha1", "ScaledObject"): _SCALED_OBJECT,
}


def check(manifest: dict[str, Any], version: str) -> None:
    """Raises jsonschema.ValidationError, or kubernetes_validate's own errors, for anything that a
    cluster of that version would reject or silently drop.

    Renderings have most objects in common, so each is checked once.
    """
    _check(json.dumps(manifest, sort_keys=True), version)


@functools.cache
def _check(text: str, version: str) -> None:
    manifest = json.loads(text)
    kind = (manifest["apiVersion"], manifest["kind"])
    if kind not in _OTHERS:
        kubernetes_validate.validate(manifest, version, strict=True)
        return
    whole = _fields(
        {
            "apiVersion": {"const": kind[0]},
            "kind": {"const": kind[1]},
            "metadata": _fields({"name": _NAME, "namespace": _NAME}, labels=_LABELS),
            "spec": _OTHERS[kind],
        }
    )
    jsonschema.validate(manifest, whole)
    for name in ("leaderTemplate", "workerTemplate"):
        if template := manifest["spec"].get("leaderWorkerTemplate", {}).get(name):
            as_core = {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": name.lower()},
                "template": template,
            }
            kubernetes_validate.validate(as_core, version, strict=True)
