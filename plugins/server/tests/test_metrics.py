"""The metrics tell the truth; the dashboard and `specdec top` use only metrics that exist."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from specdec.testing.oracles import RaisingProposer, WrongProposer, use_proposer
from specdec_server.metrics.prometheus import VLLM_PREFIX, Histogram, metric_names
from specdec_server.metrics.reading import Snapshot

DASHBOARD = Path(__file__).parents[1] / "dashboards/grafana.json"
BODY = {"prompt": "the quick brown fox the quick brown fox the quick", "temperature": 0, "ignore_eos": True}


def look(client) -> Snapshot:
    response = client.get("/metrics")
    assert response.status_code == 200
    return Snapshot.parse(response.text)


def test_nothing_is_missing_or_nan_before_and_after_traffic(client):
    for _ in range(2):
        snapshot = look(client)
        names = set(snapshot.samples)
        may_be_empty = {name for name in metric_names() if "per_pos" in name or name.startswith("specdec:proposer_")}
        assert metric_names() - may_be_empty <= names
        assert not any(math.isnan(v) or math.isinf(v) for rows in snapshot.samples.values() for v in rows.values())
        client.post("/v1/completions", json={**BODY, "max_tokens": 1})


def test_counters_are_what_was_delivered(client, running):
    running.wait_until_idle()
    before = look(client)
    answers = [
        client.post("/v1/completions", json={**BODY, "max_tokens": n, "return_spec_stats": True}).json()
        for n in range(5, 10)
    ]
    running.wait_until_idle()
    new = look(client).since(before)
    delivered = sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert new.value("generation_tokens_total") == delivered == 5 + 6 + 7 + 8 + 9
    assert new.value("request_success_total", finished_reason="length") == 5
    assert new.value("time_to_first_token_seconds_count") == 5
    assert new.value("e2e_request_latency_seconds_count") == 5
    assert new.value("request_generation_tokens_sum") == delivered
    prompt = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert new.value("prefix_cache_queries_total") == prompt
    assert new.value("prompt_tokens_total") + new.value("prefix_cache_hits_total") == prompt
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        told = sum(answer["spec_stats"][name] for answer in answers)
        assert new.value(f"spec_decode_{name}_total") == told
    per_position = new.by("spec_decode_num_accepted_tokens_per_pos_total", "position")
    assert sum(per_position.values()) == new.value("spec_decode_num_accepted_tokens_total")
    counts = [per_position[key] for key in sorted(per_position, key=int)]
    assert counts == sorted(counts, reverse=True)
    assert new.value("step_seconds_total", stage="target") > 0
    assert new.value("http_requests_total", path="/v1/completions", status="200") == 5


ACCEPTED = (
    "application/openmetrics-text",
    # what Prometheus 2 and 3 send
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,*/*;q=0.1",
    "text/plain;version=1.0.0",
    "*/*",
)


@pytest.mark.parametrize("accept", ACCEPTED)
def test_names_are_the_same_whoever_asks_and_the_format_is_valid(client, accept):
    client.post("/v1/completions", json={**BODY, "max_tokens": 3})
    response = client.get("/metrics", headers={"accept": accept})
    is_open = response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert is_open == ("openmetrics" in accept)
    families = list((parse_openmetrics if is_open else parse_text)(response.text))
    named = {sample.name for family in families for sample in family.samples}
    assert {"specdec:num_requests_running", "specdec:generation_tokens_total", "specdec:http_requests_total"} <= named
    assert {"specdec:spec_decode_num_accepted_tokens_total", "process_open_fds"} <= named


def test_states_are_those_of_now_after_an_abort(client, running):
    with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 400, "stream": True}) as response:
        lines = response.iter_lines()  # dropping it would close the connection
        next(lines)
        now = look(client)
        assert now.value("num_requests_running") == 1
        assert now.value("http_requests_active") == 2  # the stream, and the one that asks
    running.wait_until_idle()
    now = look(client)
    assert now.value("num_requests_running") == now.value("num_requests_waiting") == 0
    assert now.value("kv_blocks_free") == now.value("kv_blocks") > 0
    assert now.value("kv_cache_usage_perc") == 0


def test_faults_show_until_speculation_is_switched_off(model, serving):
    with (
        serving(model, **use_proposer(RaisingProposer(WrongProposer(5))), max_proposer_faults=3) as server,
        server.client() as client,
    ):
        assert look(client).value("speculation_disabled") == 0
        client.post("/v1/completions", json={**BODY, "max_tokens": 10})
        now = look(client)
        assert now.value("speculation_disabled") == 1
        assert now.value("proposer_faults_total", proposer="RaisingProposer") == 3


def test_vllms_names_on_request(model, serving):
    with serving(model, {"vllm_metrics": True}) as server, server.client() as client:
        client.post("/v1/completions", json={**BODY, "max_tokens": 4})
        snapshot = look(client)
        per_position = {name for name in metric_names(VLLM_PREFIX) if "per_pos" in name}
        assert metric_names(VLLM_PREFIX) - per_position <= set(snapshot.samples)
        theirs, ours = (sum(snapshot.samples[p + "generation_tokens_total"].values()) for p in ("vllm:", "specdec:"))
        assert theirs == ours >= 4  # of all engines of this process
        openmetrics = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert openmetrics.text.count("# EOF") == 1
        assert openmetrics.text.endswith("# EOF\n")


def test_the_models_label_is_the_name_it_is_served_under(model, serving):
    with serving(model, {"served_model_name": ("one", "two")}) as server, server.client() as client:
        labels = {row["model_name"] for row in look(client).labels("num_requests_running")}
        assert "one" in labels
        assert str(model) not in labels


def test_vllms_names_are_not_there_otherwise(client):
    assert "vllm:" not in client.get("/metrics").text


def test_the_dashboard_uses_only_metrics_that_exist():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 15
    used = {name for query in queries for name in re.findall(r"[a-z]+:[a-z0-9_]+", query)}
    http = {"specdec:http_requests_total", "specdec:http_requests_active"}
    assert used - metric_names() - http == set()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_histograms_count_into_the_right_bucket():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == ([("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)], 12.0)


def test_percentiles_of_histograms_are_interpolated():
    text = 'specdec:x_bucket{le="1.0"} 5\nspecdec:x_bucket{le="2.0"} 10\nspecdec:x_bucket{le="+Inf"} 10\n'
    snapshot = Snapshot.parse("# TYPE specdec:x histogram\n" + text + "specdec:x_sum 12\nspecdec:x_count 10\n")
    assert snapshot.quantile("x", 0.75) == pytest.approx(1.5)
    assert Snapshot().quantile("x", 0.5) is None


def test_top_shows_a_running_server(client, running, capsys):
    from specdec.cli.main import main

    client.post("/v1/completions", json={**BODY, "max_tokens": 30})
    assert main(["top", running.url, "--once", "--interval", "0.05"]) == 0
    out = capsys.readouterr().out
    assert "0 running, 0 waiting" in out
    assert "ngram, 4 tokens, verifier match: on" in out
    assert re.search(r"KV cache .*0%  0 of \d+ blocks", out)
    assert main(["top", "http://127.0.0.1:9", "--once"]) == 2
    assert "Is the server running?" in capsys.readouterr().err


def test_a_server_that_was_started_again_has_no_negative_rates():
    text = """\
