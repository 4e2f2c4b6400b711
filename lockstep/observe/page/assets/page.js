"use strict";
// Draws the views of runs, which the server sends as runs.json, or which stand in the page itself (a report).
// All text goes in by textContent: nothing that a run says becomes markup.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const POLL_MS = 1500, COLOURS = 8, HEIGHT = 224;
  const EDGE = { left: 60, right: 12, top: 18, bottom: 24 };
  const SIGNS = { lost: "▼", joined: "▲", left: "◆", restart: "●" };
  const byId = (id) => document.getElementById(id);
  const embedded = byId("embedded");

  const shown = { runs: [], chosen: 0, across: "step", isLog: false, hidden: new Set(), etag: "", logs: {} };
  const charts = new Map();

  // -- small parts ---------------------------------------------------------------------------------------------

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function shape(name, attributes = {}, text = null) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    return made;
  }

  function shortNumber(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(2);
    for (const [limit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= limit) return `${trimmed(value / (limit === 1e4 ? 1e3 : limit))}${letter}`;
    }
    return trimmed(value);
  }

  const trimmed = (value) => String(Number(value.toPrecision(4)));

  function bytes(value) {
    if (value === null || value === undefined) return "–";
    for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (value >= size) return `${trimmed(value / size)} ${unit}`;
    }
    return `${trimmed(value)} B`;
  }

  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds === 0) return "0 s";
    if (seconds < 1e-3) return `${trimmed(seconds * 1e6)} µs`;
    if (seconds < 1) return `${trimmed(seconds * 1e3)} ms`;
    if (seconds < 120) return `${trimmed(seconds)} s`;
    return seconds < 7200 ? `${trimmed(seconds / 60)} min` : `${trimmed(seconds / 3600)} h`;
  }

  const across = (value, axis) => (axis === "t" ? duration(value) : shortNumber(value));

  // -- scales --------------------------------------------------------------------------------------------------

  function ticks(low, high, count) {
    const step = 10 ** Math.floor(Math.log10((high - low) / count || 1));
    const factor = [1, 2, 5, 10].find((one) => (high - low) / (one * step) <= count) || 10;
    const found = [];
    for (let at = Math.ceil(low / (factor * step)) * factor * step; at <= high + step * 1e-6; at += factor * step) found.push(at);
    return found;
  }

  // `unit` is what ticks are round multiples of: 1, or 1 MiB or so.
  function scale(low, high, from, to, isLog, unit = 1) {
    if (isLog) {
      const [a, b] = [Math.log10(low), Math.log10(high)];
      const at = (value) => from + ((Math.log10(value) - a) / (b - a || 1)) * (to - from);
      const whole = [];
      for (let power = Math.ceil(a); power <= Math.floor(b); power += 1) whole.push(10 ** power);
      return { at, ticks: whole.length > 1 ? whole : [low, high], holds: (value) => value > 0 };
    }
    return { at: (value) => from + ((value - low) / (high - low || 1)) * (to - from), ticks: ticks(low / unit, high / unit, 5).map((tick) => tick * unit), holds: () => true };
  }

  function extent(values) {
    let low = Infinity, high = -Infinity;
    for (const value of values) {
      if (value === null || value === undefined) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return low <= high ? [low, high] : null;
  }

  // -- one chart -----------------------------------------------------------------------------------------------

  // plan: { id, title, series: [{ name, colour, x, y, low, high }], marks, isStacked, isStepped, isLog, axis, write }
  function draw(plan) {
    const chart = charts.get(plan.id) || made(plan);
    chart.plan = plan;
    chart.caption.textContent = plan.title;
    legend(chart);
    picture(chart);
    return chart.figure;
  }

  function made(plan) {
    const chart = { cursor: null, svg: shape("svg", { tabindex: "0", role: "img", "data-chart": plan.id }) };
    chart.caption = element("figcaption");
    chart.output = element("output", { "aria-live": "polite" });
    chart.legend = element("div", { class: "legend" });
    chart.figure = element("figure", {}, chart.caption, chart.svg, chart.output, chart.legend);
    chart.svg.addEventListener("keydown", (event) => moved(chart, event));
    chart.svg.addEventListener("pointermove", (event) => pointed(chart, event));
    chart.svg.addEventListener("pointerdown", (event) => pointed(chart, event));
    charts.set(plan.id, chart);
    byId("charts").append(chart.figure);
    return chart;
  }

  const visible = (chart) => chart.plan.series.filter((one) => !shown.hidden.has(`${chart.plan.id}/${one.name}`));

  function legend(chart) {
    const names = chart.plan.series.map((one) => one.name);
    if (chart.names === names.join("\n")) return;
    chart.names = names.join("\n");
    chart.legend.replaceChildren(...(names.length < 2 ? [] : chart.plan.series.map((one) => {
      const key = `${chart.plan.id}/${one.name}`;
      const button = element("button", { type: "button", "aria-pressed": String(!shown.hidden.has(key)) },
        element("span", { class: `swatch f${one.colour}` }), one.name);
      button.addEventListener("click", () => {
        if (!shown.hidden.delete(key)) shown.hidden.add(key);
        button.setAttribute("aria-pressed", String(!shown.hidden.has(key)));
        picture(chart);
      });
      return button;
    })));
  }

  function stacked(series) {
    const base = new Map();
    return series.map((one) => {
      const low = one.x.map((x) => base.get(x) || 0);
      const high = one.y.map((y, place) => low[place] + (y || 0));
      one.x.forEach((x, place) => base.set(x, high[place]));
      return { ...one, low, high, top: high };
    });
  }

  function picture(chart) {
    const { plan, svg } = chart;
    const width = Math.max(svg.clientWidth, 200);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const series = plan.isStacked ? stacked(visible(chart)) : visible(chart);
    const marks = plan.marks.filter((mark) => mark[plan.axis] !== null && mark[plan.axis] !== undefined);
    const drawn = extent(series.flatMap((one) => one.x));
    const xs = drawn && extent([...drawn, ...marks.map((mark) => mark[plan.axis])]); // a mark is never outside of the frame
    const held = (value) => !plan.isLog || value > 0;
    const ys = extent(series.flatMap((one) => [...one.y, ...(one.low || []), ...(one.high || [])]).filter((y) => y !== null && held(y)));
    chart.series = series;
    if (!xs || !ys) {
      svg.replaceChildren(shape("text", { class: "none", x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing recorded yet"));
      svg.setAttribute("aria-label", `${plan.title}: nothing recorded yet`);
      chart.frame = null;
      return;
    }
    const floor = plan.isStacked || plan.fromZero ? Math.min(0, ys[0]) : ys[0];
    const pad = plan.isLog ? 0 : (ys[1] - floor) * 0.06 || Math.abs(ys[1]) * 0.1 || 1;
    const low = plan.isLog ? ys[0] / 1.1 : floor === 0 ? 0 : floor - pad;
    const x = scale(xs[0], xs[1] === xs[0] ? xs[0] + 1 : xs[1], EDGE.left, width - EDGE.right, false);
    const y = scale(low, plan.isLog ? ys[1] * 1.1 : ys[1] + pad, HEIGHT - EDGE.bottom, EDGE.top, plan.isLog, plan.write === bytes ? 2 ** (10 * Math.floor(Math.log2(ys[1] || 1) / 10)) : 1);
    chart.frame = { x, y, width, marks };
    svg.replaceChildren(...grid(plan, x, y, width), ...series.flatMap((one) => curve(one, plan, x, y)), ...flags(marks, plan, x));
    svg.setAttribute("aria-label", `${plan.title}, ${across(xs[0], plan.axis)} to ${across(xs[1], plan.axis)}`);
    pointAt(chart, chart.cursor, false);
  }

  function grid(plan, x, y, width) {
    const parts = [];
    for (const value of y.ticks) {
      const at = y.at(value);
      parts.push(shape("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at }));
      parts.push(shape("text", { x: EDGE.left - 6, y: at + 4, "text-anchor": "end" }, plan.write(value)));
    }
    for (const value of x.ticks) {
      parts.push(shape("text", { x: x.at(value), y: HEIGHT - 7, "text-anchor": "middle" }, across(value, plan.axis)));
    }
    return parts;
  }

  function curve(one, plan, x, y) {
    const points = one.x.map((at, place) => ({ x: at, y: one.y[place], low: one.low?.[place], high: one.high?.[place] }));
    const parts = [];
    if (one.low) {
      const whole = points.filter((point) => point.low !== null && point.high !== null);
      const path = (edge) => whole.map((point) => `${x.at(point.x).toFixed(1)},${y.at(point[edge]).toFixed(1)}`);
      const outline = plan.isStepped ? steps(whole, "high", x, y).concat(steps(whole, "low", x, y).reverse()) : path("high").concat(path("low").reverse());
      if (whole.length) parts.push(shape("path", { class: `${plan.isStacked ? "area" : "band"} f${one.colour}`, d: `M${outline.join("L")}Z` }));
    }
    if (!plan.isStacked) {
      const runs = [[]];
      for (const point of points) {
        if (point.y === null || !y.holds(point.y)) runs.push([]);
        else runs[runs.length - 1].push(`${x.at(point.x).toFixed(1)},${y.at(point.y).toFixed(1)}`);
      }
      const d = runs.filter((run) => run.length).map((run) => `M${run.join("L")}${run.length === 1 ? "h0.1" : ""}`).join("");
      if (d) parts.push(shape("path", { class: `line c${one.colour}`, "stroke-linecap": "round", d }));
    }
    return parts;
  }

  function steps(points, edge, x, y) {
    const found = [];
    points.forEach((point, place) => {
      if (place) found.push(`${x.at(point.x).toFixed(1)},${y.at(points[place - 1][edge]).toFixed(1)}`);
      found.push(`${x.at(point.x).toFixed(1)},${y.at(point[edge]).toFixed(1)}`);
    });
    return found;
  }

  function flags(marks, plan, x) {
    return marks.flatMap((mark) => {
      const at = x.at(mark[plan.axis]);
      const line = shape("line", { class: `mark k-${mark.kind}`, x1: at, x2: at, y1: EDGE.top, y2: HEIGHT - EDGE.bottom });
      const height = mark.kind === "joined" ? HEIGHT - EDGE.bottom - 3 : EDGE.top - 5; // a loss and a join may be one
      const sign = shape("text", { class: `sign k-${mark.kind}`, x: at, y: height, "text-anchor": "middle" }, SIGNS[mark.kind] || "●");
      sign.append(shape("title", {}, mark.text));
      return [line, sign];
    });
  }

  // -- the mark that is read out -------------------------------------------------------------------------------

  const places = (chart) => [...new Set(chart.series.flatMap((one) => one.x))].sort((a, b) => a - b);

  function moved(chart, event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity, PageUp: 10, PageDown: -10 };
    if (!(event.key in moves) || !chart.frame) return;
    event.preventDefault();
    const all = places(chart);
    const now = chart.cursor === null ? all.length - 1 : nearest(all, chart.cursor);
    pointAt(chart, all[Math.min(Math.max(now + moves[event.key], 0), all.length - 1)], true);
  }

  function pointed(chart, event) {
    if (!chart.frame) return;
    const all = places(chart);
    const left = event.clientX - chart.svg.getBoundingClientRect().left;
    const ratio = chart.frame.width / (chart.svg.clientWidth || 1);
    const at = all.reduce((best, one) => (Math.abs(chart.frame.x.at(one) - left * ratio) < Math.abs(chart.frame.x.at(best) - left * ratio) ? one : best), all[0]);
    pointAt(chart, at, true);
  }

  const nearest = (all, value) => all.reduce((best, one, place) => (Math.abs(one - value) < Math.abs(all[best] - value) ? place : best), 0);

  function pointAt(chart, at, isAsked) {
    chart.svg.querySelector(".cursor")?.remove();
    if (at === null || !chart.frame) {
      chart.output.textContent = latest(chart);
      return;
    }
    if (isAsked) chart.cursor = at;
    const { x, marks } = chart.frame;
    const where = x.at(at);
    chart.svg.append(shape("line", { class: "cursor", x1: where, x2: where, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
    const near = marks.filter((mark) => Math.abs(x.at(mark[chart.plan.axis]) - where) < 5).map((mark) => mark.text);
    chart.output.textContent = [words(chart, at), ...new Set(near)].join(" · ");
  }

  function words(chart, at) {
    const { plan } = chart;
    const values = chart.series.map((one) => {
      const place = nearest(one.x, at);
      const isThere = one.x.length > 0 && at >= one.x[0] && at <= one.x[one.x.length - 1];
      const value = isThere ? one.y[place] : null;
      const interval = one.low && !plan.isStacked && value !== null ? ` (${plan.write(one.low[place])} to ${one.high[place] === null ? "∞" : plan.write(one.high[place])})` : "";
      return `${chart.plan.series.length > 1 ? `${one.name}: ` : ""}${plan.write(value)}${interval}`;
    });
    return `${plan.axis === "t" ? "at" : "step"} ${across(at, plan.axis)}: ${values.join(", ")}`;
  }

  function latest(chart) {
    const all = chart.frame ? places(chart) : [];
    return all.length ? words(chart, all[all.length - 1]) : "";
  }

  // -- all charts ----------------------------------------------------------------------------------------------

  function plans() {
    const { runs, across: axis, isLog } = shown;
    const chosen = runs[shown.chosen];
    const over = (name) => runs.map((run, place) => ({
      name: run.name, colour: place % COLOURS, x: run.steps[axis], y: run.steps[name],
    }));
    const marks = runs.length === 1 ? chosen.marks : runs.flatMap((run) => run.marks.map((mark) => ({ ...mark, text: `${run.name}: ${mark.text}` })));
    const plain = { marks, axis, write: shortNumber };
    const many = runs.length > 1 ? ` of ${chosen.name}` : "";
    const own = { marks: chosen.marks, axis };
    const found = [
      { ...plain, id: "loss", title: "Loss", series: over("loss"), isLog },
      { ...plain, id: "rate", title: "Samples per second", series: over("samples_per_s"), fromZero: true },
      { ...own, id: "parts", title: `Time of a step, by part${many}`, write: duration, isStacked: true,
        series: ["compute", "waiting", "data", "other"].map((part, place) => ({ name: part, colour: place, x: chosen.parts[axis], y: chosen.parts[part] })) },
      { ...own, id: "lanes", title: `Lanes of each worker${many}`, write: shortNumber, isStacked: true, isStepped: true,
        series: chosen.workers.slots.map((slot) => ({ name: `worker ${slot}`, colour: slot % COLOURS, x: chosen.workers.lanes[axis], y: chosen.workers.lanes[slot] })) },
      { ...own, id: "memory", title: `Memory of each worker${many}`, write: bytes, fromZero: true, series: memory(chosen, axis) },
      { ...plain, id: "noise", title: "Critical batch by the noise of the gradient, with its interval", axis: "step",
        series: runs.map((run, place) => ({ name: run.name, colour: place % COLOURS, x: run.noise.step, y: run.noise.scale, low: run.noise.low, high: run.noise.high })) },
    ];
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))];
    return found.concat(names.map((name) => ({
      ...plain, id: `metric ${name}`, title: name, axis: "step",
      series: runs.filter((run) => run.metrics[name]).map((run) => ({
        name: run.name, colour: runs.indexOf(run) % COLOURS, x: run.metrics[name].step, y: run.metrics[name].value,
      })),
    })));
  }

  function memory(run, axis) {
    const kept = run.workers.memory;
    return Object.keys(kept).filter((name) => name !== "step" && name !== "t").map((name) => ({
      name: name.startsWith("gpu ") ? `GPU of worker ${name.slice(4)}` : `worker ${name}`,
      colour: Number(name.replace("gpu ", "")) % COLOURS, x: kept[axis], y: kept[name],
    }));
  }

  // -- tables and lists ----------------------------------------------------------------------------------------

  function table(id, head, rows) {
    const cells = (name, row) => element("tr", {}, ...row.map((cell) => element(name, name === "th" ? { scope: "col" } : {}, cell)));
    byId(id).replaceChildren(element("thead", {}, cells("th", head)), element("tbody", {}, ...rows.map((row) => cells("td", row))));
  }

  function tables() {
    const { runs } = shown;
    table("runs", ["run", "script", "state", "step", "loss", "samples/s", "workers", "lanes", "time"], runs.map((run, place) => [
      element("span", {}, element("span", { class: `swatch f${place % COLOURS}` }), " ", run.name), run.program, run.state,
      shortNumber(run.now.step), shortNumber(run.now.loss), shortNumber(run.now.samples_per_s),
      shortNumber(run.now.num_workers), shortNumber(run.now.num_lanes), duration(run.updated_at - run.began_at),
    ]));
    const chosen = runs[shown.chosen];
    table("workers", ["worker", "phase", "step", "lanes", "memory"], Object.entries(chosen.workers.now).map(([slot, now]) => [
      slot, chosen.is_running ? now.phase : "ended", shortNumber(now.step), shortNumber(now.lanes), bytes(now.memory || null),
    ]));
    byId("happenings").replaceChildren(...[...chosen.happenings].reverse().map((one) => element("li", { class: one.kind },
      element("span", { class: "when" }, `${duration(one.t)} · step ${shortNumber(one.step)} · `), one.text)));
  }

  function choose(id, values, names, at) {
    const select = byId(id);
    const key = JSON.stringify([values, names]);
    if (select.dataset.key === key) return;
    select.dataset.key = key;
    select.replaceChildren(...values.map((value, place) => element("option", { value }, names[place])));
    select.value = values.includes(at) ? at : values[0] ?? "";
  }

  function links() {
    const run = shown.runs[shown.chosen];
    const place = byId("timeline");
    if (place.dataset.key === `${shown.chosen}/${run.has_timeline}`) return;
    place.dataset.key = `${shown.chosen}/${run.has_timeline}`;
    if (!run.has_timeline) place.textContent = "No timeline: start the run with --timeline to have one.";
    else if (embedded) place.textContent = "The run has a timeline: timeline.json in its folder.";
    else place.replaceChildren(element("a", { href: `timeline/${shown.chosen}.json`, download: "timeline.json" }, "Timeline"), " (open it in Perfetto, or in chrome://tracing)");
  }

  function render() {
    if (!shown.runs.length) return;
    choose("chosen", shown.runs.map((_, place) => String(place)), shown.runs.map((run) => run.name), String(shown.chosen));
    byId("chosen-label").hidden = shown.runs.length < 2;
    const slots = shown.runs[shown.chosen].log_slots.map(String);
    choose("log-slot", slots, slots, byId("log-slot").value);
    const kept = new Set(plans().map((plan) => { draw(plan); return plan.id; }));
    for (const [id, chart] of charts) if (!kept.has(id)) { chart.figure.remove(); charts.delete(id); }
    tables();
    links();
    document.title = `${shown.runs.map((run) => run.name).join(", ")} · lockstep`;
  }

  // -- where the views come from -------------------------------------------------------------------------------

  async function poll() {
    try {
      const answer = await fetch("runs.json", { headers: shown.etag ? { "If-None-Match": shown.etag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        shown.runs = (await answer.json()).runs;
        shown.etag = answer.headers.get("ETag") || "";
        render();
      }
      if (answer.status !== 200 && answer.status !== 304) throw new Error(`the server answers ${answer.status}`);
      await showLog();
      fresh(shown.runs.some((run) => run.is_running) ? "live" : "the run is over");
    } catch (error) {
      fresh(`not updated any more: ${error.message}`);
    }
    setTimeout(poll, POLL_MS);
  }

  function fresh(text) {
    if (byId("freshness").textContent !== text) byId("freshness").textContent = text;
  }

  async function showLog() {
    const slot = byId("log-slot").value;
    if (slot === "") return;
    const path = `log/${shown.chosen}/${slot}`;
    const text = embedded ? shown.logs[path] ?? "" : await (await fetch(path, { cache: "no-store" })).text();
    const log = byId("log");
    if (log.textContent === text) return;
    const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    log.textContent = text;
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  byId("controls").addEventListener("change", () => {
    shown.across = document.querySelector("input[name=across]:checked").value;
    shown.isLog = byId("log-scale").checked;
    shown.chosen = Number(byId("chosen").value || 0);
    for (const chart of charts.values()) chart.cursor = null;
    render();
    showLog();
  });
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("log-slot").addEventListener("change", showLog);
  new ResizeObserver(() => { for (const chart of charts.values()) if (chart.plan) picture(chart); }).observe(byId("charts"));

  if (embedded) {
    const given = JSON.parse(embedded.textContent);
    shown.runs = given.runs;
    shown.logs = given.logs;
    fresh(`as of ${given.made_at}`);
    render();
    showLog();
  } else {
    poll();
  }
})();
