"""Alerts and recorded ratios: each alert fires on its cause, and none of them on a healthy system, says promtool."""

import importlib.util
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.observe import catalogue
from tests.harness.processes import ROOT

RULE = ROOT / "k8s" / "components" / "monitoring" / "prometheusrule.yaml"
PLAIN = ROOT / "docker" / "observability" / "rules.yaml"

# Series by their values, one a minute, in promtool's notation: START+STEPxTIMES.
Series = Mapping[str, str]

_LATENCY = (
    "gen_ai_server_time_to_first_token_seconds",
    "gen_ai_server_time_per_output_token_seconds",
    'outrider_store_duration_seconds{operation="commit"}',
    "outrider_event_loop_lag_seconds",
)


def bucket(name: str, bound: str) -> str:
    """Of a histogram that may have labels."""
    bare, _, labels = name.removesuffix("}").partition("{")
    return f'{bare}_bucket{{le="{bound}"{"," + labels if labels else ""}}}'


def quick(name: str) -> Series:
    """A histogram in which everything is below 5 ms."""
    return {bucket(name, bound): "0+60x60" for bound in ("0.005", "10", "+Inf")}


def slow(name: str) -> Series:
    """One in which everything took between 0.005 and 10 seconds."""
    return {bucket(name, "0.005"): "0x60", bucket(name, "10"): "0+60x60", bucket(name, "+Inf"): "0+60x60"}


HEALTHY: Series = {
    'up{job="outrider-target"}': "1x60",
    'outrider_workers{pool="target",state="ready"}': "2x60",
    'outrider_workers{pool="target",state="failing"}': "0x60",
    'outrider_workers{pool="draft",state="ready"}': "2x60",
    'outrider_workers{pool="draft",state="unavailable"}': "0x60",
    'outrider_target_state{state="serving"}': "1x60",
    'outrider_target_state{state="stuck"}': "0x60",
    'outrider_draft_state{state="failed"}': "0x60",
    "outrider_event_loop_stalled_seconds": "0x60",
    'process_start_time_seconds{job="outrider-target"}': "1x60",
    'outrider_store_errors_total{operation="commit"}': "0x60",
    "outrider_store_fullness": "0.5x60",
    'gen_ai_server_request_duration_seconds_count{error_type=""}': "0+600x60",
    'gen_ai_server_request_duration_seconds_count{error_type="NO_WORKER"}': "0+1x60",
    'gen_ai_server_request_duration_seconds_count{error_type="INVALID_FIELD"}': "0+300x60",
    'outrider_requests_refused_total{tenant="other"}': "0x60",
    'outrider_rounds_total{reason="BLOCK"}': "0+600x60",
    'outrider_rounds_total{reason="DRAFT_LATE"}': "0+6x60",
    'outrider_rounds_total{reason="DRAFT_SATURATED"}': "0+6x60",
    'outrider_rounds_total{reason="VOCAB_MISMATCH"}': "0x60",
    'outrider_emitted_tokens_total{origin="ACCEPTED"}': "0+918x60",
    "outrider_drafts_total": "0+600x60",
    "outrider_draft_tokens_total": "0+2400x60",
    "outrider_accepted_tokens_total": "0+1200x60",
    "outrider_blocks_ready_total": "0+150x60",
    "outrider_round_draft_wait_seconds_sum": "0+6x60",
    "outrider_round_verify_seconds_sum": "0+30x60",
    "outrider_round_verify_queue_seconds_sum": "0+9x60",
    "outrider_round_accept_seconds_sum": "0+3x60",
    "outrider_round_commit_seconds_sum": "0+6x60",
    'outrider_request_acceptance_bucket{le="0.01"}': "0+1x60",
    'outrider_request_acceptance_bucket{le="0.99"}': "0+59x60",
    'outrider_request_acceptance_bucket{le="+Inf"}': "0+60x60",
    "outrider_request_acceptance_count": "0+60x60",
    'outrider_draft_discarded_total{reason="missed"}': "0+60x60",
    'outrider_draft_discarded_total{reason="audit"}': "0x60",
    "outrider_target_non_finite_logits_total": "0x60",
    "outrider_draft_non_finite_logits_total": "0x60",
    "outrider_target_pass_fullness_sum": "0+30x60",
    "outrider_target_pass_fullness_count": "0+60x60",
    "outrider_target_kv_pages_used": "500x60",
    "outrider_target_kv_pages_total": "1000x60",
    "outrider_draft_kv_pages_used": "0x60",
    "outrider_draft_kv_pages_total": "0x60",
} | {series: values for name in _LATENCY for series, values in quick(name).items()}

