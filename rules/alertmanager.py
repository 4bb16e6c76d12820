"""What the rules say of causes, for Alertmanager: inhibit_rules, and a route under which a second alert does not wait.

Pure: rules to the text of an alertmanager.yml (0.22 and later).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent.incidents import can_cause
from agent.model import Rule

HEAD = """\
# Alertmanager for Tocsin's alerts (0.22 and later). Written by `tocsin rules export --format alertmanager`.
#
# Into a configuration of your own: take over `inhibit_rules`, and the route as one of your `routes`, with
# `matchers: ['rule=~".+"', 'node=~".+"']` and a receiver of yours.
"""

ROUTE = """
route:
  receiver: on-call
  # By these the alerts of one rule and subject are one group. On Alertmanager's defaults (everything in one group,
  # group_interval 5m) a second alert waits 5 minutes: measured, 290 to 307 s.
  group_by: [node, rule, subject]
  group_wait: 1s
  group_interval: 1m

receivers:
  - name: on-call  # put your channels here
"""

INHIBIT = """
# A page mutes what its rule says it can cause (`causes:`, by itself or through others), of the same engine on the same
# node. Both sides must name an engine: to Alertmanager a label that both lack is equal, and a hot GPU 3 would mute the
# engine on GPUs 4-7. A ticket mutes nothing: nobody may have been woken by it.
inhibit_rules:
"""


def export(rules: Sequence[Rule]) -> str:
    """The text of an alertmanager.yml: the route, an empty receiver, and a rule of inhibition for each cause."""
    return HEAD + ROUTE + INHIBIT + "".join(_inhibit(cause, effects) for cause, effects in inhibitions(rules).items())


def inhibitions(rules: Sequence[Rule]) -> Mapping[str, list[str]]:
    """What each rule that pages mutes meanwhile.

    Of two that can cause each other neither mutes the other: nobody would hear of either.
    """
    causes = can_cause(rules)
    found = {rule.id: sorted(other for other in causes[rule.id] if rule.id not in causes.get(other, ()))
             for rule in rules if rule.severity == "page"}
    return {cause: effects for cause, effects in sorted(found.items()) if effects}


def _inhibit(cause: str, effects: Sequence[str]) -> str:
    return (f"""  - source_matchers: ['rule="{cause}"', 'severity="page"', 'engine=~".+"']\n"""
            f"""    target_matchers: ['rule=~"{'|'.join(effects)}"', 'engine=~".+"']\n"""
            "    equal: [node, engine]\n")
