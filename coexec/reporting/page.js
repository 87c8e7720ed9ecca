"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const root = document.documentElement;
  const SVG = "http://www.w3.org/2000/svg";

  // Elements are made with text only: nothing of the data is ever taken for HTML.
  function made(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }
  function drawnIn(parent, tag, attributes = {}, text) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }
  const short = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
  const fileName = (place) => place.replace(/^.*[\\/](?=[^\\/]*:\d+ in )/, "");
  const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
  function time(seconds) {
    if (seconds === null || seconds === undefined) return "";
    if (seconds === 0) return "0";
    const size = Math.abs(seconds);
    if (size < 1e-3) return `${+(1e6 * seconds).toPrecision(3)} µs`;
    return size < 1 ? `${+(1e3 * seconds).toPrecision(3)} ms` : `${+seconds.toPrecision(4)} s`;
  }
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name.replaceAll(" ", "-")}`).trim();

  // Theme: the system's, until the button is pressed.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  function applyTheme() {
    root.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
    drawTimeline();
  }
  byId("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    applyTheme();
  });
  dark.addEventListener("change", applyTheme);

  function table(parent, columns, rows, nothing) {
    parent.replaceChildren();
    if (!rows.length) {
      parent.append(made("p", {class: "hint"}, nothing));
      return;
    }
    const head = made("tr");
    for (const [name, , numeric] of columns) head.append(made("th", numeric ? {class: "n"} : {}, name));
    const body = made("tbody");
    for (const row of rows) {
      const line = made("tr");
      for (const [, content, numeric] of columns) {
        line.append(made("td", numeric ? {class: "n"} : {}, ...[content(row)].flat()));
      }
      body.append(line);
    }
    parent.append(made("table", {}, made("thead", {}, head), body));
  }
  const placed = (place, source) => [
    made("div", {class: "source"}, source || ""), made("div", {class: "place", title: place}, fileName(place)),
  ];

  // Verdict and causes.
  function showVerdict(shown) {
    const lines = shown.explain.split("\n").slice(0, 4);
    byId("verdict-text").replaceChildren(...lines.map((line) => made("div", {}, line)));
    const columns = [
      ["cause", (c) => made("code", {title: c.meaning}, c.id)],
      ["what", (c) => c.text],
      ["where", (c) => placed(c.file ? `${c.file}:${c.line} in ${c.function}` : c.function, c.source)],
      ["count", (c) => String(c.count), true],
      ["a call", (c) => (c.seconds_per_call ? time(c.seconds_per_call) : ""), true],
      ["what to do", (c) => c.what_to_do],
    ];
    table(byId("causes"), columns, shown.causes, "Nothing kept a call from the fast path.");
  }

  function showTables(shown) {
    table(byId("lines-table"), [
      ["line", (l) => placed(l.place, l.source)],
      ["launches that end here", (l) => String(l.launches), true],
      ["operations", (l) => String(l.operations), true],
      ["time", (l) => (l.seconds ? time(l.seconds) : ""), true],
      ["reads", (l) => String(l.reads), true],
    ], shown.lines, "Nothing has been launched.");
    table(byId("memoized-table"), [
      ["call", (m) => m.name],
      ["where", (m) => fileName(m.place)],
      ["state", (m) => m.state],
      ["skipped", (m) => String(m.skipped), true],
      ["variants", (m) => String(m.variants), true],
      ["why not", (m) => m.reason],
    ], shown.memoized, "No library call has been seen in a followed call.");
    const diverged = shown.causes.filter((c) => c.id === "CX-DIVERGE");
    table(byId("divergences-table"), [
      ["where", (c) => placed(c.file ? `${c.file}:${c.line} in ${c.function}` : c.function, c.source)],
      ["expected, and seen", (c) => c.text],
      ["count", (c) => String(c.count), true],
      ["what to do", (c) => c.what_to_do],
    ], diverged, "No call has left the known paths.");
  }

  // Step rate.
  function showRate(shown) {
    const svg = byId("rate-chart"), rate = shown.rate;
    svg.replaceChildren();
    if (!rate || !rate.calls.length) {
      byId("rate-about").textContent = "No call was made while events were recorded.";
      return;
    }
    const width = svg.clientWidth || 1000, height = 150, left = 60, bottom = 18, top = 10;
    const perSecond = rate.calls.map((count) => count / rate.interval);
    const most = Math.max(...perSecond);
    const x = (n) => left + ((width - left - 10) * n) / perSecond.length;
    const y = (value) => height - bottom - ((height - bottom - top) * value) / most;
    const points = perSecond.map((value, n) => `${x(n)},${y(value)} ${x(n + 1)},${y(value)}`).join(" ");
    const corners = `${left},${y(0)} ${points} ${x(perSecond.length)},${y(0)}`;
    drawnIn(svg, "polygon", {points: corners, fill: "var(--followed)", "fill-opacity": .3});
    drawnIn(svg, "polyline", {points, fill: "none", stroke: "var(--followed)"});
    for (const share of [0, .5, 1]) {
      const text = `${+(most * share).toPrecision(3)}/s`;
      drawnIn(svg, "text", {x: 4, y: y(most * share) + 4, "font-size": 11, fill: "var(--faint)"}, text);
    }
    const seconds = perSecond.length * rate.interval;
    for (const share of [0, .25, .5, .75, 1]) {
      const anchor = share === 1 ? "end" : share ? "middle" : "start";
      const at = {x: x(perSecond.length * share), y: height - 4, "font-size": 11, "text-anchor": anchor, fill: "var(--faint)"};
      drawnIn(svg, "text", at, time(seconds * share));
    }
    const calls = rate.calls.reduce((sum, count) => sum + count, 0);
    const inside = rate.seconds.reduce((sum, count) => sum + count, 0);
    byId("rate-about").textContent =
      `${plural(calls, "call")} in ${time(seconds)}, ${time(inside / calls)} each, ` +
      `${Math.round((100 * inside) / seconds)} % of the time; calls that ended in each ${time(rate.interval)}.`;
  }

  // Timeline.
  const line = data.timeline, canvas = byId("timeline-canvas"), ROW = 17, LABEL = 16;
  const events = line.events.map(([kind, name, thread, began, took, text]) => ({
    kind: line.kinds[kind], name: line.names[name], thread, began, took, text: line.texts[text], depth: 0,
  }));
  events.sort((a, b) => a.began - b.began || b.took - a.took);
  const lanes = line.threads.map((name) => ({name, depth: 0, open: [], top: 0}));
  for (const event of events) {
    const lane = lanes[event.thread];
    while (lane.open.length && lane.open.at(-1) <= event.began) lane.open.pop();
    event.depth = lane.open.length;
    lane.open.push(event.began + event.took + .05);
    lane.depth = Math.max(lane.depth, event.depth + 1);
  }
  let height = 24;
  for (const lane of lanes) {
    lane.top = height + LABEL;
    height += LABEL + ROW * lane.depth + 6;
  }
  canvas.style.height = `${height}px`;
  const ends = events.reduce((most, event) => Math.max(most, event.began + event.took), 1);
  const starts = events.length ? events[0].began : 0;
  const view = {from: starts, to: ends};
  let selected = null;

  function drawTimeline() {
    const width = canvas.clientWidth, scale = devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    const faint = colour("faint"), text = colour("text"), border = colour("line"), onBar = colour("on-bar");
    const perPixel = (view.to - view.from) / width;
    const rough = perPixel * 120, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    for (let at = Math.ceil(view.from / step) * step; at < view.to; at += step) {
      const x = (at - view.from) / perPixel;
      pen.fillStyle = border;
      pen.fillRect(x, 0, 1, height);
      pen.fillStyle = faint;
      pen.fillText(time(at / 1e6), x + 3, 12);
    }
    pen.fillStyle = faint;
    for (const lane of lanes) pen.fillText(lane.name, 4, lane.top - 4);
    const colours = Object.fromEntries(line.kinds.map((kind) => [kind, colour(kind) || faint]));
    const drawn = new Map();
    for (const event of events) {
      if (event.began > view.to || event.began + event.took < view.from) continue;
      const lane = lanes[event.thread], y = lane.top + ROW * event.depth;
      const x = Math.max((event.began - view.from) / perPixel, -2);
      const end = Math.min((event.began + event.took - view.from) / perPixel, width + 2);
      const row = event.thread * 64 + event.depth;
      if (end - x < 1 && drawn.get(row) >= x && event !== selected) continue;  // behind one that is as wide as a pixel
      const wide = Math.max(end - x, event.kind === "divergence" ? 3 : 1);
      drawn.set(row, x + wide);
      pen.fillStyle = colours[event.kind];
      pen.fillRect(x, y, wide, ROW - 2);
      if (wide > 60) {
        pen.save();
        pen.beginPath();
        pen.rect(x, y, wide - 2, ROW);
        pen.clip();
        pen.fillStyle = onBar;
        const what = event.name && event.depth === 0 ? `${event.name} (${event.kind})` : event.kind;
        pen.fillText(`${what} ${time(event.took / 1e6)}`, x + 4, y + 11);
        pen.restore();
      }
      if (event === selected) {
        pen.strokeStyle = text;
        pen.lineWidth = 2;
        pen.strokeRect(x, y, wide, ROW - 2);
      }
    }
  }
  function zoomTimeline(factor, around) {
    const middle = around ?? (view.from + view.to) / 2;
    const least = 2, most = (ends - starts) * 1.1 || 10;
    const span = Math.min(Math.max((view.to - view.from) * factor, least), most);
    const share = (middle - view.from) / (view.to - view.from);
    view.from = middle - span * share;
    view.to = view.from + span;
    drawTimeline();
  }
  function moveTimeline(by) {
    view.from += by;
    view.to += by;
    drawTimeline();
  }
  const at = (mouse) => view.from + ((view.to - view.from) * mouse.offsetX) / canvas.clientWidth;
  function eventAt(mouse) {
    const when = at(mouse), slack = (3 * (view.to - view.from)) / canvas.clientWidth;
    let best = null, distance = Infinity;
    for (const event of events) {
      const y = lanes[event.thread].top + ROW * event.depth;
      if (mouse.offsetY < y || mouse.offsetY >= y + ROW) continue;
      const away = Math.max(event.began - when, when - event.began - event.took, 0);
      if (away <= slack && away < distance) [best, distance] = [event, away];
    }
    return best;
  }
  function selectEvent(event) {
    selected = event;
    byId("timeline-detail").textContent = event
      ? [`${event.kind}${event.name ? `: ${event.name}` : ""}, ${time(event.took / 1e6)}, at ` +
         `${time(event.began / 1e6)}, on ${lanes[event.thread].name}`, event.text].filter(Boolean).join("\n")
      : "";
    drawTimeline();
  }
  canvas.addEventListener("wheel", (mouse) => {
    mouse.preventDefault();
    zoomTimeline(mouse.deltaY > 0 ? 1.25 : .8, at(mouse));
  }, {passive: false});
  let grabbed = null;
  canvas.addEventListener("pointerdown", (mouse) => { grabbed = {x: mouse.offsetX, moved: 0}; });
  canvas.addEventListener("pointermove", (mouse) => {
    if (!grabbed || !mouse.buttons) return;
    const by = grabbed.x - mouse.offsetX;
    grabbed = {x: mouse.offsetX, moved: grabbed.moved + Math.abs(by)};
    moveTimeline((by * (view.to - view.from)) / canvas.clientWidth);
  });
  canvas.addEventListener("click", (mouse) => {
    if (!grabbed || grabbed.moved < 4) selectEvent(eventAt(mouse));
    grabbed = null;
  });
  canvas.addEventListener("keydown", (key) => {
    const by = (view.to - view.from) / 10;
    const does = {
      ArrowLeft: () => moveTimeline(-by), ArrowRight: () => moveTimeline(by), "+": () => zoomTimeline(.8),
      "-": () => zoomTimeline(1.25),
    }[key.key];
    if (does) {
      key.preventDefault();
      does();
    }
  });
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => {
      if (button.dataset.zoom === "fit") [view.from, view.to] = [starts, ends];
      zoomTimeline({in: .5, out: 2, fit: 1}[button.dataset.zoom]);
    });
  }
  for (const kind of line.kinds) {
    if (!events.some((event) => event.kind === kind)) continue;
    byId("legend").append(made("span", {}, made("i", {style: `background: var(--${kind.replaceAll(" ", "-")})`}), kind));
  }
  byId("timeline-about").textContent = events.length
    ? `${plural(events.length, "event")} on ${plural(lanes.length, "thread")}` +
      (line.left_out ? `; ${line.left_out} between the first and the last ones were left out` : "") +
      ". What a call's bar shows outside of those below it is Python. trace.json has the same for ui.perfetto.dev."
    : "No events were recorded: they are from coexec.report() on.";

  // Trace graph.
  const svg = byId("graph-svg"), WIDE = 300, GAP = 22, APART = 46, OP = 15;
  let graph = null, segments = [], unfolded = new Set(), open = new Set(), boxes = [], where = {x: 20, y: 20, k: 1};
  let marked = null, searched = "";
  const layer = drawnIn(svg, "g");
  const label = (block) => block.memoized || graph.sources[block.place] || fileName(graph.places[block.place]);
  const operations = (numbers) => numbers.reduce((sum, n) => sum + graph.blocks[n].nodes.length, 0);

  /* The boxes that are shown: blocks, and repeats that are not unfolded. */
  function visible() {
    const repeatOf = new Map();
    graph.folds.forEach(([period, ...numbers], n) => {
      if (!unfolded.has(n)) for (const number of numbers) repeatOf.set(number, {n, period, numbers});
    });
    const shown = [], boxOf = new Map(), made = new Map();
    graph.blocks.forEach((block, number) => {
      const repeat = repeatOf.get(number);
      if (repeat && made.has(repeat.n)) {
        boxOf.set(number, made.get(repeat.n));
        return;
      }
      const box = repeat
        ? {repeat: repeat.n, numbers: repeat.numbers, times: repeat.numbers.length / repeat.period, period: repeat.period}
        : {numbers: [number]};
      if (repeat) made.set(repeat.n, shown.length);
      boxOf.set(number, shown.length);
      shown.push(box);
    });
    const known = new Set();
    shown.forEach((box) => Object.assign(box, {after: [], before: []}));
    graph.blocks.forEach((block, number) => {
      for (const next of block.after) {
        const from = boxOf.get(number), to = boxOf.get(next);
        const key = from * shown.length + to;
        if (from === to || known.has(key)) continue;
        known.add(key);
        shown[from].after.push(to);
        if (to > from) shown[to].before.push(from);
      }
    });
    return shown;
  }

  function place(shown) {
    const taken = [];  // by lane: what is occupied, from top to bottom
    shown.forEach((box) => {
      const blocks = box.numbers.map((n) => graph.blocks[n]);
      const single = box.repeat === undefined ? blocks[0] : null;
      box.rows = single && open.has(box.numbers[0]) ? single.nodes.length : 0;
      box.height = (box.repeat === undefined ? 42 : 30 + 14 * Math.min(box.period, 6)) + OP * box.rows;
      box.top = Math.max(0, ...box.before.map((n) => shown[n].top + shown[n].height + GAP));
      box.last = blocks.some((block) => block.segments.length);
      let lane = box.last ? 0 : Math.max(1, ...box.before.map((n) => shown[n].lane));
      if (!box.last && box.before.some((n) => shown[n].lane > 0)) {
        lane = Math.min(...box.before.map((n) => shown[n].lane).filter((n) => n > 0));
      }
      const free = (n) => !(taken[n] ?? []).some(([top, end]) => box.top < end + GAP && top < box.top + box.height + GAP);
      while (!free(lane)) lane++;
      (taken[lane] ??= []).push([box.top, box.top + box.height]);
      box.lane = lane;
      box.left = lane * (WIDE + APART);
    });
    return shown;
  }

  function drawGraph() {
    boxes = place(visible());
    layer.replaceChildren();
    const edges = drawnIn(layer, "g");
    boxes.forEach((box, from) => {
      for (const to of box.after) {
        const next = boxes[to], x1 = box.left + WIDE / 2, y1 = box.top + box.height, x2 = next.left + WIDE / 2;
        const y2 = next.top;
        if (to <= from) {
          const side = Math.min(box.left, next.left) - 24;
          const d = `M${box.left},${y1 - 12} C${side},${y1 - 12} ${side},${y2 + 12} ${next.left},${y2 + 12}`;
          drawnIn(edges, "path", {class: "back", d});
        } else if (box.lane === next.lane && y2 - y1 > GAP + 1) {
          const side = box.left + WIDE + 26;
          const d = `M${box.left + WIDE},${y1 - 12} C${side},${y1 - 12} ${side},${y2 + 12} ${next.left + WIDE},${y2 + 12}`;
          drawnIn(edges, "path", {d});
        } else {
          const middle = (y1 + y2) / 2;
          drawnIn(edges, "path", {d: `M${x1},${y1} C${x1},${middle} ${x2},${middle} ${x2},${y2}`});
        }
      }
    });
    for (const box of boxes) drawBox(box);
    applyView();
    const shown = plural(boxes.length, "box").replace("boxs", "boxes");
    byId("graph-about").textContent =
      `${plural(graph.nodes, "operation")}, ${plural(graph.forks, "fork")}, ${plural(graph.joins, "join")}, ` +
      `in ${shown}. Colours are the segments of the last call; blue frames are calls whose Python is skipped, ` +
      "dashed ones operations that run on their own; grey was not part of the last call.";
  }

  function drawBox(box) {
    const first = graph.blocks[box.numbers[0]];
    const group = drawnIn(layer, "g", {class: "box", transform: `translate(${box.left},${box.top})`});
    const segment = first.segments.length ? ((first.segments[0] - 1) % 6) + 1 : 0;
    const kinds = [first.memoized && box.repeat === undefined ? "memoized" : "", first.host ? "host" : ""];
    if (marked !== null && box.numbers.includes(marked)) kinds.push("chosen");
    if (searched && box.numbers.some((n) => matches(graph.blocks[n]))) kinds.push("found");
    const attributes = {width: WIDE, height: box.height, class: kinds.filter(Boolean).join(" "), fill: `var(--s${segment})`};
    drawnIn(group, "rect", attributes);
    const count = plural(operations(box.numbers), "operation");
    if (box.repeat !== undefined) {
      const head = box.times === 1 ? plural(box.period, "block") : `${box.times} times`;
      drawnIn(group, "text", {x: 10, y: 18, "font-weight": 600}, `${head}, ${count}`);
      box.numbers.slice(0, Math.min(box.period, 6)).forEach((n, k) => {
        const more = k === 5 && box.period > 6 ? ` … and ${box.period - 6} more` : "";
        drawnIn(group, "text", {x: 18, y: 34 + 14 * k, class: "sub"}, short(label(graph.blocks[n]), 44) + more);
      });
    } else {
      drawnIn(group, "text", {x: 10, y: 18}, short(label(first), 44));
      const parts = [fileName(graph.places[first.place]).replace(/ in .*/, ""), count];
      if (first.segments.length) parts.push(`segment ${first.segments.join(", ")}`);
      drawnIn(group, "text", {x: 10, y: 34, class: "sub"}, short(parts.join(" · "), 50));
      if (box.rows) {
        first.nodes.forEach(([number, op, , gives], k) => {
          drawnIn(group, "text", {x: 10, y: 52 + OP * k, class: "op"}, short(`${number} ${op}${gives ? ` → ${gives}` : ""}`, 44));
        });
      }
    }
    group.addEventListener("click", () => chooseBox(box));
    group.addEventListener("dblclick", () => unfoldBox(box));
  }

  function matches(block) {
    const found = (text) => text.toLowerCase().includes(searched);
    return found(label(block)) || found(graph.places[block.place]) ||
      block.nodes.some(([, op, at]) => found(op) || found(graph.places[at]) || found(graph.sources[at]));
  }

  function chooseBox(box) {
    if (suppressed) return;
    marked = box.numbers[0];
    const lines = [];
    if (box.repeat !== undefined) {
      lines.push(box.times === 1
        ? `${plural(box.period, "block")}, one after the other; double-click unfolds them.`
        : `${box.times} times the same ${plural(box.period, "block")}; double-click unfolds them.`, "");
    }
    for (const n of box.numbers.slice(0, box.period ?? 1)) {
      const block = graph.blocks[n];
      lines.push(fileName(graph.places[block.place]));
      if (graph.sources[block.place]) lines.push(`  ${graph.sources[block.place]}`);
      if (block.memoized) lines.push(`  memoized: ${block.memoized}: its Python is skipped`);
      for (const number of block.segments) {
        const segment = segments[number - 1];
        if (segment) {
          lines.push(`  segment ${number} of ${segments.length}: ${plural(segment.operations, "operation")}, ` +
            `${{xla: "by XLA", graph: "as a graph", operations: "one by one"}[segment.backend]}` +
            `${segment.seconds ? `, ${time(segment.seconds)} the last time` : ""}`);
        }
      }
      if (block.nodes[0][4]) lines.push(`  runs on its own: ${block.nodes[0][4]}`);
      let at = -1;
      for (const [number, op, of, gives] of block.nodes) {
        if (of !== at && of !== block.place) lines.push(`  # ${fileName(graph.places[of])}`);
        at = of;
        lines.push(`  ${number} ${op}${gives ? ` → ${gives}` : ""}`);
      }
      lines.push("");
    }
    byId("graph-detail").textContent = lines.join("\n");
    drawGraph();
  }
  function unfoldBox(box) {
    if (box.repeat !== undefined) unfolded.add(box.repeat);
    else if (!open.delete(box.numbers[0])) open.add(box.numbers[0]);
    drawGraph();
  }

  function applyView() {
    layer.setAttribute("transform", `translate(${where.x},${where.y}) scale(${where.k})`);
  }
  function zoomGraph(factor, x = svg.clientWidth / 2, y = svg.clientHeight / 2) {
    const k = Math.min(Math.max(where.k * factor, .02), 4);
    where = {x: x - ((x - where.x) * k) / where.k, y: y - ((y - where.y) * k) / where.k, k};
    applyView();
  }
  function fitGraph() {
    const right = Math.max(...boxes.map((box) => box.left + WIDE), 1);
    const bottom = Math.max(...boxes.map((box) => box.top + box.height), 1);
    const k = Math.min((svg.clientWidth - 80) / right, (svg.clientHeight - 40) / bottom, 1);
    where = {x: 40, y: 20, k: Math.max(k, .02)};
    applyView();
  }
  svg.addEventListener("wheel", (mouse) => {
    mouse.preventDefault();
    const box = svg.getBoundingClientRect();
    zoomGraph(mouse.deltaY > 0 ? .85 : 1.18, mouse.clientX - box.left, mouse.clientY - box.top);
  }, {passive: false});
  let held = null, suppressed = false;
  svg.addEventListener("pointerdown", (mouse) => {
    held = {x: mouse.clientX, y: mouse.clientY};
    suppressed = false;
  });
  addEventListener("pointermove", (mouse) => {
    if (!held || !mouse.buttons) return;
    const [x, y] = [mouse.clientX - held.x, mouse.clientY - held.y];
    if (!suppressed && Math.abs(x) + Math.abs(y) < 4) return;
    suppressed = true;  // this is no click
    where.x += x;
    where.y += y;
    held = {x: mouse.clientX, y: mouse.clientY};
    applyView();
  });
  addEventListener("pointerup", () => { held = null; });
  const buttons = {
    unfold: () => {
      graph.folds.forEach((_, n) => unfolded.add(n));
      graph.blocks.forEach((_, n) => open.add(n));
      drawGraph();
    },
    fold: () => {
      unfolded.clear();
      open.clear();
      drawGraph();
    },
    in: () => zoomGraph(1.4), out: () => zoomGraph(1 / 1.4), fit: fitGraph,
  };
  for (const button of document.querySelectorAll("[data-graph]")) {
    button.addEventListener("click", () => graph && buttons[button.dataset.graph]());
  }
  byId("graph-find").addEventListener("input", (typed) => {
    searched = typed.target.value.trim().toLowerCase();
    if (!graph) return;
    drawGraph();
    const found = searched && boxes.find((box) => box.numbers.some((n) => matches(graph.blocks[n])));
    if (found) {
      where = {x: svg.clientWidth / 2 - (found.left + WIDE / 2) * where.k, y: 60 - found.top * where.k, k: where.k};
      applyView();
    }
  });

  // Everything of one function.
  function show(number) {
    const shown = data.functions[number];
    showVerdict(shown);
    showTables(shown);
    showRate(shown);
    graph = shown.graph;
    segments = shown.segments;
    [unfolded, open, marked, searched] = [new Set(), new Set(), null, ""];
    where = {x: 40, y: 20, k: 1};
    byId("graph-detail").textContent =
      "Click a box to see its operations; double-click to unfold it in place. Wheel: zoom. Drag: move.";
    drawGraph();
  }
  const about = data.about;
  byId("about").textContent =
    `${about.command} · ${about.began}, ${time(about.seconds)} · TensorFlow ${about.tensorflow}, Keras ${about.keras}, ` +
    `Python ${about.python} · ${about.devices.join(", ")}, ${plural(about.cores, "core")}`;
  const choice = byId("function");
  data.functions.forEach((shown, n) => choice.append(made("option", {value: n}, shown.name)));
  choice.addEventListener("change", () => show(Number(choice.value)));
  applyTheme();
  if (data.functions.length) show(0);
  else byId("verdict-text").textContent = "No decorated function that is still alive has been called.";
  addEventListener("resize", () => {
    drawTimeline();
    if (data.functions.length) showRate(data.functions[Number(choice.value)]);
  });
  root.dataset.ready = "yes";
})();
