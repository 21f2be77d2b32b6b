"""Writes k8s/components/monitoring/dashboards: Grafana's, for Kubernetes and for Docker alike.

What they ask for is in outrider/observe/catalogue.py or recorded by the rules beside them, as
tests/deploy/test_dashboards.py holds them to.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
DASHBOARDS = ROOT / "k8s" / "components" / "monitoring" / "dashboards"

Kind = Literal["lines", "stacked", "heatmap"]
# PromQL and legend.
Query = tuple[str, str]

# Of Grafana's grid, which is 24 wide.
_WIDTH = 24
_HEIGHT = 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# How every scrape configuration of this repository names what it scrapes.
OURS = 'job=~".*outrider.*"'


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        description: what it shows and what to make of it.
        unit: Grafana's name of it.
        top: of the axis, where there is one.
    """

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    kind: Kind = "lines"
    top: float | None = None


@dataclass(frozen=True)
class Dashboard:
    """One dashboard: rows with a title and two or three panels beside each other."""

    name: str
    title: str
    description: str
    rows: Sequence[tuple[str, int, Sequence[Panel]]]


def rate(series: str, by: str = "") -> str:
    """Per second, over all processes."""
    return f"sum{f' by ({by})' if by else ''} (rate({series}[$__rate_interval]))"


def ratio(part: str, whole: str, by: str = "") -> str:
    """One rate by another; nothing where there is nothing to divide by."""
    return f"{rate(part, by)} / ({rate(whole, by)} > 0)"


def mean(histogram: str) -> str:
    """Of a histogram, over all processes."""
    return ratio(f"{histogram}_sum", f"{histogram}_count")


def quantile(part: float, histogram: str, by: str = "") -> str:
    """Of a histogram, over all processes."""
    return f"histogram_quantile({part}, {rate(f'{histogram}_bucket', f'le, {by}' if by else 'le')})"


def quantiles(histogram: str, *parts: float) -> list[Query]:
    """Lines p50, p95 and so on."""
    return [(quantile(part, histogram), f"p{part * 100:g}") for part in parts]


def buckets(histogram: str) -> list[Query]:
    """For a heatmap: how many fell into each bucket."""
    return [(f"sum by (le) (increase({histogram}_bucket[$__rate_interval]))", "{{le}}")]


def both(metric: str, of: str = "") -> list[Query]:
    """The sum of a gauge of each pool's workers."""
    return [(f"sum (outrider_{pool}_{metric})", f"{pool}{of}") for pool in ("target", "draft")]


def each(pattern: str, of: str = "") -> list[Query]:
    """A query of each pool: POOL stands for its name."""
    return [(pattern.replace("POOL", pool), f"{pool}{of}") for pool in ("target", "draft")]


_ROUNDS = "(sum(rate(outrider_rounds_total[$__rate_interval])) > 0)"


def part(plus: str, *minus: str) -> str:
    """Seconds of a mean round that went into one part of it and not into others, which are parts of that one."""
    total = " - ".join(rate(f"outrider_round_{name}_seconds_sum") for name in (plus, *minus))
    return f"clamp_min({total}, 0) / {_ROUNDS}" if minus else f"{total} / {_ROUNDS}"


