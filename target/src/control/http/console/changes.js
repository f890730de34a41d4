// Changes: a dialog with a form, the differences that a dry run reports, and their confirmation.
// It is outside of what is rendered again and again, and has the form until it is closed.

import { h, render, name, prose, bytes } from "/console/dom.js";

const READ_MS = 15000;
const CHANGE_MS = 60000;
const STATES = ["optimized", "non-optimized", "inaccessible", "persistent-loss", "change"];

const dialog = document.querySelector("#change");
/** Where an address needs one: in memory only, until the page is loaded again. */
let token = null;
/** The rendering of the last change. */
let rendered = Promise.resolve();

/** A response, or an error with what the problem document says. */
export async function request(path, options) {
  const response = await fetch(path, { signal: AbortSignal.timeout(options ? CHANGE_MS : READ_MS), ...options });
  if (response.ok) return response;
  const { detail, remedy } = await response.json().catch(() => ({}));
  throw Object.assign(new Error(detail ?? `${path}: ${response.status}`), { status: response.status, remedy });
}

function post(path, body, tag) {
  const headers = { "Content-Type": "application/json" };
  if (tag) headers["If-Match"] = tag;
  if (token) headers.Authorization = `Bearer ${token}`;
  return request(path, { method: "POST", headers, body: JSON.stringify(body) }).then((response) => response.json());
}

async function lowestFree(subsystem) {
  const { namespaces } = await (await request(`/v1/subsystems/${encodeURIComponent(subsystem)}`)).json();
  const used = new Set(namespaces.map(({ nsid }) => nsid));
  let nsid = 1;
  while (used.has(nsid)) nsid += 1;
  return nsid;
}

const of = (subsystem) => ["Subsystem ", name(subsystem)];

/** The actions: what the dialog says and asks for, and the change for these values; or the path of one without a dry run. */
const ACTIONS = {
  add_namespace: ({ subsystem }) => ({
    title: "Add a namespace",
    about: of(subsystem),
    fields: [
      { key: "kind", label: "Select the backing store", options: [["file", "File or block device"], ["ram", "Memory, until the daemon ends"], ["null", "None: data are discarded"]] },
      { key: "path", label: "Enter the path of the file or block device", only: "file", required: true },
      { key: "size", label: "Set the size", hint: "Such as 10GiB. Empty: that of the file or device; with a size, a missing file is created." },
      { key: "nsid", label: "Set the NSID", hint: "Empty: the lowest free one.", type: "number", min: 1 },
    ],
    change: async ({ kind, path, size, nsid }) => ({
      change: "add_namespace", subsystem, nsid: nsid ? Number(nsid) : await lowestFree(subsystem),
      settings: { ...(kind === "file" ? { path } : { kind }), ...(size && { size }) },
    }),
    apply: "Add",
  }),
  resize_namespace: ({ subsystem, nsid, size }) => ({
    title: `Resize namespace ${nsid}`,
    about: [of(subsystem), `, now ${bytes(Number(size))}`],
    fields: [{ key: "size", label: "Set the size", hint: "Such as 20GiB. Enlarge its file or device first.", required: true }],
    change: ({ size }) => ({ change: "set_namespace", subsystem, nsid: Number(nsid), settings: { size } }),
    apply: "Resize",
  }),
  remove_namespace: ({ subsystem, nsid }) => ({
    title: `Remove namespace ${nsid}`,
    about: [of(subsystem), ". Its hosts lose it at once. Its file or device stays."],
    fields: [{ key: "repeated", label: `Repeat the NSID, ${nsid}`, type: "number", required: true, only_value: nsid }],
    change: () => ({ change: "remove_namespace", subsystem, nsid: Number(nsid) }),
    apply: "Remove",
  }),
  allow_host: ({ subsystem, host }) => ({
    title: "Allow a host",
    about: of(subsystem),
    fields: [{ key: "host", label: "Enter the NQN of the host", value: host, required: true }],
    change: ({ host }) => ({ change: "allow_host", subsystem, host }),
    apply: "Allow",
  }),
  deny_host: ({ subsystem, host }) => ({
    title: "Deny a host",
    about: [of(subsystem), ". The host ", name(host), " is disconnected at once, and is refused from then on."],
    fields: [],
    change: () => ({ change: "deny_host", subsystem, host }),
    apply: "Deny",
  }),
  set_ana: ({ listener, address }) => ({
    title: "Set the ANA state",
    about: `Listener ${listener}, ${address}`,
    fields: [
      { key: "group", label: "Set the ANA group", hint: "1 to 64. Empty: all.", type: "number", min: 1 },
      { key: "state", label: "Select the state", options: STATES.map((state) => [state, state]) },
    ],
    change: ({ group, state }) => ({ change: "set_ana", listener: Number(listener), group: group ? Number(group) : null, state }),
    apply: "Set",
  }),
  disconnect: ({ id, host }) => ({
    title: "Disconnect a controller",
    about: ["Host ", name(host), ". It may connect again, and Linux does so by itself."],
    fields: [],
    path: `/v1/controllers/${id}/disconnect`,
    apply: "Disconnect",
  }),
};

