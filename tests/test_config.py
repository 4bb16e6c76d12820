"""tocsin.yaml: what is wrong is refused with its line and its remedy, all at once, and no secret is told."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import config as config_module
from agent.config import (
    Config,
    ConfigErrors,
    SecretUnreadable,
    channels,
    day_window,
    engine_of,
    host_port,
    load_all,
    load_config,
    read_secret,
    slo_for,
    target_name,
    with_slo,
)
from agent.model import Slo
from agent.signals import SIGNALS
from agent.strict import (
    Decoded,
    Duration,
    Share,
    Unfit,
    cut,
    decode,
    did_you_mean,
    duration_s,
    rate_per_s,
    share,
    size_bytes,
)

DATA = Path(__file__).parent / "data" / "config"


def faults_of(text: str, tmp_path: Path) -> list[str]:
    """What `load_config` says about a text, without the file's name."""
    path = tmp_path / "tocsin.yaml"
    path.write_text(text)
    with pytest.raises(ConfigErrors) as caught:
        load_config(path, {})
    return [str(fault).removeprefix(f"{path}:") for fault in caught.value.faults]


def loaded(text: str, tmp_path: Path, **env: str) -> Config:
    path = tmp_path / "tocsin.yaml"
    path.write_text(text)
    return load_config(path, env)


# ---- the files under tests/data/config: a faulty line says in its comment what must be said about it ----


@pytest.mark.parametrize("path", sorted(DATA.glob("*.bad.yaml")), ids=lambda path: path.name)
def test_every_fault_of_a_file_is_told_with_its_line(path: Path) -> None:
    """Someone starts the agent with many mistakes in one file: one look at the output mends them all."""
    wanted = [
        (number, said.strip())
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for said in line.split("# !")[1:]
    ]

    with pytest.raises(ConfigErrors) as caught:
        load_config(path, {})

    faults = list(caught.value.faults)
    assert [fault.line for fault in faults] == [number for number, _ in wanted], str(caught.value)
    for number, said in wanted:
        assert any(said in str(fault) for fault in faults if fault.line == number), (number, said, str(caught.value))
    assert all(str(fault).startswith(f"{path}:{fault.line}: ") and fault.remedy for fault in faults)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.good.yaml")), ids=lambda path: path.name)
def test_good_files_load(path: Path) -> None:
    """Empty, commented out, the whole contract, and keys whose function comes later: none of them stops the agent."""
    assert load_config(path, {}).node


# ---- the public cases ----


class Hours(msgspec.Struct):
    quiet_from: str
    quiet_to: str
    window: str
    mode: str
    on: str = ""


def test_c105_yaml_1_1_times_and_on() -> None:
    """An operator writes quiet hours without quotes: the agent must not run at minute 1350 or lose the key `on`."""
    text = "quiet_from: 22:30\nquiet_to: 09:30\non: drill\nwindow: 12:00:00\nmode: 012\n"

    read: Decoded[Hours] = decode(text, Hours, "t.yaml")

    assert [str(fault) for fault in read.faults] == [
        't.yaml:1: quiet_from: 22:30 without quotes is the number 1350 in YAML; quote the time: "22:30"',
        't.yaml:2: quiet_to: the time 09:30 is without quotes; quote the time: "09:30"',
        't.yaml:3: on: the key on is a truth value in YAML; quote it: "on"',
        't.yaml:4: window: 12:00:00 without quotes is the number 43200 in YAML; quote the time: "12:00:00"',
        't.yaml:5: mode: wanted text, found 012, a number in YAML; quote it: "012"',
    ]
    assert read.value is None


def test_c105_quoted_times_are_what_they_say() -> None:
    """The same file with quotes runs at 22:30, 09:30 and 12:00:00."""
    text = 'quiet_from: "22:30"\nquiet_to: \'09:30\'\n"on": drill\nwindow: "12:00:00"\nmode: "012"\n'

    read: Decoded[Hours] = decode(text, Hours, "t.yaml")

    assert read.faults == ()
    assert read.value == Hours("22:30", "09:30", "12:00:00", "012", "drill")


def test_c105_on_in_tocsin_yaml(tmp_path: Path) -> None:
    """`on:` is no key here; it is named as it was written, not as True."""
    assert faults_of("on: drill\n", tmp_path)[0].startswith("1: on: unknown key; known keys here: ")


class Alarm(msgspec.Struct):
    dedup_window: Duration
    queue_age: Duration


