"use strict";
// All text of runs and models is set with `textContent`, or escaped where Plotly reads HTML.
// Okabe and Ito's colours, which colour-blind readers can tell apart, darker on light paper and lighter
// on dark, so that each has a contrast of 3 to 1 at least.
const LIGHT = ["#0072B2", "#A86A00", "#007F5F", "#C74F00", "#9A3D78", "#2E86B8", "#707070", "#7D7200"];
const DARK = ["#4DA3DB", "#E69F00", "#1FB58A", "#FF7F2A", "#D67FB4", "#8CCBF0", "#A8A8A8", "#D2C22A"];
const scheme = matchMedia("(prefers-color-scheme: dark)");
const hue = (i) => (scheme.matches ? DARK : LIGHT)[i % LIGHT.length];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const SHAPES = ["", "/", ".", "x", "-", "\\", "+", "|"];
const PAGE = 50;
let data, run, axis = "round", redraws = [];

const $ = (id) => document.getElementById(id);
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}
const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function shown(value) {
  if (value == null) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 1 ? 2 : 4;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

// ---------------------------------------------------------------- tables
function table(columns, rows, { caption, search = false } = {}) {
  const area = make("div");
  let order = null, down = true, page = 0, words = "";
  const search_box = make("input", { type: "search", oninput: (e) => { words = e.target.value.toLowerCase(); page = 0; fill(); } });
  const count = make("span", { "aria-live": "polite" });
  const before = make("button", { type: "button", onclick: () => { page--; fill(); } }, "Previous rows");
  const after = make("button", { type: "button", onclick: () => { page++; fill(); } }, "Next rows");
  const heads = columns.map((name, i) => make("th", { scope: "col" },
    make("button", { type: "button", onclick: () => { down = order === i ? !down : false; order = i; page = 0; fill(); } }, name)));
  const body = make("tbody");
  const whole = make("table", {}, make("caption", {}, caption || ""), make("thead", {}, make("tr", {}, ...heads)), body);
  if (search) area.append(make("div", { class: "controls" }, make("label", {}, "Search ", search_box)));
  area.append(make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption || "Table" }, whole),
    make("div", { class: "controls" }, before, after, count));
  const texts = rows.map((row) => row.map((cell) => cell == null ? "" : String(cell).toLowerCase()));
  function compare(a, b) {
    const [x, y] = [rows[a][order], rows[b][order]];
    if (x == null || y == null) return (x == null) - (y == null);
    const by = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return down ? -by : by;
  }
  function fill() {
    let found = rows.map((_, i) => i);
    if (words) found = found.filter((i) => texts[i].some((cell) => cell.includes(words)));
    if (order !== null) found.sort(compare);
    heads.forEach((head, i) => i === order ? head.setAttribute("aria-sort", down ? "descending" : "ascending") : head.removeAttribute("aria-sort"));
    const part = found.slice(page * PAGE, (page + 1) * PAGE);
    body.replaceChildren(...part.map((i) => make("tr", {}, ...rows[i].map(cell_of))));
    count.textContent = found.length ? `${page * PAGE + 1} to ${page * PAGE + part.length} of ${found.length.toLocaleString("en")}` : "Nothing found";
    before.disabled = page === 0;
    after.disabled = (page + 1) * PAGE >= found.length;
    before.hidden = after.hidden = found.length <= PAGE;
    count.hidden = !search && rows.length <= PAGE;
  }
  fill();
  return area;
}
function cell_of(value) {
  if (typeof value === "number") return make("td", { class: "number" }, shown(value));
  const text = value == null ? "" : String(value);
  if (text.length < 60 && !text.includes("\n")) return make("td", {}, text);
  const cell = make("td", { class: "text" }, make("div", {}, text));
  if (text.length > 300 || text.split("\n").length > 4) {
    const more = make("button", { type: "button", "aria-expanded": "false", onclick: () => {
      const open = cell.classList.toggle("whole");
      more.textContent = open ? "Show less" : "Show all";
      more.setAttribute("aria-expanded", open);
    } }, "Show all");
    cell.append(more);
  }
  return cell;
}

