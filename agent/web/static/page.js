"use strict";
// Asks for the view again and puts it in place. Small polling: an open stream would hold one of the server's threads.
const EVERY_MS = 5000;
const ANSWER_MS = 15000;
const view = document.getElementById("view");
const lost = document.getElementById("lost");
const said = document.getElementById("said");
let last = "";
let answeredAt = new Date();
let asking = false;

function inUse() {
  const at = document.activeElement;
  const selected = document.getSelection();
  return (at && view.contains(at) && /^(INPUT|TEXTAREA|SELECT)$/.test(at.tagName)) ||
    (selected && !selected.isCollapsed && view.contains(selected.anchorNode));
}

function put(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const focused = document.activeElement && view.contains(document.activeElement) ? document.activeElement : null;
  const links = focused ? [...view.querySelectorAll("a, button, summary")].indexOf(focused) : -1;
  const open = new Map([...view.querySelectorAll("details[id]")].map((one) => [one.id, one.open]));
  view.replaceChildren(...fresh.body.childNodes);
  for (const one of view.querySelectorAll("details[id]")) if (open.has(one.id)) one.open = open.get(one.id);
  if (links >= 0) {
    const again = view.querySelectorAll("a, button, summary")[links];
    if (again) again.focus({ preventScroll: true });
  }
  const verdict = view.querySelector("[data-title]");
  if (verdict) {
    document.title = verdict.dataset.title;
    if (said.textContent !== verdict.dataset.said) said.textContent = verdict.dataset.said;
  }
}

async function refresh() {
  if (document.hidden || asking) return;
  asking = true;
  try {
    const asked = new URL(location.href);
    asked.searchParams.set("part", "1");
    const reply = await fetch(asked, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    if (!reply.ok) throw new Error(`status ${reply.status}`);
    const text = await reply.text();
    answeredAt = new Date();
    lost.hidden = true;
    view.classList.remove("old");
    if (text !== last && !inUse()) {
      put(text);
      last = text;
    }
  } catch (error) {
    lost.textContent = `No answer from the agent since ${answeredAt.toLocaleTimeString()}: what stands below is old.`;
    lost.hidden = false;
    view.classList.add("old");
  } finally {
    asking = false;
  }
}

setInterval(refresh, EVERY_MS);
document.addEventListener("visibilitychange", refresh);
