"""Metrics without a fleet: addresses, the little server, what is counted of nodes and operations."""

from __future__ import annotations

import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sandfleet.cli.top_facts import SORTS, Fleet, Rates, snapshot
from sandfleet.errors import ConfigError, InvalidArgument, PathNotFound, StoreUnavailable
from sandfleet.fleet_facts import ops_per_s, place_counts, shown_state, staying
from sandfleet.ids import Identity
from sandfleet.metrics import MetricsServer, Tally, new_registry, nth_address, parse_address
from sandfleet.model import NodeState, NodeView
from sandfleet.store.base import OpView, Route
from sandfleet.wire import OpMessage, queue_names, shown_owner
from sandfleet_scheduler.metrics import FleetCollector, fleet_metrics
from sandfleet_workers.metrics import NodeMeter
from sandfleet_workers.watching import Watch


def node(node_id: str = "n1", **given: object) -> NodeView:
    facts: dict[str, object] = {
        "incarnation": "i1", "state": NodeState.READY, "alive": True, "replicas": 4, "places": 0, "warm": 0,
        "data_id": "d",
    }  # fmt: skip
    return NodeView(node_id, **{**facts, **given})  # type: ignore[arg-type]


def message(kind: str = "stat", args: dict[str, object] | None = None) -> OpMessage:
    route = Route("3f9a1c22", "n1", "i1", 1)
    return OpMessage("o1", kind, Identity("alice"), route, (), args or {}, None, 0, 0, "c", 0)


# --- addresses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:9464", "127.0.0.1", 9464),
        ("0.0.0.0:0", "0.0.0.0", 0),
        (":9464", "127.0.0.1", 9464),
        ("9464", "127.0.0.1", 9464),
        ("[::1]:9464", "::1", 9464),
        ("metrics.internal:1", "metrics.internal", 1),
    ],
)
def test_an_address_without_a_host_is_loopback(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "1.2.3.4:70000", "a b:1", "http://x:1", "::1:9464", "x:-1", "x:1\n2"]
)
def test_an_address_that_is_none_names_what_one_looks_like(text: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9464"):
        parse_address(text)


def test_processes_of_one_machine_count_the_port_up_unless_any_will_do() -> None:
    assert [nth_address("127.0.0.1:9464", n) for n in (0, 1, 2)] == [f"127.0.0.1:{9464 + n}" for n in (0, 1, 2)]
    assert nth_address("127.0.0.1:0", 3) == "127.0.0.1:0"
    assert nth_address("[::1]:9464", 1) == "[::1]:9465"
    assert nth_address("", 1) == ""


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"sandfleet\[metrics\]"):
        new_registry()


# --- the server --------------------------------------------------------------------------------


class Unwell:
    def __init__(self) -> None:
        self.why = ""

    def __call__(self) -> str:
        return self.why


@pytest.fixture
def unwell() -> Unwell:
    return Unwell()


@pytest.fixture
def registry() -> CollectorRegistry:
    return new_registry()


@pytest.fixture
def server(registry: CollectorRegistry, unwell: Unwell) -> Iterator[MetricsServer]:
    made = MetricsServer("127.0.0.1:0", registry, unwell)
    made.start()
    yield made
    made.stop()