// ---------------------------------------------------------------- charts
function layout_of(more = {}) {
  const line = { gridcolor: css("--grid"), zerolinecolor: css("--grid"), linecolor: css("--line"), automargin: true };
  const { xaxis = {}, yaxis = {}, ...others } = more;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), size: 13 },
    margin: { l: 56, r: 12, t: 12, b: 44 }, hovermode: "closest", bargap: 0.1,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    hoverlabel: { bgcolor: css("--paper"), font: { color: css("--ink") } },
    xaxis: { ...line, ...xaxis }, yaxis: { ...line, ...yaxis }, ...others,
  };
}
// A chart with its title, what it means, buttons to zoom, and the same numbers as a table.
function chart(parent, { title, about, height, build, onclick }) {
  const area = make("div", { class: "chart", role: "img", "aria-label": `${title}. The table below has the numbers.` });
  if (height) area.style.height = `${height}px`;
  const numbers = make("details", {}, make("summary", {}, `${title} as a table`));
  const zoom = (factor) => () => {
    const [a, b] = area.layout.xaxis.range, middle = (a + b) / 2, half = (b - a) / 2 * factor;
    Plotly.relayout(area, { "xaxis.range": [middle - half, middle + half] });
  };
  const move = (share) => () => {
    const [a, b] = area.layout.xaxis.range;
    Plotly.relayout(area, { "xaxis.range": [a + (b - a) * share, b + (b - a) * share] });
  };
  const all = () => Plotly.relayout(area, { "xaxis.autorange": true, "yaxis.autorange": area.reversed ? "reversed" : true });
  const button = (text, label, action) => make("button", { type: "button", "aria-label": `${label}: ${title}`, onclick: action }, text);
  const figure = make("figure", {}, make("h3", {}, title), make("figcaption", {}, about), area,
    make("div", { class: "controls" }, button("+", "Zoom in", zoom(0.5)), button("−", "Zoom out", zoom(2)),
      button("←", "Move left", move(-0.25)), button("→", "Move right", move(0.25)), button("All", "Show all", all)), numbers);
  parent.append(figure);
  let built = null;
  const fill = () => {
    const { columns, rows } = built.table();
    numbers.replaceChildren(numbers.firstChild, table(columns, rows, { caption: title }));
  };
  numbers.addEventListener("toggle", () => { if (numbers.open) fill(); });
  function draw() {
    built = build();
    figure.hidden = !built;
    if (!built) return;
    area.reversed = built.reversed;
    Plotly.react(area, built.traces, layout_of(built.layout), { displayModeBar: false, responsive: true });
    if (numbers.open) fill();
    if (onclick && !area.listens) {
      area.listens = true;
      area.on("plotly_click", (event) => onclick(event.points[0]));
    }
  }
  redraws.push(draw);
  return draw;
}
const at = (columns) => axis === "round" || !columns.seconds ? columns.round : columns.seconds.map((s) => s == null ? null : s / 60);
const axis_title = () => axis === "round" ? "round" : "minutes since the run began";

