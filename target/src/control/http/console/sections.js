// What each section of the page has, made from responses of the interface.

import { h, table, list, empty, name, prose, badge, action, time, age, bytes, count, duration, percent, plural, rate } from "/console/dom.js";
import { STAGES, MEANINGS } from "/console/rates.js";

const DISCOVERY = "nqn.2014-08.org.nvmexpress.discovery";
const OPCODES = { 0: "Flush", 1: "Write", 2: "Read", 4: "Write Uncorrectable", 5: "Compare", 8: "Write Zeroes", 9: "Dataset Management",
  12: "Verify", 13: "Reservation Register", 14: "Reservation Report", 17: "Reservation Acquire", 21: "Reservation Release", 25: "Copy" };
const STATES = { serving: "good", live: "good", disabled: "fair", authenticating: "fair", closing: "fair", left: "fair" };
const MOST_ROWS = 100;
const MOST_RECENT = 15;

const state = (text) => badge(STATES[text] ?? "bad", text.replaceAll("_", " "));
const more = (all, most, command) => all.length > most && h("p", { class: "hint" }, `and ${count(all.length - most)} more: `, h("code", null, command));

/** Commands that are in progress for longer, as the alert NvmfdCommandHangs has it. */
const HANGS_NS = 15e9;

/** `inFlight`, `group`: a list and a gateway group, or the error instead; a daemon without a group has `null`. */
export function health(status, inFlight, group) {
  const reload = status.last_reload;
  const bad = [...status.pending, ...status.degraded, ...status.low_space];
  if (inFlight instanceof Error) bad.push(inFlight.message);
  else if (inFlight.some(hangs)) {
    const oldest = Math.max(...inFlight.map(({ age_ns }) => age_ns));
    bad.push(`commands are in progress for more than 15 s, the oldest for ${age(oldest / 1e9)}: see In progress`);
  }
  if (group instanceof Error) bad.push(group.message);
  if (reload && !reload.successful) bad.push(...reload.errors.map((error) => `the last reload was refused: ${error}`));
  const fair = [
    ...status.needs_restart.map((section) => `${section} has changed: takes effect after a restart`),
    ...(status.set_aside_changes ? [`${plural(status.set_aside_changes, "change")} no longer apply: see Configuration`] : []),
    ...status.warnings,
  ];
  const served = `${plural(status.subsystems, "subsystem")}, ${plural(status.namespaces, "namespace")}, ${plural(status.controllers, "controller")}`;
  return {
    problems: bad.length,
    body: [
      bad.length
        ? h("div", { class: "note bad" }, h("p", null, h("strong", null, plural(bad.length, "problem"))), list(bad.map(prose)))
        : h("div", { class: "note good" }, h("p", null, h("strong", null, "Everything that is configured is served"), `: ${served}.`)),
      fair.length > 0 && h("details", { class: "note fair" }, h("summary", null, plural(fair.length, "warning")), list(fair.map(prose))),
    ],
  };
}

export function figures(all, reactors) {
  const figure = (title, value) => h("div", { class: "figure" }, h("dt", null, title), h("dd", null, value));
  const waiting = reactors.reduce((sum, { waiting_for_buffer }) => sum + waiting_for_buffer, 0);
  return h("dl", { class: "figures" },
    figure("Commands per second", rate(all.iops)),
    figure("Bytes per second", bytes(all.bytes)),
    figure("Mean latency", all.mean === null ? "–" : duration(all.mean)),
    figure("99th percentile", all.p99 === null ? "–" : duration(all.p99)),
    figure("In flight", rate(all.depth)),
    figure("Waiting for buffers", count(waiting)));
}

const hangs = ({ age_ns }) => age_ns > HANGS_NS;

