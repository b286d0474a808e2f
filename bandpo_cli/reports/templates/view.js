"use strict";
/* Text reaches the page through textContent only. Values per token stay in typed arrays until they are shown. */
const data = JSON.parse(document.getElementById("data").textContent);
const hasTokens = data.sources.some((source) => source.texts);
const byId = (id) => document.getElementById(id);
let selected = null; // the element of a token

function element(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

function drawing(name, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const isKnown = (value) => value !== undefined && value !== null && !Number.isNaN(value);
const show = (value, digits = 4) =>
  !isKnown(value) ? "–" : value === Infinity ? "∞" : String(Number(value.toPrecision(digits)));
const signed = (value) => (value > 0 ? "+" : "") + show(value, 3).replace("-", "−");
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

/* Control characters get a visible form. */
const visible = (text) => text.replace(/[\u0000-\u0009\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)));

/* ---- parts: texts and values per token, in this file or in files beside it ---- */

const parts = [];

function half(bits) {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023, sign = bits & 32768 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
}

function decode([kind, text]) {
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  const type = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array, f2: Uint16Array }[kind];
  const values = new type(bytes.buffer);
  return kind === "f2" ? (i) => half(values[i]) : (i) => values[i];
}

function prepare(part) {
  for (const side of part.sides) {
    for (const name in side.columns ?? {}) side.columns[name] = decode(side.columns[name]);
  }
  return part;
}

function getPart(number) {
  if (parts[number]) return parts[number].promise;
  const waiting = (parts[number] = {});
  waiting.promise = new Promise((resolve, reject) => {
    waiting.resolve = (part) => resolve(prepare(part));
    const inside = byId(`part-${number}`);
    if (inside) return waiting.resolve(JSON.parse(inside.textContent));
    const script = element("script", { src: data.files[number] });
    script.onerror = () => reject(new Error(`${data.files[number]} is missing; keep the folder beside this page`));
    document.head.append(script);
  });
  return waiting.promise;
}
globalThis.loadPart = (number, part) => parts[number].resolve(part);

/* ---- the values of a token ---- */

const places = data.sources.map(() => ({ part: -1, token: 0, completion: 0, all: 0 })), counts = [];
data.groups.forEach((group, index) => {
  group.index = index;
  group.sides.forEach((side, s) => {
    const place = places[s], source = data.sources[s];
    if (place.part !== group.part) Object.assign(place, { part: group.part, token: 0, completion: 0 });
    side.forEach((completion, number) => {
      Object.assign(completion, { group, side: s, number, start: place.token, inPart: place.completion++ });
      completion.clipped = source.clipped?.[place.all] ?? 0;
      completion.lowest = source.lowest?.[place.all++] ?? 0;
      place.token += completion.length;
    });
  });
  group.inPart = counts[group.part] = (counts[group.part] ?? -1) + 1;
});

function tokenOf(part, completion, index) {
  const columns = part.sides[completion.side].columns, at = completion.start + index, values = {};
  for (const name in columns) values[name] = columns[name](at);
  values.text = data.sources[completion.side].texts[values.text_index];
  const { advantage } = completion, ratio = values.ratio;
  values.advantage = advantage;
  values.fixed = values.importance !== 0 && ((advantage > 0 && ratio > 1 + data.clip) || (advantage < 0 && ratio < 1 - data.clip));
  return values;
}

