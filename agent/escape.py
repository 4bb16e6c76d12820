"""How a report writes what others said: no secret, no control character, no markup; times, spans and unknowns.

Everything that comes from a log, a label, a file or an answer goes through here. Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

UNKNOWN = "unknown"
SHOWN_CHARS = 2000
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400
# Paths that say nothing secret. Any other path may be the credential itself, as that of a chat's webhook is.
PLAIN_PATH = re.compile(r"(?:/v\d+)?(?:/(?:models|completions|chat/completions|alerts|health|healthz|metrics))?/?")
# This and the next begin at a word's beginning alone: tried at each letter of it, a long word would take minutes.
_URL = re.compile(r"(?<![\w+.-])([\w+.-]+)://([^\s\"'<>\\`|]+)")
# The value of a key that names a secret, to its closing quote or, where that is cut off, its first word. A token may be
# a number that is none (`token: 0.5`).
_KEYS = (r"((?:api|access|routing|secret|private)[-_]?key|key[-_]?data|token|secret|passw(?:or)?d|passphrase|pwd"
         r"|authorization|credentials?|cookie)")
_QUOTED = r"""\"(?:[^"\\]|\\.){4,}"|'[^']{4,}'(?!\w)"""
_KEYED = re.compile(rf"""(?i)(?<![\w-])([\w-]*{_KEYS}["']?\s*[:=]\s*)({_QUOTED}"""
                    r"""|["']?(?:(?:bearer|basic)\s+)?[^\s"',;&}]{4,})""")
_OPTION = re.compile(rf"""(?i)(?<![\w-])(--[\w-]*{_KEYS}\s+)(?!-)({_QUOTED}|["']?[^\s"';&}}]{{4,}})""")  # --api-key x
_KNOWN = re.compile(
    r"(?i:\bbearer\s+)[\w.~+/=-]{8,}|\b[0-9a-f]{32}\b|\beyJ[\w-]{8,}\.[\w.-]{8,}|(?<![0-9])[0-9]{8,10}:[\w-]{35}\b"
    r"|\b(?:sk-|hf_|xox[abeprs]-|xapp-|gh[oprsu]_|github_pat_|glpat-|nvapi-|gsk_|pypi-|hvs\.|AIza)[\w-]{8,}"
    r"|\b(?:npm_[A-Za-z0-9]{30,}|(?:AKIA|ASIA)[A-Z0-9]{16})\b"
)
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]{0,40}-----|\Z)", re.DOTALL)


def without_secrets(text: str) -> str:
    """The text with no user info, no query and no telling path in its URLs, and without keys and tokens."""
    return without_keys(_URL.sub(lambda m: _plain_url(m[1], m[2]), text))


def without_keys(text: str) -> str:
    """The text without keys and tokens; its URLs stay."""
    return _KNOWN.sub("…", _OPTION.sub(_hidden, _KEYED.sub(_hidden, _without_pem(text))))


def _without_pem(text: str) -> str:
    """The text without private keys, which go over many lines."""
    return _PEM.sub("(a private key)", text)


def _hidden(found: re.Match[str]) -> str:
    """What stands for the value of a key, in the quotes that it had."""
    before, name, value = found.groups()
    if name.lower() == "token" and re.fullmatch(r"\d{1,7}|\d*\.\d+", value):
        return found[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{before}{quote}…{quote if len(value) > 1 and value.endswith(quote) else ''}"


def _plain_url(scheme: str, rest: str) -> str:
    plain = rest.rstrip(".,;:!?)]}")  # what ends the sentence, not the URL
    found = re.search(r"[/?#]", plain)
    cut = found.start() if found else len(plain)
    authority, path = plain[:cut], plain[cut:]
    if "@" in path:  # a password with a slash in it looks like this
        return f"{scheme}://…"
    shown = path if PLAIN_PATH.fullmatch(path) else "/…"
    return f"{scheme}://{authority.rpartition('@')[2]}{shown}{rest[len(plain):]}"


def clean(value: object, most: int = SHOWN_CHARS) -> str:
    """A value as one line of text without secrets and control characters, cut where it is endless."""
    if value is None:
        return UNKNOWN
    text = without_secrets(" ".join(str(value).split()))
    text = "".join(c if c.isprintable() else "�" for c in text)  # also what turns the direction of writing
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} more characters)"