const TOKEN = { key: "token", label: "Enter the token", hint: "That of http_token_file. It is forgotten when this page is loaded again.", type: "password", required: true };

function input({ key, options, hint, type, min, value, required }) {
  const attributes = { id: `change-${key}`, name: key, required, "aria-describedby": hint && `change-${key}-hint` };
  if (options) return h("select", attributes, options.map(([value, text]) => h("option", { value }, text)));
  return h("input", { ...attributes, type: type ?? "text", min, value, autocomplete: "off", spellcheck: "false", autocapitalize: "off" });
}

const row = (field) => h("p", null,
  h("label", { for: `change-${field.key}` }, field.label),
  input(field),
  field.hint && h("span", { class: "hint", id: `change-${field.key}-hint` }, field.hint));

/** Hides and disables a row: what is disabled is neither required nor a value. */
function enable(row, is) {
  row.hidden = !is;
  row.querySelector("input, select").disabled = !is;
}

const failure = (error) => h("div", { class: "note bad" },
  h("p", null, h("strong", null, prose(error.message)), "."),
  h("p", null, error.status === 412 ? "Somebody else has changed it, and nothing was changed here: look at the differences again."
    : error.remedy && [prose(error.remedy), "."]));

const found = ({ differences, needs_restart, kept }) => [
  differences.length ? h("pre", { tabindex: "0", "aria-label": "Differences" }, differences.join("\n")) : h("p", null, "Nothing would change."),
  needs_restart.length > 0 && h("p", null, `Only after a restart: ${needs_restart.join(", ")}`),
  !kept && h("p", null, "It does not survive a restart: there is no ", h("code", null, "state_directory"), "."),
];

/** Opens the dialog of an action. `access`: as the status has it; `changed` is called after a change. */
export function open(data, access, changed) {
  const action = ACTIONS[data.action](data);
  const rows = action.fields.map(row);
  const own = row(TOKEN);
  const fields = h("fieldset", null, h("legend", { class: "unseen" }, action.title), rows, own);
  const result = h("div", { tabindex: "-1" });
  const errors = h("div", { role: "alert" });
  const [apply, back, close] = [["submit"], ["button"], ["button"]].map(([type]) => h("button", { type }));
  const form = h("form", { method: "dialog" }, h("h2", { id: "change-title" }, action.title), h("p", null, action.about),
    fields, result, errors, h("p", { class: "buttons" }, apply, back, close));
  let step, tag, change, busy = false;

  const show = (next, ...content) => {
    step = next;
    fields.disabled = step !== "edit";
    enable(own, access === "with_token" && !token);
    apply.hidden = step === "done";
    back.hidden = step !== "confirm";
    apply.textContent = step === "edit" && !action.path ? "Show the differences" : action.apply;
    [back.textContent, close.textContent] = ["Back", step === "done" ? "Close" : "Cancel"];
    render(result, ...content);
    const first = [...fields.querySelectorAll("input, select")].find((node) => !node.disabled && !node.closest("[hidden]"));
    ({ edit: first ?? apply, confirm: result, done: close })[step].focus();
  };
  const steps = {
    async edit(values) {
      const wrong = action.fields.find((field) => field.only_value && values[field.key] !== field.only_value);
      if (wrong) throw new Error(`this is not ${wrong.only_value}`);
      if (values.token) token = values.token;
      if (action.path) return steps.confirm();
      // The differences are those from this configuration: after another change they are refused.
      tag = (await request("/v1/changes")).headers.get("etag");
      change = await action.change(values);
      const planned = await post("/v1/changes", { changes: [change], dry_run: true }, tag);
      show("confirm", h("h3", null, "Differences"), found(planned));
    },
    async confirm() {
      const done = await (action.path ? post(action.path, {}) : post("/v1/changes", { changes: [change] }, tag));
      show("done", h("h3", null, "Done"), found(done));
      rendered = changed();
    },
  };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (busy || step === "done") return;
    busy = true;
    render(errors);
    const values = Object.fromEntries([...new FormData(form)].map(([key, value]) => [key, value.trim()]));
    await steps[step](values).catch((error) => {
      if (error.status === 401) token = null;
      show("edit");
      render(errors, failure(error));
    });
    busy = false;
  });
  back.addEventListener("click", () => show("edit"));
  close.addEventListener("click", () => dialog.close());
  const kind = form.elements.kind;
  const fit = () => rows.forEach((row, at) => enable(row, !action.fields[at].only || action.fields[at].only === kind.value));
  kind?.addEventListener("change", fit);
  dialog.replaceChildren(form);
  dialog.showModal();
  fit();
  show("edit");
}

dialog.addEventListener("close", async () => {
  dialog.replaceChildren();
  // The button that has the focus again may go with what was removed.
  await rendered;
  if (document.activeElement === document.body) document.querySelector("main").focus({ preventScroll: true });
});
