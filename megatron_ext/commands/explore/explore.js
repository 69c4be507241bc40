// The explorer: options -> a table, a picture of bubble over memory, two timelines, the flags.
"use strict";

const find = id => document.getElementById(id);
const SLIDERS = ["pp", "microbatches", "slices", "chunks", "f", "b", "w", "hop", "cap", "time"];
const NO_CAP = 2.05;  // the slider's right end
let names = NAMES, rows = [], cap = null, viewer = null, asked = null, drawn = null;

// --- options and the address ------------------------------------------------------------------

function options() {
  const value = id => find(id).value;
  const words = ["--pp", value("pp"), "--microbatches", value("microbatches")];
  if (value("slices") !== "1") words.push("--slices", value("slices"));
  if (value("chunks") !== "2") words.push("--chunks", value("chunks"));
  const costs = MODEL ? [] : ["f", "b", "w"].map(value);
  if (costs.some(cost => Number(cost) !== 1)) words.push("--cost", costs.join(","));
  if (!MODEL && Number(value("hop"))) words.push("--hop", value("hop"));
  if (Number(value("cap")) < NO_CAP) words.push("--memory-cap", value("cap"));
  if (value("offload") !== "off") words.push("--offload", value("offload"), ...(MODEL ? [] : ["--offload-time", value("time")]));
  return [words.join(" "), value("more").trim()].filter(Boolean).join(" ");
}

// Put options into the controls; what has no control goes to the text field.
function setOptions(text) {
  const words = text.split(/\s+/).filter(Boolean), more = [];
  const places = {"--pp": "pp", "--microbatches": "microbatches", "--slices": "slices", "--chunks": "chunks", "--hop": "hop",
    "--memory-cap": "cap", "--offload": "offload", "--offload-time": "time"};
  for (let i = 0; i < words.length; i++) {
    const place = places[words[i]], costs = (words[i + 1] || "").split(",");
    const fits = place && find(place).type === "range"
      ? costs.length === 1 && Number(costs[0]) >= Number(find(place).min) && Number(costs[0]) <= Number(find(place).max)
      : place && [...find(place).options].some(option => option.value === words[i + 1]);
    if (fits) find(place).value = words[++i];
    else if (words[i] === "--cost" && costs.length === 3) {
      ["f", "b", "w"].forEach((id, k) => { find(id).value = costs[k]; });
      i++;
    } else more.push(words[i]);
  }
  find("more").value = more.join(" ");
  if (more.length) document.querySelector("#controls details").open = true;
}

function chosen() {
  return [find("above").value, find("below").value].filter(Boolean);
}

function query() {
  const fields = new URLSearchParams({options: options()});
  for (const name of chosen()) fields.append("schedule", name);
  return fields.toString();
}

function fromAddress() {
  const fields = new URLSearchParams(location.hash.slice(1) || FIRST);
  setOptions(fields.get("options") || "");
  const [above, below] = fields.getAll("schedule");
  offer();
  find("above").value = names.includes(above) ? above : "1f1b";
  find("below").value = names.includes(below) ? below : "";
}

function offer() {
  for (const id of ["above", "below"]) {
    const select = find(id), before = select.value;
    select.replaceChildren(...(id === "below" ? [new Option("(none)", "")] : []), ...names.map(n => new Option(n, n)));
    select.value = before;
  }
}

function show(text, bad = false) {
  find("status").textContent = text;
  find("status").classList.toggle("bad", bad);
}

// --- asking -------------------------------------------------------------------------------------

async function get(path, signal) {
  const answer = await fetch(path, {headers: {"X-Explore": "1"}, signal});
  if (!answer.ok) throw new Error(await answer.text());
  return answer;
}

// Ask again for everything: the timelines, and row by row the table.
async function ask() {
  if (asked) asked.abort();
  const mine = asked = new AbortController(), began = performance.now();
  for (const id of SLIDERS) label(id);
  history.replaceState(null, "", `#${query()}`);
  try {
    show("…");
    const drawing = timelines(mine.signal);
    const answer = await get(`/api/compare?${new URLSearchParams({options: options()})}`, mine.signal);
    const fresh = [], reader = answer.body.getReader(), decode = new TextDecoder();
    let rest = "";
    for (;;) {
      const {done, value} = await reader.read();
      if (done) break;
      rest += decode.decode(value, {stream: true});
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const row = JSON.parse(line);
        if (row.end) cap = row.cap; else fresh.push(row);
      }
      rows = fresh;
      table();
      show(`${fresh.length} of ${names.filter(n => !n.startsWith("measured:")).length} schedules`);
    }
    if (await drawing) show(`all schedules in ${((performance.now() - began) / 1000).toFixed(2)} s`);
    scatter();
  } catch (error) {
    if (error.name !== "AbortError") show(error.message, true);
  }
}

