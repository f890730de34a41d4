// Asks the interface again and again, and renders what it answers.

import { h, render, bytes, duration, rate, age, plural, time } from "/console/dom.js";
import { rates, STAGES } from "/console/rates.js";
import * as sections from "/console/sections.js";
import { open, request } from "/console/changes.js";

const INTERVAL_MS = 2000;
const SPANS_MS = [60000, 120000, 300000];
const MOST_EVENTS = 100;

const at = (selector) => document.querySelector(selector);
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const history = [];
const events = [];
let before = null;
let paused = false;
let lost = null;

let groupless = null;
let access = "no";

const ask = (path) => request(path).then((response) => response.json());

/** `null` where there is no gateway group, which only a restart changes: such a process is asked once. */
async function gatewayGroup(pid) {
  if (groupless === pid) return null;
  const found = await ask("/v1/gateway-group").catch((error) => error);
  if (found.status === 404) groupless = pid;
  return found.status === 404 ? null : found;
}

async function load() {
  const now = await ask("/v1/stats");
  const found = before && rates(before, now);
  before = now;
  if (!found) return;
  history.push({ at: Date.now(), ...found });
  while (Date.now() - history[0].at > SPANS_MS.at(-1)) history.shift();
  render(at("#figures"), sections.figures(found.all, found.reactors));
  render(at("#rates"), sections.byHost(found.rows));
  render(at("#reactors"), sections.reactors(found.reactors));
  render(at("#charts"), charts());
}

function charts() {
  const times = history.map(({ at }) => at);
  const series = (title, kind, value) => ({ title, kind, values: history.map((point) => value(point) ?? null) });
  const kinds = (value) => [["reads", "read", "pull"], ["writes", "write", "disk"]].map(([title, op, kind]) =>
    series(title, kind, ({ kinds }) => (kinds[op] ? value(kinds[op]) : 0)));
  const span = SPANS_MS.find((span) => times.at(-1) - times[0] <= span) ?? SPANS_MS.at(-1);
  return h("div", { class: "charts" },
    sections.chart({ title: "Commands per second", times, span, format: rate, series: kinds(({ iops }) => iops) }),
    sections.chart({ title: "Bytes per second", times, span, format: bytes, series: kinds(({ bytes }) => bytes) }),
    sections.chart({ title: "Latency", times, span, format: duration, series: [
      series("median", "pull", ({ all }) => all.p50), series("99th percentile", "wait", ({ all }) => all.p99)] }),
    sections.chart({ title: "Mean latency by stage", times, span, format: duration, stacked: true,
      series: STAGES.map((stage, at) => series(stage, stage, ({ all }) => all.stages[at].mean)) }));
}

async function state() {
  const paths = ["status", "subsystems", "hosts", "listeners", "controllers", "why", "slow", "changes", "history", "memory"];
  const [status, subsystems, hosts, listeners, controllers, why, slow, changes, past, memory] = await Promise.all(paths.map((path) => ask(`/v1/${path}`)));
  const plan = await ask("/v1/plan").catch((error) => error);
  const inFlight = await ask("/v1/inflight").catch((error) => error);
  const group = await gatewayGroup(status.pid);
  access = status.accepts_changes;
  const may = access !== "no";
  const { problems, body } = sections.health(status, inFlight, group);
  const show = (id, ...content) => render(at(`#${id} .body`), ...content);
  document.title = problems ? `nvmfd: ${plural(problems, "problem")}` : "nvmfd";
  render(at("#identity"), `${status.version}, ${status.provider}, process ${status.pid}, up ${age(status.uptime_s)}`);
  show("health", body);
  show("served", sections.served(subsystems, hosts, listeners, may));
  show("controllers", sections.controllers(controllers, may));
  show("refused", sections.refused(why, may));
  show("progress", sections.inFlight(inFlight));
  show("slow", sections.slow(slow));
  for (const node of document.querySelectorAll("#group, nav [href='#group']")) node.hidden = !group;
  show("group", sections.group(group));
  show("configuration", sections.configuration(status, changes, plan, past));
  show("memory", sections.memory(memory, status));
  render(at("#access"), sections.access(access));
}

function link(error) {
  lost = error ? lost ?? Date.now() : null;
  at("#link").className = error ? "bad" : paused ? "fair" : "good";
  render(at("#link"), error ? ["no answer since ", time(lost), `: ${error.message}`] : paused ? "paused" : "live");
}

/** Events, until the connection ends. */
async function follow() {
  const response = await fetch("/v1/watch");
  if (!response.ok) throw new Error((await response.json()).detail);
  render(at("#watch"), "since this page was opened; times are those of this browser's zone");
  let rest = "";
  for await (const part of response.body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + part).split("\n");
    rest = lines.pop();
    const shown = lines.map((line) => sections.event(JSON.parse(line))).filter(Boolean);
    if (!shown.length) continue;
    events.unshift(...shown.reverse());
    events.length = Math.min(events.length, MOST_EVENTS);
    // Copies: render moves what it is given into the page.
    render(at("#events .body"), events.map((event) => event.cloneNode(true)));
  }
}

async function watch() {
  for (;;) {
    await follow().catch((error) => render(at("#watch"), `no events now: ${error.message}`));
    await sleep(INTERVAL_MS);
  }
}

async function poll() {
  for (let turn = 0; ; turn += 1) {
    const began = performance.now();
    if (!paused && document.visibilityState === "visible") {
      try {
        await load();
        if (turn % 2 === 0) await state();
        link(null);
      } catch (error) {
        link(error);
      }
    }
    // A large target or a slow line is asked less often.
    const took = performance.now() - began;
    await sleep(Math.max(INTERVAL_MS - took, 2 * took));
  }
}

at("#pause").addEventListener("click", () => {
  paused = !paused;
  at("#pause").setAttribute("aria-pressed", String(paused));
  link(null);
});
document.addEventListener("click", ({ target }) => {
  const button = target.closest("button[data-action]");
  if (button) open({ ...button.dataset }, access, () => state().then(() => link(null), link));
});
render(at("#stages"), sections.legend());
render(at("#events .body"), h("p", { class: "hint" }, "None so far."));
watch();
poll();