const both = (value, scale) => [value > 0 ? "more" : "less", Math.min(1, Math.abs(value) / scale)];
const interval = `${show(1 - data.clip)} – ${show(1 + data.clip)}`;
const QUANTITIES = {
  ratio: { name: "ratio π/π_old", ends: ["≤ 0.5", "1", "≥ 2"], color: (t) => isKnown(t.ratio) && both(Math.log2(t.ratio), 1) },
  clipped: {
    name: "clipped, and by which bound",
    swatches: { more: "by the upper bound", less: "by the lower bound" },
    color: (t) => isKnown(t.ratio) && [["", "more", "less"][t.clipped], 1],
  },
  fixed: {
    name: `against the fixed clip ${interval}`,
    swatches: { only: "clipped by this method only", other: "by the fixed clip only", more: "by both" },
    color: (t) => isKnown(t.ratio) && [t.clipped ? (t.fixed ? "more" : "only") : t.fixed ? "other" : "", 1],
  },
  old_logprob: { name: "log-prob under π_old", ends: ["0", "", "≤ −4 nats"], color: (t) => ["less", Math.min(1, -t.old_logprob / 4)] },
  advantage: { name: "advantage", ends: ["≤ −2", "0", "≥ 2"], color: (t) => isKnown(t.advantage) && both(t.advantage, 2) },
  entropy: { name: "entropy of π_old", ends: ["0", "", "≥ 2 nats"], color: (t) => isKnown(t.entropy) && ["less", Math.min(1, t.entropy / 2)] },
  importance: { name: "importance weight", ends: ["≤ 0.5", "1", "≥ 2"], color: (t) => isKnown(t.importance) && both(Math.log2(t.importance), 1) },
};

function paint(span, token) {
  const [kind, amount] = QUANTITIES[byId("quantity").value].color(token) || ["unknown", 0];
  span.className = `t ${kind}${token.clipped ? ` at${token.clipped}` : ""}${span === selected ? " selected" : ""}`;
  span.style.setProperty("--a", amount.toFixed(2));
}

/* ---- groups and completions ---- */

const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
const rewards = (side) => side.map((completion) => completion.reward).filter(isKnown);

function heading(group) {
  const facts = group.sides.map((side, s) => {
    const right = side.filter((completion) => completion.correct).length;
    const name = data.sources.length > 1 ? `${"AB"[s]}: ` : "";
    return `${name}${right} of ${side.length} correct, mean reward ${show(mean(rewards(side)), 3)}`;
  });
  const badges = group.equal.flatMap((equal, s) => equal ? [data.sources.length > 1 ? `zero variance in ${"AB"[s]}` : "zero variance"] : []);
  return element("header", {}, element("h2", { textContent: visible(group.name) }),
    element("span", { className: "excerpt muted", textContent: visible(group.question) }),
    element("span", { className: "muted", textContent: facts.join(" · ") }),
    ...badges.map((text) => element("span", { className: "badge", textContent: text })));
}

function card(part, completion) {
  const { correct, verdict, reward, advantage, length, truncated, clipped, side } = completion;
  const facts = [isKnown(reward) ? `reward ${show(reward, 3)}` : "no reward"];
  if (isKnown(advantage)) facts.push(`advantage ${signed(advantage)}`);
  if (length) facts.push(plural(length, "token"));
  if (truncated) facts.push("truncated");
  if (clipped) facts.push(`${clipped} clipped`);
  const title = element("h4", {}, element("b", { textContent: `${correct ? "✓" : "✗"} ${visible(verdict)}` }), ...facts.map((fact) => `\u00a0· ${fact.replaceAll(" ", "\u00a0")}`));
  const body = element("p", { className: "tokens" });
  const values = part.sides[side];
  if (values.columns) {
    body.setAttribute("role", "group");
    body.setAttribute("aria-label", `Tokens of completion ${completion.number + 1}: ${verdict}, ${facts.join(", ")}`);
    for (let index = 0; index < length; index++) {
      const token = tokenOf(part, completion, index);
      const span = element("span", { textContent: visible(token.text) || "∅" });
      if (token.text.includes("\n")) span.prepend(element("i", { textContent: "↵" }));
      paint(span, token);
      body.append(span);
    }
    if (body.firstChild) body.firstChild.tabIndex = 0;
    Object.assign(body, { inside: part, completion }); // Element.part is taken
  } else {
    body.className = "text";
    body.textContent = visible(values.texts[completion.inPart]);
  }
  return element("article", { className: `completion${correct ? " correct" : ""}` }, title, body);
}