OVERVIEW = Dashboard(
    "overview",
    "Outrider: overview",
    "What clients see, and where the time goes",
    (
        (
            "What clients see",
            3,
            (
                Panel(
                    "Time to first token",
                    "From a request's arrival at the orchestrator to its first token: waiting to be let in, prefill "
                    "and the first round.",
                    "s",
                    quantiles("gen_ai_server_time_to_first_token_seconds", 0.5, 0.95),
                ),
                Panel(
                    "Time per output token",
                    "Of generations that ended well: seconds for every token after the first.",
                    "s",
                    quantiles("gen_ai_server_time_per_output_token_seconds", 0.5, 0.95),
                ),
                Panel(
                    "Tokens per second",
                    "Committed tokens of all sessions; recorded over five minutes.",
                    "short",
                    [("outrider:tokens:rate5m", "tokens/s")],
                ),
            ),
        ),
        (
            "Load",
            2,
            (
                Panel(
                    "Running sessions and waiting requests",
                    "Generations that run, and requests that wait to be let in. Requests wait when the limits of "
                    "sessions or tokens are reached.",
                    "short",
                    [
                        ("sum (outrider_running_sessions)", "running sessions"),
                        ("sum (outrider_waiting_requests)", "waiting requests"),
                    ],
                ),
                Panel(
                    "Tokens per round",
                    "Committed tokens for each verification by the target: 1 is what plain decoding has. Recorded over "
                    "five minutes.",
                    "short",
                    [("outrider:tokens_per_round:ratio_rate5m", "tokens per round")],
                ),
                Panel(
                    "Requests by error",
                    "Requests that ended, by error.type; ok has none.",
                    "reqps",
                    [
                        (rate('gen_ai_server_request_duration_seconds_count{error_type=""}'), "ok"),
                        (
                            rate('gen_ai_server_request_duration_seconds_count{error_type!=""}', "error_type"),
                            "{{error_type}}",
                        ),
                    ],
                ),
                Panel(
                    "Requests refused, by tenant",
                    "Requests that there was no room for, or not in time. One tenant alone: its own limit or share; "
                    "all of them: there is too little of something.",
                    "reqps",
                    [(rate("outrider_requests_refused_total", "tenant"), "{{tenant}}")],
                ),
            ),
        ),
        (
            "Where the time goes",
            2,
            (
                Panel(
                    "Where a round's time goes",
                    "Seconds of a mean round. Draft wait: more or faster drafts would save it. Batch wait: until the "
                    "next call to the target leaves the orchestrator. Verify queue: at the target, until its pass. "
                    "Target forward: the pass. On the way: the rest of the call. Then acceptance and the store.",
                    "s",
                    [
                        (part("draft_wait"), "draft wait"),
                        (part("batch_wait"), "batch wait"),
                        (part("verify_queue", "batch_wait"), "verify queue"),
                        (part("target_forward"), "target forward"),
                        (part("verify", "verify_queue", "target_forward"), "on the way"),
                        (part("accept"), "accept"),
                        (part("commit"), "commit"),
                    ],
                    "stacked",
                ),
                Panel(
                    "Share of rounds' time that is waiting",
                    "For a block, and for the target's pass (the wait in the orchestrator included); recorded over "
                    "five minutes. The greater one says which pool to enlarge.",
                    "percentunit",
                    [
                        ("outrider:draft_wait:share_rate5m", "draft wait"),
                        ("outrider:verify_queue:share_rate5m", "batch wait and verify queue"),
                    ],
                    top=1,
                ),
            ),
        ),
        (
            "Tenants",
            2,
            (
                Panel(
                    "Tokens by tenant",
                    "Generated tokens by whom they were for, counted when a request ends.",
                    "short",
                    [(rate("outrider_tenant_tokens_total", "tenant"), "{{tenant}}")],
                    "stacked",
                ),
                Panel(
                    "Prompt and output tokens",
                    "Tokens per second of generations that ended: of their prompts (input) and of their output.",
                    "short",
                    [(rate("gen_ai_client_token_usage_sum", "gen_ai_token_type"), "{{gen_ai_token_type}}")],
                ),
            ),
        ),
    ),
)

