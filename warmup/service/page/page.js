"use strict";
// Everything that comes from outside goes in as text, never as HTML.

const SIGNS = {
  waiting: "·", compiling: "…", priming: "…", publishing: "…", restored: "↓", local: "✓", rewritten: "⇄",
  compiled: "✓", bypass: "↷", failed: "✕", cancelled: "–", "in image": "↓", "in store": "↓", "by rewriting": "⇄",
  damaged: "✕", missing: "○",
};
const MEANINGS = {
  waiting: "not begun", compiling: "being compiled", priming: "being loaded", publishing: "on its way to the store",
  restored: "came from the store", local: "was in the cache root",
  rewritten: "another device's program, with this one's index", compiled: "compiled in this job",
  bypass: "ran, and torch compiles it again on every start", failed: "did not get warm", cancelled: "not wanted any more",
  "in image": "a start would take it from the image", "in store": "a restore would bring it", "by rewriting": "another device's program would be rewritten",
  damaged: "a file of it is not what it was", missing: "would be compiled",
};
const BUSY = ["compiling", "priming", "publishing"];
const OPEN = ["running", "cancelling", "queued"];
const SHOWN_ENDED = 20;

const state = {
  jobs: new Map(), rows: [], detail: null, chosen: null, pinned: false, last: 0, source: null, late: null, store: null,
};
const $ = (id) => document.getElementById(id);

function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") made.addEventListener("click", value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const signed = (word) => el("span", { "aria-hidden": "true" }, `${SIGNS[word] ?? "·"} `);
const kind = (word) => "is-" + word.replace(" ", "-");

function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}
const ago = (when) => `${span(Date.now() / 1000 - when)} ago`;

function say(text) {
  if ($("said").textContent !== text) $("said").textContent = text;
}

// -- asking ---------------------------------------------------------------------------------------

async function ask(path, options = {}) {
  const answer = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  if (answer.status === 401) {
    showLogin();
    throw new Error("a token is needed");
  }
  const body = answer.status === 204 ? null : await answer.json();
  if (!answer.ok && answer.status !== 503) throw new Error(`${body.detail}. ${body.next_step}.`);
  if (!answer.ok) throw new Error(body.detail ?? body.why);
  return body;
}

function post(path, body = {}) {
  return ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
}

async function act(path, body) {
  try {
    return await post(path, body);
  } catch (error) {
    showError(error.message);
    return null;
  }
}

function showError(text) {
  $("job-error").textContent = text ?? "";
  $("job-error").hidden = !text;
}

// -- coming in ------------------------------------------------------------------------------------

function showLogin() {
  state.source?.close();
  $("login").hidden = false;
  $("main").hidden = true;
  live(false, "locked");
  $("token").focus();
}

$("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const answer = await fetch("/login", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ token: $("token").value }),
  });
  $("token").value = "";
  if (answer.status === 204) {
    $("login-error").textContent = "";
    $("login").hidden = true;
    start();
  } else {
    $("login-error").textContent = (await answer.json()).detail;
  }
});

$("logout").addEventListener("click", async () => {
  await fetch("/logout", { method: "POST" });
  showLogin();
});

async function start() {
  const about = await ask("/v1/about");
  $("main").hidden = false;
  $("logout").hidden = !about.needs_token;
  $("about").textContent = `${about.devices.join(", ")} · ${about.workloads.join(", ") || "no workload is allowed"}`;
  await loadJobs();
  listen();
  loadStore();
}

// -- staying current ------------------------------------------------------------------------------

async function loadJobs() {
  const page = await ask("/v1/jobs?limit=100");
  const open = await Promise.all(OPEN.map((one) => ask(`/v1/jobs?limit=100&state=${one}`)));
  state.jobs = new Map();
  for (const job of [page, ...open].flatMap((one) => one.jobs)) state.jobs.set(job.id, job);
  state.last = page.last_event;
  showQueue();
  await follow();
}

function live(on, words) {
  $("live").className = `live ${on ? "on" : "off"}`;
  $("live-words").textContent = words;
}

function listen() {
  state.source?.close();
  const source = new EventSource(`/v1/events?after=${state.last}`);
  state.source = source;
  source.onopen = () => live(true, "live");
  source.onerror = async () => {
    live(false, "connecting again");
    if (source.readyState !== EventSource.CLOSED || source !== state.source) return;
    await new Promise((done) => setTimeout(done, 2000));
    if (source === state.source) await restart();
  };
  source.addEventListener("job", (event) => hearJob(JSON.parse(event.data)));
  source.addEventListener("target", (event) => hearTarget(JSON.parse(event.data)));
  source.addEventListener("reset", restart);
}

