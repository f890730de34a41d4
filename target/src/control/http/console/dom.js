// Elements, numbers and times. Texts of the daemon become text nodes or attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "path", "line"]);

/** An element. Absent children (null, false) are left out; others that are no nodes become text. */
export function h(name, attributes, ...children) {
  const node = DRAWN.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if ((value ?? false) !== false) node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

/** Makes the children of an element equal to others. What is equal remains, with focus, selection and scroll position. */
export function render(node, ...children) {
  align(node, h("div", null, ...children));
}

function align(node, wanted) {
  const next = [...wanted.childNodes];
  while (node.childNodes.length > next.length) node.lastChild.remove();
  next.forEach((child, at) => {
    const old = node.childNodes[at];
    if (!old) return node.append(child);
    if (old.nodeName !== child.nodeName) return old.replaceWith(child);
    if (old.nodeType === Node.TEXT_NODE) {
      if (old.data !== child.data) old.data = child.data;
      return;
    }
    // Whether details are open is up to the reader.
    const ours = (node) => [...node.attributes].filter(({ name }) => name !== "open");
    for (const { name } of ours(old)) if (!child.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of ours(child)) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    align(old, child);
  });
}

/** A table in a region that scrolls. Columns: [title, "number" or ""]; rows: lists of contents; the first names the row. */
export function table(caption, columns, rows) {
  const cells = (row) =>
    row.map((cell, at) => h(at ? "td" : "th", { scope: at ? null : "row", class: columns[at][1] || null }, cell));
  return h("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" },
    h("table", null,
      h("caption", { class: "unseen" }, caption),
      h("thead", null, h("tr", null, columns.map(([title, kind]) => h("th", { scope: "col", class: kind || null }, title)))),
      h("tbody", null, rows.map((row) => h("tr", null, cells(row))))));
}

/** A sentence of the daemon: begins with a capital, and what is in backquotes is code. */
export const prose = (text) =>
  (text ? text[0].toUpperCase() + text.slice(1) : "").split("`").map((part, at) => (at % 2 ? h("code", null, part) : part));
export const list = (sentences) => h("ul", null, sentences.map((sentence) => h("li", null, sentence)));
export const empty = (sentence) => h("p", { class: "hint" }, sentence);
export const name = (text) => h("span", { class: "name" }, text);
/** A button that opens the dialog of an action: `data` is what it is about. */
export const action = (text, what, action, data) => h("button", { type: "button", "aria-label": `${text} ${what}`, "data-action": action,
  ...Object.fromEntries(Object.entries(data).map(([key, value]) => [`data-${key}`, value])) }, text);
export const badge = (kind, text) => h("span", { class: `badge ${kind}` }, text);

function scaled(value, step, units) {
  let at = 0;
  while (value >= step * 0.9995 && at + 1 < units.length) [value, at] = [value / step, at + 1];
  const digits = value === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return value.toFixed(digits) + units[at];
}
export const count = (value) =>
  (Number.isInteger(value) && value < 10000 ? String(value) : scaled(value, 1000, ["", " k", " M", " G"]));
export const rate = (value) => scaled(value, 1000, ["", " k", " M", " G"]);
export const bytes = (value) =>
  (value < 1024 ? `${Math.round(value)} B` : scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"]));
export const duration = (ns) => (ns < 1000 ? `${Math.round(ns)} ns` : scaled(ns / 1000, 1000, [" µs", " ms", " s"]));
export const percent = (share) => `${Math.round(share * 100)} %`;
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export function age(seconds) {
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([size]) => seconds >= size) ?? [1, "s"];
  return `${Math.floor(seconds / size)} ${unit}`;
}

const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const date = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
export function time(ms) {
  const at = new Date(ms);
  const isToday = at.toDateString() === new Date().toDateString();
  return h("time", { datetime: at.toISOString() }, (isToday ? clock : date).format(at));
}