SPECULATION = Dashboard(
    "speculation",
    "Outrider: speculation",
    "Whether drafting pays, and why not",
    (
        (
            "Acceptance",
            3,
            (
                Panel(
                    "Acceptance rate",
                    "Part of verified draft tokens that was kept, by acceptance rule and of all (recorded over five "
                    "minutes). Low: the draft does not fit the target or the text.",
                    "percentunit",
                    [
                        ("outrider:acceptance:ratio_rate5m", "all"),
                        (
                            ratio("outrider_accepted_tokens_total", "outrider_draft_tokens_total", "acceptance"),
                            "{{acceptance}}",
                        ),
                    ],
                    top=1,
                ),
                Panel(
                    "Acceptance by position",
                    "Part of verified draft tokens that was kept, by their position in the block. It falls from one "
                    "position to the next; where it is near 0, blocks are too long.",
                    "percentunit",
                    [
                        (
                            ratio(
                                "outrider_accepted_tokens_by_position_total",
                                "outrider_draft_tokens_by_position_total",
                                "position",
                            ),
                            "{{position}}",
                        )
                    ],
                    top=1,
                ),
                Panel(
                    "Acceptance of requests",
                    "How many generations with 16 or more draft tokens had which part of them accepted. At 0 a draft "
                    "is broken, at 1 output repeats itself, or the draft is the target.",
                    "percentunit",
                    buckets("outrider_request_acceptance"),
                    "heatmap",
                ),
            ),
        ),
        (
            "Rounds",
            2,
            (
                Panel(
                    "Lookahead",
                    "Length of a round's block, those without one included as 0: what the controller makes of "
                    "acceptance and costs.",
                    "short",
                    [(mean("outrider_lookahead"), "mean"), *quantiles("outrider_lookahead", 0.5, 0.95)],
                ),
                Panel(
                    "Rounds by lookahead",
                    "How many rounds had a block of which length.",
                    "short",
                    buckets("outrider_lookahead"),
                    "heatmap",
                ),
                Panel(
                    "Rounds by reason",
                    "Rounds per second with a block (BLOCK), and without one by why. DRAFT_SATURATED and DRAFT_LATE: "
                    "the draft pool is too small or too slow; NO_GAIN: speculation would not pay now.",
                    "ops",
                    [(rate("outrider_rounds_total", "reason"), "{{reason}}")],
                    "stacked",
                ),
                Panel(
                    "Tokens by origin",
                    "Committed tokens per second: of the draft (ACCEPTED), in place of the first one that was rejected "
                    "(RECOVERED), after a block that was kept whole (BONUS), of rounds without a block (PLAIN).",
                    "short",
                    [(rate("outrider_emitted_tokens_total", "origin"), "{{origin}}")],
                    "stacked",
                ),
            ),
        ),
        (
            "Drafting ahead",
            3,
            (
                Panel(
                    "Hit rate of drafting ahead",
                    "Part of the commands after work ahead that it served, whole (ready) or begun; and part of blocks "
                    "that were there before their round (recorded over five minutes).",
                    "percentunit",
                    [
                        (
                            ratio(
                                'outrider_draft_ahead_outcomes_total{outcome=~"ready|begun"}',
                                "outrider_draft_ahead_outcomes_total",
                            ),
                            "ready or begun",
                        ),
                        (
                            ratio(
                                'outrider_draft_ahead_outcomes_total{outcome="ready"}',
                                "outrider_draft_ahead_outcomes_total",
                            ),
                            "ready",
                        ),
                        ("outrider:blocks_ready:ratio_rate5m", "blocks that did not wait"),
                    ],
                    top=1,
                ),
                Panel(
                    "Wasted tokens drawn ahead",
                    "Part of the draft tokens drawn ahead that no command asked for: the price of the hits. It costs "
                    "only time that draft workers had to spare.",
                    "percentunit",
                    [
                        (
                            ratio("outrider_draft_ahead_wasted_tokens_total", "outrider_draft_ahead_tokens_total"),
                            "wasted",
                        )
                    ],
                    top=1,
                ),
                Panel(
                    "Tokens drawn ahead",
                    "Per second: drawn, wasted, and verified in the end.",
                    "short",
                    [
                        (rate("outrider_draft_ahead_tokens_total"), "drawn"),
                        (rate("outrider_draft_ahead_wasted_tokens_total"), "wasted"),
                        (rate("outrider_drafted_ahead_tokens_total"), "verified"),
                    ],
                ),
            ),
        ),
        (
            "Losses",
            3,
            (
                Panel(
                    "Discarded blocks by reason",
                    "Blocks per second that came and were not verified. missed: pushed for other tokens than were "
                    "committed, as is normal; late: after the deadline; the others say that a draft worker is wrong.",
                    "ops",
                    [(rate("outrider_draft_discarded_total", "reason"), "{{reason}}")],
                ),
                Panel(
                    "Hedges and superseded commands",
                    "Per second: late blocks asked for at a second worker, by whether that one won, and commands given "
                    "up for a newer one, a Close or a lost stream.",
                    "ops",
                    [
                        (rate('outrider_draft_hedges_total{won="True"}'), "hedge won"),
                        (rate('outrider_draft_hedges_total{won="False"}'), "hedge lost"),
                        (rate("outrider_draft_superseded_total"), "superseded"),
                    ],
                ),
                Panel(
                    "Sessions that lost speculation",
                    "Sessions per second that decode plainly to their end, by why.",
                    "ops",
                    [(rate("outrider_speculation_disabled_total", "reason"), "{{reason}}")],
                ),
            ),
        ),
        (
            "What drafts cost",
            3,
            (
                Panel(
                    "Draft tokens by proposer",
                    "Draft tokens per second that workers shipped, by what proposed them.",
                    "short",
                    [(rate("outrider_draft_shipped_tokens_total", "proposer"), "{{proposer}}")],
                    "stacked",
                ),
                Panel(
                    "Commands to draft workers",
                    "Per second and kind: blocks, probes of acceptance, prefixes sent beforehand.",
                    "ops",
                    [(rate("outrider_draft_calls_total", "kind"), "{{kind}}")],
                ),
                Panel(
                    "Draft and verify messages",
                    "Serialised bytes per second in both directions, by acceptance rule.",
                    "Bps",
                    [(rate("outrider_wire_bytes_total", "acceptance"), "{{acceptance}}")],
                ),
            ),
        ),
    ),
)

