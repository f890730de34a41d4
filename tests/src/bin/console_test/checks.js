// What holds for the page in every state: evaluated in it. Returns sentences about what does not.
(() => {
  const found = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  const fail = (what, node) => found.push(`${what}: ${node.outerHTML.slice(0, 120)}`);

  // Landmarks, headings, names.
  for (const landmark of ["header", "nav", "main", "footer"]) {
    if (all(landmark).length !== 1) found.push(`${all(landmark).length} of ${landmark}`);
  }
  if (all("h1").length !== 1) found.push("not one h1");
  for (const node of all("section, nav, [role=region]")) {
    const by = node.getAttribute("aria-labelledby");
    if (!(by ? document.getElementById(by)?.textContent : node.getAttribute("aria-label"))) fail("no name", node);
  }
  for (const node of all("nav a")) if (!document.querySelector(node.getAttribute("href"))) fail("leads nowhere", node);
  const ids = all("[id]").map(({ id }) => id);
  if (new Set(ids).size !== ids.length) found.push("an id is there twice");
  // Tables: a caption, headers with a scope, a cell for each header.
  for (const node of all("table")) {
    if (!node.caption?.textContent) fail("no caption", node);
    const columns = node.tHead.rows[0].cells.length;
    for (const cell of node.tHead.rows[0].cells) if (cell.scope !== "col" || !cell.textContent) fail("no header", cell);
    for (const row of node.tBodies[0].rows) {
      if (row.cells.length !== columns || row.cells[0].scope !== "row") fail("not like its header", row);
    }
  }
  for (const node of all("input, select, button")) {
    if (!(node.labels[0]?.textContent || node.getAttribute("aria-label") || node.textContent)) fail("no label", node);
  }
  for (const node of all("[aria-describedby]")) if (!document.getElementById(node.getAttribute("aria-describedby"))) fail("no hint", node);
  for (const node of all("svg")) if (node.getAttribute("aria-hidden") !== "true") fail("read aloud", node);
  // What scrolls can be reached by the keyboard.
  for (const node of all("main *")) {
    const scrolls = node.scrollWidth > node.clientWidth + 1 && /auto|scroll/.test(getComputedStyle(node).overflowX);
    if (scrolls && node.tabIndex < 0) fail("out of reach", node);
  }
  const page = document.scrollingElement;
  if (page.scrollWidth > innerWidth) found.push(`${page.scrollWidth} pixels in a window of ${innerWidth}`);

  // Contrast of every text with what is behind it (WCAG 2, AA: 4.5 to 1, large text 3 to 1).
  const rgb = (text) => text.match(/[\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if ((colour[3] ?? 1) === 1) return colour;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let texts = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
    texts += 1;
    const style = getComputedStyle(node);
    const [light, dark] = [luminance(rgb(style.color)), luminance(behind(node))].sort((a, b) => b - a);
    const needed = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
    const contrast = (light + 0.05) / (dark + 0.05);
    if (contrast < needed) fail(`contrast ${contrast.toFixed(2)}`, node);
  }
  if (texts < 50) found.push(`only ${texts} texts`);
  return found;
})()