def ask(server: MetricsServer, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{server.address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def test_it_serves_metrics_and_health_and_nothing_else(
    server: MetricsServer, registry: CollectorRegistry, unwell: Unwell
) -> None:
    NodeMeter(registry, lambda: 0).answered(message(), "ok", (1, 2, 3), 10)
    status, body = ask(server, "/metrics")
    assert status == 200
    assert 'sandfleet_ops_total{kind="stat",outcome="ok"} 1.0' in body
    assert ask(server, "/healthz") == (200, "ok\n")
    assert [ask(server, path)[0] for path in ("/", "/metrics/x", "/../etc/passwd", "/healthz/")] == [404] * 4
    assert ask(server, "/metrics", "POST")[0] == 501
    unwell.why = "Redis is away"
    assert ask(server, "/healthz") == (503, "Redis is away\n")


def test_a_scrape_that_fails_is_an_error_and_the_next_one_may_succeed(
    server: MetricsServer, registry: CollectorRegistry
) -> None:
    class Away:
        away = True

        def describe(self) -> list[object]:
            return []

        def collect(self) -> Iterator[object]:
            if self.away:
                raise StoreUnavailable("Redis is away")
            return iter(())

    collector = Away()
    registry.register(collector)  # type: ignore[arg-type]
    assert ask(server, "/metrics")[0] == 503
    collector.away = False
    assert ask(server, "/metrics")[0] == 200


def test_an_address_that_is_taken_is_told_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: Address already in use"):
            MetricsServer(f"127.0.0.1:{port}", new_registry(), lambda: "")


def test_a_server_that_was_never_started_is_stopped_without_harm() -> None:
    server = MetricsServer("127.0.0.1:0", new_registry(), lambda: "")
    server.stop()
    server.stop()


def test_a_tally_counts_from_any_thread() -> None:
    tally = Tally()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(lambda: [tally.add("placements", "reserved") for _ in range(1000)])
    tally.add("evictions")
    assert tally.of("placements") == {"reserved": 8000}
    assert tally.of("evictions") == {"": 1}
    assert tally.of("nothing") == {}


# --- a node's ----------------------------------------------------------------------------------


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"sandfleet_{name}", labels)


def test_an_operation_is_counted_by_kind_and_outcome_and_its_times_in_seconds(registry: CollectorRegistry) -> None:
    meter = NodeMeter(registry, lambda: 0)
    meter.answered(message("stat"), "ok", (10, 20, 300), 100)
    meter.answered(message("stat"), "path_not_found", (10, 20, 300), 100)
    assert value(registry, "ops_total", kind="stat", outcome="ok") == 1
    assert value(registry, "ops_total", kind="stat", outcome="path_not_found") == 1
    assert value(registry, "op_queue_wait_seconds_sum") == pytest.approx(0.02)
    assert value(registry, "op_lane_wait_seconds_sum") == pytest.approx(0.04)
    assert value(registry, "op_run_seconds_sum", kind="stat") == pytest.approx(0.6)
    assert value(registry, "op_run_seconds_bucket", kind="stat", le="0.25") == 0
    assert value(registry, "op_run_seconds_bucket", kind="stat", le="0.5") == 2
    assert value(registry, "reply_bytes_total") == 200


def test_a_kind_that_somebody_made_up_makes_no_label_of_its_own(registry: CollectorRegistry) -> None:
    meter = NodeMeter(registry, lambda: 0)
    for number in range(50):
        meter.answered(message(f"made-up-{number}"), "unknown_operation", (0, 0, 0), 0)
    meter.refused("invalid_argument")
    kinds = {
        sample.labels["kind"] for family in registry.collect() for sample in family.samples if "kind" in sample.labels
    }
    assert kinds == {"other"}
    assert value(registry, "ops_total", kind="other", outcome="unknown_operation") == 50


def test_a_node_counts_every_answer_and_every_refusal_once(registry: CollectorRegistry) -> None:
    watch = Watch()
    watch.answered(message(), None, (0, 0, 0), 0)
    watch.meter = NodeMeter(registry, lambda: 0)
    watch.answered(message(), None, (0, 0, 0), 0)
    watch.answered(message(), PathNotFound("no"), (0, 0, 0), 0)
    watch.refused("o1", InvalidArgument("no message"))
    assert watch.answers == 4
    assert value(registry, "ops_total", kind="stat", outcome="ok") == 1
    assert value(registry, "ops_total", kind="stat", outcome="path_not_found") == 1
    assert value(registry, "ops_total", kind="other", outcome="invalid_argument") == 1


def test_an_acquire_is_measured_from_its_asking_to_its_creation(registry: CollectorRegistry) -> None:
    meter = NodeMeter(registry, lambda: 10_000)
    meter.answered(message("node.create", {"asked_at_ms": 7_000}), "ok", (0, 0, 500), 0)
    meter.answered(message("node.create", {"asked_at_ms": 7_000}), "start_failed", (0, 0, 500), 0)
    meter.answered(message("node.create", {"asked_at_ms": "soon"}), "ok", (0, 0, 500), 0)
    assert value(registry, "acquire_seconds_count") == 1
    assert value(registry, "acquire_seconds_sum") == 3
    assert value(registry, "creates_total", outcome="ok") == 2
    assert value(registry, "creates_total", outcome="start_failed") == 1
    assert value(registry, "create_seconds_sum") == 1


# --- a fleet's ---------------------------------------------------------------------------------


def test_the_places_of_a_node_add_up() -> None:
    counts = place_counts(node(replicas=4, places=6, warm=1, creating=2, stopping=1))
    assert counts == {"free": 0, "creating": 2, "live": 2, "warm": 1, "blank": 0, "stopping": 1, "burst": 2}
    counts = place_counts(node(replicas=8, places=3, warm=1))
    assert counts == {"free": 5, "creating": 0, "live": 2, "warm": 1, "blank": 0, "stopping": 0, "burst": 0}
    counts = place_counts(node(replicas=8, places=7, creating=1, warm=1, blanks={"a": 2, "b": 1}, starting=1))
    assert counts == {"free": 1, "creating": 1, "live": 1, "warm": 1, "blank": 4, "stopping": 0, "burst": 0}
    assert place_counts(node(alive=False, places=1))["free"] == 0, "nobody can be placed on a dead node"


def test_a_node_without_a_lease_is_dead_whatever_it_said() -> None:
    assert shown_state(node(alive=False)) == "dead"
    assert shown_state(node(alive=False, state=NodeState.GONE)) == "gone"
    assert shown_state(node(state=NodeState.CORDONED)) == "cordoned"
    nodes = [node("a"), node("b", alive=False), node("c", alive=False, state=NodeState.GONE)]
    assert [found.node_id for found in staying(nodes)] == ["a", "b"]
    assert queue_names(["a"]) == [
        "sandfleet.scheduler",
        "sandfleet.ops",
        "sandfleet.ops.waiting",
        "sandfleet.node.a",
    ]


def test_the_fleets_metrics_name_nodes_and_states_only() -> None:
    nodes = [node(places=4, blanks={"a": 2}, starting=1), node("n2", alive=False), node("n3", state=NodeState.GONE)]
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in fleet_metrics(nodes, {"sandfleet.ops": 3}, 7)
        for sample in family.samples
    }
    assert found["sandfleet_queue_depth", "sandfleet.ops"] == 3
    assert found["sandfleet_line_length",] == 7
    assert found["sandfleet_places", "n1", "live"] == 1
    assert found["sandfleet_places", "n1", "blank"] == 3
    assert [found["sandfleet_blank_sandboxes", name] for name in ("n1", "n2")] == [2, 0]
    assert [found["sandfleet_nodes", state] for state in ("ready", "dead", "gone", "cordoned")] == [1, 1, 1, 0]
    assert not [key for key in found if "n3" in key], "a node that left is not measured"


