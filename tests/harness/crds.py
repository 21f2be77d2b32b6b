"""Strict schemas of the custom resources that k8s/ uses: the fields that we use, written from the operators' documents.

kubernetes-validate knows what Kubernetes itself has, and no custom resources. A field that is not here is refused:
whoever adds one looks it up first.
"""

from typing import Any

import jsonschema

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(h|m|s))+$"}
_LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def _object(required: str = "", **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


def _resource(version: str, kind: str, spec: Schema) -> Schema:
    metadata = _object("name", name=_TEXT, namespace=_TEXT, labels=_LABELS, annotations=_LABELS)
    return _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


_EXPRESSION = _object(
    "key operator",
    key=_TEXT,
    operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
    values=_list(_TEXT),
)
_SELECTOR = _object(matchLabels=_LABELS, matchExpressions=_list(_EXPRESSION))
_POLICY = _object(
    "type value periodSeconds",
    type={"enum": ["Pods", "Percent"]},
    value={"type": "integer", "minimum": 1},
    periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
)
_SCALING = _object(
    "policies",
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    policies=_list(_POLICY),
)
_TRIGGER: Schema = {
    "oneOf": [
        _object(
            "type metadata",
            type={"const": "prometheus"},
            metricType={"enum": ["AverageValue", "Value"]},
            metadata=_object("serverAddress query threshold", serverAddress=_TEXT, query=_TEXT, threshold=_TEXT),
        ),
        _object(
            "type metricType metadata",
            type={"const": "cpu"},
            metricType={"enum": ["Utilization", "AverageValue"]},
            metadata=_object("value", value=_TEXT),
        ),
    ]
}
_RULE = _object(
    "expr",
    record=_TEXT,
    alert=_TEXT,
    expr=_TEXT,
    labels=_LABELS,
    annotations=_LABELS,
    **{"for": _DURATION},
)

SCHEMAS: dict[str, Schema] = {
    "Issuer": _resource(
        "cert-manager.io/v1",
        "Issuer",
        {
            "oneOf": [
                _object("selfSigned", selfSigned=_object()),
                _object("ca", ca=_object("secretName", secretName=_TEXT)),
            ]
        },
    ),
    "Certificate": _resource(
        "cert-manager.io/v1",
        "Certificate",
        _object(
            "secretName issuerRef",
            isCA={"type": "boolean"},
            commonName={"type": "string", "maxLength": 64},
            secretName=_TEXT,
            dnsNames=_list(_TEXT),
            usages=_list({"enum": ["digital signature", "server auth", "client auth"]}),
            duration=_DURATION,
            renewBefore=_DURATION,
            privateKey=_object(
                algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
                size={"type": "integer"},
                rotationPolicy={"enum": ["Never", "Always"]},
            ),
            issuerRef=_object("name", name=_TEXT, kind={"enum": ["Issuer", "ClusterIssuer"]}, group=_TEXT),
        ),
    ),
    "PodMonitor": _resource(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        _object(
            "selector podMetricsEndpoints",
            selector=_SELECTOR,
            podTargetLabels=_list(_TEXT),
            podMetricsEndpoints=_list(_object("port", port=_TEXT, path=_TEXT, interval=_DURATION)),
        ),
    ),
    "PrometheusRule": _resource(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        _object("groups", groups=_list(_object("name rules", name=_TEXT, interval=_DURATION, rules=_list(_RULE)))),
    ),
    "ScaledObject": _resource(
        "keda.sh/v1alpha1",
        "ScaledObject",
        _object(
            "scaleTargetRef triggers",
            scaleTargetRef=_object("name", apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
            minReplicaCount={"type": "integer", "minimum": 0},
            maxReplicaCount={"type": "integer", "minimum": 1},
            pollingInterval={"type": "integer", "minimum": 1},
            fallback=_object(
                "failureThreshold replicas",
                failureThreshold={"type": "integer", "minimum": 0},
                replicas={"type": "integer", "minimum": 0},
                behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]},
            ),
            advanced=_object(
                horizontalPodAutoscalerConfig=_object(behavior=_object(scaleUp=_SCALING, scaleDown=_SCALING))
            ),
            triggers=_list(_TRIGGER),
        ),
    ),
}


def check(resource: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError, or KeyError for a kind that there is no schema of."""
    jsonschema.validate(resource, SCHEMAS[resource["kind"]], jsonschema.Draft202012Validator)