POOLS = Dashboard(
    "pools",
    "Outrider: pools",
    "Workers, queues, passes, memory and the store",
    (
        (
            "Workers",
            2,
            (
                Panel(
                    "Workers by pool and state",
                    "As orchestrators see them, the mean over orchestrators. failing: tried now and then, its breaker "
                    "is open; unavailable: not reached, not ready, or not fitting.",
                    "short",
                    [("avg by (pool, state) (outrider_workers)", "{{pool}} {{state}}")],
                ),
                Panel(
                    "Engines by state",
                    "As workers say it of themselves. stuck: its turn takes too long; failed: it will not come back.",
                    "short",
                    each("sum by (state) (outrider_POOL_state)", " {{state}}"),
                ),
            ),
        ),
        (
            "Queues",
            3,
            (
                Panel(
                    "Queues in orchestrators",
                    "Commands to draft workers that are not answered; items that wait for the next call to a target, "
                    "and items in calls that are not answered.",
                    "short",
                    [
                        ("sum (outrider_awaited_blocks)", "awaited blocks"),
                        ("sum (outrider_verify_queue)", "verify queue"),
                        ("sum (outrider_verify_in_flight)", "verify in flight"),
                    ],
                ),
                Panel(
                    "Queues in workers",
                    "Items that were taken in and are not answered: what autoscaling goes by.",
                    "short",
                    both("queue"),
                ),
                Panel(
                    "Queue time p95",
                    "Of each item, from its arrival at the worker to its first pass.",
                    "s",
                    each(quantile(0.95, "outrider_POOL_queue_time_seconds")),
                ),
            ),
        ),
        (
            "Passes",
            3,
            (
                Panel(
                    "Pass fullness",
                    "Mean positions of a pass as part of its token budget (the target's recorded over five minutes). "
                    "Near 1 the pool is at its limit; a low one has room for more sessions at little cost.",
                    "percentunit",
                    [
                        ("outrider:target_pass_fullness:mean_rate5m", "target"),
                        (mean("outrider_draft_pass_fullness"), "draft"),
                    ],
                    top=1,
                ),
                Panel(
                    "Items per pass",
                    "Mean number of sessions that shared a pass.",
                    "short",
                    each(mean("outrider_POOL_pass_items")),
                ),
                Panel(
                    "Pass time p95",
                    "How long a forward pass took.",
                    "s",
                    each(quantile(0.95, "outrider_POOL_pass_time_seconds")),
                ),
                Panel(
                    "Positions per second",
                    "Computed in passes, prefill and drafting ahead included.",
                    "short",
                    each(rate("outrider_POOL_positions_total")),
                ),
                Panel(
                    "Age of the engine's turn",
                    "The greatest of each pool: grows when an engine is stuck.",
                    "s",
                    each("max (outrider_POOL_turn_age_seconds)"),
                ),
                Panel(
                    "Errors of workers",
                    "Items per second that were not answered with OK, by reason.",
                    "ops",
                    each(rate('outrider_POOL_answers_total{reason!="OK"}', "reason"), " {{reason}}"),
                ),
            ),
        ),
        (
            "State of sessions",
            2,
            (
                Panel(
                    "KV pages in use",
                    "Part of the KV cache's pages that sessions hold, by worker. At 1 sessions are evicted.",
                    "percentunit",
                    each("outrider:POOL_kv_pages:used_ratio", " {{instance}}"),
                    top=1,
                ),
                Panel(
                    "Sessions with state",
                    "Of each pool.",
                    "short",
                    both("sessions"),
                ),
                Panel(
                    "Evictions and prefixes sent again",
                    "Per second. An evicted session that goes on has its whole prefix sent and computed again.",
                    "ops",
                    [
                        *each(rate("outrider_POOL_evictions_total"), " evictions"),
                        (rate("outrider_prefix_resent_total"), "prefixes sent again"),
                    ],
                ),
                Panel(
                    "Prefix hit rate",
                    "Part of the tokens of newly opened sequences whose state other sessions had left in the worker.",
                    "percentunit",
                    each(ratio("outrider_POOL_prefix_hit_tokens_total", "outrider_POOL_prefix_tokens_total")),
                    top=1,
                ),
            ),
        ),
        (
            "Session store",
            3,
            (
                Panel(
                    "Store duration p50",
                    "Of calls of the session store, by operation, repeats included.",
                    "s",
                    [(quantile(0.5, "outrider_store_duration_seconds", "operation"), "{{operation}}")],
                ),
                Panel(
                    "Store duration p99",
                    "Of calls of the session store, by operation, repeats included. Every round waits for its commit.",
                    "s",
                    [(quantile(0.99, "outrider_store_duration_seconds", "operation"), "{{operation}}")],
                ),
                Panel(
                    "Store errors",
                    "Calls per second that did not get through, by operation.",
                    "ops",
                    [(rate("outrider_store_errors_total", "operation"), "{{operation}}")],
                ),
            ),
        ),
        (
            "Processes",
            3,
            (
                Panel(
                    "Event loop lag p99",
                    "How late each process's event loop was. Above some tens of milliseconds it holds up every session "
                    "of that process.",
                    "s",
                    [(quantile(0.99, "outrider_event_loop_lag_seconds", "job, instance"), "{{job}} {{instance}}")],
                ),
                Panel(
                    "Memory",
                    "Resident memory of each process; not the accelerator's.",
                    "bytes",
                    [(f"process_resident_memory_bytes{{{OURS}}}", "{{job}} {{instance}}")],
                ),
                Panel(
                    "CPU",
                    "Processors that each process keeps busy.",
                    "short",
                    [(f"rate(process_cpu_seconds_total{{{OURS}}}[$__rate_interval])", "{{job}} {{instance}}")],
                ),
            ),
        ),
    ),
)