/** A bar with the share of each stage, and the words for it. */
function stages(shares) {
  let at = 0;
  const parts = shares.map(([stage, share]) => {
    const path = h("path", { class: `fill ${stage}`, d: `M${(at * 100).toFixed(2)} 0h${(share * 100).toFixed(2)}v8h-${(share * 100).toFixed(2)}z` });
    at += share;
    return path;
  });
  const largest = shares.filter(([, share]) => share >= 0.05).sort((a, b) => b[1] - a[1]).slice(0, 2);
  return [
    h("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" }, parts),
    h("span", { class: "small" }, largest.map(([stage, share]) => `${stage} ${percent(share)}`).join(", ") || "–"),
  ];
}

export const legend = () => [
  "Where commands are, on average: ",
  STAGES.map((stage) => [h("span", { class: "key" }, swatch(stage), ` ${stage}`), ` ${MEANINGS[stage]}${stage === "reply" ? "." : "; "}`]),
];

const swatch = (kind) =>
  h("svg", { class: "swatch", viewBox: "0 0 8 8", "aria-hidden": "true" }, h("path", { class: `fill ${kind}`, d: "M0 0h8v8h-8z" }));

export function byHost(rows) {
  const active = rows.filter(({ commands }) => commands > 0);
  if (!active.length) return empty("No commands in the last seconds.");
  const columns = [["Host"], ["Subsystem"], ["NSID", "number"], ["Commands/s", "number"], ["Bytes/s", "number"], ["Mean", "number"], ["99th percentile", "number"],
    ["In flight", "number"], ["Failed", "number"], ["Waits in"]];
  return [
    table("Load by host and namespace", columns, active.slice(0, MOST_ROWS).map((row) => [
      name(row.host), name(row.subsystem), row.nsid ? String(row.nsid) : "all", rate(row.iops), bytes(row.bytes),
      duration(row.mean ?? 0), duration(row.p99 ?? 0), rate(row.depth), count(row.failures),
      stages(row.stages.map(({ stage, share }) => [stage, share])),
    ])),
    more(active, MOST_ROWS, "nvmfctl top"),
  ];
}

export const reactors = (all) =>
  table("Reactors", [["Reactor"], ["Busy", "number"], ["Queue pairs", "number"], ["Data buffers in use", "number"],
    ["Receive buffers free", "number"], ["Commands waiting for buffers", "number"], ["Slow commands", "number"]],
  all.map((one) => [String(one.index), one.busy === null ? "–" : percent(one.busy), count(one.queues),
    `${bytes(one.data_bytes - one.data_free_bytes)} of ${bytes(one.data_bytes)}`, count(one.receives_free), count(one.waiting_for_buffer), count(one.slow)]));