class Counting:
    """A store that counts how often it was read."""

    def __init__(self) -> None:
        self.read = 0

    def nodes(self) -> list[NodeView]:
        self.read += 1
        return [node()]

    def queue_length(self, _queue: str) -> int:
        return 0

    def line_length(self) -> int:
        return 0


def test_however_many_scrape_the_store_is_read_once_a_second() -> None:
    store, tally = Counting(), Tally()
    collector = FleetCollector(store, tally)  # type: ignore[arg-type]
    registry = new_registry()
    registry.register(collector)  # type: ignore[arg-type]
    assert store.read == 0
    tally.add("acquires", "placed")
    tally.add("evictions")
    for _ in range(20):
        list(registry.collect())
    assert store.read == 1
    assert value(registry, "acquire_requests_total", outcome="placed") == 1
    assert value(registry, "evictions_total") == 1
    assert value(registry, "serve_passes_total") == 0


def test_those_who_wait_behind_a_scrape_that_failed_fail_with_it() -> None:
    """Else ten scrapes of a Redis that hangs wait ten timeouts one after the other."""
    asked = []

    class Away:
        def nodes(self) -> Any:
            asked.append(threading.get_ident())
            time.sleep(0.2)
            raise StoreUnavailable("it hangs")

    collector = FleetCollector(Away(), Tally())  # type: ignore[arg-type]

    def scrape(_: int) -> str:
        with pytest.raises(StoreUnavailable):
            list(collector.collect())
        return "failed"

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(scrape, range(10))) == ["failed"] * 10
    assert len(asked) == 1


# --- what top makes of it ----------------------------------------------------------------------


def load(at_ms: int, answers: int, **more: object) -> dict[str, object]:
    return {"at_ms": at_ms, "answers": answers, "running": 2, "waiting": 1, "load_1m": 0.5, "cpus": 2, **more}


