"""Metrics of a scrape after known events. The peer's names are pinned: dashboards hang on them."""

import time

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.contracts.adapters import AdapterStats
from quire.contracts.output import PrefixStats, StateStats, StepStats, TierStats
from quire.contracts.sampling import SamplingParams
from quire.contracts.step import Tier
from quire.observe import metrics as module
from quire.observe.metrics import Metrics

PEER_NAMES = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc prefix_cache_queries_total
prefix_cache_hits_total num_preemptions_total prompt_tokens_total prompt_tokens_by_source_total
prompt_tokens_cached_total generation_tokens_total request_success_total request_prompt_tokens request_generation_tokens
iteration_tokens_total request_params_n request_params_max_tokens time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
request_prefill_kv_computed_tokens request_num_preemptions cache_config_info admission_rejections_total
request_max_num_generation_tokens
""".split()
COPIES = {Tier.HOST: TierStats(num_blocks=9, num_used=3, num_loaded=5, num_stored=8, num_failed=2)}
STEP = StepStats(
    step=7,
    num_running=3,
    num_waiting=5,
    num_blocked=2,
    num_tokens=40,
    num_prefill_tokens=38,
    num_scheduled=4,
    num_prefills=2,
    num_preempted=6,
    num_free_blocks=60,
    num_cached_blocks=20,
    prefix=PrefixStats(
        queries=100, hits=25, states=StateStats(hits=25, cut=9, taken=7, num_checkpoints=6, num_used=4, tiers=COPIES)
    ),
    schedule_s=0.0002,
    execute_s=0.02,
    finish_s=0.0001,
)


def ready(prefix: str = "quire") -> Metrics:
    metrics = Metrics(prefix, "some/model")
    metrics.engine_ready(
        num_slots=8, num_blocks=100, block_size=16, max_model_len=1000, cache_dtype="bfloat16", core_pid=None
    )
    return metrics


def scrape(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Sample name and own labels -> value, after a pass through the reference parser."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = frozenset((k, v) for k, v in sample.labels.items() if k not in ("model_name", "engine"))
            assert (sample.name, labels) not in samples, f"{sample.name} {labels} twice"
            samples[sample.name, labels] = sample.value
    return samples


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return scrape(metrics)["quire:" + name, frozenset(labels.items())]


def test_with_the_peers_prefix_the_names_are_the_peers() -> None:
    metrics = ready("vllm")
    metrics.rejected("queue_full")
    body = metrics.render()[0].decode()
    types = {line.split()[2] for line in body.splitlines() if line.startswith("# TYPE")}
    assert {f"vllm:{name}" for name in PEER_NAMES} <= types
    assert 'vllm:num_requests_running{engine="0",model_name="some/model"} 0.0' in body
    assert 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.02",model_name="some/model"} 0.0' in body
    assert 'vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="some/model"} 0.0' in body
    assert 'vllm:inter_token_latency_seconds_bucket{engine="0",le="0.025",model_name="some/model"} 0.0' in body


def test_adapters_are_counted() -> None:
    metrics = ready()
    assert not [name for name, _ in scrape(metrics) if "adapter_slots" in name]
    stats = AdapterStats(slots=4, resident={"sql": 2, "idle": 0}, waiting=3, loads=9, reads=5, failed=1)
    metrics.step(STEP, 4, stats)
    metrics.step(STEP, 4)
    assert value(metrics, "adapter_slots", state="all") == 4
    assert value(metrics, "adapter_slots", state="used") == 2
    assert value(metrics, "adapter_slots", state="held") == 1
    assert value(metrics, "adapter_requests", adapter="sql") == 2
    assert value(metrics, "adapter_requests_waiting") == 3
    assert value(metrics, "adapter_loads_total", source="files") == 5
    assert value(metrics, "adapter_loads_total", source="host") == 4
    assert value(metrics, "adapter_load_failures_total") == 1


def test_a_step_is_counted() -> None:
    metrics = ready()
    metrics.step(STEP, 4)
    samples = scrape(metrics)
    expected = {
        ("num_requests_running", ""): 3,
        ("num_requests_waiting", ""): 5,
        ("num_requests_waiting_by_reason", "reason=capacity"): 3,
        ("num_requests_waiting_by_reason", "reason=deferred"): 2,
        ("kv_cache_usage_perc", ""): 0.4,
        ("kv_blocks", "state=used"): 40,
        ("kv_blocks", "state=cached"): 20,
        ("kv_blocks", "state=free"): 40,
        ("step_requests", "phase=prefill"): 2,
        ("step_requests", "phase=decode"): 2,
        ("step_tokens_total", "phase=prefill"): 38,
        ("step_tokens_total", "phase=decode"): 2,
        ("prompt_tokens_total", ""): 63,
        ("prompt_tokens_by_source_total", "source=local_compute"): 38,
        ("prompt_tokens_by_source_total", "source=local_cache_hit"): 25,
        ("generation_tokens_total", ""): 4,
        ("prefix_cache_queries_total", ""): 100,
        ("prefix_cache_hits_total", ""): 25,
        ("prefix_cache_state_hits_total", ""): 25,
        ("prefix_cache_state_cut_total", ""): 9,
        ("state_checkpoints_taken_total", ""): 7,
        ("state_checkpoints", "state=all"): 6,
        ("state_checkpoints", "state=used"): 4,
        ("state_tier_failed_checkpoints_total", "tier=host"): 2,
        ("num_preemptions_total", ""): 6,
        ("steps_total", ""): 1,
        ("iteration_tokens_total_sum", ""): 42,
        ("step_time_seconds_sum", "part=schedule"): 0.0002,
        ("step_time_seconds_sum", "part=execute"): 0.02,
        ("step_time_seconds_count", "part=finish"): 1,
    }
    for (name, label), number in expected.items():
        key = "quire:" + name, frozenset([tuple(label.split("="))] if label else [])
        assert samples[key] == pytest.approx(number), (name, label)
    for direction, number in (("load", 5), ("store", 8)):
        labels = {("tier", "host"), ("direction", direction)}
        assert samples["quire:state_tier_copied_checkpoints_total", frozenset(labels)] == number


@pytest.mark.parametrize(
    ("running", "waiting", "free", "load"),
    [
        (0, 0, 100, 0.0),
        (2, 0, 90, 0.25),  # 2 of 8 slots
        (2, 0, 40, 0.6),  # 60 of 100 blocks
        (8, 0, 50, 1.0),
        (8, 4, 50, 1.5),  # 12 requests for 8 slots
        (2, 2, 10, 1.8),  # 90 blocks for 2 requests, so 180 for 4
        (0, 8, 100, 1.0),
    ],
)
def test_load_is_the_number_of_engines_that_the_requests_would_fill(
    running: int, waiting: int, free: int, load: float
) -> None:
    metrics = ready()
    metrics.step(StepStats(step=1, num_running=running, num_waiting=waiting, num_free_blocks=free), 1)
    assert value(metrics, "engine_load") == pytest.approx(load)


def test_outputs_without_a_step_change_the_state_only() -> None:
    metrics = ready()
    metrics.step(STEP, 4)
    metrics.step(StepStats(num_free_blocks=100, num_preempted=6, prefix=PrefixStats(queries=100, hits=25)), 0)
    assert value(metrics, "num_requests_running") == 0 and value(metrics, "kv_cache_usage_perc") == 0
    assert value(metrics, "steps_total") == 1 and value(metrics, "iteration_tokens_total_count") == 1


def test_while_the_engine_is_started_again_the_requests_that_are_held_wait() -> None:
    metrics = ready()
    metrics.step(STEP, 4)
    metrics.engine_lost(lambda: 12)
    empty = {"num_requests_running": 0, "kv_cache_usage_perc": 0, "num_requests_waiting": 12, "engine_load": 1.5}
    assert {name: value(metrics, name) for name in empty} == empty
    assert value(metrics, "num_requests_waiting_by_reason", reason="restart") == 12
    assert metrics.snapshot().num_waiting == 12 and value(metrics, "kv_blocks", state="used") == 0
    metrics.engine_ready(num_slots=8, num_blocks=100, block_size=16, max_model_len=1000)
    assert {name: value(metrics, name) for name in empty} == empty, "the next core gets them, and has said nothing yet"
    metrics.step(STEP, 4)
    assert value(metrics, "num_requests_waiting") == 5 and value(metrics, "kv_cache_usage_perc") == 0.4


def test_a_replica_that_died_is_left_out() -> None:
    """Its KV blocks are neither used nor free."""
    metrics = ready()
    metrics.step(StepStats(step=1, num_blocks=100, num_free_blocks=80, replicas={0: 2, 1: 3}), 1)
    for number, count in enumerate((2, 3)):
        assert value(metrics, "num_requests_running_by_replica", replica=str(number)) == count
    metrics.step(StepStats(num_blocks=50, num_free_blocks=40, replicas={1: 3}), 0)
    assert value(metrics, "num_requests_running_by_replica", replica="1") == 3
    assert 'replica="0"' not in metrics.render()[0].decode()
    assert value(metrics, "kv_cache_usage_perc") == pytest.approx(0.2)


def test_tiers_are_counted_by_tier_and_direction() -> None:
    metrics = ready()
    host = TierStats(
        num_blocks=9,
        num_used=4,
        num_loaded=3,
        loaded_bytes=30,
        loaded_seconds=0.5,
        num_stored=7,
        stored_bytes=70,
        stored_seconds=2.0,
        num_failed=1,
        num_dropped=2,
    )
    metrics.step(msgspec.structs.replace(STEP, tiers={Tier.HOST: host, Tier.DISK: TierStats(num_stored=5)}), 2)
    assert value(metrics, "kv_tier_blocks", tier="host", state="used") == 4
    assert value(metrics, "kv_tier_copied_blocks_total", tier="host", direction="load") == 3
    assert value(metrics, "kv_tier_copied_blocks_total", tier="disk", direction="store") == 5
    assert value(metrics, "kv_tier_copied_bytes_total", tier="host", direction="store") == 70
    assert value(metrics, "kv_tier_copy_seconds_total", tier="host", direction="load") == 0.5
    assert value(metrics, "kv_tier_failed_blocks_total", tier="host") == 1
    assert value(metrics, "kv_tier_dropped_blocks_total", tier="host") == 2


def test_a_tier_that_ranks_count_in_bytes_has_no_size() -> None:
    metrics, host, disk = ready(), TierStats(num_blocks=9, num_used=4), TierStats(num_stored=5)
    tiers = {Tier.HOST: host, Tier.DISK: disk}
    prefix = PrefixStats(states=StateStats(tiers=tiers))
    metrics.step(msgspec.structs.replace(STEP, tiers=tiers, prefix=prefix), 2)
    for name in ("kv_tier_blocks", "state_tier_checkpoints"):
        sizes = {labels: count for (found, labels), count in scrape(metrics).items() if found == f"quire:{name}"}
        assert sizes == {frozenset({("tier", "host"), ("state", state)}): n for state, n in (("all", 9), ("used", 4))}


def test_before_any_step_no_block_is_used() -> None:
    metrics = ready()
    assert value(metrics, "kv_cache_usage_perc") == 0 and value(metrics, "kv_blocks", state="free") == 100


def test_a_request_from_start_to_end() -> None:
    metrics = ready()
    metrics.request_started(SamplingParams(max_tokens=64, n=2))
    metrics.first_token(0.03)
    metrics.inter_token(0.015, 4)
    metrics.tokens(5)
    metrics.request_finished(
        "length",
        num_prompt=30,
        num_outputs=[1, 4],
        queue_s=0.01,
        prefill_s=0.02,
        decode_s=0.06,
        e2e_s=0.09,
        num_cached=16,
        num_preemptions=3,
        token_s=[0.02, 0.03],
    )
    sums = {
        "time_to_first_token_seconds": 0.03,
        "inter_token_latency_seconds": 0.06,
        "request_time_per_output_token_seconds": 0.05,
        "e2e_request_latency_seconds": 0.09,
        "request_queue_time_seconds": 0.01,
        "request_prefill_time_seconds": 0.02,
        "request_decode_time_seconds": 0.06,
        "request_inference_time_seconds": 0.08,
        "request_prompt_tokens": 30,
        "request_generation_tokens": 5,
        "request_max_num_generation_tokens": 4,
        "request_prefill_kv_computed_tokens": 14,
        "request_params_n": 2,
        "request_params_max_tokens": 64,
        "request_num_preemptions": 3,
    }
    assert {name: value(metrics, name + "_sum") for name in sums} == pytest.approx(sums)
    assert value(metrics, "inter_token_latency_seconds_count") == 4
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "request_success_total", finished_reason="stop") == 0
    assert value(metrics, "delivered_tokens_total") == 5


def test_a_request_that_never_ran_has_no_times_of_phases() -> None:
    metrics = ready()
    metrics.request_finished(
        "abort", num_prompt=3, num_outputs=[0], queue_s=None, prefill_s=None, decode_s=None, e2e_s=1.0
    )
    assert value(metrics, "e2e_request_latency_seconds_count") == 1
    assert value(metrics, "request_queue_time_seconds_count") == 0
    assert value(metrics, "request_inference_time_seconds_count") == 0


def test_counters_with_known_labels_have_samples_before_their_first_event() -> None:
    """`increase()` does not see the event that makes a series."""
    counted = {(name, *sorted(labels)): count for (name, labels), count in scrape(ready()).items()}
    assert counted["quire:restarts_total", ("part", "http"), ("reason", "killed")] == 0
    assert counted["quire:admission_rejections_total", ("reason", "queue_full")] == 0
    assert counted["quire:request_aborts_total", ("cause", "engine")] == 0


def test_refusals_aborts_and_answers_are_counted_by_label() -> None:
    metrics = ready()
    metrics.rejected("queue_full")
    metrics.aborted("disconnect")
    metrics.http("/v1/chat/completions", 200)
    metrics.http("/health", 503, "GET")
    metrics.http("none", 405, "SOMEBODYS-OWN")
    metrics.loop_lag(0.02)
    assert value(metrics, "admission_rejections_total", reason="queue_full") == 1
    assert value(metrics, "request_aborts_total", cause="disconnect") == 1
    assert value(metrics, "http_requests_total", route="/v1/chat/completions", method="POST", status="200") == 1
    assert value(metrics, "http_requests_total", route="/health", method="GET", status="503") == 1
    assert value(metrics, "http_requests_total", route="none", method="other", status="405") == 1
    assert value(metrics, "event_loop_lag_seconds_bucket", le="0.03") == 1


def test_label_values_from_outside_cannot_grow_without_bound() -> None:
    metrics = ready()
    for number in range(2000):
        metrics.http(f"/{number}", 404)
        metrics.rejected(f"{number}")
        metrics.aborted(f"{number}")
    assert len(scrape(metrics)) < 1000


def test_the_age_of_the_last_step_counts_only_while_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    metrics = ready()

    def age_after(seconds: float) -> float:
        now[0] += seconds
        return value(metrics, "last_step_age_seconds")

    assert age_after(50) == 0
    metrics.request_started(SamplingParams())
    assert age_after(5) == 5  # the core has not answered yet
    metrics.step(STEP, 1)
    assert age_after(2) == 2
    metrics.step(StepStats(step=8, num_free_blocks=100), 1)
    assert age_after(30) == 0


def test_the_line_shows_rates_since_the_line_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    metrics = ready()
    metrics.step(STEP, 4)
    now[0] += 10
    line = metrics.snapshot()
    assert (line.num_running, line.num_waiting, line.kv_usage) == (3, 5, 0.4)
    assert line.prompt_tokens_per_s == pytest.approx(6.3) and line.generation_tokens_per_s == pytest.approx(0.4)
    assert line.hit_rate == 0.25
    now[0] += 10
    idle = metrics.snapshot()
    assert idle.hit_rate is None and idle.prompt_tokens_per_s == idle.generation_tokens_per_s == 0


def test_the_line_shows_the_acceptance_of_drafts_since_the_line_before() -> None:
    metrics = ready()
    assert metrics.snapshot().acceptance == ()
    found = []
    for drafts in ((10, 30, 5, 2, 1), (10, 30, 5, 2, 1), (14, 42, 8, 4, 1)):
        metrics.step(msgspec.structs.replace(STEP, drafts=drafts), 1)
        found.append(metrics.snapshot().acceptance)
    assert found == [(0.5, 0.2, 0.1), (), (0.75, 0.5, 0.0)]


def test_two_servers_in_one_process_do_not_share_a_registry() -> None:
    first, second = ready(), ready()
    first.step(STEP, 4)
    assert value(first, "steps_total") == 1 and value(second, "steps_total") == 0