async function restart() {
  try {
    state.detail = null;
    await loadJobs();
    listen();
  } catch {
    live(false, "connecting again");
    setTimeout(restart, 3000);
  }
}

function hearJob(event) {
  const before = state.jobs.get(event.job_id);
  state.jobs.set(event.job_id, event.job);
  soon(showQueue);
  if (before?.state !== event.job.state) {
    if (event.job.ended !== null) {
      say(`${event.job.name}: ${event.job.state}, ${words(event.job)}`);
      loadStore();
    }
    if (event.job_id === state.chosen && event.job.ended !== null) loadDetail(event.job_id);
    else follow();
  }
  if (before?.ended_targets !== event.job.ended_targets) storeSoon();
  if (event.job_id === state.chosen) soon(showJob);
}

function hearTarget(event) {
  if (event.job_id !== state.chosen) return;
  if (state.late) state.late.push(event);
  else if (state.detail && event.id > state.detail.last_event) {
    state.rows[event.target.position] = event.target;
    soon(showJob);
  }
}

const waiting = new Set();
function soon(show) {
  if (waiting.has(show)) return;
  waiting.add(show);
  setTimeout(() => {
    waiting.delete(show);
    show();
  }, 60);
}

// -- the chosen job -------------------------------------------------------------------------------

function newest(jobs) {
  return jobs.reduce((best, job) => (best && best.number > job.number ? best : job), null);
}

async function follow() {
  const jobs = [...state.jobs.values()];
  const running = newest(jobs.filter((job) => job.state === "running"));
  const wanted = state.pinned && state.jobs.has(state.chosen) ? state.chosen : (running ?? newest(jobs))?.id;
  if (wanted && (wanted !== state.chosen || !state.detail)) await loadDetail(wanted);
}

function choose(id) {
  state.pinned = true;
  loadDetail(id);
  $("job").focus({ preventScroll: false });
}

async function loadDetail(id) {
  const late = [];
  state.chosen = id;
  state.late = late;
  try {
    const detail = await ask(`/v1/jobs/${encodeURIComponent(id)}`);
    if (state.chosen !== id || state.late !== late) return;
    state.detail = detail;
    state.rows = detail.rows;
    for (const event of late) if (event.id > detail.last_event) state.rows[event.target.position] = event.target;
    if (!state.jobs.has(id)) state.jobs.set(id, detail);
  } catch (error) {
    showError(error.message);
  }
  if (state.late === late) state.late = null;
  showError(null);
  showJob();
  showQueue();
}

function words(job) {
  const failed = job.failed_targets ? `, ${job.failed_targets} failed` : "";
  return `${job.ended_targets} of ${job.targets} targets${failed}`;
}

function showJob() {
  const job = state.jobs.get(state.chosen);
  if (!job || !state.detail) return;
  $("job-title").replaceChildren(job.name, " ", el("span", { class: `tag ${kind(job.state)}` }, job.state));
  const print = job.fingerprint ? `fingerprint ${job.fingerprint.slice(0, 12)}` : null;
  const explains = job.kind === "explain" ? "explains, compiles nothing" : null;
  const took = job.started ? `took ${span(job.ended - job.started)}, ` : "";
  const hand = state.rows.find((row) => BUSY.includes(row.state));
  const doing = hand ? `${hand.state} ${hand.shape} on ${hand.device}` : job.phase;
  const when = job.ended ? `${took}ended ${ago(job.ended)}` : doing;
  $("job-words").textContent = [explains, job.workload === job.name ? null : job.workload, print, when]
    .filter(Boolean).join(" · ");
  showProgress(job);
  showButtons(job);
  if (job.error) showError(`${job.error}. ${job.next_step ?? ""}`);
  showGrid();
  showWhy(job);
}

function progress(job, label) {
  const name = job.state === "failed" ? "failed" : null;
  return el("progress", { max: job.targets, value: job.ended_targets, class: name, "aria-label": label });
}

function showProgress(job) {
  const left = job.ended === null && job.estimate_seconds !== null ? ` · about ${span(job.estimate_seconds)} left` : "";
  $("job-progress").replaceChildren(progress(job, "Targets that have ended"), el("span", { class: "quiet" }, words(job) + left));
}

function showButtons(job) {
  const made = [];
  if (job.ended === null && job.state !== "cancelling") made.push(["Cancel", () => act(`/v1/jobs/${job.id}/cancel`)]);
  if (["failed", "cancelled"].includes(job.state)) made.push(["Retry", () => act(`/v1/jobs/${job.id}/retry`)]);
  if (job.kind === "warm") made.push(["Why not warm?", () => explain(job)]);
  const now = made.map(([words]) => words).join();
  if ($("job-buttons").dataset.now === now && $("job-buttons").dataset.job === job.id) return;
  Object.assign($("job-buttons").dataset, { now, job: job.id });
  $("job-buttons").replaceChildren(...made.map(([words, onclick]) => el("button", { type: "button", onclick }, words)));
}

