"use strict";
// The browser of questions. The hash of the address alone decides what is shown:
// #q=words&filter=forgotten&order=replays&question=0a1b2c3d4e5f. Texts are set by textContent only.

const ROW = 30; // pixels of a line of the list
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
const whole = (n) => n.toLocaleString("en");
const fixed = (x, digits = 2) => (x === null || x === undefined ? "–" : x.toFixed(digits).replace("-", "−"));
const percent = (x) => `${Math.round(100 * x)} %`;
let data; // what run_page.py packed
let lives; // lives[from[q] … from[q + 1]]: the events of question q, in the order of steps
let from;
let about; // of each question: replays, accuracy (latest; −1 unknown), best of its groups, lucky, retired (now), returned
let found = []; // the questions that pass the filter and the search, in order
let texts; // of each question in small letters, for the search
let colouring = "now";

const FILTERS = {
  all: ["all", () => true],
  stored: ["stored", (q) => data.stored[q] > 0],
  replayed: ["replayed", (q) => about[q].replays > 0],
  retired: ["retired", (q) => about[q].retired],
  returned: ["returned", (q) => about[q].returned],
  forgotten: ["forgotten", (q) => about[q].best > 0 && about[q].accuracy === 0],
  lucky: ["lucky guesses", (q) => about[q].lucky > 0],
  logged: ["with logged rollouts", (q) => q in data.logged],
};
const ORDERS = {
  replays: ["most replays", (q) => -about[q].replays],
  low: ["lowest accuracy", (q) => (about[q].accuracy < 0 ? 2 : about[q].accuracy)],
  stored: ["most stored", (q) => -data.stored[q]],
  lucky: ["most lucky guesses", (q) => -about[q].lucky],
  same: ["least diverse", (q) => (data.distinct[q] < 0 ? 2 : data.distinct[q])],
  first: ["first seen", (q) => q],
};

function make(tag, text, attributes = {}, parent = null) {
  const node = attributes.svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) if (name !== "svg") node.setAttribute(name, value);
  if (parent) parent.append(node);
  return node;
}

async function unpack() {
  const bytes = Uint8Array.from(atob(JSON.parse(byId("data").textContent)), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text(), (_, v) => (typeof v === "string" ? v.toWellFormed() : v));
}

function prepare() {
  if (!data.checked) for (const choices of [FILTERS, ORDERS]) delete choices.lucky;
  const { q, kind, correct, graded, lucky, replay } = data.events;
  const n = data.ids.length;
  from = new Int32Array(n + 1);
  for (const one of q) from[one + 1] += 1;
  for (let i = 0; i < n; i += 1) from[i + 1] += from[i];
  const at = from.slice();
  lives = new Int32Array(q.length);
  q.forEach((one, i) => (lives[at[one]++] = i));
  const [retired, returned, leftOut] = ["retired", "returned", "left_out"].map((name) => data.kinds.indexOf(name));
  about = data.ids.map((_, i) => ({ replays: 0, accuracy: data.accuracy[i], best: -1, lucky: 0, retired: data.retired[i] >= 0, returned: false }));
  for (const i of lives) {
    const one = about[q[i]];
    one.replays += replay[i] >= 0;
    one.lucky += lucky[i];
    if (kind[i] === retired) one.retired = true;
    if (kind[i] === returned) [one.retired, one.returned] = [false, true];
    if (kind[i] <= leftOut && graded[i] > 0) {
      one.accuracy = correct[i] / graded[i];
      one.best = Math.max(one.best, one.accuracy);
    }
  }
  texts = data.ids.map((id, i) => `${id} ${data.prompts[i]}`.toLowerCase());
}

// -- the list ---------------------------------------------------------------------------------------------------------

let state = {};
function read() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const pick = (name, among) => (Object.hasOwn(among, asked.get(name)) ? asked.get(name) : Object.keys(among)[0]);
  state = { q: asked.get("q") ?? "", filter: pick("filter", FILTERS), order: pick("order", ORDERS), question: asked.get("question") ?? "" };
}