async function fill(section) {
  const { group, shown } = section;
  if (section.body || !shown) return section.body;
  const body = (section.body = element("div"));
  section.append(body);
  section.style.minHeight = "";
  let part;
  try {
    part = await getPart(group.part);
  } catch (error) {
    body.append(element("p", { textContent: error.message }));
    return body;
  }
  const reference = part.references[group.inPart];
  const prompt = element("details", { className: "plain" }, element("summary", { textContent: `prompt${reference ? ` · reference answer ${visible(reference)}` : ""}` }),
    element("div", { className: "prompt", textContent: visible(part.prompts[group.inPart]) }));
  const sides = element("div", { className: "sides" });
  sides.style.setProperty("--sides", shown.length);
  shown.forEach((completions, s) => {
    const average = mean(completions.map((completion) => completion.length || 400));
    const cards = element("div", { className: "cards" }, ...completions.map((completion) => card(part, completion)));
    cards.style.setProperty("--card", average < 40 ? "17rem" : "26rem");
    const title = shown.length > 1 ? [element("h3", { textContent: `${"AB"[s]}: ${data.sources[s].name}` })] : [];
    sides.append(element("div", { className: "side" }, ...title, cards));
  });
  body.append(prompt, sides);
  return body;
}

/* Approximate height of a group, so that the window does not jump over many groups without a body. */
function estimate(shown) {
  const columns = Math.max(1, Math.floor(byId("groups").clientWidth / shown.length / 280));
  const heights = shown.map((side) => side.reduce((sum, { length }) => sum + 70 + Math.min(416, 26 * Math.ceil((length || 100) / 12)), 0));
  return 80 + Math.max(...heights) / columns;
}

/* A group has a body only while it is near the window. */
const near = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) fill(target);
    else if (target.body?.childElementCount && !target.contains(document.activeElement)) {
      target.style.minHeight = `${target.offsetHeight}px`;
      target.body.remove();
      target.body = null;
    }
  }
}, { rootMargin: "1200px 0px" });

const sections = data.groups.map((group) => Object.assign(element("section", { className: "group" }, heading(group)), { group }));

function update() {
  const [wrong, truncated] = ["wrong", "truncated"].map((id) => byId(id).checked);
  const [equal, order, search] = ["equal", "order", "search"].map((id) => byId(id).value);
  const keep = (completion) => (!wrong || !completion.correct) && (!truncated || completion.truncated);
  near.disconnect();
  let count = 0;
  const visibleSections = sections.filter((section) => {
    const { group } = section, isEqual = group.equal.some(Boolean);
    section.shown = group.sides.map((side) => side.filter(keep));
    const all = section.shown.flat();
    section.lowest = Math.min(0, ...all.map((completion) => completion.lowest));
    section.reward = mean(rewards(group.sides.flat())) ?? Infinity;
    if (order === "clipped") for (const side of section.shown) side.sort((a, b) => a.lowest - b.lowest);
    section.body?.remove();
    section.body = null;
    section.style.minHeight = `${estimate(section.shown)}px`;
    section.style.containIntrinsicBlockSize = `auto ${section.style.minHeight}`;
    const text = `${group.name} ${group.question}`.toLowerCase();
    const isShown = all.length && (equal === "all" || isEqual === (equal === "only")) && text.includes(search.toLowerCase());
    count += isShown ? all.length : 0;
    return isShown;
  });
  const key = { sampled: () => 0, clipped: (section) => section.lowest, reward: (section) => section.reward }[order];
  visibleSections.sort((a, b) => key(a) - key(b) || 0);
  byId("groups").replaceChildren(...visibleSections);
  byId("count").textContent = `${plural(visibleSections.length, "problem")}, ${plural(count, "completion")}`;
  for (const section of visibleSections) near.observe(section);
}