async function explain(job) {
  const made = await act("/v1/jobs", {
    plan: state.detail.plan, devices: job.devices, kind: "explain", name: `Why: ${job.name}`.slice(0, 200), priority: 100,
  });
  if (!made) return;
  state.jobs.set(made.id, made);
  choose(made.id);
}

function withoutCommon(shapes) {
  const split = shapes.map((shape) => shape.split(" "));
  const shared = shapes.length < 2 ? [] : split[0].filter((word) => word.includes("=") && split.every((other) => other.includes(word)));
  return [shared.join(" "), split.map((other) => other.filter((word) => !shared.includes(word)).join(" "))];
}

function showGrid() {
  const rows = state.rows;
  const devices = [...new Set(rows.map((row) => row.device))];
  const shapes = [...new Set(rows.map((row) => row.shape))];
  const cells = new Map(rows.map((row) => [`${row.shape}\n${row.device}`, row]));
  const [common, names] = withoutCommon(shapes);
  const body = shapes.map((shape, i) => el("tr", {}, el("th", { scope: "row" }, names[i]),
    ...devices.map((device) => cell(cells.get(`${shape}\n${device}`)))));
  const head = el("tr", {}, el("th", { scope: "col" }, "shape"), ...devices.map((device) => el("th", { scope: "col" }, device)));
  const table = el("table", { class: "grid" }, el("caption", { class: "unseen" }, "Targets by shape and device"),
    el("thead", {}, head), el("tbody", {}, ...body));
  const old = $("job-grid").querySelector(".wide");
  const scrolled = old ? old.scrollLeft : 0;
  const focused = old && document.activeElement === old;
  const wide = el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Targets by shape and device" }, table);
  $("job-grid").replaceChildren(wide, common ? el("p", { class: "quiet" }, `all: ${common}`) : "", legend(rows));
  wide.scrollLeft = scrolled;
  if (focused) wide.focus();
}

function cell(row) {
  if (!row) return el("td", { class: "cell" }, "·");
  const busy = BUSY.includes(row.state) && row.began;
  const seconds = busy ? `${Math.max(0, Date.now() / 1000 - row.began).toFixed(0)} s` : row.seconds !== null ? `${row.seconds.toFixed(1)} s` : null;
  const why = row.error ?? (row.notes.length ? row.notes.join("; ") : null);
  return el("td", { class: `cell ${kind(row.state)}` }, signed(row.state), row.state,
    seconds ? el("span", { class: "number", "data-began": busy ? row.began : null }, ` ${seconds}`) : null,
    why ? el("span", { class: "why" }, why) : null);
}

function legend(rows) {
  const counts = new Map();
  for (const row of rows) counts.set(row.state, (counts.get(row.state) ?? 0) + 1);
  return el("dl", { class: "legend" }, ...Object.keys(SIGNS).filter((word) => counts.has(word)).map((word) =>
    el("div", {}, el("dt", {}, el("span", { class: `cell ${kind(word)}` }, signed(word), word)),
      el("dd", {}, `${counts.get(word)}: ${MEANINGS[word]}`))));
}

// -- why not warm ---------------------------------------------------------------------------------

function showWhy(job) {
  const parts = [];
  if (job.gave_up.length) parts.push(el("h3", {}, "Given up"), el("ul", {}, ...job.gave_up.map((line) => el("li", {}, line))));
  const found = state.detail.explanation;
  if (found && state.detail.id === job.id) parts.push(...reasons(found));
  $("job-why").replaceChildren(...parts);
}

function reasons(found) {
  const parts = [el("h3", {}, found.warm ? "A start here would compile nothing" : "Why a start here would not be warm")];
  const near = found.nearest;
  if (near) {
    const changed = Object.entries(near.changed);
    const same = changed.length ? `It differs in ${changed.length}:` : "It is this very fingerprint, and lacks what is missing.";
    parts.push(el("p", {}, `Nearest published fingerprint: ${near.digest.slice(0, 12)}, ${near.targets} targets. ${same}`));
    if (changed.length) parts.push(differences(changed, near.weights));
  } else if (!found.warm) {
    parts.push(el("p", {}, found.trouble ? `The store could not be asked: ${found.trouble}.` : "Nothing that is published comes near."));
  }
  if (found.untrusted.length) parts.push(el("ul", {}, ...found.untrusted.map((line) => el("li", {}, `not trusted: ${line}`))));
  parts.push(el("p", {}, `${found.next_step}.`));
  return parts;
}

