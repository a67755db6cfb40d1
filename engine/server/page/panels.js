// The numbers beside the chat, from a History of /metrics and the answer of /load.

import { byId, element, setText, short, whole } from "./dom.js";
import { METRICS } from "./names.js";
import { say } from "./panel.js";
import { Sparkline } from "./sparkline.js";

const sparkline = new Sparkline(byId("sparkline"));

function windowOf(span) {
  return span.first ? "last minute" : "since start";
}

export function showMetrics(history, numRunning) {
  showTokens(history);
  showMedian("first-token", history, METRICS.firstToken, "No answer has begun yet.");
  showMedian("inter-token", history, METRICS.interToken, "No answer has had a second token yet.");
  showDraft(history, numRunning);
  showCommunication(history);
}

function showTokens(history) {
  const rate = history.rate(METRICS.generationTokens);
  const points = history.rates(METRICS.generationTokens);
  const peak = Math.max(0, ...points.map((point) => point.value ?? 0));
  const steps = history.rate(METRICS.steps);
  setText("token-rate", rate === null ? "–" : short(rate).replace(/\.0+$/, ""));
  const words = [steps ? `${short(steps)} steps/s` : "idle", ...(peak ? [`peak ${short(peak)}`] : [])];
  setText("token-note", rate === null ? "measuring" : words.join(" · "));
  sparkline.show(points);
}

function secondsText(seconds) {
  return seconds < 1 ? `${short(1000 * seconds)} ms` : `${short(seconds)} s`;
}

function showMedian(id, history, name, reason) {
  const span = history.recent(`${name}_count`);
  const median = span.median(name);
  say(`${id}-panel`, median === null ? reason : "");
  if (median === null) return;
  setText(id, secondsText(median));
  setText(`${id}-note`, `median, ${windowOf(span)}`);
}

export function showLoad(load) {
  const { free = 0, cached = 0, held = 0 } = load.kv_cache_blocks;
  const all = Math.max(free + cached + held, 1);
  setText("running", whole(load.num_requests_running));
  setText("waiting", whole(load.num_requests_waiting));
  const limit = load.max_queued_requests;
  const queue = limit === null ? "any number may wait" : `up to ${whole(limit)} may wait`;
  setText("queue-note", load.is_draining ? "draining: no new requests" : queue);
  byId("kv-held").style.width = `${(100 * held) / all}%`;
  byId("kv-cached").style.width = `${(100 * cached) / all}%`;
  byId("kv-bar").setAttribute("aria-valuenow", ((100 * held) / all).toFixed(1));
  setText("kv-share", `${percent(held / all)} held`);
  setText("kv-held-count", whole(held));
  setText("kv-cached-count", whole(cached));
  setText("kv-free-count", whole(free));
}

function percent(share) {
  return `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)} %`;
}

function showDraft(history, numRunning) {
  const { last } = history;
  if (!last.has(METRICS.drafts)) {
    say("draft-panel", "No draft loaded; start the server with --draft to speculate.");
    return;
  }
  const span = history.recent(METRICS.drafts);
  const chains = span.count(METRICS.drafts);
  const choice = choiceText(last.rows(METRICS.draftChoice), numRunning);
  say("draft-panel", chains ? "" : `A draft is loaded, but no guess was verified yet${choice && `; ${choice}`}.`);
  if (!chains) return;
  setText("draft-window", windowOf(span));
  setText("accept-length", short(1 + span.count(METRICS.acceptedTokens) / chains));
  setText("draft-choice", choice);
  const accepted = [...span.by(METRICS.acceptedByPosition, "position").values()];
  byId("positions").replaceChildren(...accepted.map((count, i) => barOf(i + 1, count / chains)));
}

/** What the last step of the present size verified, and why. */
function choiceText(rows, numRunning) {
  const sizes = rows.map((row) => ({ ...row.labels, bucket: Number(row.labels.bucket) }));
  sizes.sort((a, b) => a.bucket - b.bucket);
  const chosen = sizes.find((row) => row.bucket >= Math.max(numRunning, 1)) ?? sizes.at(-1);
  return chosen ? `guesses now: ${chosen.num_drafts} (${chosen.reason})` : "";
}

function barOf(position, share) {
  const item = element("li");
  const track = element("span", "track");
  const fill = element("span", "fill");
  fill.style.width = `${100 * share}%`;
  track.append(fill);
  item.append(element("span", "place", String(position)), track, element("b", "", `${Math.round(100 * share)} %`));
  return item;
}

function showCommunication(history) {
  const span = history.recent(METRICS.steps);
  const steps = span.count(METRICS.steps);
  const rounds = span.by(METRICS.commRounds, "kind");
  const seconds = span.by(METRICS.commSeconds, "kind");
  say("comm-panel", whySilent(history.last, steps));
  if (!steps) return;
  setText("comm-window", windowOf(span));
  const shown = [...rounds].filter(([, count]) => count > 0);
  const rows = shown.map(([kind, count]) => rowOf(kind.replaceAll("_", " "), count / steps, perStep(seconds.get(kind))));
  const timed = [...seconds.values()];
  const total = timed.length ? timed.reduce((a, b) => a + b, 0) : undefined;
  const all = rowOf("all", shown.reduce((sum, [, count]) => sum + count, 0) / steps, perStep(total));
  all.className = "total";
  byId("comm-rows").replaceChildren(...rows, all);

  function perStep(value) {
    return value === undefined ? null : (1e6 * value) / steps;
  }
}

function whySilent(last, steps) {
  const bytes = last.rows(METRICS.commBytes);
  if (!steps) return "No step has run yet.";
  if (!bytes.some((row) => row.value > 0)) return "One rank: no communication.";
  return "";
}

function rowOf(kind, rounds, microseconds) {
  const row = element("tr");
  const name = element("th", "", kind);
  name.scope = "row";
  const time = microseconds === null ? "not timed" : whole(microseconds);
  row.append(name, element("td", "", rounds.toFixed(1)), element("td", "", time));
  return row;
}