# By alert: what is otherwise than in a healthy system.
CAUSES: Mapping[str, Sequence[Series]] = {
    "OutriderDown": [{'up{job="outrider-target"}': "0x60"}],
    # No samples.
    "OutriderGone": [{'up{job="outrider-target"}': "_x60"}],
    "OutriderNoTarget": [{'outrider_workers{pool="target",state="ready"}': "0x60"}],
    "OutriderNoDraft": [
        {
            'outrider_workers{pool="draft",state="ready"}': "0x60",
            'outrider_workers{pool="draft",state="unavailable"}': "2x60",
        }
    ],
    "OutriderWorkerFailing": [
        {'outrider_workers{pool="target",state="failing"}': "1x60"},
        {'outrider_workers{pool="draft",state="unavailable"}': "1x60"},
    ],
    "OutriderEngineStuck": [
        {'outrider_target_state{state="stuck"}': "1x60"},
        {'outrider_draft_state{state="failed"}': "1x60"},
    ],
    "OutriderEventLoopStalled": [
        {"outrider_event_loop_stalled_seconds": "3x60"},
        slow("outrider_event_loop_lag_seconds"),
    ],
    "OutriderRestarts": [{'process_start_time_seconds{job="outrider-target"}': "1+1x60"}],
    "OutriderStoreUnavailable": [{'outrider_store_errors_total{operation="commit"}': "0+1x60"}],
    "OutriderStoreFull": [{"outrider_store_fullness": "0.85x60"}],
    "OutriderStoreSlow": [slow('outrider_store_duration_seconds{operation="commit"}')],
    "OutriderRequestsFail": [{'gen_ai_server_request_duration_seconds_count{error_type="NO_WORKER"}': "0+60x60"}],
    "OutriderRequestsRefused": [{'outrider_requests_refused_total{tenant="other"}': "0+1x60"}],
    "OutriderFirstTokenSlow": [slow("gen_ai_server_time_to_first_token_seconds")],
    "OutriderTokensSlow": [slow("gen_ai_server_time_per_output_token_seconds")],
    "OutriderTargetSaturated": [{"outrider_round_verify_queue_seconds_sum": "0+27x60"}],
    "OutriderDraftSaturated": [
        {'outrider_rounds_total{reason="DRAFT_SATURATED"}': "0+100x60"},
        {'outrider_rounds_total{reason="DRAFT_LATE"}': "0+100x60"},
    ],
    "OutriderAcceptanceLow": [{"outrider_accepted_tokens_total": "0+240x60"}],
    # FAILURES I8: a draft that is always right, one that never is.
    "OutriderAcceptanceOdd": [
        {
            'outrider_request_acceptance_bucket{le="0.01"}': "0x60",
            'outrider_request_acceptance_bucket{le="0.99"}': "0x60",
        },
        {'outrider_request_acceptance_bucket{le="0.01"}': "0+60x60"},
    ],
    "OutriderBlocksInvalid": [{'outrider_draft_discarded_total{reason="audit"}': "0+1x60"}],
    "OutriderVocabularyMismatch": [{'outrider_rounds_total{reason="VOCAB_MISMATCH"}': "0+60x60"}],
    "OutriderNonFiniteLogits": [
        {"outrider_target_non_finite_logits_total": "0+1x60"},
        {"outrider_draft_non_finite_logits_total": "0+1x60"},
    ],
    "OutriderKvPressure": [
        {"outrider_target_kv_pages_used": "950x60"},
        {"outrider_draft_kv_pages_used": "950x60", "outrider_draft_kv_pages_total": "1000x60"},
    ],
}
# An alert whose cause is another one's too.
ALSO = {("OutriderNoDraft", "OutriderWorkerFailing")}

RECORDED = {
    "outrider:acceptance:ratio_rate5m": 0.5,
    "outrider:tokens_per_round:ratio_rate5m": 1.5,
    "outrider:tokens:rate5m": 15.3,
    "outrider:blocks_ready:ratio_rate5m": 0.25,
    "outrider:round_seconds:rate5m": 0.75,
    "outrider:draft_wait:share_rate5m": 6 / 45,
    "outrider:verify_queue:share_rate5m": 0.2,
    "outrider:draft_short:ratio_rate5m": 12 / 612,
    "outrider:target_pass_fullness:mean_rate5m": 0.5,
    "outrider:target_kv_pages:used_ratio": 0.5,
    "outrider:requests_failed:ratio_rate5m": 1 / 901,
}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULE.read_text())["spec"]["groups"] for rule in group["rules"]]


def with_instance(series: str) -> str:
    """As Prometheus stores it: every series of a target has its address."""
    return series.replace("{", '{instance="i",', 1) if "{" in series else f'{series}{{instance="i"}}'


def case(series: Series, **tests: object) -> dict[str, object]:
    values = [{"series": with_instance(name), "values": each} for name, each in series.items()]
    return {"interval": "1m", "input_series": values} | tests


def firing(alert: str, expected: bool) -> dict[str, object]:
    """promtool tests alerts by all of their labels and annotations: the series ALERTS is less to repeat."""
    return {
        "expr": f'count by (alertname) (ALERTS{{alertname="{alert}",alertstate="firing"}})',
        "eval_time": "50m",
        "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if expected else [],
    }


