"""PagerDuty, Slack and what Apprise reaches: limits, answers, and neither data nor secrets become anything else."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.config import load_config
from agent.model import AlertMessage, Notice, Rejected, Severity, TryLater
from agent.notifiers import Needs, build_channels, channel_names, chat, not_installed, pagerduty, slack
from agent.notifiers.alertmanager import Alertmanager
from agent.notifiers.apprise_send import send, without
from agent.notifiers.channel import BadMessage, Channel
from agent.notifiers.chat import Chat
from agent.notifiers.pagerduty import PagerDuty
from agent.notifiers.slack import Slack
from agent.notifiers.webhook import Webhook
from tests.receiver import Receiver, Reply

NOW = 1795937438.0  # 2026-11-29T07:30:38Z
KEY = "0123456789abcdef0123456789abcdef"
TEXTS = {"summary": "gpu-temperature 91 °C, limit 85 °C: GPU 3 on gpu-17, 4 min",
         "description": "hot\nlook at the fans", "value": "91 °C", "limit": "85 °C", "action": "Look at the fans.",
         "runbook_url": "https://t.example/runbooks/x"}
LABELS = {"alertname": "GpuTemperature", "rule": "gpu-temperature", "node": "gpu-17", "subject": "GPU-8f6a"}


def alert(status: str = "firing", severity: Severity = "page", key: str = "gpu-17/gpu-temperature/GPU-8f6a",
          **texts: str) -> Notice:
    """A delivery owed of a hot GPU."""
    ends_at = None if status == "firing" else NOW + 1740.0
    said = AlertMessage(key, "firing" if status == "firing" else "resolved", severity, LABELS, {**TEXTS, **texts}, NOW,
                        ends_at, "http://gpu-17:9959/alerts/gpu-temperature/GPU-8f6a")
    return Notice(1, "c", said, NOW, NOW)


def pager(url: str) -> PagerDuty:
    """PagerDuty at a stand-in."""
    return PagerDuty("pagerduty", lambda: KEY, f"{url}/v2/enqueue")


def by_webhook(url: str) -> Slack:
    """Slack by an incoming webhook."""
    return Slack("slack", lambda: f"{url}/services/T000/B000/SECRETPART")


def by_bot(url: str) -> Slack:
    """Slack by a bot's token."""
    return Slack("slack", lambda: "xoxb-SECRETPART", "#on-call", f"{url}/api/chat.postMessage")


def webhook(url: str) -> Webhook:
    """The generic one."""
    return Webhook("webhook", lambda: url)


def by_apprise(url: str) -> Chat:
    """Whatever Apprise reaches, here its own JSON; in this process, since starting one for each is slow."""
    return Chat("apprise", lambda: f"{url.replace('http', 'json')}/SECRETPART/?+X-Key={KEY}", send)


# --- what an answer means, for all of them ----------------------------------------------------------------------------

OLD_IMPORTS = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # Apprise's, on 3.11
MEANS = {202: "delivered", 301: "Rejected", 400: "BadMessage", 401: "Rejected", 403: "Rejected", 404: "Rejected",
         408: "TryLater", 410: "Rejected", 413: "BadMessage", 429: "TryLater", 500: "TryLater", 503: "TryLater"}


def outcome(make: Callable[[str], Channel], reply: Reply) -> tuple[str, str]:
    """What a channel makes of an answer, and what it says of it."""
    with Receiver(lambda _: reply) as receiver:
        try:
            make(receiver.url).send([alert()], NOW)
        except (Rejected, TryLater) as error:
            return type(error).__name__, str(error)
    return "delivered", ""


@OLD_IMPORTS
@pytest.mark.parametrize("make", [pager, by_webhook, by_bot, webhook, by_apprise])
def test_one_table_of_answers_for_all(make: Callable[[str], Channel]) -> None:
    """Each status means the same whoever sends; none of them tells a secret."""
    there = {"Location": "http://169.254.169.254/SECRETPART"}
    found = {status: outcome(make, Reply(status, there, body=b'{"ok": true}')) for status in MEANS}
    assert {status: name for status, (name, _) in found.items()} == MEANS
    assert not [text for _, text in found.values() if "SECRETPART" in text or KEY in text]


# --- PagerDuty --------------------------------------------------------------------------------------------------------