async function timelines(signal) {
  try {
    const answer = await get(`/api/timelines?${query()}`, signal);
    const data = await answer.json(), same = drawn === chosen().join("|");
    drawn = chosen().join("|");
    if (viewer) viewer.set(data, same && viewer.span < viewer.end); else viewer = new Viewer(find("timeline"), data);
    flags(data);
    return true;
  } catch (error) {
    if (error.name === "AbortError") return false;
    show(error.message, true);
    find("flags").replaceChildren();
    return false;
  }
}

let pending = 0;
function soon() {
  for (const id of SLIDERS) label(id);
  clearTimeout(pending);
  pending = setTimeout(ask, 60);
}

async function choose(name) {
  if (!chosen().includes(name)) find("below").value = name;
  table();
  scatter();
  history.replaceState(null, "", `#${query()}`);
  await timelines();
}

// --- showing --------------------------------------------------------------------------------------

function label(id) {
  const input = find(id), output = document.querySelector(`label[for="${id}"] output`);
  find("copying").hidden = MODEL !== null || find("offload").value === "off";
  output.textContent = id === "cap" && Number(input.value) >= NO_CAP ? "none" : input.value;
}

function element(kind, text, attributes = {}) {
  const made = kind.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", kind.slice(4))
    : document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}

function table() {
  const place = {}, here = rows.filter(row => !row.reason), gone = rows.filter(row => row.reason);
  here.sort((a, b) => a.over_cap - b.over_cap || a.makespan - b.makespan);
  const most = Math.max(...here.map(row => row.bubble), 0.01);
  place.rows = here.map((row, i) => {
    const line = element("tr", null), name = element("td", null), bubble = 100 * row.bubble;
    const button = element("button", row.schedule, {type: "button"});
    button.onclick = () => choose(row.schedule);
    name.append(button);
    const bar = element("td", `${bubble.toFixed(2)} %`, {class: "bar-cell"});
    const share = `${(100 * row.bubble / most).toFixed(1)}%`;
    bar.style.backgroundImage = `linear-gradient(to left, var(--area) ${share}, transparent ${share})`;
    const above = row.above_bound === undefined || row.above_bound === null ? "-" : `${(100 * row.above_bound).toFixed(2)} %`;
    line.append(name, bar, element("td", shortened(row.peak)), ...(MODEL ? [element("td", row.gib.toFixed(2))] : []),
      element("td", MODEL ? `${row.step_ms.toFixed(1)} ms` : shortened(row.makespan)), element("td", above));
    line.classList.toggle("chosen", chosen().includes(row.schedule));
    line.classList.toggle("best", i === 0 && !row.over_cap);
    line.classList.toggle("over", row.over_cap);
    if (row.over_cap) line.title = "over the cap";
    return line;
  });
  for (const row of gone) {
    const line = element("tr", null, {class: "over", title: row.reason});
    line.append(element("td", row.schedule), element("td", "not possible here", {colspan: MODEL ? 5 : 4}));
    place.rows.push(line);
  }
  find("rows").replaceChildren(...place.rows);
}