def test_c107_duration_without_unit() -> None:
    """400 was nanoseconds to a parser and milliseconds to its operator: refused in file and command line alike."""
    read: Decoded[Alarm] = decode("dedup_window: 400\nqueue_age: 400s\n", Alarm, "t.yaml")

    assert [str(fault) for fault in read.faults] == [
        "t.yaml:1: dedup_window: missing unit in duration 400; write 400s, 400ms or 400m"
    ]
    with pytest.raises(Unfit, match="missing unit in duration 400; write 400s, 400ms or 400m"):
        duration_s("400")
    assert duration_s("400s") == 400
    with pytest.raises(Unfit, match="missing unit in duration 400"):
        with_slo(Config(), {"ttft_p99": "400"})


class Thresholds(msgspec.Struct):
    gpu_temperature_max: float = 85
    kv_utilization: float = 0.85


class Top(msgspec.Struct):
    thresholds: Thresholds


def test_c108_misspelt_and_duplicate_keys() -> None:
    """A misspelt threshold was ignored for months: it is refused, with the right spelling, and so is a second value."""
    text = "thresholds:\n  gpu_tempratur_max: 85\n  kv_utilization: 0.9\n  kv_utilization: 0.5\n"

    read: Decoded[Top] = decode(text, Top, "t.yaml")

    assert [str(fault) for fault in read.faults] == [
        "t.yaml:2: thresholds.gpu_tempratur_max: unknown key; did you mean gpu_temperature_max?",
        "t.yaml:4: thresholds.kv_utilization: duplicate key, first on line 3; keep one of them",
    ]


def test_c108_misspelt_key_in_tocsin_yaml(tmp_path: Path) -> None:
    """`mathc` for `match` would have sent every ticket to a pager."""
    text = 'notify:\n  - webhook: {url: "http://h/"}\n    mathc: {severity: [page]}\n'

    assert faults_of(text, tmp_path) == ["3: notify[0].mathc: unknown key; did you mean match?"]


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("slack: {webhook_env: X}, quiet: {window: '20:00-08:00', severity: [page]}", "a page is never held back"),
        ("alertmanager: {urls: ['http://h']}, repeat: 4h", "Alertmanager has that itself"),
        ("alertmanager: {urls: ['http://h']}, quiet: {window: '20:00-08:00'}", "Alertmanager has that itself"),
        ("heartbeat: {url: 'http://h/'}, repeat: 4h", "a heartbeat has `every`"),
        ("apprise: {url_file: /a, url_env: B}", "url_file and url_env are both written"),
        ("apprise: {url: 'discord://a/b'}", "a secret must not stand in the configuration; write url_file: /path"),
        ("slack: {token_env: X}", "slack.channel: is missing: a bot's token reaches many"),
        ("slack: {webhook_env: X, channel: '#a'}", "slack.channel: is the webhook's own"),
        ("slack: {webhook_env: X, token_env: Y, channel: '#a'}", "token_env and webhook_env are both written"),
    ],
)
def test_a_channel_that_asks_for_what_it_cannot_have(item: str, said: str, tmp_path: Path) -> None:
    """It was loaded, and did what nobody had meant."""
    assert said in "\n".join(faults_of(f"notify: [{{{item}}}]\n", tmp_path))


# ---- secrets ----


