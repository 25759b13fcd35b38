"use strict";
// The browser of samples. The hash of the address alone decides what is shown:
// #model=0&benchmark=aime24&verdict=wrong&q=words&sample=17.3 (row 17, sample 3). Texts are set by textContent only.

const byId = (id) => document.getElementById(id);
// Half a surrogate pair, which a model may write, becomes the replacement character.
const models = JSON.parse(byId("data").textContent, (_, value) => (typeof value === "string" ? value.toWellFormed() : value));
const correct = (verdict) => verdict === "correct";
const FILTERS = {
  all: ["all", () => true],
  correct: ["correct", (s) => s.verdict === "correct"],
  wrong: ["wrong", (s) => s.verdict === "wrong"],
  no_answer: ["no answer", (s) => s.verdict === "no_answer"],
  ungraded: ["timeout, error", (s) => s.verdict === "timeout" || s.verdict === "error"],
  truncated: ["truncated", (s) => s.finish === "length"],
  disagree: ["graders disagree", (s) => s.plain !== null && correct(s.plain) !== correct(s.verdict)],
};
const keyOf = (sample) => `${sample.row}.${sample.sample}`;
const words = (verdict) => (verdict === null ? "not requested" : verdict.replace("_", " "));
let state = {};
let matches = []; // the samples that pass the filter and the search

function make(tag, text, attributes = {}) {
  const node = document.createElement(tag);
  node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function read() {
  const query = new URLSearchParams(location.hash.slice(1));
  const model = Math.max(0, models.findIndex((m, i) => String(i) === query.get("model") || m.name === query.get("model")));
  const benchmarks = models[model].benchmarks;
  const pick = (value, among) => (Object.hasOwn(among, value) ? value : Object.keys(among)[0]);
  state = {
    model,
    benchmark: pick(query.get("benchmark"), benchmarks),
    verdict: pick(query.get("verdict"), FILTERS),
    q: query.get("q") ?? "",
    sample: query.get("sample"),
  };
}

function change(what) {
  const next = { ...state, ...what };
  if (!("sample" in what)) next.sample = null;
  const hash = new URLSearchParams();
  for (const [name, value] of Object.entries(next)) if (value !== null && value !== "" && value !== undefined) hash.set(name, value);
  history.replaceState(null, "", `#${hash}`);
  show();
}

function show() {
  read();
  const { benchmarks } = models[state.model];
  byId("model").replaceChildren(...models.map((m, i) => make("option", m.name, { value: i })));
  byId("model").value = state.model;
  byId("benchmark").replaceChildren(...Object.entries(benchmarks).map(([key, b]) => make("option", b.title, { value: key })));
  if (state.benchmark === undefined) return void (byId("shown").textContent = "No benchmark was run.");
  byId("benchmark").value = state.benchmark;
  if (byId("query").value !== state.q) byId("query").value = state.q;

  const { samples, total } = benchmarks[state.benchmark];
  byId("filters").replaceChildren(
    ...Object.entries(FILTERS).map(([key, [name, passes]]) => {
      const button = make("button", `${name} ${samples.filter(passes).length}`, { type: "button", "data-verdict": key });
      button.setAttribute("aria-pressed", key === state.verdict);
      button.addEventListener("click", () => change({ verdict: key }));
      return button;
    }),
  );
  const query = state.q.toLowerCase();
  const fields = (s) => [s.prompt, s.response, s.gold, s.extracted ?? "", s.id, s.group ?? ""];
  matches = samples
    .filter(FILTERS[state.verdict][1])
    .filter((s) => query === "" || fields(s).some((field) => field.toLowerCase().includes(query)));
  const count = (n) => n.toLocaleString("en");
  byId("shown").textContent =
    `${count(samples.length)} of ${count(total)} shown` + (matches.length < samples.length ? `; ${count(matches.length)} of these pass the filter` : "");
  byId("list").replaceChildren(...matches.map(entry));
  turnTo(Math.max(0, matches.findIndex((s) => keyOf(s) === state.sample)));
}

function entry(sample) {
  const item = make("li", "", { "data-verdict": sample.verdict });
  const button = make("button", "", { type: "button" });
  button.append(
    make("i", "", { class: `mark ${sample.verdict}` }),
    make("span", `row ${sample.row}, sample ${sample.sample}`),
    make("small", words(sample.verdict) + (sample.finish === "length" ? ", truncated" : "")),
  );
  button.addEventListener("click", () => change({ sample: keyOf(sample) }));
  item.append(button);
  return item;
}

function turnTo(index) {
  const sample = matches[index];
  byId("sample").hidden = sample === undefined;
  if (sample === undefined) return;
  byId("list").querySelectorAll("li").forEach((item, i) => item.setAttribute("aria-current", i === index));
  const item = byId("list").children[index];
  byId("list").scrollTop = item.offsetTop - byId("list").clientHeight / 2;
  byId("position").textContent = `${index + 1} of ${matches.length}`;
  byId("previous").disabled = index === 0;
  byId("next").disabled = index === matches.length - 1;
  const facts = [
    ["verdict", words(sample.verdict), sample.verdict],
    ["plain math-verify", words(sample.plain), sample.plain],
    ["gold", sample.gold],
    ["extracted", sample.extracted ?? "nothing"],
    ["response", `${sample.response_tokens.toLocaleString("en")} tokens, ${sample.finish === "length" ? "truncated" : "ended by itself"}`],
    ["prompt", `${sample.prompt_tokens.toLocaleString("en")} tokens`],
    ["row, sample", `${sample.row}, ${sample.sample}`],
    ["seed", sample.seed],
    ["id", sample.id],
  ];
  if (sample.sound !== null) facts.push(["reasoning", sample.sound ? "holds" : "does not hold"]);
  if (sample.group !== null) facts.push(["group", sample.group]);
  byId("facts").replaceChildren(
    ...facts.map(([name, value, verdict]) => {
      const pair = make("div", "");
      const cell = make("dd", value);
      if (verdict) cell.prepend(make("i", "", { class: `mark ${verdict}` }));
      pair.append(make("dt", name), cell);
      return pair;
    }),
  );
  byId("prompt").textContent = sample.prompt;
  byId("response").textContent = sample.response;
}

function turn(by) {
  const index = Math.max(0, matches.findIndex((s) => keyOf(s) === state.sample)) + by;
  if (matches[index]) change({ sample: keyOf(matches[index]) });
}

byId("model").addEventListener("change", (event) => change({ model: event.target.value }));
byId("benchmark").addEventListener("change", (event) => change({ benchmark: event.target.value }));
byId("query").addEventListener("input", (event) => change({ q: event.target.value }));
byId("previous").addEventListener("click", () => turn(-1));
byId("next").addEventListener("click", () => turn(1));
document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.matches("input, select, pre")) return;
  if (event.key === "ArrowLeft") turn(-1);
  if (event.key === "ArrowRight") turn(1);
});
const hasState = () => location.hash.includes("="); // else it names a section
window.addEventListener("hashchange", () => {
  if (!hasState()) return;
  show();
  byId("samples").scrollIntoView();
});
show();
if (hasState()) byId("samples").scrollIntoView();