/** `may`: changes are accepted. */
export function served(subsystems, hosts, listeners, may) {
  const known = new Map(hosts.map((host) => [host.nqn, host]));
  const host = (nqn, subsystem) => h("li", null, name(nqn),
    known.get(nqn)?.has_key && [" ", badge("fair", "key")], known.get(nqn)?.controllers > 0 && [" ", badge("good", "connected")],
    may && [" ", action("Deny", `host ${nqn} in ${subsystem}`, "deny_host", { subsystem, host: nqn })]);
  // What hosts have created, they delete.
  const actions = ({ kind, subsystem, nsid, size_bytes }) => h("span", { class: "actions" }, kind !== "managed" && [
    action("Resize", `namespace ${nsid} of ${subsystem}`, "resize_namespace", { subsystem, nsid, size: size_bytes }),
    action("Remove", `namespace ${nsid} of ${subsystem}`, "remove_namespace", { subsystem, nsid })]);
  const namespace = (one) => [
    String(one.nsid), [one.kind, one.path && [" ", name(one.path)]], bytes(one.size_bytes), bytes(one.block_size_bytes),
    [state(one.state), one.detached && [" ", badge("bad", `file ${one.detached}`)],
      one.format_left_percent !== null && [" ", badge("fair", `formatting, ${one.format_left_percent} % left`)]],
    count(one.failures),
    [one.read_only && "read-only", one.write_protected && "write-protected", `ANA group ${one.ana_group}`,
      one.hosts && `seen by ${plural(one.hosts.length, "host")}`].filter(Boolean).join(", "),
    ...(may ? [actions(one)] : []),
  ];
  const change = may ? [["Change"]] : [];
  const columns = [["NSID"], ["Backing store"], ["Size", "number"], ["Block", "number"], ["Health"], ["Failures", "number"], ["Properties"], ...change];
  const subsystem = (one) => h("article", null,
    h("h3", null, name(one.nqn)),
    h("p", { class: "hint" }, `${plural(one.controllers, "controller")}, `, `up to ${one.io_queues} I/O queues of ${one.queue_depth} entries, ${bytes(one.mdts_bytes)} a command, serial ${one.serial}`,
      one.listeners.length > 0 && `, at ${one.listeners.length === 1 ? "listener" : "listeners"} ${one.listeners.join(", ")}`),
    one.namespaces.length ? table(`Namespaces of ${one.nqn}`, columns, one.namespaces.map(namespace)) : empty("No namespaces."),
    one.allow_any_host ? h("p", null, badge("fair", "any host"), " may connect.")
      : one.hosts.length ? h("details", { open: one.hosts.length <= 8 }, h("summary", null, `${plural(one.hosts.length, "host")} may connect`), h("ul", null, one.hosts.map((nqn) => host(nqn, one.nqn))))
        : empty("No host may connect."),
    may && h("p", { class: "actions" }, action("Add a namespace", `to ${one.nqn}`, "add_namespace", { subsystem: one.nqn }),
      !one.allow_any_host && action("Allow a host", `in ${one.nqn}`, "allow_host", { subsystem: one.nqn })));
  const ana = (one) => Object.entries(one.ana).map(([group, what]) => `group ${group} ${what}`).join(", ") || "optimized";
  return [
    table("Listeners", [["Listener"], ["Address"], ["ANA state"], ["Controllers", "number"], ...change],
      listeners.map((one) => [String(one.id), one.address, ana(one), count(one.controllers),
        ...(may ? [action("Set ANA state", `at listener ${one.id}`, "set_ana", { listener: one.id, address: one.address })] : [])])),
    subsystems.length ? subsystems.map(subsystem) : empty("No subsystems are configured."),
  ];
}

export function controllers(all, may) {
  if (!all.length) return empty("No host is connected.");
  const row = (one) => [name(one.host), one.source, one.subsystem === DISCOVERY ? "discovery" : name(one.subsystem), String(one.cntlid),
    [state(one.state), one.authenticated && [" ", badge("good", "authenticated")]],
    `${one.io_queues} of ${one.granted_io_queues}`, String(one.queue_depth), age(one.connected_s), count(one.errors),
    ...(may ? [action("Disconnect", `${one.host}, controller ${one.cntlid}`, "disconnect", { id: one.id, host: one.host })] : [])];
  return [
    table("Controllers", [["Host"], ["Address"], ["Subsystem"], ["CNTLID", "number"], ["State"], ["I/O queues", "number"],
      ["Entries", "number"], ["Connected for", "number"], ["Failed commands", "number"], ...(may ? [["Change"]] : [])], all.slice(0, MOST_ROWS).map(row)),
    more(all, MOST_ROWS, "nvmfctl controllers"),
  ];
}

export function refused(all, may) {
  if (!all.length) return empty("No host was refused or has lost its connection.");
  const term = (title, value) => value && [h("dt", null, title), h("dd", null, value)];
  const one = (why) => h("article", { class: "refusal" },
    h("h3", null, prose(why.reason)),
    h("p", { class: "remedy" }, h("strong", null, "Remedy: "), prose(why.remedy),
      may && why.cause === "host-not-allowed" && [" ", action("Allow", `${why.host} in ${why.subsystem}`, "allow_host", { subsystem: why.subsystem, host: why.host })]),
    h("dl", null,
      term("Host", why.host && name(why.host)),
      term("Address", why.remote),
      term("Subsystem", why.subsystem && name(why.subsystem)),
      term("Details", why.detail),
      term("When", [why.count > 1 ? `${count(why.count)} times, the last: ` : null, time(why.last_s * 1000)]),
      term("Cause", [h("code", null, why.cause), ` (${why.stage}), at ${why.local}`])));
  return [all.slice(0, MOST_RECENT).map(one), more(all, MOST_RECENT, "nvmfctl why")];
}