@pytest.mark.parametrize(
    "text",
    [
        "notify:\n  - pagerduty: {routing_key: hunter2hunter2}\n",
        "notify:\n  - pagerduty: hunter2hunter2\n",
        "notify:\n  - pagerduty: {hunter2hunter2}\n",
        'notify:\n  - webhook: {url: "htps://hooks.slack.com/services/hunter2hunter2"}\n',
        'notify:\n  - webhook: {url: "hooks.slack.com/services/hunter2hunter2"}\n',
        'notify:\n  - webhook: {url: "https://hooks.slack.com/services/hunter2hunter2"}\n',
        'notify:\n  - webhook: {url: "https://discord.com/api/webhooks/1/hunter2hunter2"}\n',
        'notify:\n  - webhook: {url: "https://h/hook/hunter2Hunter2hunter2"}\n',
        'notify:\n  - webhook: {url: "https://h/00112233445566778899aabb"}\n',
        'notify:\n  - heartbeat: {url: "https://h/ping/6b5c9a1e-9c1f-4e7c-8a53-0123456789ab"}\n',
        'notify:\n  - webhook: {url: "https:/hooks.slack.com/services/hunter2hunter2"}\n',
        "notify:\n  - pagerduty: {routing_key_file: hunter2hunter2}\n",
        "notify:\n  - pagerduty: {routing_key_env: hunter2hunter2}\n",
        "notify:\n  - pagerduty: {routing_key_file: [hunter2hunter2]}\n",
        "notify:\n  - pagerduty: {routing_key_file: *hunter2hunter2}\n",
        "notify:\n  - pagerduty: {routing_key_file: !hunter2hunter2 x}\n",
        "notify:\n  - pagerduty: {routing_key_file: !hunter2hunter2! x}\n",
        "notify:\n  - pagerduty: {routing_key: 'hunter2hunter2}\n",
        "notify:\n  - pagerduty: {routing_key: hunter2hunter2: x}\n",
        "notify:\n  - slack: {webhook: https://hooks.slack.com/services/hunter2hunter2}\n",
        "notify:\n  - slack: {url: https://hooks.slack.com/services/hunter2hunter2}\n",
        'notify:\n  - webhook: {url: "http://me:hunter2hunter2@h/"}\n',
        'notify:\n  - webhook: {url: "http://h/hook?token=hunter2hunter2"}\n',
        'notify:\n  - webhook: {url: "ftp://h/hook?token=hunter2hunter2"}\n',
        'notify:\n  - heartbeat: {url: "http://me:hunter2hunter2@h:999999/"}\n',
        'engines:\n  - {url: "http://hunter2hunter2@h"}\n',
        'engines:\n  - {url: "http://h?api_key=hunter2hunter2"}\n',
        'node: "http://me:hunter2hunter2@h/ x"\n',
        "web: {token: hunter2hunter2}\n",
        "web: {token: {a: hunter2hunter2}}\n",
        "probe: {canary: {api_key: hunter2hunter2}}\n",
        "password: hunter2hunter2\n",
        "drills: [{load: {api_key: hunter2hunter2}}]\n",
        "drills: [{load: {authorization: 22:30, x-api-key: hunter2hunter2}}]\n",
    ],
)
def test_a_secret_in_the_file_is_refused_and_never_told(text: str, tmp_path: Path) -> None:
    """Someone pastes the key itself: the log of the failed start must not spread it."""
    said = faults_of(text, tmp_path)

    assert said
    assert "hunter2" not in "\n".join(said)


def test_an_inline_secret_gets_its_remedy(tmp_path: Path) -> None:
    """The fault names the two keys to use instead."""
    said = faults_of("notify:\n  - pagerduty: {routing_key: abc}\n", tmp_path)

    assert len(said) == 1
    assert said[0].startswith("2: notify[0].pagerduty.routing_key: a secret must not stand in the configuration; ")
    assert said[0].endswith("write routing_key_file: /path or routing_key_env: NAME")


@pytest.mark.parametrize("path", ["/hook", "/api/v1/alerts", "/hook/gpu-alerts-2026-production-cluster",
                                  "/AlertmanagerWebhookV2Receiver"])
def test_a_path_in_words_is_no_secret(path: str, tmp_path: Path) -> None:
    """A receiver of one's own on the network is written as it is."""
    assert loaded(f"notify: [{{webhook: {{url: 'http://receiver:9000{path}'}}}}]\n", tmp_path).notify


@pytest.mark.parametrize("text", [
    "node: ${NODE_NAME}\n", "node: $(NODE_NAME)\n", "node: $NODE_NAME\n", "node: '{{ inventory_hostname }}'\n",
    "engines: [{name: '${POD}', url: 'http://h:8000'}]\n", "state_dir: /var/lib/${NODE}\n",
    "notify: [{slack: {webhook_file: '${CREDENTIALS_DIRECTORY}/slack'}}]\n"])
def test_a_variable_is_not_taken_for_its_value(text: str, tmp_path: Path) -> None:
    """The template was mounted as it was: every alert of the fleet came from the node `${NODE_NAME}`."""
    [said] = faults_of(text, tmp_path)
    assert said.endswith("holds a variable, and none is expanded here; write the value itself")


def test_off_in_another_word_is_told_what_can_stand_there(tmp_path: Path) -> None:
    """`kernel_log: false` was told to quote it, and then that "false" is no path."""
    assert faults_of("kernel_log: false\n", tmp_path) == [
        "1: kernel_log: wanted auto, off or a path, found false, a truth value; write auto, off or a path"]


