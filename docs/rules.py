"""Writes docker/observability/rules.yaml: the rules of k8s/components/monitoring for a plain Prometheus."""

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
RULE = ROOT / "k8s" / "components" / "monitoring" / "prometheusrule.yaml"
PLAIN = ROOT / "docker" / "observability" / "rules.yaml"

_HEAD = "# Written by `make docs` from k8s/components/monitoring/prometheusrule.yaml.\n"


def plain() -> str:
    """The file's text."""
    rule = yaml.safe_load(RULE.read_text())
    return _HEAD + str(yaml.safe_dump(rule["spec"], sort_keys=False, width=1000))


if __name__ == "__main__":
    PLAIN.write_text(plain())