# TYPE specdec:generation_tokens counter
specdec:generation_tokens_total{{engine="0"}} {}
# TYPE specdec:e2e histogram
specdec:e2e_bucket{{engine="0",le="1.0"}} {}
specdec:e2e_bucket{{engine="0",le="+Inf"}} {}
"""
    before, after = Snapshot.parse(text.format(900, 5, 9)), Snapshot.parse(text.format(30, 7, 8))
    recent = after.since(before)
    assert recent.value("generation_tokens_total") == 30
    assert (recent.value("e2e_bucket", le="1.0"), recent.value("e2e_bucket", le="+Inf")) == (7, 8)


def test_ctrl_c_is_how_one_leaves_top(running, monkeypatch, capsys):
    from specdec.cli.main import main

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec_server.top.time.sleep", interrupt)
    assert main(["top", running.url]) == 0
    shown = capsys.readouterr()
    assert "requests" in shown.out
    assert shown.err == ""


def test_top_takes_the_difference_of_two_looks(client, running):
    from specdec_server.top import rows

    before = look(client)
    client.post("/v1/completions", json={**BODY, "max_tokens": 30})
    now = look(client)
    shown = dict(rows(now, now.since(before), 2.0))
    assert shown["tokens"].startswith("15.0/s generated")
    assert shown["between tokens"].startswith("p50 ")
    assert "acceptance length" in shown


def test_what_a_proposer_counts_itself_is_shown():
    from specdec_server.metrics.prometheus import _numbers

    counted = {"members": {"ngram": {"num_faults": 2, "is_on": True, "per_pos": [1, 2]}}, "note": "text"}
    assert list(_numbers(counted)) == [("members.ngram.num_faults", 2.0), ("members.ngram.is_on", 1.0)]