def test_a_secret_is_read_when_it_is_used(tmp_path: Path) -> None:
    """The key is rotated while the agent runs: the next page goes out with the new one."""
    path = tmp_path / "key"
    path.write_text("first\n")
    assert read_secret(path, None) == "first"

    path.write_text("second\r\n")

    assert read_secret(path, None) == "second"
    assert read_secret(None, "KEY", {"KEY": "third"}) == "third"


@pytest.mark.parametrize("content", [b"key \n", b"key\n\n", b" key", b"\tkey\r\n", b"\xef\xbb\xbfkey\n"])
def test_white_space_around_a_secret_is_none_of_it(content: bytes, tmp_path: Path) -> None:
    """An editor's last line or a template's space: Slack's answer was 404, and of a header "invalid value"."""
    (tmp_path / "key").write_bytes(content)
    assert read_secret(tmp_path / "key", None) == "key"
    assert read_secret(None, "KEY", {"KEY": " key\n"}) == "key"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"hunter2\nhunter2\n", "more than one line"),
        (b"hunter2\xff\n", "is not UTF-8"),
        (b"hunter2" * 10000, "over 64 KiB"),
    ],
)
def test_an_unusable_secret_names_its_file_never_its_content(content: bytes, said: str, tmp_path: Path) -> None:
    """A broken secret file surfaces as its path, not as half a key in the log."""
    path = tmp_path / "key"
    path.write_bytes(content)

    with pytest.raises(SecretUnreadable, match=said) as caught:
        read_secret(path, None)

    assert str(path) in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_missing_secret_says_what_is_missing(tmp_path: Path) -> None:
    """The mount is not there yet, or the variable is not set for the daemon."""
    with pytest.raises(SecretUnreadable, match=r"gone cannot be read: No such file"):
        read_secret(tmp_path / "gone", None)
    with pytest.raises(SecretUnreadable, match="KEY is not set"):
        read_secret(None, "KEY", {})
    with pytest.raises(SecretUnreadable, match="no file and no environment variable"):
        read_secret(None, None)


# ---- the file as a whole ----


def test_a_named_but_missing_file_is_a_fault(tmp_path: Path) -> None:
    """A typo in --config must not start an agent that watches nothing of what was asked."""
    with pytest.raises(ConfigErrors, match=r"gone.yaml: cannot be read: No such file or directory; check the path"):
        load_config(tmp_path / "gone.yaml", {})


def test_without_the_default_file_the_defaults_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh machine: the agent starts with discovery alone."""
    monkeypatch.setattr(config_module, "DEFAULT_PATH", tmp_path / "none" / "tocsin.yaml")

    config = load_config(None, {})

    assert config.node == socket.gethostname()
    assert slo_for(config) == Slo()


def test_a_broken_link_at_the_default_place_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link's goal is gone: someone did configure this node, so defaults would be a lie."""
    link = tmp_path / "tocsin.yaml"
    link.symlink_to(tmp_path / "gone")
    monkeypatch.setattr(config_module, "DEFAULT_PATH", link)

    with pytest.raises(ConfigErrors, match="cannot be read"):
        load_config(None, {})


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"node: a\nslo: \xff\n", ":2: is not UTF-8"),
        ("node: a\n".encode("utf-16"), ":1: is not UTF-8"),
        (b"# x\n" * 300_000, ": is over 1 MiB"),
        (b"node: a\nslo: {\x01}\n", ":2: holds a control character"),
        (b"[" * 50_000, ":1: broken YAML: is nested too deeply"),
        (b"node: {a: " * 500 + b"x", "holds too many values|never closed"),
        (b"rules: {override: {a: {params: &a {x: *a}}}}\n", ": holds too many values"),
    ],
)
def test_files_that_are_no_configuration(raw: bytes, said: str, tmp_path: Path) -> None:
    """A wrong file (a log, a binary, a bomb) is named as such, in bounded time, without a traceback."""
    path = tmp_path / "tocsin.yaml"
    path.write_bytes(raw)

    with pytest.raises(ConfigErrors, match=said):
        load_config(path, {})


def test_an_alias_bomb_is_refused(tmp_path: Path) -> None:
    """300 bytes that mean 10^9 values cost milliseconds and one fault."""
    lines = ["rules:", "  override:", "    a:", "      params:", "        a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"        a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]

    said = faults_of("\n".join(lines), tmp_path)

    assert len(said) == 1
    assert "holds too many values; write less, and without aliases (*)" in said[0]