function opcode({ qid, opcode }) {
  const hex = `opcode ${opcode.toString(16).padStart(2, "0").toUpperCase()}h`;
  return qid === 0 ? `admin ${hex}` : OPCODES[opcode] ?? hex;
}

export function inFlight(all) {
  if (all instanceof Error) return h("div", { class: "note bad" }, h("p", null, all.message));
  if (!all.length) return empty("No command is in progress.");
  const row = (one) => [name(one.host), name(one.subsystem), String(one.nsid), opcode(one), String(one.slba), one.stage,
    hangs(one) ? badge("bad", duration(one.age_ns)) : duration(one.age_ns), `${one.reactor}, ${one.qid}, ${one.cid}`];
  return [
    table("Commands in progress", [["Host"], ["Subsystem"], ["NSID", "number"], ["Command"], ["First block", "number"], ["Stage"],
      ["For", "number"], ["Reactor, queue, CID"]], all.slice(0, MOST_RECENT).map(row)),
    more(all, MOST_RECENT, "nvmfctl inflight"),
  ];
}

export function slow(all) {
  if (!all.length) return empty("No command has taken longer than [observe] slow_ms.");
  const row = (one) => [time(one.at_ms), name(one.host), name(one.subsystem), String(one.nsid),
    opcode(one), bytes(one.bytes), one.status.replace(/ \(sct 0h, sc 00h\)$/, ""), duration(one.total_ns),
    stages(one.stages_ns.map((stage) => [stage.name, one.total_ns ? stage.count / one.total_ns : 0]))];
  return [
    table("Slow commands", [["Completed"], ["Host"], ["Subsystem"], ["NSID", "number"], ["Command"], ["Bytes", "number"], ["Status"], ["Time", "number"], ["Spent in"]],
      all.slice(0, MOST_RECENT).map(row)),
    more(all, MOST_RECENT, "nvmfctl slow"),
  ];
}

export function event(one) {
  const { controller: of, what, differences } = one;
  const who = of && [name(of.host), ` at ${of.source}, controller ${of.cntlid} of `, name(of.subsystem)];
  const text = {
    connected: () => [badge("good", "connected"), " ", who],
    state: () => [state(of.state), " ", who],
    disconnected: () => [badge("bad", "disconnected"), " ", who],
    changed: () => [badge("fair", "configuration changed"), list(differences)],
    degraded: () => [badge("bad", "degraded"), " ", what],
    recovered: () => [badge("good", "recovered"), " ", what],
  }[one.event];
  return text && h("p", { class: "event" }, time(one.at_unix_s * 1000), " ", text());
}

/** Nothing, for a daemon that is no gateway of a group. */
export function group(one) {
  if (!one) return [];
  if (one instanceof Error) return h("div", { class: "note bad" }, h("p", null, one.message));
  const version = (of) => [of.applied === null ? "–" : String(of.applied), of.refused && [" ", badge("bad", `refuses ${of.refused.version}`), ` ${of.refused.why}`]];
  const move = ({ ana_group, to }) => `ANA group ${ana_group} to gateway ${to}`;
  return [
    h("p", null, "Gateway ", name(one.gateway), " of the group ", name(one.name), " ", one.fresh ? badge("good", "confirmed") : badge("bad", "serves nothing")),
    table("Gateways", [["Gateway"], ["State"], ["RADOS client"], ["Listeners"], ["Version"]], one.gateways.map((of) =>
      [name(of.name), state(of.state), of.address, of.listeners.join(", "), version(of)])),
    table("ANA groups", [["ANA group"], ["Owner"], ["Since", "number"], ["Here"], ["Pending"]], one.ana_groups.map((of) =>
      [String(of.id), of.owner ? name(of.owner) : badge("bad", "nobody"), of.since_unix_s === null ? "–" : time(of.since_unix_s * 1000), of.stage, of.pending ?? ""])),
    one.moving && h("p", null, "Moving: ", move(one.moving)),
    one.balance.length > 0 && h("p", { class: "hint" }, `Balanced after: ${one.balance.map(move).join(", ")} (`, h("code", null, "nvmfctl gateway rebalance"), ")"),
    one.conflicts.length > 0 && h("div", { class: "note bad" }, list(one.conflicts.map(prose))),
  ];
}

