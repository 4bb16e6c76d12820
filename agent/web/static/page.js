"use strict";
// Asks for the view again and puts it in place. Small polling: an open stream would hold one of the server's threads.
const EVERY_MS = 5000;
const ANSWER_MS = 15000;
const HELD_MS = 30000;
const HIDDEN_EVERY = 12;  // a tab in the background asks once a minute, for the verdict in its title
const view = document.getElementById("view");
const lost = document.getElementById("lost");
const said = document.getElementById("said");
let last = "";
let answeredAt = new Date();
let asking = false;
let ticks = 0;
let putAt = Date.now();

// What a select had when the page came.
function chosen(select) {
  return ([...select.options].find((one) => one.defaultSelected) || select.options[0]).value;
}

// Somebody types or chooses, or marks text to copy it: the view is left as it is, and says so.
function inUse() {
  const at = document.activeElement;
  const selected = document.getSelection();
  return (at && view.contains(at) && at.closest("form")) ||
    [...view.querySelectorAll("input, textarea")].some((one) => one.value !== one.defaultValue) ||
    [...view.querySelectorAll("select")].some((one) => one.value !== chosen(one)) ||
    (selected && !selected.isCollapsed && view.contains(selected.anchorNode));
}

function nameOf(element) {
  return element.id || element.getAttribute("href") || element.textContent;
}

// Names occur twice, as of a rule whose only engine has the link of the engine: the ordinal tells them apart.
function namesakes(name) {
  return [...view.querySelectorAll("a, button, summary")].filter((one) => nameOf(one) === name);
}

// A time of day, in UTC as every other on the page.
function utc(at) {
  return `${at.toISOString().slice(11, 19)} UTC`;
}

function tell(fresh) {
  const verdict = fresh.querySelector("[data-title]");
  if (!verdict) return;
  document.title = verdict.dataset.title;
  const incidents = [...fresh.querySelectorAll(".incident details[id]")];
  const known = (said.dataset.incidents || "").split(" ");
  const news = incidents.filter((one) => !known.includes(one.id));
  // said is a change of the verdict or a new incident: not each new number, nor that one of several has ended
  if (said.dataset.word !== verdict.dataset.title || news.length) {
    const titles = news.map((one) => one.closest(".incident").querySelector("h2").textContent);
    said.textContent = [verdict.dataset.said, ...titles].join(". ");
  }
  said.dataset.word = verdict.dataset.title;
  said.dataset.incidents = incidents.map((one) => one.id).join(" ");
}

function put(fresh) {
  const focused = document.activeElement && view.contains(document.activeElement) ? document.activeElement : null;
  const name = focused ? nameOf(focused) : "";
  const ordinal = name ? namesakes(name).indexOf(focused) : 0;
  const open = new Map([...view.querySelectorAll("details[id]")].map((one) => [one.id, one.open]));
  view.replaceChildren(...fresh.body.childNodes);
  for (const one of view.querySelectorAll("details[id]")) if (open.has(one.id)) one.open = open.get(one.id);
  const same = name ? namesakes(name) : [];
  const again = same[Math.min(ordinal, same.length - 1)];
  if (again) again.focus({ preventScroll: true });
}

function warn(text) {
  if (lost.textContent !== text) lost.textContent = text;  // an alert: each time it is set it is read aloud
  lost.hidden = !text;
  view.classList.toggle("old", Boolean(text));
}

async function refresh() {
  ticks += 1;
  if (asking || (document.hidden && ticks % HIDDEN_EVERY)) return;
  asking = true;
  try {
    const asked = new URL(location.href);
    asked.searchParams.set("part", "1");
    const reply = await fetch(asked, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    if (!reply.ok && reply.status !== 404) throw new Error(`status ${reply.status}`);  // 404: what it showed has gone
    const text = await reply.text();
    answeredAt = new Date();
    const fresh = new DOMParser().parseFromString(text, "text/html");
    tell(fresh);
    if (text === last) {
      warn("");
    } else if (inUse()) {
      if (Date.now() - putAt > HELD_MS) warn(`Held while something is typed or marked: as of ${utc(new Date(putAt))}.`);
    } else {
      put(fresh);
      last = text;
      putAt = Date.now();
      warn("");
    }
  } catch (error) {
    warn(`No answer from the agent since ${utc(answeredAt)}: what stands below is old.`);
  } finally {
    asking = false;
  }
}

setInterval(refresh, EVERY_MS);
document.addEventListener("visibilitychange", () => { ticks = -1; refresh(); });