def test_an_event_and_its_end() -> None:
    """Trigger with all that a person asks for; resolve with the same key and nothing else."""
    with Receiver() as receiver:
        channel = pager(receiver.url)
        for one in (alert(), alert("resolved")):
            channel.send([one], NOW)
        fired, ended = (arrival.json for arrival in receiver.arrivals)
    assert {k: v for k, v in fired.items() if k not in ("payload", "links")} == {
        "routing_key": KEY, "event_action": "trigger", "dedup_key": "gpu-17/gpu-temperature/GPU-8f6a",
        "client": "Tocsin", "client_url": "http://gpu-17:9959/alerts/gpu-temperature/GPU-8f6a"}
    payload = fired["payload"]
    assert {k: v for k, v in payload.items() if k != "custom_details"} == {
        "summary": TEXTS["summary"], "source": "gpu-17", "severity": "critical",
        "timestamp": "2026-11-29T07:30:38.000Z", "component": "GPU-8f6a", "class": "gpu-temperature"}
    assert payload["custom_details"] == {
        name: TEXTS[name] for name in ("description", "value", "limit", "action")}  # no wall of labels
    assert fired["links"][0] == {"href": "https://t.example/runbooks/x", "text": "Runbook"}
    assert ended == {"routing_key": KEY, "event_action": "resolve", "dedup_key": "gpu-17/gpu-temperature/GPU-8f6a"}


@pytest.mark.parametrize(("severity", "want"), [("page", "critical"), ("ticket", "warning"), ("info", "info")])
def test_severities_are_theirs(severity: Severity, want: str) -> None:
    """It takes four words and refuses every other."""
    assert pagerduty.event(alert(severity=severity).message)["payload"]["severity"] == want


def test_c066_long_texts_are_cut_by_characters() -> None:
    """1,100 times é are 2,200 bytes: 1,024 characters go out, marked as cut, and the whole beside it."""
    summary, key = "é" * 1100, "k" * 300
    fired = pagerduty.event(alert(key=key, summary=summary).message)
    ended = pagerduty.event(alert("resolved", key=key).message)
    assert (len(fired["payload"]["summary"]), fired["payload"]["summary"][-2:]) == (1024, "é…")
    assert fired["payload"]["custom_details"]["full_summary"] == summary
    assert len(fired["dedup_key"]) <= 255
    assert fired["dedup_key"] == ended["dedup_key"]
    assert fired["dedup_key"] != pagerduty.dedup_key("k" * 301)


def test_an_event_is_never_too_large() -> None:
    """PagerDuty takes 512 KB and no more (alertmanager#2178): a hundred long details, and the page was refused."""
    few = alert().message
    long = {f"detail_{n}": "\x01" * 9000 for n in range(100)}  # six bytes each in JSON
    found = pagerduty.event(replace(few, annotations={**few.annotations, "short": "91 °C", **long}))

    assert len(msgspec.json.encode(found)) <= 500_000
    details = found["payload"]["custom_details"]
    assert details["short"] == "91 °C"
    left_out = int(details.pop("left_out").split()[0])
    assert left_out + len(details) == 101 + len(pagerduty.event(few)["payload"]["custom_details"])



@pytest.mark.parametrize(
    ("said", "want"),
    [('{"status": "invalid event", "errors": ["Length of \'routing_key\' is incorrect"]}', Rejected),
     ('{"status": "invalid event", "errors": ["\'payload.severity\' is invalid"]}', BadMessage),
     (f'{{"errors": ["routing_key {KEY} is unknown"]}}', Rejected)],
)
def test_a_wrong_key_is_the_channels_fault(said: str, want: type[Rejected]) -> None:
    """It answers 400 to a revoked key too: the page was given up as malformed, and nobody mended the key."""
    with Receiver() as receiver:
        receiver.script(Reply(400, body=said.encode()))
        with pytest.raises(Rejected) as error:
            pager(receiver.url).send([alert()], NOW)
    assert type(error.value) is want
    assert KEY not in str(error.value)


# --- Slack ------------------------------------------------------------------------------------------------------------