// Lines of all runs: `of(run)` gives columns, `names` those that are drawn.
function lines(parent, title, about, unit, of, names) {
  const known = (r) => names(of(r) || {}).filter((name) => of(r)[name]);
  if (!data.runs.some((r) => known(r).length)) return;
  chart(parent, { title, about, build() {
    const traces = [];
    data.runs.forEach((r, i) => known(r).forEach((name, j) => traces.push({
      x: at(of(r)), y: of(r)[name], connectgaps: true, mode: of(r).round.length > 60 ? "lines" : "lines+markers",
      name: escaped(data.runs.length > 1 ? `${r.name}${known(r).length > 1 ? ", " + said(name) : ""}` : said(name)),
      showlegend: data.runs.length > 1 || known(r).length > 1,
      line: { color: hue(data.runs.length > 1 ? i : j), dash: DASHES[((data.runs.length > 1 ? j : 0) + Math.floor((data.runs.length > 1 ? i : j) / LIGHT.length)) % 4], width: 2 },
      marker: { symbol: (data.runs.length > 1 ? i : j), size: 6 },
    })));
    return { traces, layout: { xaxis: { title: { text: axis_title() } }, yaxis: { title: { text: unit } } }, table: () => ({
      columns: ["run", "round", "seconds", ...new Set(data.runs.flatMap(known))],
      rows: data.runs.flatMap((r) => (of(r)?.round || []).map((round, k) =>
        [r.name, round, of(r).seconds?.[k], ...[...new Set(data.runs.flatMap(known))].map((name) => of(r)[name]?.[k])])),
    }) };
  } });
}
const WORDS = { "rollout/trained_over_drawn_length": "in each round", "pool/trained_over_drawn_length": "since the run began", "val/accuracy": "accuracy", "val/greedy_accuracy": "greedy decoding", "frac_reward_zero_std": "as drawn", "prompt_choice/known_zero_std": "of all known prompts" };
const said = (name) => WORDS[name] || name.match(/^rewards\/(.*)\/mean$/)?.[1] || name.replace(/^val\/mean@(\d+)$/, "$1 samples").replace(/^[a-z_]+\//, "").replaceAll("_", " ");
const patterned = (shape) => ({ shape, solidity: 0.2, size: 7, fillmode: "overlay", fgcolor: css("--paper") });
// Colour and pattern of a part; those that `looks` does not name have one by their place.
const look = (looks, name, i) => {
  const [colour, shape] = looks[name] || [i, SHAPES[i % SHAPES.length]];
  return { color: hue(colour), pattern: patterned(shape), line: { width: 0 } };
};
// Bars of the chosen run that are stacked; all other columns but `round` are parts.
function bars(parent, title, about, unit, of, looks = {}) {
  if (!data.runs.some((r) => Object.keys(of(r) || {}).length > 1)) return;
  chart(parent, { title, about, build() {
    const columns = of(run) || {}, names = Object.keys(columns).filter((name) => name !== "round").sort((a, b) => a.startsWith("waits") - b.startsWith("waits"));
    if (!names.length) return null;
    const traces = names.map((name, i) => ({
      type: "bar", x: columns.round, y: columns[name], name: escaped(name),
      marker: look(looks, name, i),
    }));
    return { traces, layout: { barmode: "stack", xaxis: { title: { text: "round" } }, yaxis: { title: { text: unit } } },
      table: () => ({ columns: ["round", ...names], rows: columns.round.map((n, k) => [n, ...names.map((name) => columns[name][k])]) }) };
  } });
}
// ---------------------------------------------------------------- the timeline of a round
const END_SHAPES = ["", ".", "+", "/", "x", "\\"];
const END_MARKS = ["▮", "▒", "✚", "▨", "▩", "▧"];
const LANES = { decode: [0, ""], update: [2, ""], gradients: [2, "/"], advantages: [7, ""], weights: [4, ""],
  verify: [7, "x"], validation: [6, "x"], other: [6, ""], "waits for engines": [1, "/"], "waits for trainer": [3, "\\"], "waits for rewards": [5, "|"] };

function timeline(parent) {
  if (!data.runs.some((r) => r.timelines.length)) return;
  let place = null;
  const slider = make("input", { type: "range", min: 0, oninput: (e) => show(+e.target.value), "aria-label": "Round of the timeline" });
  const previous = make("button", { type: "button", onclick: () => show(place - 1) }, "Previous round");
  const next = make("button", { type: "button", onclick: () => show(place + 1) }, "Next round");
  const name = make("strong", { "aria-live": "polite", id: "round-shown" });
  const told = make("p", { id: "span-told", "aria-live": "polite" }, "Click on a bar to read which completion it is.");
  const legend = make("ul", { class: "legend" }, ...data.ends.map((text, i) => make("li", {}, `${END_MARKS[i]} ${text}`)),
    make("li", {}, "▶ begins with tokens of an earlier round"), make("li", {}, "‖ paused, comes back later"), make("li", {}, "⚒ waits for its environment"));
  parent.append(make("div", { class: "controls" }, previous, slider, next, name), legend);
  const draw = chart(parent, {
    title: "What each slot decoded", height: 560,
    about: "A bar is a completion in a slot; neighbours of one colour belong to one prompt, and the pattern says how its time in this round ended. Below: what trainer and engines did until the next round began.",
    build() {
      const of = run.timelines[place];
      if (!of) return null;
      const seconds = (column) => column.map((ms) => ms / 1000);
      const start = seconds(of.start), end = seconds(of.end);
      const slots = [...new Set(of.slot)].sort((a, b) => a - b), row = new Map(slots.map((slot, i) => [slot, i]));
      const label = (i) => { const [prompt, index] = of.requests[of.request[i]]; return `prompt ${of.prompts[prompt]}, completion ${index}`; };
      const facts = of.request.map((r, i) => `${label(i)}: ${of.tokens[i]} tokens in slot ${of.slot[i]}, ${shown(start[i])} to ${shown(end[i])} s, ${fate(i)}`);
      function fate(i) {
        const [, , ended, before, reward, waited, deferred, attempts] = of.requests[of.request[i]];
        const parts = [!of.last[i] ? (waited ? "then waits for its environment" : "then paused") : data.ends[ended]];
        if (before && of.first[i]) parts.unshift(`begins with ${before} tokens of an earlier round`);
        if (deferred) parts.push(`its prompt was deferred ${deferred} times`);
        if (attempts) parts.push(`drawn again ${attempts} times`);
        if (reward != null) parts.push(`reward ${shown(reward)}`);
        return parts.join(", ");
      }
      const traces = LIGHT.map((_, place) => {
        const own = of.request.map((_, i) => i).filter((i) => of.requests[of.request[i]][0] % LIGHT.length === place), each = (value) => own.map(value);
        return {
          type: "bar", orientation: "h", y: each((i) => row.get(of.slot[i])), base: each((i) => start[i]), x: each((i) => end[i] - start[i]), width: 0.92,
          customdata: each((i) => facts[i]), hovertemplate: each((i) => escaped(facts[i]).replace(/%\{/g, "% {") + "<extra></extra>"), showlegend: false, textposition: "none",
          marker: { color: hue(place), line: { width: slots.length > 80 ? 0 : 0.5, color: css("--paper") },
            pattern: { ...patterned(""), solidity: 0.35, shape: each((i) => of.last[i] ? END_SHAPES[of.requests[of.request[i]][2]] : "") } },
        };
      });
      const mark = (text, own, x, side) => own.length && traces.push({ x: own.map((i) => x[i]), y: own.map((i) => row.get(of.slot[i])), mode: "text",
        text: own.map(text), textposition: `middle ${side}`, hoverinfo: "skip", showlegend: false, cliponaxis: true, textfont: { size: 11, color: scheme.matches ? "#000" : "#fff" } });
      const places = of.request.map((_, i) => i);
      mark(() => "▶", places.filter((i) => of.first[i] && of.requests[of.request[i]][3]), start, "right");
      mark((i) => of.requests[of.request[i]][5] ? "⚒" : "‖", places.filter((i) => !of.last[i]), end, "left");
      const names = new Set();
      of.lanes.forEach((lane, j) => {
        for (const what of new Set(lane.what)) {
          const own = lane.what.map((w, i) => i).filter((i) => lane.what[i] === what);
          traces.push({ type: "bar", orientation: "h", yaxis: "y2", y: own.map(() => j), base: own.map((i) => lane.start[i] / 1000),
            x: own.map((i) => (lane.end[i] - lane.start[i]) / 1000), width: 0.8, name: escaped(what), legendgroup: what, showlegend: !names.has(what), textposition: "none",
            marker: look(LANES, what, names.size),
            hovertemplate: own.map((i) => `${escaped(lane.lane)}: ${escaped(what)}, ${shown((lane.end[i] - lane.start[i]) / 1000)} s<extra></extra>`) });
          names.add(what);
        }
      });
      const step = Math.ceil(slots.length / 12), ticks = slots.map((_, i) => i).filter((i) => i % step === 0);
      const lanes = of.lanes.length, split = lanes ? Math.min(0.4, 0.06 * lanes + 0.06) : 0;
      return { traces, reversed: true, layout: {
        barmode: "overlay", xaxis: { title: { text: "seconds since the first decode step" }, anchor: lanes ? "y2" : "y" },
        yaxis: { title: { text: "slot" }, domain: [split, 1], autorange: "reversed", tickvals: ticks, ticktext: ticks.map((i) => slots[i]) },
        ...(lanes ? { yaxis2: { domain: [0, split - 0.04], tickvals: of.lanes.map((_, j) => j), ticktext: of.lanes.map((l) => escaped(l.lane)), autorange: "reversed", automargin: true, fixedrange: true, gridcolor: "rgba(0,0,0,0)" } } : {}),
      }, table: () => ({
        columns: ["prompt", "completion", "slot", "start (s)", "end (s)", "tokens", "what then", "reward"],
        rows: of.request.map((r, i) => [of.prompts[of.requests[r][0]], of.requests[r][1], of.slot[i], start[i], end[i], of.tokens[i], fate(i), of.requests[r][4]]),
      }) };
    },
    onclick(point) { if (point.customdata) told.textContent = point.customdata; },
  });
  parent.append(told);
  function label() {
    const of = run.timelines[place];
    slider.max = Math.max(0, run.timelines.length - 1);
    slider.value = place;
    slider.setAttribute("aria-valuetext", of ? `round ${of.round}` : "none");
    name.textContent = of ? `Round ${of.round}${of.every > 1 ? `, 1 of ${of.every} slots` : ""}` : "No timeline";
    previous.disabled = place <= 0;
    next.disabled = place >= run.timelines.length - 1;
  }
  function show(wanted) {
    place = Math.max(0, Math.min(run.timelines.length - 1, wanted));
    label();
    draw();
  }
  let of_run = null;
  redraws.unshift(() => { if (of_run !== run) { of_run = run; place = run.timelines.length - 1; label(); } });
}

// ---------------------------------------------------------------- sections
function section(id, title, about) {
  const grid = make("div", { class: "grid" });
  const whole = make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), make("p", { class: "about" }, about), grid);
  $("main").append(whole);
  $("sections").append(make("li", {}, make("a", { href: `#${id}` }, title)));
  return { whole, grid };
}
const ends = (columns, name) => { const of = (columns[name] || []).filter((v) => v != null); return of.length ? `${shown(of[0])} → ${shown(of.at(-1))}` : ""; };
function mean(column) { const of = (column || []).filter((v) => v != null); return of.length ? of.reduce((a, b) => a + b) / of.length : null; }