function repaint() {
  for (const body of document.querySelectorAll(".tokens")) {
    [...body.children].forEach((span, index) => paint(span, tokenOf(body.inside, body.completion, index)));
  }
  const { name, ends, swatches } = QUANTITIES[byId("quantity").value];
  const legend = byId("legend");
  legend.replaceChildren(element("b", { textContent: name }));
  if (ends) {
    const bar = element("div", { className: "scale" });
    const color = (kind) => `color-mix(in srgb, var(--${kind}) var(--full), transparent)`;
    bar.style.background = `linear-gradient(to right, ${ends[1] ? `${color("less")}, transparent, ${color("more")}` : `transparent, ${color("less")}`})`;
    legend.append(bar, element("div", { className: "ends" }, ...ends.map((text) => element("span", { textContent: text }))));
  }
  for (const [kind, text] of Object.entries(swatches ?? {})) {
    const swatch = element("span", { className: `t ${kind}`, textContent: "token" });
    swatch.style.setProperty("--a", 1);
    legend.append(element("div", { className: "swatches" }, swatch, text));
  }
  legend.append(element("div", { className: "swatches" }, element("span", { className: "t at1", textContent: "token" }), "upper, ",
    element("span", { className: "t at2", textContent: "token" }), "lower bound clips it"));
}

/* ---- the selected token ---- */

const position = (ratio) => 100 + 100 * Math.max(-1, Math.min(1, Math.log2(Math.max(ratio, 1e-9)) / 2));

function numberLine(token) {
  const bar = (name, low, high, y, height) => drawing("rect", { class: name, x: position(low), y, width: Math.max(1, position(high) - position(low)), height });
  const x = position(token.ratio), svg = drawing("svg", { viewBox: "-8 0 216 44", role: "img", "aria-label": "the ratio and the intervals, from 1/4 to 4" });
  if (isKnown(token.lower)) svg.append(bar("interval", token.lower, token.upper, 12, 9));
  svg.append(bar("fixed", 1 - data.clip, 1 + data.clip, 23, 5), drawing("line", { class: "axis", x1: 0, x2: 200, y1: 31, y2: 31 }));
  for (const tick of [0.25, 0.5, 1, 2, 4]) svg.append(drawing("text", { x: position(tick), y: 43, "text-anchor": "middle" }, show(tick)));
  if (isKnown(token.ratio)) svg.append(drawing("path", { class: "ratio", d: `M${x - 5} 0h10l-4 8v22h-2v-22z` }));
  return svg;
}

function select(span) {
  const body = span?.parentElement;
  if (!body?.completion) return;
  selected?.classList.remove("selected");
  selected = span;
  span.classList.add("selected");
  const index = [...body.children].indexOf(span), { completion } = body, token = tokenOf(body.inside, completion, index);
  const range = isKnown(token.lower) ? `[${show(token.lower, 3)}, ${show(token.upper, 3)}]` : "none";
  const yes = ["not clipped", "clipped, upper bound", "clipped, lower bound"];
  const rows = {
    position: `${index + 1} of ${completion.length}`,
    "π_old": show(Math.exp(token.old_logprob), 3),
    "log π_old": `${show(token.old_logprob)} nats`.replace("-", "−"),
    ratio: isKnown(token.ratio) ? show(token.ratio) : "not trained on",
    interval: range,
    advantage: isKnown(token.advantage) ? signed(token.advantage) : "–",
    "this method": isKnown(token.ratio) ? yes[token.clipped] : "–",
    [`fixed clip ${data.clip}`]: isKnown(token.ratio) ? (token.fixed ? "would clip" : "would not clip") : "–",
    entropy: isKnown(token.entropy) ? `${show(token.entropy, 3)} nats` : "–",
    importance: isKnown(token.importance) ? show(token.importance, 3) : "–",
  };
  const list = element("dl", {}, ...Object.entries(rows).flatMap(([name, value]) =>
    [element("dt", { textContent: name }), element("dd", { textContent: value })]));
  const close = element("button", { id: "close", className: "link", type: "button", textContent: "close", onclick: deselect });
  byId("token").replaceChildren(close, element("code", { textContent: JSON.stringify(token.text) }), list);
  if (isKnown(token.ratio)) {
    const bars = [["interval", "▬ interval"], ["fixed", `▬ fixed clip ${interval}`], ["ratio", "▼ ratio"]];
    byId("token").append(numberLine(token), element("div", { className: "ends bars" }, ...bars.map(([className, textContent]) => element("span", { className, textContent }))));
  }
}