def blocks(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The blocks of what was sent."""
    (attachment,) = body["attachments"]
    found: list[dict[str, Any]] = attachment["blocks"]
    return found


def test_a_message_and_its_end() -> None:
    """A title that a phone shows, the body (what to do is in it), links; green and said first when it is over."""
    fired, ended = (slack.rich(alert(status).message) for status in ("firing", "resolved"))
    header, body, context = blocks(fired)
    assert header["text"]["text"] == TEXTS["summary"]
    assert body["text"]["text"] == "hot\nlook at the fans"
    assert "<https://t.example/runbooks/x|Runbook>" in context["elements"][0]["text"]
    assert ended["text"].startswith("Resolved: gpu-temperature")
    assert (fired["attachments"][0]["color"], ended["attachments"][0]["color"]) == ("#d93025", "#188038")


def test_no_data_calls_a_whole_channel() -> None:
    """A log line held <!channel>, and 4,000 people were woken; a label held a link to somewhere else."""
    hostile = "<!channel> <https://evil.example|Runbook> & <@U123>"
    sent = slack.rich(alert(summary=hostile, description=hostile, action=hostile).message)
    texts = [sent["text"], *(b["text"]["text"] for b in blocks(sent)[1:2])]
    assert all("<" not in text and "&lt;!channel&gt;" in text for text in texts)
    assert blocks(sent)[0]["text"]["type"] == "plain_text"  # which has no mark-up
    # without it Slack itself makes mentions and links of what looks like them
    assert [b["verbatim"] for b in (blocks(sent)[1]["text"], *blocks(sent)[2]["elements"])] == [True, True]


def test_a_text_that_is_none_is_sent_all_the_same() -> None:
    """Half a character (a JSON source told it) cannot be encoded: it was tried for ever. A blank title is none."""
    with Receiver() as receiver:
        by_webhook(receiver.url).send([alert(summary=" \n", description="hot \ud800")], NOW)
        sent = receiver.arrivals[0].json
    assert sent["text"] == "GpuTemperature"
    assert blocks(sent)[1]["text"]["text"] == "hot ?"


def test_c068_long_text_is_cut_at_a_line_and_a_400_is_no_delivery() -> None:
    """90 failed, 4,778 characters: at most 3,000 a section, whole lines, how many are not shown; then as plain text."""
    lines = ["90 failed", *(f"item {i:02d}: {'x' * 42}" for i in range(90))]
    text = "\n".join(lines)[:4778]
    body = blocks(slack.rich(alert(description=text).message))[1]["text"]["text"]
    shown = body.split("\n")
    assert len(body) <= 3000
    assert shown[0] == "90 failed"
    assert shown[:-1] == text.split("\n")[: len(shown) - 1]
    assert shown[-1] == f"… {len(text.split(chr(10))) - len(shown) + 1} more lines not shown"

    with Receiver() as receiver:
        receiver.script(Reply(400, body=b"invalid_blocks"), Reply(200, body=b"ok"))
        by_webhook(receiver.url).send([alert(description=text)], NOW)
        first, second = (arrival.json for arrival in receiver.arrivals)
        receiver.script(Reply(400), Reply(400))
        with pytest.raises(BadMessage):
            by_webhook(receiver.url).send([alert()], NOW)
    assert "attachments" in first
    assert set(second) == {"text"}
    assert "90 failed" in second["text"]


def test_a_bot_reads_what_slack_says_in_its_200() -> None:
    """chat.postMessage answers 200 to everything: what it refused was counted as delivered for a month."""
    said = {b'{"ok": true}': "delivered", b'{"ok": false, "error": "invalid_auth"}': "Rejected",
            b'{"ok": false, "error": "msg_too_long"}': "BadMessage",
            b'{"ok": false, "error": "internal_error"}': "TryLater", b"<html>": "TryLater", b"[]": "TryLater"}
    assert {body: outcome(by_bot, Reply(200, body=body))[0] for body in said} == said
    with Receiver(lambda _: Reply(200, body=b'{"ok": true}')) as receiver:
        by_bot(receiver.url).send([alert()], NOW)
    (arrival,) = receiver.arrivals
    assert arrival.headers["Authorization"] == "Bearer xoxb-SECRETPART"
    assert arrival.json["channel"] == "#on-call"


def test_a_webhook_that_answers_as_the_api_is_read_as_that() -> None:
    """A relay in front of Slack passed its answer on, 200 and `"ok": false`: the page was counted as delivered."""
    said = {b"ok": "delivered", b"": "delivered", b'{"ok": true}': "delivered", b'{"success": true}': "delivered",
            b'{"status": "ok"}': "delivered",
            b'{"ok": false, "error": "channel_not_found"}': "Rejected",
            b'{"ok":false,"error":"rate_limited"}': "TryLater"}
    assert {body: outcome(by_webhook, Reply(200, body=body))[0] for body in said} == said


@pytest.mark.parametrize("make", [pager, by_webhook, by_bot])
def test_a_login_page_takes_no_page(make: Callable[[str], Channel]) -> None:
    """The company's proxy asked for a password, with status 200: the pager stayed silent, and all was delivered."""
    said, why = outcome(make, Reply(200, body=b"\n<!DOCTYPE html><html><title>Sign in</title>"))
    assert said == "TryLater"
    assert "SECRETPART" not in why


# --- Apprise ----------------------------------------------------------------------------------------------------------


@OLD_IMPORTS
def test_no_channel_follows_a_redirect() -> None:
    """A chat server's open redirect led to 169.254.169.254: with the node's credentials in the answer, and logged."""
    def alertmanager(url: str) -> Alertmanager:
        return Alertmanager("alertmanager", [url], list)

    for make in (pager, by_webhook, by_bot, webhook, by_apprise, alertmanager):
        with Receiver() as inside, Receiver() as receiver:
            for status in (301, 302, 303, 307, 308):
                receiver.script(Reply(status, {"Location": f"{inside.url}/latest/meta-data/SECRETPART"}))
                with pytest.raises(Rejected, match="are not followed") as error:
                    make(receiver.url).send([alert()], NOW)
                assert "SECRETPART" not in str(error.value)
            assert len(receiver.arrivals) == 5, make
            assert inside.arrivals == []


def test_a_process_of_its_own_sends(tmp_path: Path) -> None:
    """As configured, through the real process: the address comes from a file, and `ps` shows nothing of it."""
    with Receiver() as receiver:
        (tmp_path / "url").write_text(f"json://127.0.0.1:{receiver.port}/hook/\n")
        (tmp_path / "tocsin.yaml").write_text(f"notify: [{{apprise: {{url_file: {tmp_path}/url}}}}]\n")
        config = load_config(tmp_path / "tocsin.yaml", {})
        (route,) = build_channels(config, Needs(list, lambda: True), channel_names(config, {}))
        route.channel.send([alert()], NOW)
        route.channel.send([alert("resolved")], NOW)
        fired, ended = (arrival.json for arrival in receiver.arrivals)
    assert not_installed(config) == []
    assert route.wants.severities == {"page", "ticket", "info"}
    assert (fired["title"], fired["type"]) == (TEXTS["summary"], "failure")
    assert fired["message"] == ("hot\nlook at the fans\nDo now: Look at the fans.\n"
                                "Runbook: https://t.example/runbooks/x\n"
                                "Alert: http://gpu-17:9959/alerts/gpu-temperature/GPU-8f6a")
    assert (ended["title"], ended["type"]) == (f"Resolved: {TEXTS['summary']}", "success")


@pytest.mark.parametrize(
    ("told", "want", "said"),
    [({"ok": True, "service": "Discord"}, None, ""),
     ({"missing": True}, Rejected, "apprise is not installed; pip install 'tocsin[chat]'"),
     ({"ok": False, "unknown": True}, Rejected, "Apprise knows no such address"),
     ({"ok": False, "service": "Discord", "status": 429, "headers": {"Retry-After": "7"}}, TryLater, "429"),
     ({"ok": True, "service": "Discord", "status": 302, "headers": {}}, Rejected, "redirects"),
     ({"ok": False, "service": "Discord", "status": 200}, TryLater, "does not take that for a delivery"),
     ({"ok": False, "service": "Matrix", "error": "ConnectTimeout"}, TryLater, "Matrix (by Apprise): ConnectTimeout"),
     ({"ok": False, "service": "Email", "words": "Connection refused"}, TryLater, "not delivered: Connection refused")],
)
def test_what_apprise_s_process_tells(told: Mapping[str, Any], want: type[Exception] | None, said: str) -> None:
    """It tells yes or no; which no decides whether a page is sent again or a person must mend something."""
    channel = Chat("apprise", lambda: "json://x", lambda asked: told)
    if want is None:
        assert channel.send([alert()], NOW) == {}
        return
    with pytest.raises(want, match=re.escape(said)) as error:
        channel.send([alert()], NOW)
    assert getattr(error.value, "after_s", None) == (7.0 if told.get("status") == 429 else None)


def test_apprise_missing_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image had no Apprise, and the first to notice was the first page."""
    (tmp_path / "tocsin.yaml").write_text("notify: [{apprise: {url_env: CHAT}}]\n")
    monkeypatch.setattr("agent.notifiers.find_spec", lambda name: None)
    assert not_installed(load_config(tmp_path / "tocsin.yaml", {})) == [f"notify: {chat.MISSING}"]


def test_nothing_calls_a_whole_channel_elsewhere_either() -> None:
    """Discord, Teams and Matrix have marks of their own for it; an address with @ in it stays readable."""
    said = chat.asked(alert(summary="@everyone <@&4711> <!channel> @here", description="a@b.example").message, "u")
    assert not re.search(r"@everyone|@here|<@|<!", said["title"])
    assert said["body"].startswith("a@b.example")


def test_apprise_s_words_without_the_address() -> None:
    """`mailto://on-call:hunter2@mail.example` stood in /healthz, password and all."""
    url = "mailtos://on-call:hunter%242@mail.example/ops@corp.example?smtp=relay.corp.example"
    words = "A problem with relay.corp.example: hunter$2 of ON-CALL was refused (535) for ops@corp.example"
    assert without(words, url) == "A problem with …: … of … was refused (535) for …"