def test_a_directory_is_a_fault(tmp_path: Path) -> None:
    """--config names the directory instead of the file in it."""
    with pytest.raises(ConfigErrors, match="cannot be read: Is a directory"):
        load_config(tmp_path, {})


def test_a_byte_order_mark_is_no_key(tmp_path: Path) -> None:
    """An editor on Windows saved the file."""
    assert loaded("\ufeffnode: a\r\npoll: 2s\r\n", tmp_path).poll == 2


@given(st.text(alphabet=st.sampled_from("abc:-[]{}\"'#&*!|>%@`,? \n\t0129~"), max_size=60))
def test_any_text_gives_a_value_or_faults(text: str) -> None:
    """Whatever is in the file, the answer is a configuration or a list of faults, never another error."""
    read: Decoded[Config] = decode(text, Config, "t.yaml")

    assert read.value is not None or read.faults


# ---- meaning ----


def test_the_contract_is_read_as_it_stands() -> None:
    """The example of the contract, with its numbers in seconds and ratios."""
    config = load_config(DATA / "contract.good.yaml", {})

    assert config.node == "gpu-17"
    assert config.slo.written
    assert slo_for(config) == Slo(0.5, 0.15, None, 0.999, 2_592_000, written=True)
    assert slo_for(config, "llama-70b").itl_p99 == 0.075
    assert slo_for(config, "llama-70b/1").itl_p99 == 0.075
    assert slo_for(config, "other").itl_p99 == 0.15
    assert config.engines[0].gpus == (0, 1, 2, 3)
    assert config.rules.override["kv-cache-utilization"].for_ == 120
    assert config.rules.xid[13].severity == "log"
    assert [name for name, _ in channels(config)] == ["alertmanager", "webhook", "pagerduty", "slack", "heartbeat"]
    assert [item.severities for _, item in channels(config)][:3] == [
        ("page", "ticket", "info"),
        ("page",),
        ("page",),
    ]
    assert config.drill_guards.min_gap == 72_000
    assert config.socket == Path("/run/tocsin/tocsin.sock")


def test_defaults_are_the_contract_s() -> None:
    """Nothing written is the same as the contract's own numbers written, but for what it adds as an example."""
    defaults, written = Config(), load_config(DATA / "contract.good.yaml", {})

    for key in ("state_dir", "listen", "external_url", "socket", "poll", "discover", "nvml", "gpus", "kernel_log"):
        assert getattr(defaults, key) == getattr(written, key), key
    for key in ("sources", "cluster_rules", "pattern", "probe", "web", "drills", "drill_guards", "drill_group"):
        assert getattr(defaults, key) == getattr(written, key), key
    assert not defaults.slo.written


def test_slo_counts_as_written_only_with_a_level_in_it(tmp_path: Path) -> None:
    """`slo:` with every line commented out promises nothing, so nothing may page on it."""
    assert not loaded("slo:\n", tmp_path).slo.written
    assert loaded("slo: {ttft_p99: 500ms}\n", tmp_path).slo.written


def test_an_engine_may_promise_less(tmp_path: Path) -> None:
    """e2e_p99: null takes the global promise away for one engine; a key that is left out keeps it."""
    config = loaded(
        'slo: {e2e_p99: 20s}\nengines: [{name: a, url: "http://h:1", slo: {e2e_p99: null, availability: 99%}},'
        ' {url: "https://h"}]\n',
        tmp_path,
    )

    assert slo_for(config, "a").e2e_p99 is None
    assert slo_for(config, "a").availability == 0.99
    assert slo_for(config, "h:443").e2e_p99 == 20
    found = engine_of(config, "h:443/2")
    assert found is not None
    assert target_name(found) == "h:443"


def test_the_node_is_named_by_file_then_environment_then_host(tmp_path: Path) -> None:
    """In Kubernetes NODE_NAME names the node; the pod's host name would be another after each restart."""
    assert loaded("node: a\n", tmp_path, NODE_NAME="b").node == "a"
    assert loaded("", tmp_path, NODE_NAME="b").node == "b"
    assert loaded("", tmp_path).node == socket.gethostname()


NO_IP = ("is no IP address; write four numbers from 0 to 255, without leading zeros, or a whole IPv6 address in"
         " brackets")