function deselect() {
  selected?.classList.remove("selected");
  selected = null;
  byId("token").replaceChildren();
}

for (const type of ["pointerover", "focusin", "click"]) {
  byId("groups").addEventListener(type, (event) => {
    const span = event.target.closest(".t");
    if (span && (type !== "pointerover" || event.pointerType !== "touch")) select(span);
  });
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return deselect();
  const span = event.target.closest?.(".tokens > .t");
  if (!span || event.ctrlKey || event.metaKey || event.altKey) return;
  const spans = [...span.parentElement.children], at = spans.indexOf(span);
  const isClipped = (other) => other.matches(".at1, .at2");
  const next = {
    ArrowRight: () => spans[at + 1], ArrowLeft: () => spans[at - 1], Home: () => spans[0], End: () => spans.at(-1),
    ArrowDown: () => spans.slice(at + 1).find(isClipped), ArrowUp: () => spans.slice(0, at).findLast(isClipped),
  }[event.key];
  if (!next) return;
  event.preventDefault();
  focusToken(next() ?? span);
});

function focusToken(span, block = "nearest") {
  for (const other of span.parentElement.querySelectorAll("[tabindex]")) other.removeAttribute("tabindex");
  span.tabIndex = 0;
  span.focus({ preventScroll: true });
  span.scrollIntoView({ block, behavior: "instant" });
  select(span);
}

async function goTo(completion, index) {
  const section = sections[completion.group.index];
  if (!section.isConnected || !section.shown.flat().includes(completion)) {
    for (const id of ["wrong", "truncated"]) byId(id).checked = false;
    byId("equal").value = "all";
    byId("search").value = "";
    update();
  }
  section.scrollIntoView({ behavior: "instant" });
  await fill(section);
  await getPart(completion.group.part);
  const body = [...section.querySelectorAll(".tokens")].find((other) => other.completion === completion);
  if (!body) return;
  focusToken(body.children[index], "center");
  setTimeout(() => body.children[index].scrollIntoView({ block: "center" }), 300); // the groups above have their heights now
}

/* ---- curves and tables ---- */

function curves() {
  const names = [...new Set(data.sources.flatMap((source) => source.curves.map((curve) => curve.name)))];
  for (const name of names) {
    const lines = data.sources.map((source) => source.curves.find((curve) => curve.name === name));
    const [places, values] = ["places", "values"].map((key) => lines.flatMap((line) => line?.[key] ?? []));
    const low = Math.min(...values), high = Math.max(...values), last = Math.max(...places), first = Math.min(...places);
    const x = (place) => (100 * (place - first)) / (last - first || 1), y = (value) => 38 - (36 * (value - low)) / (high - low || 1);
    const place = data.sources[0].place, svg = drawing("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": `${name} over ${data.axis} ${show(first, 6)} to ${show(last, 6)}, from ${show(low, 3)} to ${show(high, 3)}` });
    for (const line of lines) {
      svg.append(drawing("path", { d: (line?.places ?? []).map((place, i) => `${i ? "L" : "M"}${x(place).toFixed(2)} ${y(line.values[i]).toFixed(2)}`).join("") }));
    }
    svg.append(drawing("line", { x1: x(place), x2: x(place), y1: 0, y2: 40 }));
    const caption = element("figcaption", {}, data.axis === "steps" ? name : `${name} over ${data.axis}`, element("span", { className: "range", textContent: `${show(low, 2)} – ${show(high, 2)}` }));
    byId("curves").append(element("figure", {}, caption, svg));
  }
}