const requester = (uid, by_token) => (uid !== null ? `, user ${uid}` : by_token ? ", by the token" : "");

function past(all) {
  if (!all.length) return empty("None since the history begins.");
  const one = (entry) => [time(entry.at_unix_s * 1000), requester(entry.uid, entry.by_token), ": ", entry.requested.join("; "),
    entry.differences.length > 0 && h("details", null, h("summary", null, plural(entry.differences.length, "difference")),
      h("pre", { tabindex: "0", "aria-label": "Differences of this change" }, entry.differences.join("\n")))];
  return [list(all.slice(0, MOST_RECENT).map(one)), more(all, MOST_RECENT, "nvmfctl history")];
}

export function configuration(status, changes, plan, history) {
  const edit = ({ change, at_unix_s, uid }) => {
    const { change: kind, ...keys } = change;
    const shown = Object.entries(keys).map(([key, value]) => `${key} = ${typeof value === "string" ? value : JSON.stringify(value)}`);
    return [h("strong", null, kind.replaceAll("_", " ")), " ", name(shown.join(", ").slice(0, 500)), " ", h("span", { class: "hint" }, time(at_unix_s * 1000), requester(uid))];
  };
  const planned = plan instanceof Error ? h("div", { class: "note bad" }, h("p", null, h("strong", null, "A reload would be refused: "), plan.message))
    : plan.differences.length || plan.needs_restart.length
        ? [h("pre", { tabindex: "0", "aria-label": "Differences" }, plan.differences.join("\n")),
          plan.needs_restart.length > 0 && h("p", null, `Only after a restart: ${plan.needs_restart.join(", ")}`)]
        : empty("Nothing: the files are what is in force.");
  return [
    h("p", null, "File ", name(status.config_file), status.last_reload && [", last reload ", time(status.last_reload.at_unix_s * 1000), " ",
      status.last_reload.successful ? badge("good", "successful") : badge("bad", "refused")]),
    h("h3", null, "What a reload would change"), planned,
    h("h3", null, "Changes that are not saved"),
    changes.kept.length ? list(changes.kept.map(edit)) : empty("None."),
    changes.set_aside.length > 0 && [h("h3", null, "Changes that no longer apply"), list(changes.set_aside.map(({ kept, why }) => [edit(kept), `: ${why}`]))],
    h("h3", null, "History"), past(history),
  ];
}

export function memory(memory, status) {
  const { host, pool } = memory;
  const section = (one) => [`Pool: ${one.name}`, one.buffers ? `${count(one.buffers)} buffers of ${bytes(Math.floor(one.size_bytes / one.buffers))}` : "buffers of all sizes", bytes(one.size_bytes)];
  return table("Memory", [["Part"], ["Formula"], ["Size", "number"]], [
    ...pool.map(section),
    ["All pools", `${plural(memory.reactors, "reactor")} × the sections above`, bytes(memory.pool_bytes)],
    ["Connected controllers", plural(status.controllers, "controller"), bytes(memory.controllers_bytes)],
    ["A host with all its queues", `${bytes(host.controller_bytes)} + ${host.io_queues} × ${bytes(host.io_queue_bytes)} (${host.queue_depth} entries)`, bytes(host.size_bytes)],
    ["All hosts that may connect", `${memory.max_controllers} × a host with all its queues`, bytes(memory.max_controllers * host.size_bytes)],
    ["Resident", "as the kernel counts it, with code and libraries", memory.resident_bytes === null ? "not known" : bytes(memory.resident_bytes)],
  ]);
}