@pytest.mark.parametrize(("text", "said"), [
    ("listen: 99999\n", "1: listen: '99999' names no host; write 127.0.0.1:9959"),
    ("listen: 8080\n", "1: listen: '8080' names no host; write 127.0.0.1:8080"),
    ("listen: ${HOST}:9959\n",
     "1: listen: '${HOST}:9959' is not host:port; write 127.0.0.1:9959, 0.0.0.0:9959 or [::1]:9959"),
    ('listen: "0.0.0.0:99999"\n', "1: listen: '0.0.0.0:99999' has a port over 65535; write 127.0.0.1:9959"),
    ("listen: 256.0.0.1:9959\n", f"1: listen: '256.0.0.1' {NO_IP}"),
    ('engines: [{url: "http://010.0.0.1:8000"}]\n', f"1: engines[0].url: '010.0.0.1' {NO_IP}"),
    ('engines: [{url: "http://h:0"}]\n',
     "1: engines[0].url: 'http://h:0' has port 0, at which nobody answers; write http://host:port"),
    ('engines:\n- {name: a, url: "http://h"}\n- {name: b, url: "http://H:80/metrics"}\n',
     "3: engines[1].url: the address of engines[0] stands here again; keep one of them: each would count twice"),
])
def test_an_address_has_a_host_and_a_port_that_exist(tmp_path: Path, text: str, said: str) -> None:
    """"Quote it" was no advice: 99999 is no port, however it is quoted. 010.0.0.1 is 8.0.0.1 to the system's resolver,
    and one engine by two spellings of its address counted twice.
    """
    assert faults_of(text, tmp_path) == [said]


def test_half_a_name_is_nearer_than_another() -> None:
    """People remember how a rule's name begins; where two begin so, the list is the better answer."""
    rules = ("kv-cache-utilization", "queue-age", "gpu-memory", "gpu-memory-low", "gpu-count")

    assert did_you_mean("kv-cache", rules) == "did you mean kv-cache-utilization?"
    assert did_you_mean("queue-aeg", rules) == "did you mean queue-age?"
    assert did_you_mean("gpu", rules).startswith("known: ")


@pytest.mark.parametrize("written", ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/metrics/"])
def test_an_engine_is_found_by_whichever_of_its_addresses(written: str, tmp_path: Path) -> None:
    """The clients' own base URL ends in /v1: its page was a 404, and lint asked for /v1/v1/models."""
    assert loaded(f"engines: [{{url: '{written}'}}]\n", tmp_path).engines[0].url == "http://h:8000"


@pytest.mark.parametrize("path", ["", "/", "/v1/chat/completions", "/v1/completions", "/v1/models"])
def test_a_canary_asks_the_api_whichever_of_its_paths_is_written(path: str, tmp_path: Path) -> None:
    """It asked for /v1/chat/completions/v1/chat/completions, and a 404 is no answer of an engine."""
    config = loaded(f"probe: {{canary: {{urls: ['http://h:8000/llm{path}']}}}}\n", tmp_path)
    assert config.probe.canary.urls == ("http://h:8000/llm",)


@pytest.mark.parametrize("path", ["", "/", "/api/v1", "/api/v1/query"])
def test_a_promql_source_asks_the_api_whichever_of_its_paths_is_written(path: str, tmp_path: Path) -> None:
    """Copied from a command line of curl: it asked for /api/v1/query/api/v1/query."""
    source = f"{{name: a, url: 'http://h:9090/select/0/prometheus{path}', query: up}}"
    [read] = loaded(f"sources: {{promql: [{source}]}}\n", tmp_path).sources.promql
    assert read.url == "http://h:9090/select/0/prometheus"


def test_a_channel_that_waits_for_a_rule_that_is_none(tmp_path: Path) -> None:
    """`match: {rule: [quee-age]}`: on-call was told of nothing for a month, and the file had no fault."""
    path = tmp_path / "tocsin.yaml"
    catalogue = {id_: row[0] for id_, row in SIGNALS.items()}
    item = "- slack: {webhook_file: /a}\n  match:\n    rule: [kv-*, quee-age]\n"
    path.write_text(f"notify:\n{item}")
    with pytest.raises(ConfigErrors, match=r"yaml:4: notify\[0\].match.rule\[1\]: no rule is called quee-age; did you"
                                           r" mean queue-age\?"):
        load_all(path, {}, catalogue)
    path.write_text("rules: {disable: [gpu-utilization]}\nnotify:\n" + item.replace("quee-age", "gpu-utilization"))
    assert load_all(path, {}, catalogue)
    assert "2: notify[0].match.rule: an empty list matches nothing; leave the key out" in faults_of(
        "notify:\n- {slack: {webhook_file: /a}, match: {rule: []}}\n", tmp_path)


def test_two_channels_of_a_kind_have_two_names(tmp_path: Path) -> None:
    """A notice is owed to one channel by name: two webhooks must not share their debts."""
    text = 'notify: [{webhook: {url: "http://a/"}}, {webhook: {url: "http://b/"}}]\n'

    assert [name for name, _ in channels(loaded(text, tmp_path))] == ["webhook", "webhook-2"]


def test_service_levels_from_the_command_line() -> None:
    """`backtest --slo ttft_p99=250ms` is a promise, written by hand."""
    config = with_slo(Config(), {"ttft_p99": "250ms", "availability": "99.5%"})

    assert slo_for(config) == Slo(ttft_p99=0.25, availability=0.995, written=True)
    with pytest.raises(Unfit, match=r"service level 'ttft_p9' is unknown; did you mean ttft_p99\?"):
        with_slo(Config(), {"ttft_p9": "1s"})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("15s", 15), ("5m", 300), ("2h", 7200), ("30d", 2_592_000), ("1.5s", 1.5), ("0s", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    """The five units of the contract."""
    assert duration_s(text) == seconds


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("5min", "write 5m"),
        ("5 s", "write 5s"),
        ("5M", "write 5m"),
        ("1w", "write 7d"),
        ("2 weeks", "write 14d"),
        ("5us", "write it in ms, s, m, h or d"),
        ("1y", "write it in ms, s, m, h or d"),
        ("2hours", "write 2h"),
        ("0", "write 0s"),
        ("-5s", "as 500ms, 15s"),
        ("1h30m", "as 500ms, 15s"),
        ("5000d", "write a shorter"),
        ("１s", "as 500ms, 15s"),
    ],
)
def test_durations_that_are_none(text: str, remedy: str) -> None:
    """What people write instead of a duration, and what they are told."""
    with pytest.raises(Unfit, match=remedy):
        duration_s(text)