def promtool(tmp_path: Path, *cases: Mapping[str, object]) -> subprocess.CompletedProcess[str]:
    """`promtool test rules`; skips where there is none."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: the Debian package prometheus has it")
    file = tmp_path / "rules_test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(PLAIN)], "evaluation_interval": "1m", "tests": list(cases)}))
    return subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)


def test_the_plain_file_is_fresh() -> None:
    spec = importlib.util.spec_from_file_location("rules", ROOT / "docs" / "rules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert PLAIN.read_text() == module.plain(), "run `make docs`"


def test_every_alert_is_tested_here_and_says_what_to_do() -> None:
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert alerts.keys() == CAUSES.keys()
    for name, rule in alerts.items():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"


def test_what_the_tests_feed_exists() -> None:
    fed = {series.partition("{")[0] for causes in CAUSES.values() for one in causes for series in one} | {
        series.partition("{")[0] for series in HEALTHY
    }
    assert fed - {"up"} <= catalogue.series() | set(catalogue.PROCESS_METRICS)


def test_no_alert_fires_on_a_healthy_system_and_ratios_are_right(tmp_path: Path) -> None:
    quiet = {"expr": 'count(ALERTS{alertstate="firing"})', "eval_time": "50m", "exp_samples": []}
    ratios = [
        {"expr": f"round({name}, 1e-6)", "eval_time": "50m", "exp_samples": [{"value": round(value, 6)}]}
        for name, value in RECORDED.items()
        if "kv_pages" not in name
    ]
    done = promtool(tmp_path, case(HEALTHY, promql_expr_test=[quiet, *ratios]))
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_divided_by_nothing(tmp_path: Path) -> None:
    """No load, and a draft without a KV cache: no series, and no NaN."""
    idle = {name: "0x60" if "+" in values else values for name, values in HEALTHY.items()}
    names = "|".join(name for name in RECORDED if "ratio" in name or "share" in name or "mean" in name)
    draft = {"expr": "outrider:draft_kv_pages:used_ratio", "eval_time": "50m", "exp_samples": []}
    nothing = {
        "expr": f'count({{__name__=~"{names.replace("outrider:target_kv_pages:used_ratio|", "")}"}})',
        "eval_time": "50m",
        "exp_samples": [],
    }
    done = promtool(tmp_path, case(idle, promql_expr_test=[draft, nothing]))
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_on_its_cause_and_no_other(tmp_path: Path) -> None:
    cases = []
    for alert, causes in CAUSES.items():
        for cause in causes:
            expected = [firing(other, other == alert or (alert, other) in ALSO) for other in CAUSES]
            cases.append(case({**HEALTHY, **cause}, promql_expr_test=expected))
    done = promtool(tmp_path, *cases)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_failure_their_share_is_zero(tmp_path: Path) -> None:
    """A series of a failure begins with the first one."""
    failed = 'gen_ai_server_request_duration_seconds_count{error_type="NO_WORKER"}'
    series = {name: values for name, values in HEALTHY.items() if name != failed}
    share = {"expr": "outrider:requests_failed:ratio_rate5m", "eval_time": "50m"}
    zero = {"labels": "outrider:requests_failed:ratio_rate5m", "value": 0}
    done = promtool(tmp_path, case(series, promql_expr_test=[share | {"exp_samples": [zero]}]))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_worker_that_loads_is_not_failing(tmp_path: Path) -> None:
    cases = []
    for pool in ("target", "draft"):
        unavailable = {**HEALTHY, f'outrider_workers{{pool="{pool}",state="unavailable"}}': "1x60"}
        for loading in ("target", "draft"):
            series = {**unavailable, f'outrider_{loading}_state{{state="loading"}}': "1x60"}
            cases.append(case(series, promql_expr_test=[firing("OutriderWorkerFailing", loading != pool)]))
    done = promtool(tmp_path, *cases)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_installations_are_not_added_up(tmp_path: Path) -> None:
    """One accepts half of what it drafts, the other one next to nothing: its alert, and not that of the sum."""
    series = {}
    for namespace, accepted in (("good", "0+1200x60"), ("bad", "0+120x60")):
        series[f'outrider_draft_tokens_total{{namespace="{namespace}"}}'] = "0+2400x60"
        series[f'outrider_accepted_tokens_total{{namespace="{namespace}"}}'] = accepted
    alert = {
        "expr": 'count by (namespace) (ALERTS{alertname="OutriderAcceptanceLow",alertstate="firing"})',
        "eval_time": "50m",
        "exp_samples": [{"labels": '{namespace="bad"}', "value": 1}],
    }
    done = promtool(tmp_path, case(series, promql_expr_test=[alert]))
    assert done.returncode == 0, done.stdout + done.stderr


def test_these_tests_can_fail(tmp_path: Path) -> None:
    done = promtool(tmp_path, case(HEALTHY, promql_expr_test=[firing("OutriderDown", True)]))
    assert done.returncode != 0