function change(what) {
  const hash = new URLSearchParams();
  for (const [name, value] of Object.entries({ ...state, ...what })) if (value !== "") hash.set(name, value);
  history.replaceState(null, "", `#${hash}`);
  show();
}

function show() {
  const before = { ...state };
  read();
  const changed = ["q", "filter", "order"].some((name) => before[name] !== state[name]);
  if (changed) {
    if (byId("query").value !== state.q) byId("query").value = state.q;
    byId("order").value = state.order;
    for (const button of byId("filters").children) button.setAttribute("aria-pressed", button.dataset.filter === state.filter);
    const words = state.q.toLowerCase();
    const passes = FILTERS[state.filter][1];
    const [, key] = ORDERS[state.order];
    found = data.ids.map((_, q) => q).filter((q) => passes(q) && (words === "" || texts[q].includes(words)));
    found = found.map((q) => [key(q), q]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map((pair) => pair[1]);
    byId("shown").textContent = `${whole(found.length)} of ${whole(data.ids.length)} questions; in the list: latest accuracy, replays`;
    byId("space").style.height = `${found.length * ROW}px`;
    byId("scroller").scrollTop = 0;
  }
  let chosen = data.ids.indexOf(state.question);
  if (chosen < 0) chosen = found[0] ?? -1;
  if (changed) byId("scroller").scrollTop = Math.max(0, found.indexOf(chosen) * ROW - 200);
  draw(chosen);
  byId("question").hidden = chosen < 0;
  if (chosen >= 0) detail(chosen);
}

function draw(chosen) {
  const scroller = byId("scroller");
  const first = Math.max(0, Math.floor(scroller.scrollTop / ROW) - 5);
  const shown = found.slice(first, first + Math.ceil(scroller.clientHeight / ROW) + 10);
  byId("window").style.top = `${first * ROW}px`;
  byId("window").dataset.chosen = chosen;
  byId("window").replaceChildren(...shown.map((q) => {
    const button = make("button", "", { type: "button", role: "option", "aria-selected": q === Number(chosen), title: data.prompts[q] });
    make("span", data.prompts[q] || data.ids[q], {}, button);
    make("small", about[q].accuracy < 0 ? "–" : percent(about[q].accuracy), {}, button);
    make("small", whole(about[q].replays), {}, button);
    button.addEventListener("click", () => change({ question: data.ids[q] }));
    return button;
  }));
}

function turn(by) {
  const next = found[found.indexOf(Number(byId("window").dataset.chosen)) + by];
  if (next === undefined) return;
  change({ question: data.ids[next] });
  const top = found.indexOf(next) * ROW;
  const scroller = byId("scroller");
  if (top < scroller.scrollTop || top > scroller.scrollTop + scroller.clientHeight - ROW) scroller.scrollTop = top - 200;
}

// -- a question -------------------------------------------------------------------------------------------------------

function events(q) {
  const e = data.events;
  return Array.from(lives.subarray(from[q], from[q + 1]), (i) => {
    const r = e.replay[i];
    const replay = r < 0 ? null : Object.fromEntries(Object.entries(data.replays).map(([name, values]) => [name, values[r]]));
    if (replay) replay.weight = Math.exp(replay.log_weight);
    return { step: e.step[i], kind: data.kinds[e.kind[i]], correct: e.correct[i], graded: e.graded[i], lucky: e.lucky[i], stored: e.stored[i], replay };
  });
}

const COLOURS = { fresh: "m2", replayed: "m1", injected: "m3", continued: "m5", left_out: "m7" };

function detail(q) {
  const life = events(q);
  const one = about[q];
  byId("name").textContent = data.ids[q];
  const logged = data.logged[q] ?? [];
  byId("prompt").textContent = logged[0]?.prompt || data.prompts[q] || "The prompt is not known: neither the run's questions nor its logged rollouts have it.";
  const facts = [
    ["latest accuracy", one.accuracy < 0 ? "–" : percent(one.accuracy) + (one.best > 0 && one.accuracy === 0 ? ", forgotten" : "")],
    ["replays", whole(one.replays)],
    ["stored now", data.bufferStep === null ? "–" : whole(data.stored[q])],
    ["diversity of these", data.distinct[q] < 0 ? "–" : fixed(data.distinct[q])],
    ["lucky guesses", data.checked ? whole(one.lucky) : "– (nothing checks the reasoning)"],
    ["state", one.retired ? "retired" : data.stored[q] ? (one.accuracy === 0 ? "stored, unsolved" : "candidate") : "nothing stored"],
  ];
  if (data.measured[q] != null) facts.push(["accuracy before the run", percent(data.measured[q])]);
  if (logged.length || data.answers[q]) facts.push(["gold answer", logged[0]?.answer ?? data.answers[q]]);
  byId("facts").replaceChildren(...facts.map(([name, value]) => {
    const pair = make("div", "");
    pair.append(make("dt", name), make("dd", value));
    return pair;
  }));
  byId("life").replaceChildren(lifeline(life));
  byId("rows").replaceChildren(...life.map((e) => {
    const row = make("tr", "");
    const r = e.replay;
    const cells = [e.step, e.kind.replace("_", " "), e.graded ? `${e.correct}/${e.graded}` : "", e.lucky || "", e.stored || "", r ? `${r.place + 1} of ${r.of}` : "", r ? r.age : "", r ? fixed(r.entropy) : "", r ? fixed(r.weight) : ""];
    cells.forEach((cell, i) => make("td", String(cell), { class: i < 2 ? "left" : "num" }, row));
    return row;
  }));
  byId("logged").replaceChildren(...answers(logged));
  byId("stored").replaceChildren(...inBuffer(q));
}

function lifeline(life) {
  const [width, left, right] = [820, 66, 12];
  const [a, b] = data.steps;
  const x = (step) => left + ((step - a) / Math.max(1, b - a)) * (width - left - right);
  const svg = make("svg", "", { svg: 1, viewBox: `0 0 ${width} 268`, role: "img", "aria-label": "the question's life by step" });
  const put = (tag, attributes, words = "") => {
    const node = make(tag, "", { svg: 1, ...attributes }, svg);
    if (words) make("title", words, { svg: 1 }, node);
    return node;
  };
  const label = (text, at, y, anchor = "end") => make("text", text, { svg: 1, x: at, y, "text-anchor": anchor }, svg);
  const ages = life.flatMap((e) => (e.replay ? [e.replay.age] : []));
  const logs = life.flatMap((e) => (e.replay ? [Math.abs(e.replay.log_weight)] : []));
  const [oldest, widest] = [Math.max(1, ...ages), Math.max(0.1, ...logs)];
  const accuracy = (value) => 128 - 112 * value;
  const weight = (log) => 220 - (20 * log) / widest;
  let out = null; // since when it is retired
  const gone = (until) => put("rect", { class: "gone", x: x(out), y: 10, width: Math.max(2, x(until) - x(out)), height: 232 }, `retired from step ${out} to ${until}`);
  for (const e of life) {
    if (e.kind === "returned" && out !== null) (gone(e.step), (out = null));
    if (e.kind === "retired") out = e.step;
  }
  if (out !== null) gone(b);
  for (const [value, text] of [[0, "0 %"], [0.5, "50 %"], [1, "100 %"]]) {
    put("line", { class: value ? "grid" : "axis", x1: left, x2: width - right, y1: accuracy(value), y2: accuracy(value) });
    label(text, left - 8, accuracy(value) + 4);
  }
  label("accuracy", left, 8, "start");
  put("line", { class: "axis", x1: left, x2: width - right, y1: 180, y2: 180 });
  label(`age ≤ ${oldest}`, left - 8, 166);
  put("line", { class: "axis", x1: left, x2: width - right, y1: 220, y2: 220 });
  label(`×${fixed(Math.exp(widest))}`, left - 8, 204);
  label("weight 1", left - 8, 224);
  label(`×${fixed(Math.exp(-widest))}`, left - 8, 243);
  label(`step ${a}`, left, 262, "start");
  label(`step ${b}`, width - right, 262);
  for (const e of life) {
    const where = `step ${e.step}: ${e.kind.replace("_", " ")}`;
    if (e.kind === "evicted") put("line", { class: "end", x1: x(e.step), x2: x(e.step), y1: 136, y2: 144 }, `${where}: a stored trajectory`);
    if (!(e.kind in COLOURS)) continue;
    const m = COLOURS[e.kind];
    if (e.replay) {
      const r = e.replay;
      const words = `${where}, number ${r.place + 1} of ${r.of}; age ${r.age}, weight ${fixed(r.weight)}, entropy ${fixed(r.entropy)}${r.sound === false ? "; its reasoning does not hold" : ""}`;
      put("line", { class: `bar ${m}`, x1: x(e.step), x2: x(e.step), y1: 180, y2: 180 - 30 * (r.age / oldest) - 1 }, words);
      put("circle", { class: `dot ${m}`, cx: x(e.step), cy: weight(r.log_weight), r: 3 }, words);
    }
    if (e.graded) put("circle", { class: `dot ${m}${e.lucky ? " lucky" : ""}`, cx: x(e.step), cy: accuracy(e.correct / e.graded), r: 4.5 }, `${where}, ${e.correct} of ${e.graded} correct${e.lucky ? `, ${e.lucky} of them lucky` : ""}`);
  }
  return svg;
}

// -- texts ------------------------------------------------------------------------------------------------------------

function answers(logged) {
  if (!logged.length) return [];
  const title = make("h3", "Logged rollouts ");
  make("small", "newest first; the chosen one is marked", {}, title);
  const controls = make("div", "", { class: "controls" });
  const label = make("label", "Colours ", {}, controls);
  const select = make("select", "", { id: "colouring" }, label);
  for (const [value, text] of [["now", "probability when last trained on"], ["then", "probability when stored"], ["change", "change since stored"]]) make("option", text, { value }, select);
  select.value = colouring;
  select.addEventListener("change", () => {
    colouring = select.value;
    for (const node of document.querySelectorAll("#logged .tokens")) node.colour();
  });
  const scale = make("span", "", { class: "scale" }, controls);
  scale.append("1", make("i", "", { style: "background: linear-gradient(90deg, transparent, color-mix(in srgb, var(--wrong) 85%, transparent))" }), "0; for a change: less likely ");
  scale.append(make("i", "", { style: "background: linear-gradient(90deg, color-mix(in srgb, var(--wrong) 85%, transparent), transparent, color-mix(in srgb, var(--correct) 85%, transparent))" }), "more likely");
  return [title, controls, ...logged.flatMap((row) => [make("h3", `Step ${row.step}, ${row.as}`), ...row.responses.map(answer)])];
}

function answer(r) {
  const box = make("div", "", { class: `answer ${r.chosen ? "chosen" : ""}` });
  const head = make("header", "", {}, box);
  const say = (text) => make("span", text, {}, head);
  make("b", r.chosen ? "stored, chosen" : r.kind, {}, head);
  if (r.verdict) say(r.verdict.replace("_", " "));
  if (r.reward !== undefined) say(`reward ${fixed(r.reward)}`);
  for (const [name, reward] of Object.entries(r.rewards ?? {})) say(`${name} ${fixed(reward)}`);
  if (r.sound === false) say(r.verdict === "correct" || r.kind === "stored" ? "lucky guess" : "reasoning does not hold");
  if (r.age !== undefined) say(`age ${r.age} steps`);
  if (r.entropy !== undefined) say(`entropy ${fixed(r.entropy)} nats`);
  say(`${whole(r.tokens)} tokens`);
  if (r.given) say(`${whole(r.given)} given`);
  if (r.finish === "length") say("truncated");
  const body = make("div", "", { class: "tokens", tabindex: 0 }, box);
  const spans = r.text.map((piece, i) => {
    if (r.left_out && i === r.text.length / 2) make("i", ` … ${whole(r.left_out)} tokens … `, {}, body);
    const span = make("span", piece === "" ? "\u25e6" : piece, {}, body);
    const said = [["when last trained on", r.now], ["when stored", r.then]].filter(([, values]) => values);
    if ((r.now ?? r.then)[i] === null) {
      span.className = "environment";
      span.title = i < (r.given ?? 0) ? "given, of a stored response: not trained on" : "from the environment: not trained on";
    } else span.title = said.map(([when, values]) => `p ${Math.exp(values[i]).toPrecision(3)} ${when}`).join(", ");
    return span;
  });
  body.colour = () => spans.forEach((span, i) => {
    if (span.className === "environment") return;
    const then = r.then ?? r.now; // a fresh rollout is stored with the log-probs of this step
    const now = r.now ?? r.then;
    const change = now[i] - then[i];
    const strength = colouring === "change" ? Math.min(1, Math.abs(change)) : 1 - Math.exp((colouring === "then" ? then : now)[i]);
    const colour = colouring === "change" && change > 0 ? "correct" : "wrong";
    span.style.background = strength < 0.02 ? "" : `color-mix(in srgb, var(--${colour}) ${Math.round(85 * strength)}%, transparent)`;
  });
  body.colour();
  return box;
}

function inBuffer(q) {
  if (!data.stored[q]) return [];
  const title = make("h3", "Stored now ");
  const kept = data.texts[q] ?? [];
  make("small", `${whole(data.stored[q])} in the buffer of step ${whole(data.bufferStep)}` + (kept.length < data.stored[q] ? `; ${whole(kept.length)} texts are in this page` : ""), {}, title);
  return [title, ...kept.map((one) => {
    const box = make("div", "", { class: "answer" });
    const head = make("header", "", {}, box);
    make("b", `of step ${one.step}`, {}, head);
    make("span", `${whole(one.tokens)} tokens`, {}, head);
    make("span", `mean probability when stored ${fixed(Math.exp(-one.surprisal))}`, {}, head);
    if (one.sound === false) make("span", "lucky guess", {}, head);
    make("div", one.text, { class: "tokens" }, box);
    return box;
  })];
}

// -- begin ------------------------------------------------------------------------------------------------------------

async function begin() {
  data = await unpack();
  prepare();
  byId("order").replaceChildren(...Object.entries(ORDERS).map(([value, [name]]) => make("option", name, { value })));
  byId("filters").replaceChildren(...Object.entries(FILTERS).map(([key, [name, passes]]) => {
    const count = data.ids.reduce((sum, _, q) => sum + Boolean(passes(q)), 0);
    const button = make("button", `${name} ${whole(count)}`, { type: "button", "data-filter": key });
    button.addEventListener("click", () => change({ filter: key }));
    return button;
  }));
  byId("query").addEventListener("input", (event) => change({ q: event.target.value }));
  byId("order").addEventListener("change", (event) => change({ order: event.target.value }));
  byId("scroller").addEventListener("scroll", () => draw(byId("window").dataset.chosen));
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.matches("input, select, pre")) return;
    if (event.key === "ArrowLeft") turn(-1);
    if (event.key === "ArrowRight") turn(1);
  });
  window.addEventListener("hashchange", () => location.hash.includes("=") && show());
  show();
  document.body.dataset.ready = Math.round(performance.now()); // milliseconds since the page was opened
}
begin();