def test_shares_sizes_and_rates() -> None:
    """85% and 0.85 are the same; sizes and rates carry their unit."""
    assert [share("85%"), share("0.85"), share("99.9%"), share("0"), share("100%")] == [0.85, 0.85, 0.999, 0, 1]
    assert [size_bytes("32MiB"), size_bytes("1GB"), size_bytes("512B")] == [33_554_432, 1_000_000_000, 512]
    assert [rate_per_s("5/s"), rate_per_s("300/m")] == [5, 5]
    for parse, text in ((share, "85"), (share, "1"), (size_bytes, "32"), (size_bytes, "32mib"), (rate_per_s, "5")):
        with pytest.raises(Unfit):
            parse(text)


def test_addresses_and_windows() -> None:
    """An address of either family, and a night that crosses midnight."""
    assert host_port("[::1]:9959") == ("::1", 9959)
    assert host_port("0.0.0.0:0") == ("0.0.0.0", 0)
    assert day_window("20:00-08:00") == (1200, 480)
    for bad in (":9959", "9959", "h:99999", "a b:1"):
        with pytest.raises(Unfit):
            host_port(bad)


def test_a_socket_path_that_no_socket_takes(tmp_path: Path) -> None:
    """bind() would fail with a riddle at 108 bytes."""
    assert "over 107 bytes" in faults_of(f"socket: /{'x' * 107}\n", tmp_path)[0]


def test_values_are_cut_and_one_line() -> None:
    """A page of text in the wrong key makes one short line in the log."""
    assert cut("a\nb" + "x" * 100) == "a�b" + "x" * 56 + "…"
    assert cut("see https://me:pw@h/a?b=c now") == "see https://…@h/a?… now"


class Label(msgspec.Struct):
    text: str
    part: Share = 0.5


def test_text_is_quoted_numbers_are_not() -> None:
    """A model called 17 is text, and only quotes say so; a share may be quoted or not."""
    quoted: Decoded[Label] = decode('text: "17"\npart: "85%"\n', Label, "t")
    bare: Decoded[Label] = decode("text: 17\n", Label, "t")

    assert quoted.value == Label("17", 0.85)
    assert str(bare.faults[0]) == 't:1: text: wanted text, found the integer 17; quote it: "17"'