def test_a_rate_is_what_was_answered_between_two_loads() -> None:
    assert ops_per_s(load(1000, 10), load(3000, 50)) == 20
    assert ops_per_s(load(1000, 10), load(1000, 10)) is None
    assert ops_per_s(load(1000, 10), load(2000, 5)) is None, "it started anew"
    assert ops_per_s({}, load(2000, 5)) is None
    assert ops_per_s({"at_ms": "x", "answers": 1}, load(2000, 5)) is None


def test_a_rate_stays_until_the_node_tells_a_new_load_and_ends_with_its_incarnation() -> None:
    rates = Rates()
    assert rates.learn([node(load=load(1000, 10))]) == {"n1": None}
    assert rates.learn([node(load=load(2000, 20))]) == {"n1": 10}
    assert rates.learn([node(load=load(2000, 20))]) == {"n1": 10}
    assert rates.learn([node(load=load(3000, 20))]) == {"n1": 0}
    assert rates.learn([node(load=load(3000, 20), alive=False)]) == {"n1": None}
    assert rates.learn([node(load=load(4000, 1), incarnation="i2")]) == {"n1": None}


def op(op_id: str, *, claimed_ms: int | None, recorded_ms: int = 0) -> OpView:
    state = "recorded" if claimed_ms is None else "claimed"
    return OpView(
        op_id, "execute_command", "3f9a1c22", "n1", "i1", state, "", "bash: ls", recorded_ms, claimed_ms, None, 0
    )


def test_a_snapshot_has_running_operations_first_and_the_longest_of_them_on_top() -> None:
    ops = [op("waits", claimed_ms=None, recorded_ms=1), op("short", claimed_ms=9_000), op("long", claimed_ms=2_000)]
    told = snapshot(Fleet(10_000, [node()], ops, {}, 0), {})
    assert [(row["op_id"], row["state"], row["age_s"]) for row in told["ops"]] == [
        ("long", "running", 8.0), ("short", "running", 1.0), ("waits", "waiting", 9.999),
    ]  # fmt: skip


def test_a_snapshot_counts_live_nodes_only_and_believes_no_nonsense_in_a_load() -> None:
    nodes = [
        node("a", places=1, load=load(0, 0, metrics="127.0.0.1:1")),
        node("b", alive=False, places=3, load=load(0, 0)),
        node("c", state=NodeState.GONE),
        node("d", load={"running": "many", "load_1m": None, "cpus": 0}),
    ]
    told = snapshot(Fleet(0, nodes, [], {"sandfleet.node.a": 5}, 2), {"a": 1.5, "d": None})
    assert [row["node_id"] for row in told["nodes"]] == ["a", "b", "d"]
    assert told["totals"] == {"nodes": 3, "alive": 2, "used": 1, "replicas": 8, "ops_per_s": 1.5}
    first, dead, odd = told["nodes"]
    assert (first["queue"], first["running"], first["metrics"]) == (5, 2, "127.0.0.1:1")
    assert (dead["state"], dead["running"], dead["load_1m"]) == ("dead", 0, None)
    assert (odd["running"], odd["load_1m"], odd["cpus"]) == (0, None, 1)


def test_nodes_are_sorted_as_asked() -> None:
    nodes = [node("a", places=1, load=load(0, 0, load_1m=3)), node("b", places=3, load=load(0, 0, running=9))]
    fleet = Fleet(0, nodes, [], {}, 0)
    order = {sort: [row["node_id"] for row in snapshot(fleet, {"a": 5.0}, sort=sort)["nodes"]] for sort in SORTS}
    assert order == {
        "node": ["a", "b"],
        "places": ["b", "a"],
        "ops": ["b", "a"],
        "rate": ["a", "b"],
        "load": ["a", "b"],
    }


def test_whose_operation_it_is_reads_well_and_trusts_nobody() -> None:
    assert shown_owner([None, "alice"]) == "thread alice"
    assert shown_owner(["u1", "alice"]) == "thread alice · user u1"
    for hostile in (None, "alice", [None], [None, "a\x1b[2J"], [None, "a" * 65], [None, 5], ["u"], {}):
        assert shown_owner(hostile) == ""
    assert shown_owner(["u\n", "alice"]) == "thread alice"