function scatter() {
  const picture = find("scatter"), here = rows.filter(row => !row.reason);
  const held = row => MODEL ? row.gib : row.peak, line = MODEL ? MODEL.budget : cap;
  picture.replaceChildren();
  if (!here.length) return;
  const [left, right, top, bottom] = [44, 404, 12, 262];
  const wide = Math.max(...here.map(held), line || 0) * 1.12, high = Math.max(...here.map(row => row.bubble), 0.01) * 1.1;
  const x = peak => left + (right - left) * peak / wide, y = bubble => bottom - (bottom - top) * bubble / high;
  const add = (kind, attributes, text = null, parent = picture) => parent.appendChild(element(`svg:${kind}`, text, attributes));
  const across = tick(wide / 6), up = tick(100 * high / 6);
  for (let i = 0; i * across <= wide; i++) {
    add("line", {x1: x(i * across), x2: x(i * across), y1: top, y2: bottom, class: "axis"});
    add("text", {x: x(i * across), y: bottom + 14, "text-anchor": "middle", class: "soft"}, shortened(i * across));
  }
  for (let i = 0; i * up <= 100 * high; i++) {
    add("line", {x1: left, x2: right, y1: y(i * up / 100), y2: y(i * up / 100), class: "axis"});
    add("text", {x: left - 5, y: y(i * up / 100) + 4, "text-anchor": "end", class: "soft"}, `${shortened(i * up)} %`);
  }
  add("text", {x: right, y: bottom + 30, "text-anchor": "end", class: "soft"}, MODEL ? "GiB of the fullest rank" : "peak activations, microbatches");
  add("text", {x: left + 6, y: top + 8, class: "soft"}, "bubble");
  if (line) add("line", {x1: x(line), x2: x(line), y1: top, y2: bottom, class: "cap"});
  const taken = here.map(row => [x(held(row)) - 5, y(row.bubble) + 4, 10]);
  for (const row of [...here].sort((a, b) => a.bubble - b.bubble)) {
    const group = add("g", {class: `${row.over_cap ? "over" : ""} ${chosen().includes(row.schedule) ? "chosen" : ""}`});
    const [cx, cy] = [x(held(row)), y(row.bubble)], long = 6.2 * row.schedule.length;
    add("circle", {cx, cy, r: 4.5}, null, group).onclick = () => choose(row.schedule);
    add("title", {}, `${row.schedule}: bubble ${(100 * row.bubble).toFixed(2)} %, ${MODEL ? `${row.gib.toFixed(2)} GiB` : `peak ${shortened(row.peak)}`}`, group);
    // A label stands where it covers none before it, or is left to the tooltip.
    const spots = [[cx + 8, cy + 4], [cx - 8 - long, cy + 4], [cx + 8, cy - 9], [cx + 8, cy + 17], [cx - 8 - long, cy - 9], [cx - 8 - long, cy + 17]];
    const free = spots.find(([a, b]) => a > left && a + long < 420 && b > top && b < bottom + 2
      && !taken.some(([c, d, e]) => Math.abs(d - b) < 11 && a < c + e && c < a + long));
    if (!free) continue;
    taken.push([...free, long]);
    add("text", {x: free[0], y: free[1]}, row.schedule, group);
  }
}

function flags(data) {
  const lines = data.rows.filter(row => row.flags).map(row => [`train with ${row.schedule}`, row.flags]);
  if (data.command) lines.push(["these timelines", data.command]);
  find("flags").replaceChildren(...lines.map(([title, text]) => {
    const line = element("div", null), copy = element("button", "copy", {type: "button", title, "aria-label": `copy: ${title}`});
    copy.onclick = async () => {
      await navigator.clipboard.writeText(text);
      copy.textContent = "copied";
      setTimeout(() => { copy.textContent = "copy"; }, 1500);
    };
    line.append(element("code", text), copy);
    return line;
  }));
}

// --- events ---------------------------------------------------------------------------------------

for (const id of [...SLIDERS, "offload", "more"]) find(id).addEventListener("input", soon);
find("controls").addEventListener("submit", event => event.preventDefault());
for (const id of ["above", "below"]) find(id).addEventListener("change", () => choose(find(id).value || find("above").value));
find("save").onclick = () => { location.href = `/export?${query()}`; };
find("theme").onchange = event => {
  if (event.target.value) document.documentElement.dataset.theme = event.target.value;
  else delete document.documentElement.dataset.theme;
  if (viewer) viewer.draw();
};
find("file").onchange = async event => {
  const [file] = event.target.files;
  if (!file) return;
  try {
    const answer = await fetch(`/api/load?${new URLSearchParams({name: file.name})}`,
      {method: "POST", headers: {"X-Explore": "1"}, body: file});
    if (!answer.ok) throw new Error(await answer.text());
    const {name} = await answer.json();
    if (!names.includes(name)) names = [...names, name];
    offer();
    find("below").value = name;
    await ask();
  } catch (error) {
    show(error.message, true);
  }
};
if (MODEL) {
  find("costs").hidden = true;
  find("gib").hidden = false;
  find("step").textContent = "passes of a step";
  find("model").textContent = MODEL.text;
}
addEventListener("hashchange", () => { fromAddress(); ask(); });
fromAddress();
ask();