function differences(changed, weights) {
  const rows = changed.map(([name, [then, here]]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, then),
    el("td", {}, here), el("td", {}, weights[name]?.matters ? "matters" : "only caution")));
  const heads = ["what", "published", "here", "does it matter"].map((name) => el("th", { scope: "col" }, name));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Differences" },
    el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows)));
}

// -- queue and store ------------------------------------------------------------------------------

function ordered() {
  const jobs = [...state.jobs.values()];
  const open = jobs.filter((job) => OPEN.includes(job.state)).sort((a, b) =>
    OPEN.indexOf(a.state) - OPEN.indexOf(b.state) || b.priority - a.priority || a.number - b.number);
  const ended = jobs.filter((job) => !OPEN.includes(job.state)).sort((a, b) => b.ended - a.ended);
  for (const job of ended.slice(200)) state.jobs.delete(job.id);
  return [...open.slice(0, 100), ...ended.slice(0, SHOWN_ENDED)];
}

function showQueue() {
  let ahead = 0;
  const focused = document.activeElement?.dataset?.job;
  const jobs = ordered();
  const known = jobs.find((job) => job.state === "running" && job.estimate_seconds);
  const pace = known ? known.estimate_seconds / (known.targets - known.ended_targets) : null;
  const rows = jobs.map((job) => {
    const open = OPEN.includes(job.state);
    const own = job.estimate_seconds ?? (open && pace !== null ? pace * (job.targets - job.ended_targets) : null);
    if (open) ahead += own ?? 0;
    return queueRow(job, !open ? "–" : own === null ? "not known yet" : `about ${span(ahead)}`);
  });
  if (!rows.length) rows.push(el("tr", {}, el("td", { colspan: "6" }, "Nothing was submitted.")));
  $("queue").replaceChildren(...rows);
  if (focused) $("queue").querySelector(`[data-job="${focused}"]`)?.focus({ preventScroll: true });
}

function queueRow(job, still) {
  const pick = el("button", {
    type: "button", class: "pick", "data-job": job.id, "aria-current": String(job.id === state.chosen), onclick: () => choose(job.id),
  }, job.name);
  return el("tr", {}, el("th", { scope: "row" }, pick),
    el("td", { "data-name": "state" }, el("span", { class: `tag ${kind(job.state)}` }, job.state)),
    el("td", { "data-name": "progress" }, progress(job, `Progress of ${job.name}`), ` ${job.ended_targets}/${job.targets}`),
    el("td", { "data-name": "still takes" }, still),
    el("td", { "data-name": "priority", class: "number" }, String(job.priority)),
    el("td", { "data-name": "submitted" }, ago(job.created)));
}

let storeWanted = false;
function storeSoon() {
  if (storeWanted) return;
  storeWanted = true;
  setTimeout(() => {
    storeWanted = false;
    loadStore();
  }, 5000);
}

let storeTimer = null;
async function loadStore() {
  clearTimeout(storeTimer);
  storeTimer = setTimeout(loadStore, 30000);
  try {
    state.store = await ask("/v1/fingerprints");
    showStore(null);
  } catch (error) {
    showStore(error.message);
  }
}

function showStore(trouble) {
  const found = state.store;
  const more = found?.left_out ? `, ${found.left_out} more are not shown` : "";
  $("store-words").textContent = trouble ?? (found.store ? `${found.store}${more}` : "No store: everything stays in the cache root.");
  if (!found) return;
  const rows = found.fingerprints.map((one) => el("tr", {},
    el("th", { scope: "row", class: "mono" }, one.digest.slice(0, 12)),
    el("td", { "data-name": "what" }, Object.values(one.what).join(", ") || "not readable"),
    el("td", { "data-name": "targets", class: "number" }, String(one.targets)),
    el("td", { "data-name": "MB", class: "number" }, (one.bytes / 1e6).toFixed(1)),
    el("td", { "data-name": "age" }, span(Date.now() / 1000 - one.newest))));
  if (!rows.length && found.store) rows.push(el("tr", {}, el("td", { colspan: "5" }, "Nothing is published yet.")));
  $("store").replaceChildren(...rows);
}

setInterval(() => {
  for (const one of document.querySelectorAll("[data-began]")) {
    one.textContent = ` ${Math.max(0, Date.now() / 1000 - Number(one.dataset.began)).toFixed(0)} s`;
  }
}, 1000);

start().catch((error) => {
  if ($("login").hidden) {
    live(false, error.message);
    setTimeout(() => location.reload(), 5000);
  }
});
