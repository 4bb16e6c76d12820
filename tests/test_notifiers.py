"""The channels: what goes over the wire, what an answer means, and that no secret leaves by an error."""

from __future__ import annotations

import io
import logging
import re
import socket
import ssl
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog

from agent.config import load_config
from agent.model import AlertMessage, Book, IncidentMessage, Notice, Rejected, TryLater
from agent.notifiers import NOTIFIERS, Needs, build_channels, channel_names, owed_for_incidents, owed_to
from agent.notifiers import channel as channel_module
from agent.notifiers.alertmanager import Alertmanager
from agent.notifiers.channel import (
    Channel,
    clean_labels,
    rfc3339,
    safe_url,
    status_outcome,
    web_address,
)
from agent.notifiers.heartbeat import Heartbeat
from agent.notifiers.webhook import Webhook, fingerprint
from agent.outbox import Outbox
from agent.retry_after import retry_after_s
from agent.store import Store
from tests.needs import need
from tests.receiver import Arrival, Receiver, Reply

NOW = 1795937438.0  # 2026-11-29T07:30:38Z
LABELS = {"alertname": "KvCacheUtilization", "rule": "kv-cache-utilization", "node": "n1", "severity": "ticket"}


def message(
    key: str = "a",
    status: str = "firing",
    labels: Mapping[str, str] = LABELS,
    starts_at: float = NOW,
    annotations: Mapping[str, str] | None = None,
) -> AlertMessage:
    """An alert as a receiver gets it; resolved 602 s after it began."""
    firing = status == "firing"
    return AlertMessage(
        key,
        "firing" if firing else "resolved",
        "ticket",
        labels,
        annotations or {"summary": "0.97 of 0.85"},
        starts_at,
        None if firing else starts_at + 602.0,
        "http://gpu-17:9959/alerts/a",
    )


def notice(what: AlertMessage, number: int = 1) -> Notice:
    """A delivery owed."""
    return Notice(number, "c", what, NOW, NOW)


def alertmanager(urls: Sequence[str], firing: Callable[[], list[AlertMessage]] = list, **more: float) -> Alertmanager:
    """A channel to the Alertmanagers at `urls`."""
    return Alertmanager("alertmanager", urls, firing, **more)


def posted(receiver: Receiver) -> list[list[dict[str, Any]]]:
    """The alerts of each POST that a stand-in for Alertmanager got."""
    return [arrival.json for arrival in receiver.arrivals]


# ---- what an answer means ----


def outcome(status: int) -> str:
    """What a status means, in a word."""
    try:
        status_outcome(status, {}, NOW, "http://h:1")
    except (TryLater, Rejected) as error:
        named = str(error).startswith(f"http://h:1: {status} ")
        return type(error).__name__ if named else f"unnamed: {error}"
    return "delivered"


def test_what_every_status_means() -> None:
    """One shared table for all channels, as Alertmanager's own notify/test has it."""
    want = dict.fromkeys(range(100, 600), "TryLater")
    want |= dict.fromkeys(range(200, 300), "delivered")
    want |= dict.fromkeys(set(range(300, 500)) - {408, 425, 429}, "Rejected")
    want |= dict.fromkeys((400, 413, 422), "BadMessage")
    assert {status: outcome(status) for status in range(100, 600)} == want