function runs_section() {
  const { grid } = section("runs", data.runs.length > 1 ? "Runs" : "Run", data.verdict);
  const held_out = (r) => Object.keys(r.validations).filter((n) => n.startsWith("val/")).map((n) => `${ends(r.validations, n)} (${said(n)})`).join(", ");
  const facts = [...new Set(data.runs.flatMap((r) => r.facts.map(([name]) => name)))];
  const rows = [
    ["Rounds", ...data.runs.map((r) => r.curves.round.length)],
    ["Minutes", ...data.runs.map((r) => shown((r.curves.seconds?.at(-1) || 0) / 60))],
    ["Reward, first and last round", ...data.runs.map((r) => ends(r.curves, "reward"))],
    ["Held-out accuracy", ...data.runs.map(held_out)],
    ["Idle slot-time", ...data.runs.map((r) => { const m = mean(r.rollouts["rollout/bubble_ratio"]); return m == null ? "" : `${shown(100 * m)} %`; })],
    ...facts.map((name) => [name, ...data.runs.map((r) => (r.facts.find(([n]) => n === name) || [])[1])]),
  ];
  grid.append(make("figure", {}, table(["of the run", ...data.runs.map((r) => r.name)], rows.map((row) => row.map((v) => v == null ? "" : String(v))), { caption: "Settings and results" })));
}