export const access = (access) => ({
  yes: ["Changes take effect at once; ", h("code", null, "nvmfctl save"), " writes them to the configuration file."],
  with_token: ["Changes at this address need the token of ", h("code", null, "http_token_file"), "."],
}[access] ?? ["This address accepts no changes: forward the socket of the daemon, or set ", h("code", null, "http_token_file"), " in [management]."]);

/** A chart over time. Series: {title, kind, values}, a value for each of `times` (ms), or null. */
export function chart({ title, times, span, series, format, stacked }) {
  const end = times.at(-1) ?? 0;
  const x = (at) => (300 * (1 - (end - at) / span)).toFixed(1);
  const sums = times.map((_, at) => series.reduce((sum, { values }) => sum + (values[at] ?? 0), 0));
  const highest = Math.max(0, ...(stacked ? sums : series.flatMap(({ values }) => values.map((value) => value ?? 0))));
  const top = format === bytes ? 2 ** Math.ceil(Math.log2(Math.max(highest, 1024))) : nice(highest);
  const y = (value) => (100 * (1 - value / top)).toFixed(2);
  // Without a value, or after a pause, a line begins again.
  const runs = (values) => times.reduce((runs, when, at) => {
    if (values[at] === null) runs.push([]);
    else if (at && when - times[at - 1] > 15000) runs.push([at]);
    else runs.at(-1).push(at);
    return runs;
  }, [[]]).filter((run) => run.length);
  const base = times.map(() => 0);
  const paths = series.map(({ kind, values }) => {
    const d = runs(values).map((run) => {
      const line = run.map((at) => `${x(times[at])} ${y((stacked ? base[at] : 0) + values[at])}`).join("L");
      if (!stacked) return run.length > 1 ? `M${line}` : `M${line}h.1`;
      const back = [...run].reverse().map((at) => `${x(times[at])} ${y(base[at])}`).join("L");
      return `M${line}L${back}z`;
    }).join("");
    if (stacked) values.forEach((value, at) => { base[at] += value ?? 0; });
    return h("path", { class: `${stacked ? "fill" : "stroke"} ${kind}`, d });
  });
  const known = (values) => values.filter((value) => value !== null);
  const last = (values) => (values.length && values.at(-1) !== null ? format(values.at(-1)) : "–");
  const mean = (values) => (values.length ? format(values.reduce((sum, value) => sum + value, 0) / values.length) : "–");
  return h("figure", null,
    h("figcaption", null, title),
    h("div", { class: "plot" },
      h("span", { class: "top", "aria-hidden": "true" }, format(top)),
      h("svg", { viewBox: "0 0 300 100", preserveAspectRatio: "none", "aria-hidden": "true" },
        [0, 50, 100].map((at) => h("line", { class: "grid", x1: "0", x2: "300", y1: String(at), y2: String(at) })), paths),
      h("span", { class: "start", "aria-hidden": "true" }, `${age(span / 1000)} ago`),
      h("span", { class: "end", "aria-hidden": "true" }, "now")),
    h("table", { class: "legend" },
      h("caption", { class: "unseen" }, title),
      h("thead", null, h("tr", null, ["", "now", "mean", "highest"].map((head) => h("th", { scope: "col" }, head || h("span", { class: "unseen" }, "series"))))),
      h("tbody", null, series.map(({ title, kind, values }) => h("tr", null,
        h("th", { scope: "row" }, swatch(kind), ` ${title}`), h("td", null, last(values)), h("td", null, mean(known(values))),
        h("td", null, known(values).length ? format(Math.max(...known(values))) : "–"))))));
}

/** The next of 1, 2, 5, 10, 20, … */
function nice(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value) ?? 10 * power;
}