function differences(source, s) {
  const flat = data.groups.flatMap((group) => group.sides[s]);
  const table = (rows) => {
    const equal = Object.groupBy(rows, ([owner, , ...values]) => JSON.stringify([flat[owner].group.index, values]));
    const body = element("tbody", {}, ...Object.values(equal).map((members) => {
      const [owner, index, text, logprob, ratio, lower, upper, advantage] = members[0];
      const link = element("button", { type: "button", textContent: flat[owner].group.name, onclick: () => goTo(flat[owner], index) });
      const range = isKnown(lower) ? `${show(lower, 3)} – ${show(upper ?? Infinity, 3)}` : "–";
      const cells = [show(Math.exp(logprob), 3), show(ratio), range, signed(advantage)];
      return element("tr", {}, element("td", {}, element("code", { textContent: JSON.stringify(source.texts[text]) })),
        ...cells.map((value) => element("td", { textContent: value })), element("td", {}, link, members.length > 1 ? ` × ${members.length}` : ""));
    }));
    const heads = ["token", "π_old", "ratio", "interval", "advantage", "problem"];
    const scroll = element("div", { className: "scroll", tabIndex: 0 }, element("table", {},
      element("thead", {}, element("tr", {}, ...heads.map((text) => element("th", { scope: "col", textContent: text })))), body));
    return rows.length ? scroll : element("p", { className: "muted", textContent: "none" });
  };
  const about = { method: `Clipped by ${source.method}, not by the fixed clip ${interval}`, fixed: `Not clipped by ${source.method}, but by the fixed clip` };
  const tables = Object.entries(source.differences).map(([name, { count, rows }]) => {
    const limit = rows.length < count ? `; the ${rows.length} least probable` : "";
    return element("div", {}, element("p", { textContent: `${about[name]}: ${plural(count, "token")}${limit}` }), table(rows));
  });
  const counts = Object.values(source.differences).map(({ count }) => count.toLocaleString("en"));
  const name = data.sources.length > 1 ? `${"AB"[s]}, ${source.method}: ` : "";
  const summary = element("summary", { textContent: `${name}${counts[0]} of ${plural(source.tokens, "token")} clipped that the fixed clip keeps, ${counts[1]} kept that it clips` });
  return element("details", { open: innerWidth > 1000 && data.sources.length === 1 }, summary, element("div", { className: "tables" }, ...tables));
}

curves();
data.sources.forEach((source, s) => source.differences && byId("differences").append(differences(source, s)));
for (const [value, { name }] of Object.entries(QUANTITIES)) byId("quantity").append(element("option", { value, textContent: name }));
byId("order").value = hasTokens ? "clipped" : "sampled";
byId("quantity").addEventListener("change", repaint);
for (const id of ["order", "equal", "wrong", "truncated"]) byId(id).addEventListener("change", update);
byId("search").addEventListener("input", update);
byId("controls").addEventListener("submit", (event) => event.preventDefault());

/* #quantity=entropy&wrong=1&token=GROUP.SIDE.COMPLETION.TOKEN sets the controls and selects a token. */
const given = new URLSearchParams(location.hash.slice(1));
for (const control of byId("controls").elements) {
  const value = given.get(control.id);
  if (value !== null) Object.assign(control, control.type === "checkbox" ? { checked: true } : { value });
}
if (hasTokens) repaint();
else for (const node of [byId("colors"), document.querySelector("aside")]) node.remove();
update();
const [g, side, number, index] = (given.get("token") ?? "").split(".").map(Number);
const target = data.groups[g]?.sides[side]?.[number];
if (target) goTo(target, index);
document.documentElement.dataset.ready = "true";