def scrubbed(value: Any) -> Any:
    """Plain data with every text in it cleaned, line by line; what is indented stays so."""
    if isinstance(value, Mapping):
        return {clean(k): scrubbed(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(v) for v in value]
    if isinstance(value, str):
        return "\n".join(re.sub(r"[^ ].*", lambda m: clean(m[0]), line) for line in _without_pem(value).splitlines())
    return value if value is None or isinstance(value, bool | int | float) else clean(value)


# --- the options of a program ----------------------------------------------------------------------------------------

# The name of an option, or of a key in its value, that names a secret: api-key, hf_token, ssl-keyfile-password, x-auth;
# not tokenizer, max-num-batched-tokens, long-prefill-token-threshold, nor a file that holds one.
_SECRET = re.compile(
    r"secret|passw|passphrase|pwd|credential|bearer|authorization|cookie|webhook|(api|access|private|routing)[-_]?key"
    r"|keys?(?![a-z])|tok(en?)?$|(api|auth|access|admin|hf|hub|refresh|session)[-_]?tokens?(?![a-z])"
    r"|(?<![a-z])(auth|pass|sig|signature|dsn|hft)(?![a-z])|(?<!allowed[-_])headers?$", re.IGNORECASE)
# Options that argparse takes by their beginnings, too.
_SHORTENED = ("admin-api-key", "api-key", "auth-token", "basic-auth", "hf-token", "hub-token", "otlp-traces-headers",
              "ssl-keyfile-password", "token")
_ADDRESS = re.compile(r"""://(?:[^\s"']*@)?([^\s"'?#]*)[^\s"']*""")  # without its user, its query and its fragment
_USER = re.compile(r"""(?<![^\s"',;=])[^\s"',;=:@]*+:\S{0,2000}@""")  # user:password@, with a scheme or none
_NAMED = re.compile(r"""(?<![\w.-])([\w.-]++)(?:["'\]]*\s*[:=]|\s)""")


def is_secret(name: str) -> bool:
    """Whether an option without its dashes, or a key, names a secret. In doubt it does."""
    is_shortened = len(name) > 2 and name != "ssl-keyfile" and any(known.startswith(name) for known in _SHORTENED)
    return is_shortened or _SECRET.search(name) is not None


def plain_value(words: Sequence[str]) -> str:
    """The values of one option with a space between them, without what is secret in them; JSON stays JSON."""
    try:
        told = [_plain_json(word) for word in words]
    except RecursionError:
        return "…"
    text = " ".join(word if plain is None else plain for word, plain in zip(words, told, strict=True))
    return _plain_text(text) if None in told else text


def _plain_json(text: str) -> str | None:
    """An object or a list without what is secret in it; None: it is neither."""
    try:
        value = json.loads(text) if text.lstrip()[:1] in ("{", "[") else None
    except ValueError:
        return None
    if value is None:
        return None
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace").decode()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain_text(key): "…" if is_secret(key) and not isinstance(one, bool | None) else _plain(one)
                for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return plain_value([value]) if isinstance(value, str) else value


def _plain_text(text: str) -> str:
    """What comes after a name that names a secret is left out to the end: it may have spaces and marks in it."""
    for told in _NAMED.finditer(text):
        if is_secret(told[1].lstrip("-")) and (told[1].startswith("-") or not told[0][-1].isspace()):
            text = f"{text[:told.end()]}…"
            break
    return without_keys(_USER.sub("…@", _ADDRESS.sub(r"://\1", text)))


# --- Markdown and XML ------------------------------------------------------------------------------------------------


def cell(value: object) -> str:
    """Text for a cell of a Markdown table or a line of a list: it reads as it is, and nothing in it is markup."""
    text = re.sub(r"[\\|`*\[\]~]", lambda m: "\\" + m[0], clean(value))
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)  # inside of a word it is no emphasis
    text = re.sub(r"&(?=#?\w+;)", "&amp;", text)
    text = re.sub(r"<(?![=\s\d])", "&lt;", text)
    starts = r"^(?:#{1,6}(?=\s|$)|>|[+-](?=\s|$)|-(?=-+$)|=(?==*$)|\d+[.)](?=\s|$))"
    return re.sub(starts, lambda m: f"{m[0][:-1]}\\{m[0][-1]}", text)


def fenced(value: object, language: str = "") -> str:
    """A block of code, whose fence is longer than any in it."""
    text = str(value)
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}"


def xml_text(value: object) -> str:
    """Text that XML 1.0 can hold: `clean`, without the characters that it forbids in any form."""
    return re.sub(r"[^\t\n\r\u0020-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]", "�", clean(value))


# --- times -----------------------------------------------------------------------------------------------------------


def number(value: object) -> float | None:
    """A finite number; None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) \
        else None


def instant(value: object) -> float | None:
    """Unix seconds of a number or of an ISO 8601 text with its zone; a time without a zone is no instant."""
    if not isinstance(value, str):
        return number(value)
    try:
        at = datetime.fromisoformat(value.upper())  # RFC 3339 allows t and z
    except ValueError:
        return None
    return at.timestamp() if at.tzinfo is not None else None


def utc(value: object) -> str:
    """2026-11-29 08:00:00Z."""
    return _form(value, "%Y-%m-%d %H:%M:%SZ")


def day(value: object) -> str:
    """Sunday 2026-11-29 08:00:00 UTC."""
    return _form(value, "%A %Y-%m-%d %H:%M:%S UTC")


def _form(value: object, form: str) -> str:
    at = instant(value)
    try:
        return UNKNOWN if at is None else datetime.fromtimestamp(at, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return UNKNOWN


def span(value: object) -> str:
    """12.3 s, 30 min, 1 h 5 min."""
    took_s = number(value)
    if took_s is None:
        return UNKNOWN
    sign, took_s = ("-" if took_s < 0 else ""), abs(took_s)
    if round(took_s, 1) < 2 * MINUTE_S:
        return f"{sign}{round(took_s, 1):g} s"
    whole_s = round(took_s)
    parts = [(whole_s // HOUR_S, "h"), (whole_s % HOUR_S // MINUTE_S, "min"), (whole_s % MINUTE_S, "s")]
    return sign + " ".join(f"{n} {unit}" for n, unit in parts if n)


def offset(value: object) -> str:
    """+12.3 s: the span from the injection."""
    at_s = number(value)
    return UNKNOWN if at_s is None else span(at_s) if at_s < 0 else f"+{span(at_s)}"


def share(value: object) -> str:
    """0.1 -> 10 %."""
    part = number(value)
    return UNKNOWN if part is None else f"{part:.2%}".replace(".00%", "%").replace("%", " %")