def test_a_redirect_names_its_target_without_its_path() -> None:
    """The POST was redirected to https: say so; the path is the credential."""
    headers = {"Location": "https://hooks.example/services/SECRETPART"}
    with pytest.raises(Rejected, match=r"redirects to https://hooks\.example are not followed; configure the final"):
        status_outcome(301, headers, NOW, "http://hooks.example")
    with pytest.raises(Rejected, match="redirects to another path"):
        status_outcome(302, {"Location": "/login?next=SECRETPART"}, NOW, "http://h")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("1", 1.0),
        ("1.5", 1.5),
        ("-3", 0.0),
        ("Sun, 29 Nov 2026 07:31:08 GMT", 30.0),
        ("Sun, 29 Nov 2026 07:30:08 GMT", 0.0),
        ("soon", None),
        ("Mon, 30 Nov 2026 06:52:" + "9" * 99, None),  # found by the fuzz: an OverflowError
        ("nan", None),
        ("inf", None),
        (f"Mon, 30 Nov {'9' * 400}26 06:52:35 GMT", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_in_every_form(text: str | None, want: float | None) -> None:
    """RFC 9110 allows seconds and dates; some receivers send neither."""
    assert retry_after_s(text, NOW) == want


@pytest.mark.parametrize(
    ("url", "want"),
    [
        ("https://hooks.slack.example/services/T000/B000/SECRETPART", "https://hooks.slack.example"),
        ("https://u:pw@hook.example/x?token=SECRET2", "https://hook.example"),
        ("http://u:pw@127.0.0.1:9093/", "http://127.0.0.1:9093"),
        ("http://[::1]:9093/x", "http://[::1]:9093"),
        ("http://[::1/SECRETPART", "an address that is not valid"),
        ("http://h:99999/SECRETPART", "an address that is not valid"),
        ("SECRETPART", "an address without a scheme or host"),
    ],
)
def test_what_may_be_told_of_an_address(url: str, want: str) -> None:
    """Host and port help a person; the rest may be the credential."""
    assert safe_url(url) == want


def test_labels_as_prometheus_takes_them() -> None:
    """Kubernetes-like and odd names; the same input always gives the same output."""
    odd = {"proc_aname[2]": "x", "": "y", "app.kubernetes.io/name": "v", "9lives": "z", "empty": "", "ok": "\ud800 °"}
    want = {
        "_9lives": "z",
        "app_kubernetes_io_name": "v",
        "ok": "? °",
        "proc_aname_2_": "x",
    }
    assert clean_labels(odd) == want
    assert list(clean_labels(odd)) == sorted(want)
    assert clean_labels({"a_b": "2", "a.b": "1"}) == clean_labels({"a.b": "1", "a_b": "2"}) == {"a_b": "1"}


@pytest.mark.parametrize("url", ["", "gpu-17:9959/x", "http://", "ftp://h/x", "http://h/a b", "http://[::1", "http://h/é"])
def test_a_link_that_is_none_is_left_out(url: str) -> None:
    """Alertmanager 400s a whole batch for one generatorURL that it cannot parse."""
    assert web_address(url) == ""
    assert web_address("http://gpu-17:9959/alerts/a?x=%5B1%5D#y") == "http://gpu-17:9959/alerts/a?x=%5B1%5D#y"


def test_times_are_utc_with_milliseconds() -> None:
    """2026-11-29 07:30:38 UTC is 1795937438 (date -u -d @1795937438)."""
    assert rfc3339(1795937438.0) == "2026-11-29T07:30:38.000Z"
    assert rfc3339(0.25) == "1970-01-01T00:00:00.250Z"


# ---- the generic webhook ----


def test_the_webhook_speaks_alertmanagers_format() -> None:
    """A receiver written for Alertmanager must not notice a difference: firing, then resolved."""
    with Receiver() as receiver:
        hook = Webhook("webhook", lambda: receiver.url + "/hook", "http://gpu-17:9959")
        hook.send([notice(message())], NOW)
        hook.send([notice(message(status="resolved"))], NOW)
        firing, resolved = (arrival.json for arrival in receiver.arrivals)
        assert receiver.arrivals[0].path == "/hook"
        assert receiver.arrivals[0].headers["Content-Type"] == "application/json"
    assert firing == {
        "version": "4",
        "groupKey": '{}:{alertname="KvCacheUtilization", node="n1", rule="kv-cache-utilization", severity="ticket"}',
        "truncatedAlerts": 0,
        "status": "firing",
        "receiver": "webhook",
        "groupLabels": LABELS,
        "commonLabels": LABELS,
        "commonAnnotations": {"summary": "0.97 of 0.85"},
        "externalURL": "http://gpu-17:9959",
        "alerts": [
            {
                "status": "firing",
                "labels": LABELS,
                "annotations": {"summary": "0.97 of 0.85"},
                "startsAt": "2026-11-29T07:30:38.000Z",
                "endsAt": "0001-01-01T00:00:00Z",
                "generatorURL": "http://gpu-17:9959/alerts/a",
                "fingerprint": firing["alerts"][0]["fingerprint"],
            }
        ],
    }
    assert resolved["status"] == resolved["alerts"][0]["status"] == "resolved"
    assert resolved["alerts"][0]["endsAt"] == "2026-11-29T07:40:40.000Z"
    assert resolved["groupKey"] == firing["groupKey"]
    assert resolved["alerts"][0]["fingerprint"] == firing["alerts"][0]["fingerprint"]


# ---- Alertmanager ----


def test_c071_labels_are_byte_equal_from_firing_to_resolved() -> None:
    """An error text among the labels made two alerts of one: texts go into annotations, labels never change."""
    labels = {"alertname": "KvFull", "node": "n1"}
    fire = message(labels=labels, annotations={"error_message": "0.97 used"})
    resolve = message(status="resolved", labels=labels, annotations={"error_message": "0.60 used"})
    with Receiver() as receiver:
        channel = alertmanager([receiver.url])
        channel.send([notice(fire)], NOW)
        channel.send([notice(resolve)], NOW + 602)
        (first,), (second,) = posted(receiver)
    assert first["labels"] == second["labels"] == labels
    assert first["startsAt"] == second["startsAt"] == "2026-11-29T07:30:38.000Z"
    assert second["endsAt"] == "2026-11-29T07:40:40.000Z"
    assert first["annotations"] != second["annotations"]


def test_c072_times_and_names_are_valid_and_a_bad_alert_blocks_nobody() -> None:
    """A zero startsAt and odd label names cost a whole batch; and a 400 was retried for ever."""

    def judge(arrival: Arrival) -> Reply:
        names = [alert["labels"].get("alertname") for alert in arrival.json]
        return Reply(400, body=b'"start time must be before end time"') if "A" in names else Reply(200)

    batch = [
        notice(message("a", "resolved", {"alertname": "A"}), 1),
        notice(message("b", labels={"alertname": "B", "proc_aname[2]": "x", "": "y"}), 2),
        notice(message("c", labels={"alertname": "C"}, starts_at=1795950000.0), 3),
    ]
    with Receiver(judge) as receiver:
        refused = alertmanager([receiver.url]).send(batch, NOW + 700)
        whole, *single = posted(receiver)
    assert whole[1]["labels"] == {"alertname": "B", "proc_aname_2_": "x"}
    assert all(alert["startsAt"] <= alert["endsAt"] for alert in whole)
    assert whole[0]["startsAt"] == "2026-11-29T07:30:38.000Z"
    assert [alerts[0]["labels"]["alertname"] for alerts in single] == ["A", "B", "C"]
    assert refused.keys() == {1}
    assert "start time must be before end time" in str(refused[1])


def test_a_firing_alert_ends_by_itself_if_nobody_tells_of_it() -> None:
    """endsAt is now + 5 m, or 4 resends where that is longer: a node that dies must not leave its alerts open."""
    with Receiver() as receiver:
        alertmanager([receiver.url], resend_s=60.0).send([notice(message())], NOW + 10)
        alertmanager([receiver.url], resend_s=120.0).send([notice(message())], NOW + 10)
        ends = [alerts[0]["endsAt"] for alerts in posted(receiver)]
        assert {alerts[0]["startsAt"] for alerts in posted(receiver)} == {"2026-11-29T07:30:38.000Z"}
    assert ends == ["2026-11-29T07:35:48.000Z", "2026-11-29T07:38:48.000Z"]


def test_everything_firing_is_told_at_start_and_every_resend() -> None:
    """Alertmanager was restarted and forgot all alerts: within a minute it knows them again."""
    firing = [message("a"), message("b", labels={"alertname": "B"})]
    with Receiver() as receiver:
        channel = alertmanager([receiver.url], lambda: firing)
        assert channel.pulse(NOW, []) == NOW + 60
        assert channel.pulse(NOW + 59, []) == NOW + 60
        assert [len(alerts) for alerts in posted(receiver)] == [2]
        channel.pulse(NOW + 60, [])
        assert [len(alerts) for alerts in posted(receiver)] == [2, 2]
        channel.pulse(NOW - 3600, [])  # the clock was set back: not silent for an hour
        assert len(receiver.arrivals) == 3


def test_a_resend_never_opens_what_was_resolved() -> None:
    """The resolve was sent between the tick's commit and its new book: the old book still had the alert firing."""
    again = message("a", starts_at=NOW + 700)
    firing = [message("a"), message("b", labels={"alertname": "B"})]
    with Receiver() as receiver:
        channel = alertmanager([receiver.url], lambda: firing)
        channel.send([notice(message("a", "resolved"))], NOW + 602)
        channel.pulse(NOW + 602, [])
        assert [alert["labels"]["alertname"] for alert in posted(receiver)[-1]] == ["B"]
        firing[0] = again
        channel.pulse(NOW + 702, [])
        assert [alert["startsAt"] for alert in posted(receiver)[-1]] == [
            "2026-11-29T07:42:18.000Z",
            "2026-11-29T07:30:38.000Z",
        ]


def test_a_held_resolve_is_resent_as_firing() -> None:
    """While its resolve is held back, the alert that Alertmanager knows must stay as it is, even if it fires anew."""
    with Receiver() as receiver:
        channel = alertmanager([receiver.url], lambda: [message("a", starts_at=NOW + 700)])
        channel.pulse(NOW + 710, [message("a", "resolved")])
        ((alert,),) = posted(receiver)
    assert alert["startsAt"] == "2026-11-29T07:30:38.000Z"
    assert alert["endsAt"] == "2026-11-29T07:47:28.000Z"


@pytest.mark.parametrize("path", ["", "/", "/api/v2/alerts", "/am", "/am/api/v2/alerts/"])
def test_an_address_may_be_written_with_the_apis_path(path: str) -> None:
    """Its owner wrote the whole address, and no alert arrived: /api/v2/alerts/api/v2/alerts."""
    with Receiver() as receiver:
        alertmanager([receiver.url + path]).send([notice(message())], NOW)
        assert receiver.arrivals[0].path == f"{'/am' if 'am' in path else ''}/api/v2/alerts"


def test_one_peer_that_accepts_is_enough() -> None:
    """Of two peers one is dead: delivered, and the dead one costs no later page its connect timeout."""
    with Receiver() as dead:
        gone = dead.url
    with Receiver() as alive, Receiver() as flaky:
        flaky.script(Reply(503))
        channel = alertmanager([gone, flaky.url, alive.url], lambda: [message()])
        assert channel.send([notice(message())], NOW) == {}
        channel.send([notice(message("b", labels={"alertname": "B"}))], NOW)
        assert (len(alive.arrivals), len(flaky.arrivals)) == (2, 1)
        channel.pulse(NOW + 60, [])  # a resend asks every peer
        channel.send([notice(message("c", labels={"alertname": "C"}))], NOW)
        assert (len(alive.arrivals), len(flaky.arrivals)) == (4, 3)
        assert [a["labels"]["alertname"] for a in posted(flaky)[1]] == ["KvCacheUtilization"]


def test_no_peer_accepts() -> None:
    """All are down: try later, naming each; all refuse the credentials: a person must mend it."""
    with Receiver() as one, Receiver() as two:
        one.script(Reply(503, {"Retry-After": "7"}), Reply(401))
        two.script(Reply(500), Reply(404))
        channel = alertmanager([one.url, two.url])
        with pytest.raises(TryLater) as later:
            channel.send([notice(message())], NOW)
        assert str(later.value) == f"{one.url}: 503 Service Unavailable; {two.url}: 500 Internal Server Error"
        with pytest.raises(Rejected, match=r"401 Unauthorized; .*404 Not Found"):
            channel.send([notice(message())], NOW)


def test_a_bad_alert_is_not_resent_for_ever() -> None:
    """Alertmanager refuses one alert of those that fire: told once, then left out while it lasts."""

    def judge(arrival: Arrival) -> Reply:
        return Reply(400 if any(a["labels"]["alertname"] == "Bad" for a in arrival.json) else 200)

    firing = [message("bad", labels={"alertname": "Bad"}), message("good", labels={"alertname": "Good"})]
    with Receiver(judge) as receiver:
        channel = alertmanager([receiver.url], lambda: firing)
        for minute in range(3):
            channel.pulse(NOW + 60 * minute, [])
        got = [[alert["labels"]["alertname"] for alert in alerts] for alerts in posted(receiver)]
    assert got == [["Bad", "Good"], ["Bad"], ["Good"], ["Good"], ["Good"]]


# ---- the heartbeat ----


def test_the_heart_beats_only_while_the_tick_is_on_time() -> None:
    """The agent hung but its heartbeat thread went on: the dead man's switch never fired."""
    well = True
    with Receiver() as receiver:
        heart = Heartbeat("heartbeat", lambda: receiver.url + "/ping/SECRETPART", 60.0, lambda: well)
        assert heart.pulse(NOW, []) == NOW + 60
        assert heart.pulse(NOW + 30, []) == NOW + 60
        well = False
        assert heart.pulse(NOW + 60, []) == NOW + 65
        assert len(receiver.arrivals) == 1
        well = True
        assert heart.pulse(NOW + 70, []) == NOW + 130
        assert [(a.method, a.path) for a in receiver.arrivals] == [("GET", "/ping/SECRETPART")] * 2


def test_a_failing_heartbeat_is_counted_and_tried_again(tmp_path: Path) -> None:
    """The switch's own address was down: /healthz tells, and the next try does not wait for the next minute."""
    now = NOW
    store = Store(tmp_path / "tocsin.db")
    with Receiver() as receiver:
        receiver.script(Reply(503), Reply(404))
        heart = Heartbeat("heartbeat", lambda: receiver.url, 60.0, lambda: True)
        worker = Outbox(store, [heart], lambda: now, dice=lambda low, _: low).workers[0]
        assert worker.step() == NOW + 1
        now = NOW + 1
        assert worker.step() == NOW + 61  # a refusal does not spin
        remedy = "see the path of this channel's address"
        assert worker.problems(now) == [
            f"heartbeat: nothing delivered for 1 s, 0 waiting ({receiver.url}: 404 Not Found; {remedy})"
        ]
        now = NOW + 61
        worker.step()
        assert worker.problems(now) == []
    store.close()


# ---- secrets ----

SECRETS = ("SECRETPART", "SECRET2", "swordfish", "T000")


def secret_url(base: str) -> str:
    """An address that is a credential in each of its parts."""
    return base.replace("//", "//u:swordfish@") + "/services/T000/SECRETPART?token=SECRET2"


def told(error: BaseException) -> str:
    """All that a log with tracebacks, or a careless `repr`, would show of an error."""
    chain = "".join(traceback.format_exception(error))
    return f"{chain}{error!r}{error.__cause__!r}{error.__context__!r}{error.args!r}"


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.fixture(scope="session")
def tls_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A TLS server whose certificate nobody trusts."""
    need("openssl")
    folder = tmp_path_factory.mktemp("tls")
    files = ["-keyout", str(folder / "key"), "-out", str(folder / "cert")]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=nobody", *files]
    subprocess.run(make, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert", folder / "key")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                try:
                    context.wrap_socket(connection, server_side=True).close()
                except OSError:
                    connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(30)


def failure_of(channel: Channel) -> Exception:
    """What a send raises, or tells of its one notice."""
    try:
        refused = channel.send([notice(message())], NOW)
    except (Rejected, TryLater) as error:
        return error
    return refused[1]


ECHO = b"bad request to /services/T000/SECRETPART?token=SECRET2 by u:swordfish"


@pytest.mark.parametrize(
    ("story", "reply", "want"),
    [
        ("the body echoes the address", Reply(400, body=ECHO), Rejected),
        ("the body echoes it and a person must mend it", Reply(403, body=ECHO), Rejected),
        ("a redirect to the same secret", Reply(301, {"Location": "http://h/SECRETPART"}), Rejected),
        ("a header that urllib3 would warn about, with the URL", Reply(500, {"Bad Header\n\n": "x"}, ECHO), TryLater),
        ("the connection is reset", Reply(drop=True), TryLater),
        ("no such status", Reply(799), TryLater),
    ],
)
def test_c109_no_answer_makes_us_tell_the_address(
    story: str, reply: Reply, want: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """The webhook's URL is its credential: not in the error, its traceback, its context, nor in a log line."""
    caplog.set_level(logging.DEBUG)
    with Receiver(lambda _: reply) as receiver:
        url = secret_url(receiver.url)
        for channel in (Webhook("webhook", lambda: url), alertmanager([url])):
            refusal = failure_of(channel)
            assert isinstance(refusal, want)
            assert not any(secret in told(refusal) + caplog.text for secret in SECRETS), story
            assert receiver.url in str(refusal)
            assert refusal.__context__ is None


@pytest.mark.parametrize("fault", ["refused", "timeout", "tls", "name", "nonsense", "bad port", "no scheme"])
def test_c109_no_transport_error_tells_the_address(
    fault: str,
    silent_port: int,
    tls_port: int,
    free_port: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """ConnectTimeout and its like hold the whole URL in their text: ours hold the host and the cause."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(channel_module, "ANSWER_S", 0.2)
    base, cause = {
        "refused": (f"http://127.0.0.1:{free_port()}", "Connection refused"),
        "timeout": (f"http://127.0.0.1:{silent_port}", "no answer within"),
        "tls": (f"https://127.0.0.1:{tls_port}", "TLS: self-signed certificate"),
        "name": ("https://hooks.tocsin-test.invalid", "its name cannot be resolved"),
        "nonsense": ("http://[::1", "an address that is not valid"),
        "bad port": ("http://127.0.0.1:99999", "an address that is not valid"),
        "no scheme": ("//127.0.0.1", "InvalidSchema"),
    }[fault]
    url = secret_url(base)
    for channel in (Webhook("webhook", lambda: url), alertmanager([url])):
        with pytest.raises(TryLater) as caught:
            channel.send([notice(message())], NOW)
        assert not any(secret in told(caught.value) + caplog.text for secret in SECRETS)
        assert cause in str(caught.value).replace("self signed", "self-signed")
        assert caught.value.__context__ is None


def test_c109_nothing_that_is_stored_or_shown_holds_a_secret(tmp_path: Path) -> None:
    """The same through the whole outbox: database, log, /healthz, the status, and every repr."""
    now = NOW
    lines = io.StringIO()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(lines), cache_logger_on_first_use=False)
    store = Store(tmp_path / "tocsin.db")
    try:
        with Receiver(lambda arrival: Reply(403, body=ECHO)) as receiver:
            url = secret_url(receiver.url)
            channels: list[Channel] = [
                Webhook("webhook", lambda: url),
                alertmanager([url], lambda: [message()]),
                Heartbeat("heartbeat", lambda: url, 60.0, lambda: True),
            ]
            store.commit_tick(NOW, Book(), (), [(c.name, message()) for c in channels[:2]])
            outbox = Outbox(store, channels, lambda: now)
            for worker in outbox.workers:
                worker.step()
            now = NOW + 5
            shown = f"{outbox.problems()} {outbox.status()} {channels!r} {[vars(w) for w in outbox.workers]}"
            assert len(outbox.problems()) == 5
    finally:
        store.close()
        structlog.reset_defaults()
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir()).decode("utf-8", "replace")
    assert "403 Forbidden" in stored
    assert "notice_refused" in lines.getvalue()
    for secret in SECRETS:
        assert secret not in shown + stored + lines.getvalue()


def test_a_proxy_is_not_asked_for_what_is_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell that started the agent had a proxy: the Alertmanager beside it must be told all the same."""
    with Receiver() as receiver, Receiver() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv("no_proxy", "")
        for base in (receiver.url, receiver.url.replace("127.0.0.1", "localhost")):
            Webhook("webhook", lambda base=base: f"{base}/hook", None).send([notice(message())], NOW)  # type: ignore[misc]
        assert proxy.arrivals == []
        Webhook("webhook", lambda: "http://198.51.100.7/hook", None).send([notice(message())], NOW)

    assert [arrival.path for arrival in receiver.arrivals] == ["/hook", "/hook"]
    assert [arrival.path for arrival in proxy.arrivals] == ["http://198.51.100.7/hook"]


def test_netrc_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """requests sends what ~/.netrc has for a host; nobody configured that a webhook should get it."""
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login root password swordfish\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    with Receiver() as receiver:
        Webhook("webhook", lambda: receiver.url).send([notice(message())], NOW)
        url = receiver.url.replace("//", "//u:p%40w@")
        Webhook("webhook", lambda: url).send([notice(message())], NOW)
        assert [a.headers.get("Authorization") for a in receiver.arrivals] == [None, "Basic dTpwQHc="]


# ---- from the configuration ----


def config_of(tmp_path: Path, text: str) -> Any:
    """A configuration with this `notify`."""
    file = tmp_path / "tocsin.yaml"
    file.write_text(text)
    return load_config(file, {})


def test_channels_are_built_and_routed_as_configured(tmp_path: Path) -> None:
    """Alertmanager gets everything, the second webhook and PagerDuty pages, Slack tickets, the heartbeat nothing."""
    secret = tmp_path / "hook"
    secret.write_text("http://127.0.0.1:9/services/SECRETPART\n")
    text = f"""
notify:
  - alertmanager: {{urls: ["http://127.0.0.1:9093"], resend: 30s, min_visible: 10s}}
  - webhook: {{url: "http://127.0.0.1:9000/hook"}}
  - webhook: {{url_file: {secret}}}
    match: {{severity: [page]}}
  - heartbeat: {{url_env: NO_SUCH_VARIABLE, every: 1m}}
  - pagerduty: {{routing_key_file: {secret}, url: "http://127.0.0.1:9/v2/enqueue"}}
  - slack: {{webhook_env: NO_SUCH_VARIABLE}}
    match: {{severity: [ticket]}}
"""
    config = config_of(tmp_path, text)
    fires = [AlertMessage("d", "firing", "page", LABELS, {"route_to": "webhook-2"}, NOW), message()]
    routes = build_channels(config, Needs(lambda: fires, lambda: True), channel_names(config, {}))
    assert isinstance(routes[0].channel, Alertmanager)
    assert routes[0].channel._wanted([]) == fires[1:]  # what Alertmanager is told again and again
    names = ["alertmanager", "webhook", "webhook-2", "heartbeat", "pagerduty", "slack"]
    assert [route.channel.name for route in routes] == names
    assert (routes[0].channel.min_visible_s, routes[0].channel.batch) == (10.0, 64)
    ticket = message()
    page = AlertMessage("p", "firing", "page", LABELS, {}, NOW)
    assert owed_to(routes, [ticket, page]) == [
        ("alertmanager", ticket),
        ("webhook", ticket),
        ("slack", ticket),
        ("alertmanager", page),
        ("webhook", page),
        ("webhook-2", page),
    ]
    incident = IncidentMessage("opened", replace(page, key="incident"), (page,))
    assert owed_for_incidents(routes, [incident, replace(incident, change="updated")]) == [
        ("pagerduty", incident.message), ("pagerduty", incident.message)]
    diverted = AlertMessage("d", "firing", "page", LABELS, {"route_to": "webhook-2"}, NOW)
    assert owed_to(routes, [diverted]) == [("webhook-2", diverted)]  # a drill's own channel: nobody else is woken
    with pytest.raises(TryLater, match="environment variable NO_SUCH_VARIABLE is not set"):
        routes[3].channel.pulse(NOW, [])
    secret.write_text("")
    with pytest.raises(TryLater, match=f"{secret} is empty"):
        routes[2].channel.send([notice(page)], NOW)


def told_of(rule: str, key: str = "k") -> AlertMessage:
    """A page of a rule."""
    return AlertMessage(key, "firing", "page", {"rule": rule, "subject": "llama"}, {}, NOW)


def test_an_update_pages_the_channel_that_was_told_of_nothing_before(tmp_path: Path) -> None:
    """Slack wants itl-p99 alone: the hot GPU was no page of its, and what joins it silently would never reach it."""
    secret = tmp_path / "s"
    secret.write_text("https://hooks.slack.example/x")
    config = config_of(tmp_path, f"""
notify:
  - slack: {{webhook_file: {secret}}}
    match: {{severity: [page], rule: [itl-p99]}}
""")
    routes = build_channels(config, Needs(list, lambda: True), channel_names(config, {}))
    hot, slow, queue = told_of("gpu-thermal-limit", "a"), told_of("itl-p99", "b"), told_of("queue-age", "c")
    page = told_of("gpu-thermal-limit", "incident")

    def owed(change: Literal["opened", "updated", "resolved"], alerts: tuple[AlertMessage, ...],
             before: tuple[AlertMessage, ...]) -> int:
        return len(owed_for_incidents(routes, [IncidentMessage(change, page, alerts, before)]))

    assert owed("opened", (hot,), ()) == 0
    assert owed("updated", (hot, slow), (hot,)) == 1
    assert owed("updated", (hot, slow, queue), (hot, slow)) == 0
    assert owed("resolved", (hot, slow, queue), (hot, slow, queue)) == 1
    over = replace(slow, status="resolved")
    assert owed("opened", (hot, over), ()) == 0  # told again (`repeat:`): what it wanted is over
    assert owed("resolved", (hot, over), (hot, over)) == 1
    muted = replace(slow, annotations={"silenced": "until …"})
    assert owed("opened", (hot, muted), ()) == 0


A, B, C = '{webhook: {url: "http://a/"}}', '{webhook: {url: "http://b/"}}', '{webhook: {url_file: /c}}'
BEAT, ALERTMANAGER = '{heartbeat: {url: "http://d/"}}', '{alertmanager: {urls: ["http://e"]}}'
AGAIN = '{webhook: {url: "http://a/"}, match: {severity: [ticket]}}'


@pytest.mark.parametrize(("story", "before", "after", "want"), [
    ("the first is taken out", [A, B], [B], ["webhook-2"]),
    ("they change places", [A, B], [B, A], ["webhook-2", "webhook"]),
    ("one is put before it", [B], [A, B], ["webhook-2", "webhook"]),
    ("another kind stands between", [A, B], [BEAT, A, ALERTMANAGER, B],
     ["heartbeat", "webhook", "alertmanager", "webhook-2"]),
    ("one address is mended", [A, B], [A, C], ["webhook", "webhook-2"]),
    ("two are replaced: nobody can say which by which", [A, B], [C, AGAIN.replace("a/", "x/")],
     ["webhook-3", "webhook-4"]),
    ("how often a heart beats is not who it is", [BEAT], [BEAT.replace("}}", ", every: 5s}}")], ["heartbeat"]),
    ("one receiver, told twice", [A, AGAIN], [A, AGAIN], ["webhook", "webhook-2"]),
    ("one goes, one of another kind comes", [A], [BEAT], ["heartbeat"]),
])
def test_a_channel_keeps_its_name_whatever_else_is_configured(
    tmp_path: Path, story: str, before: list[str], after: list[str], want: list[str]
) -> None:
    """Pages are owed by name: a line taken out of `notify` must not send another's page to the wrong receiver."""
    old, new = (config_of(tmp_path, f"notify: [{', '.join(items)}]\n") for items in (before, after))

    names = channel_names(new, channel_names(old, {}))

    assert set(names.values()) == set(want), story
    routes = build_channels(new, Needs(list, lambda: True), names)
    assert [route.channel.name for route in routes] == want, story


def test_routes_by_rule_and_subject_quiet_hours_and_repeats(tmp_path: Path) -> None:
    """Hardware tickets go to the hardware team, not at night: 21:30 in Berlin (UTC+1) is quiet until 08:00."""
    config = config_of(tmp_path, """
notify:
  - slack: {webhook_env: HARDWARE}
    match: {rule: ["gpu-*"], subject: ["GPU-8*"]}
    quiet: {window: "20:00-08:00", zone: Europe/Berlin}
    repeat: 4h
""")
    hot = replace(message(), labels={"rule": "gpu-temperature", "subject": "GPU-8f6a"})
    others = [replace(message(), labels={"rule": rule, "subject": subject}) for rule, subject in (
        ("gpu-temperature", "GPU-77aa"), ("kv-cache-utilization", "GPU-8f6a"))]
    (route,) = build_channels(config, Needs(lambda: [hot, *others], lambda: True), channel_names(config, {}))
    assert owed_to([route], [hot, *others]) == [("slack", hot)]
    hours = route.channel.hours
    assert (hours.repeat_s, list(hours.firing())) == (14400.0, [hot])
    night, day = NOW + 13 * 3600.0, NOW + 3600.0  # 20:30:38Z and 08:30:38Z
    assert hours.quiet_until("ticket", night) == NOW + 23 * 3600.0 + 29 * 60 + 22  # 07:00Z
    assert hours.quiet_until("ticket", day) is None
    assert hours.quiet_until("page", night) is None


@pytest.mark.parametrize(("now", "until"), [  # by zdump: Berlin is UTC+1, 03-29 01:00Z to 10-25 01:00Z +2
    ("2026-03-28T23:30:00Z", "2026-03-29T06:00:00Z"),  # 00:30 to 08:00 of a night that lacks an hour: it was 07:00Z
    ("2026-10-24T22:30:00Z", "2026-10-25T07:00:00Z"),  # 00:30 to 08:00 of one that has an hour twice: it was 06:00Z
    ("2026-10-25T00:30:00Z", "2026-10-25T07:00:00Z"),  # 02:30, the first
    ("2026-10-25T01:30:00Z", "2026-10-25T07:00:00Z"),  # 02:30, the second
    ("2026-10-25T07:00:00Z", None),
])
def test_quiet_hours_end_when_the_clock_on_the_wall_says_so(tmp_path: Path, now: str, until: str | None) -> None:
    """In the night of a clock change a ticket came an hour late."""
    quiet = '{window: "20:00-08:00", zone: Europe/Berlin}'
    config = config_of(tmp_path, f"notify: [{{slack: {{webhook_env: X}}, quiet: {quiet}}}]")
    (route,) = build_channels(config, Needs(list, lambda: True), channel_names(config, {}))
    want = None if until is None else datetime.fromisoformat(until).timestamp()
    assert route.channel.hours.quiet_until("ticket", datetime.fromisoformat(now).timestamp()) == want


@pytest.mark.parametrize("pattern", ["[fd00::17]:8000", "[fd00::*", "[fd00::17]:800?", "*]:8000"])
def test_a_route_by_an_ipv6_address_is_told_of_that_engine(tmp_path: Path, pattern: str) -> None:
    """Its brackets were taken for "one of these letters": nobody was told."""
    config = config_of(tmp_path, f"notify: [{{slack: {{webhook_env: X}}, match: {{subject: ['{pattern}']}}}}]\n")
    (route,) = build_channels(config, Needs(list, lambda: True), channel_names(config, {}))
    down, other = (replace(message(), labels={"rule": "engine-down", "subject": at}) for at in (
        "[fd00::17]:8000", "[fe80::18]:9000"))
    assert owed_to([route], [down, other]) == [("slack", down)]


def test_a_route_by_a_target_s_name_is_told_of_its_engines_as_a_silence_by_it_mutes_them(tmp_path: Path) -> None:
    """The target llama has two engines; that one of them is down nobody was told."""
    config = config_of(tmp_path, "notify: [{slack: {webhook_env: X}, match: {subject: [llama]}}]\n")
    (route,) = build_channels(config, Needs(list, lambda: True), channel_names(config, {}))
    its, engine, other = (replace(message(), labels={"rule": "engine-down", "subject": name})
                          for name in ("llama", "llama/1", "llama-2"))
    assert owed_to([route], [its, engine, other]) == [("slack", its), ("slack", engine)]


def test_a_pager_that_is_told_of_some_rules_is_told_of_their_pages(tmp_path: Path) -> None:
    """`match` by rule alone made tickets of a pager's wake people."""
    text = "notify: [{pagerduty: {routing_key_env: X}, match: {rule: [gpu-*]}}]\n"
    config = config_of(tmp_path, text)
    (route,) = build_channels(config, Needs(list, lambda: True), channel_names(config, {}))
    assert route.wants.severities == {"page"}


def test_a_channels_identity_tells_no_secret(tmp_path: Path) -> None:
    """It is kept in the database, and the address of a webhook is its credential."""
    config = config_of(tmp_path, 'notify: [{webhook: {url: "http://a/services/SECRETPART"}}]\n')
    (identity,) = channel_names(config, {})
    assert re.fullmatch("[0-9a-f]{64}", identity)


def test_the_table_names_what_there_is() -> None:
    """Parts are found in an explicit table, not by import."""
    assert set(NOTIFIERS) == {"alertmanager", "webhook", "pagerduty", "slack", "apprise", "kubernetes", "heartbeat"}


def test_the_fingerprint_is_alertmanagers() -> None:
    """The empty set's is FNV-1a's offset basis; the other was read from a real Alertmanager 0.25's /api/v2/alerts."""
    assert fingerprint({}) == "cbf29ce484222325"
    assert fingerprint(LABELS) == "f4e106ac3420d6b8"