function by_round_and_seconds(r) {
  const of = r.lengths.rounds;
  if (!of) return null;
  const seconds = new Map(r.curves.round.map((n, i) => [n, r.curves.seconds?.[i]]));
  return { ...of, seconds: of.round.map((n) => seconds.get(n)) };
}

function page() {
  for (const note of data.notes) $("main").append(make("p", { class: "note", role: "note" }, note));
  runs_section();
  const learning = section("learning", "What it learned", "Training reward and held-out accuracy, and what else the update measured.").grid;
  const metric = (title, about, unit, name) => lines(learning, title, about, unit, (r) => r.curves, () => [name]);
  metric("Mean reward", "Of the completions of a round, by the policy that drew them.", "reward", "reward");
  lines(learning, "Held-out accuracy", "Share of correct answers on held-out prompts.", "share", (r) => r.validations, (of) => Object.keys(of).filter((n) => n.startsWith("val/")));
  lines(learning, "Rewards by function", "The mean of each reward function.", "reward", (r) => r.rewards, (of) => Object.keys(of).length > 3 ? Object.keys(of).filter((n) => n.startsWith("rewards/")) : []);
  metric("Mean length", "Tokens of the completions of a round.", "tokens", "completions/mean_length");
  metric("KL divergence", "From the reference model.", "nats per token", "kl");
  metric("Entropy", "Of the policy.", "nats per token", "entropy");
  const idle = section("seconds", "Where the seconds went", "Every moment of trainer and engines has one cause.").grid;
  bars(idle, "Seconds of the trainer", "From the end of a rollout to the end of the next one; if the run has ended, the last bar is what came after the last rollout.", "seconds", (r) => r.lanes.trainer && { round: r.lanes.round, ...r.lanes.trainer }, LANES);
  bars(idle, "Seconds of the engines", "The mean over the engines.", "seconds", (r) => r.lanes.engines && { round: r.lanes.round, ...r.lanes.engines }, LANES);
  lines(idle, "Idle slot-time", "Share of the slots' time in a rollout without a completion (the bubble).", "share", (r) => r.rollouts, () => ["rollout/bubble_ratio"]);
  lines(idle, "Tokens a second", "Tokens that a rollout drew over its seconds.", "tokens per second", (r) => r.rollouts, () => ["rollout/tokens_per_second"]);
  const line = section("timeline", "Timeline of a round", "Choose a round with the buttons or the slider; drag over the chart or use the buttons below it to zoom.").whole;
  timeline(line);
  const lengths = section("lengths", "Lengths", "Tokens of completions that have ended. A schedule that prefers short completions shows where trained lengths are below drawn ones.").grid;
  lines(lengths, "Trained over drawn length", "Mean length of the completions of a round's update over that of all that were drawn for it; below 1, long ones are missing.", "ratio", (r) => r.rollouts, (of) => Object.keys(of).filter((n) => n.endsWith("trained_over_drawn_length")));
  lines(lengths, "Lengths by round", "Quantiles and means of the completions in the update, and the mean of those with an advantage other than 0.", "tokens", by_round_and_seconds, (of) => Object.keys(of).filter((n) => !["round", "seconds"].includes(n) && (data.runs.length < 2 || n.startsWith("mean"))));
  if (data.runs.some((r) => r.lengths.edges)) chart(lengths, { title: "Lengths of the whole run", about: "Share of the completions in each range of lengths.", build() {
    const of = run.lengths;
    if (!of.edges) return null;
    const share = (counts) => { const sum = counts.reduce((a, b) => a + b, 0) || 1; return counts.map((c) => c / sum); };
    const names = of.edges.slice(0, -1).map((a, i) => of.edges[i + 1] - a > 1 ? `${a}–${of.edges[i + 1] - 1}` : `${a}`);
    const one = (name, i) => ({ type: "bar", x: names, y: share(of[name]), name, marker: look({}, name, i) });
    return { traces: [one("ended", 0), one("with an advantage", 1)], layout: { barmode: "group", xaxis: { title: { text: "tokens" }, type: "category", nticks: 14 }, yaxis: { title: { text: "share" } } },
      table: () => ({ columns: ["tokens", "ended", "with an advantage"], rows: names.map((n, i) => [n, of.ended[i], of["with an advantage"][i]]) }) };
  } });
  const groups = section("groups", "Groups", "Completions of a prompt whose rewards are all equal have no advantage, and GRPO and RLOO learn nothing from them.").grid;
  bars(groups, "Kinds of groups", "All right and all wrong: every completion has the highest or the lowest reward of the run. One text: every completion is the same.", "groups", (r) => r.groups,
    { "several rewards": [0, ""], "all right": [2, "/"], "all wrong": [3, "."], "one text": [4, "x"], "one other reward": [6, "-"], "no reward": [7, "+"] });
  lines(groups, "Share of groups without a signal", "Of the prompts drawn; with PromptChoice also of all known prompts, the last time that each was drawn: the difference is what the choice avoids.", "share", (r) => r.rollouts, (of) => Object.keys(of).filter((n) => n.endsWith("zero_std")));
  chart(groups, { title: "Prompts", about: "How often each prompt was drawn, and its mean reward the last time.", build() {
    const of = run.prompts, columns = ["prompt", "times drawn", "reward, first time", "reward, last time"], hovertemplate = of.map((r) => escaped(r[0]).replace(/%\{/g, "% {") + "<extra></extra>");
    return of.length ? { traces: [{ mode: "markers", x: of.map((r) => r[1]), y: of.map((r) => r[3]), hovertemplate, marker: { color: hue(0) } }],
      layout: { xaxis: { title: { text: columns[1] } }, yaxis: { title: { text: columns[3] } } }, table: () => ({ columns, rows: of }) } : null;
  } });
  if (data.runs.some((r) => r.schedules.length)) {
    const whatif = section("schedules", "What another schedule would have done", "Simulated on the lengths and costs of this run's newest rounds, as if engine and trainer had devices or cores of their own, unless the run shows how much they slow each other down. The command lit-rlsched simulate has other settings, all pairs, and the rules of other packages.").grid;
    chart(whatif, { title: "Simulated seconds of a round", about: "For each update's worth of prompts. Striped: trains on tokens of older policies. Dotted: trained lengths differ from those drawn by more than 2 %.", build() {
      const rows = run.schedules;
      if (!rows.length) return null;
      const ordered = [...rows].reverse(), plain = rows.find((r) => r[0].startsWith("no callback"));
      return { traces: [{ type: "bar", orientation: "h", y: ordered.map((r) => escaped(r[0])), x: ordered.map((r) => r[1]), marker: { color: hue(0), pattern: { shape: ordered.map((r) => r[5] > 0 ? "/" : Math.abs(r[6] - 1) > 0.02 ? "." : "") } } }],
        layout: { xaxis: { title: { text: "seconds" } }, height: Math.max(320, 26 * rows.length + 80) },
        table: () => ({ columns: ["schedule", "seconds", "times as fast as no callback", "steps", "idle", "discarded", "stale", "trained over drawn length", "tokens in the cache"],
          rows: rows.map((r) => [r[0], r[1], plain ? plain[1] / r[1] : null, ...r.slice(2)]) }) };
    } });
  }
  completions_section();
}

function completions_section() {
  if (!data.runs.some((r) => r.completions.rows.length)) return;
  const { whole, grid } = section("completions", "Completions", "");
  grid.remove();
  const area = make("div"), about = whole.querySelector(".about");
  whole.append(area);
  const draw = () => {
    const of = run.completions;
    const parts = [`Of ${of.rounds} of ${of.of} rounds from which the run kept some`];
    if (of.shown < of.in_them) parts.push(`${of.shown} of their ${of.in_them} rows`);
    about.textContent = `${parts.join(", ")}. Numbers have five digits. Click on a column to sort.`;
    area.replaceChildren(table(of.columns, [...of.rows].reverse(), { caption: "Rows of completions.jsonl, the newest first", search: true }));
  };
  redraws.push(() => { if (area.run !== run) { area.run = run; draw(); } });
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}
async function begin() {
  data = await unpack($("data").textContent.trim());
  run = data.runs[0];
  $("title").textContent = data.title;
  document.title = data.title;
  $("made").textContent = data.made;
  $("run").append(...data.runs.map((r, i) => make("option", { value: i }, r.name)));
  $("run-label").hidden = data.runs.length < 2;
  const again = () => redraws.forEach((draw) => draw());
  $("run").addEventListener("change", (e) => { run = data.runs[+e.target.value]; again(); });
  $("axis").addEventListener("change", (e) => { axis = e.target.value; again(); });
  scheme.addEventListener("change", again);
  page();
  again();
  document.body.dataset.ready = "yes";
}
begin().catch((error) => $("main").replaceChildren(make("p", { class: "note", role: "alert" }, `This page cannot be shown: ${error}. It needs a browser of 2023 or later.`)));