ALL = (OVERVIEW, SPECULATION, POOLS)


def _options(panel: Panel) -> dict[str, Any]:
    """What differs by kind."""
    if panel.kind == "heatmap":
        return {
            "type": "heatmap",
            "fieldConfig": {"defaults": {"unit": "short"}, "overrides": []},
            "options": {
                "calculate": False,
                "cellGap": 1,
                "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
                "filterValues": {"le": 1e-9},
                "legend": {"show": True},
                "rowsFrame": {"layout": "auto"},
                "tooltip": {"mode": "single", "yHistogram": True},
                "yAxis": {"axisPlacement": "left", "unit": panel.unit},
            },
        }
    stacked = panel.kind == "stacked"
    custom = {
        "drawStyle": "line",
        "fillOpacity": 60 if stacked else 5,
        "lineWidth": 1,
        "showPoints": "auto",
        "stacking": {"group": "A", "mode": "normal" if stacked else "none"},
    }
    defaults: dict[str, Any] = {"custom": custom, "min": 0, "unit": panel.unit}
    if panel.top is not None:
        defaults["max"] = panel.top
    return {
        "type": "timeseries",
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"calcs": ["lastNotNull"], "displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "none" if stacked else "desc"},
        },
    }


def _targets(panel: Panel) -> Iterator[dict[str, Any]]:
    for index, (expression, legend) in enumerate(panel.queries):
        yield {
            "datasource": _SOURCE,
            "editorMode": "code",
            "expr": expression,
            "format": "heatmap" if panel.kind == "heatmap" else "time_series",
            "legendFormat": legend,
            "range": True,
            "refId": chr(ord("A") + index),
        }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    """Rows from top to bottom, panels from left to right; the last of a row take what width is left."""
    identifier = y = 0
    for title, columns, panels in dashboard.rows:
        identifier += 1
        place = {"h": 1, "w": _WIDTH, "x": 0, "y": y}
        yield {"id": identifier, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        y += 1
        for start in range(0, len(panels), columns):
            beside = panels[start : start + columns]
            width = _WIDTH // len(beside)
            for column, panel in enumerate(beside):
                identifier += 1
                yield {
                    "id": identifier,
                    "title": panel.title,
                    "description": panel.description,
                    "datasource": _SOURCE,
                    "gridPos": {"h": _HEIGHT, "w": width, "x": column * width, "y": y},
                    "targets": list(_targets(panel)),
                    **_options(panel),
                }
            y += _HEIGHT


def rendered(dashboard: Dashboard) -> str:
    """The file's text."""
    made = {
        "uid": f"outrider-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["outrider"],
        "schemaVersion": 41,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                    "hide": 0,
                    "includeAll": False,
                    "multi": False,
                    "options": [],
                    "refresh": 1,
                    "regex": "",
                }
            ]
        },
        "annotations": {"list": []},
        "links": [
            {
                "title": "Outrider",
                "type": "dashboards",
                "tags": ["outrider"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "panels": list(_panels(dashboard)),
    }
    return json.dumps(made, indent=2) + "\n"


def files() -> dict[str, str]:
    """Texts by file name."""
    return {f"{dashboard.name}.json": rendered(dashboard) for dashboard in ALL}


if __name__ == "__main__":
    DASHBOARDS.mkdir(exist_ok=True)
    for name, text in files().items():
        (DASHBOARDS / name).write_text(text)
