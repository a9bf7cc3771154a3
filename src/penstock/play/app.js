// The page: what is asked for (`state`, which the address repeats), what follows from it, and what shows it.
(() => {
  const $ = (id) => document.getElementById(id);
  const { short } = view;
  const NEW = { name: "zb-h1", ranks: 4, microbatches: 8, options: {}, times: { F: 10, I: 10, W: 10, B: 20 }, slow: [0, 1], links: new Map(),
    dispatch: "hinted", grid: null, placement: "one-to-one", cap: "", split: true, channel: "nccl" };
  const LATE_AT_FIRST = [["1>2", 30], ["2>1", 30]]; // what a page that is opened without an address shows
  const TIMES = { F: "F forward", I: "I input", W: "W weight", B: "B whole" };
  const MOST_MS = 60, PLAN_MS = 3000, PLAN_SLICE = 25;
  const LARGE = 4000, REHEARSALS = 30; // ops, and runs
  const DRAGGED_PX = 5, ONE_EDIT_MS = 800, OFFER_MS = 1500;
  const seen = [{}, {}], unseen = { canvas: document.createElement("canvas"), spaces: [{}, {}] };
  const rest = window.requestIdleCallback || ((then) => setTimeout(then, 50));
  const state = read(location.hash);
  let shown = null; // the last schedule that was right: { schedule, graph, kinds, runs, place }
  let written = null; // what the grid says, right or not; null where it can't be read
  let chosen = null; // the key of an op
  let pending = null, planning = null, told = "";
  let offered = null; // a plan for what the page opened with: { address, text }
  let drag = null; // an op that the pointer holds: { op, from, left, time, step }, where `step` is its new place in the row
  let past = [], edited = 0; // the grids before each edit, and when the last one was typed

  // ---- the address

  function write() {
    const parts = { s: state.name, p: state.ranks, n: state.microbatches, t: Object.values(state.times).join(","), d: state.dispatch };
    for (const [name, value] of Object.entries(state.options)) if (value) parts[`o.${name}`] = Array.isArray(value) ? value.join(",") : value;
    if (state.slow[1] !== 1) parts.slow = state.slow.join(",");
    if (state.links.size) parts.l = [...state.links].map(([link, ms]) => `${link}:${ms}`).join(",");
    if (state.cap) parts.cap = state.cap;
    if (state.placement !== NEW.placement) parts.where = state.placement;
    if (!state.split) parts.whole = 1;
    if (state.channel !== NEW.channel) parts.over = state.channel;
    if (state.grid !== null) parts.g = state.grid;
    return "#" + Object.entries(parts).map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
  }

  function read(hash) {
    const found = { ...NEW, options: {}, times: { ...NEW.times }, links: new Map(hash.length > 1 ? [] : LATE_AT_FIRST) };
    for (const part of hash.replace(/^#/, "").split("&").filter(Boolean)) {
      const name = part.split("=")[0];
      let value;
      try { value = decodeURIComponent(part.slice(name.length + 1)); } catch { continue; }
      const numbers = value.split(",").map(Number), fine = numbers.every((each) => Number.isFinite(each) && each >= 0);
      if (name === "s" && library.SCHEDULES.includes(value)) found.name = value;
      else if (name === "p" && fine) found.ranks = Math.min(64, Math.trunc(numbers[0])) || NEW.ranks;
      else if (name === "n" && fine) found.microbatches = Math.min(512, Math.trunc(numbers[0])) || NEW.microbatches;
      else if (name === "t" && fine && numbers.length === 4) [found.times.F, found.times.I, found.times.W, found.times.B] = numbers;
      else if (name === "d" && [...$("dispatch").options].some((each) => each.value === value)) found.dispatch = value;
      else if (name === "slow" && fine && numbers.length === 2) found.slow = numbers;
      else if (name === "cap" && fine) found.cap = value;
      else if (name === "where" && [...$("placement").options].some((each) => each.value === value)) found.placement = value;
      else if (name === "whole") found.split = false;
      else if (name === "over" && torch.CHANNELS.includes(value)) found.channel = value;
      else if (name === "g") found.grid = value;
      else if (name === "o.backward" && (value === "whole" || value === "split")) found.options.backward = value;
      else if (name === "o.warmup" && fine) found.options.warmup = numbers;
      else if ((name === "o.num_stages" || name === "o.waves") && fine) found.options[name.slice(2)] = numbers[0];
      else if (name === "l")
        for (const link of value.split(",")) {
          const match = /^(\d+>\d+):([\d.]+)$/.exec(link);
          if (match) found.links.set(match[1], Number(match[2]));
        }
    }
    return found;
  }

  let writing = 0;
  function note() {
    clearTimeout(writing);
    writing = setTimeout(() => history.replaceState(null, "", write()), 120);
  }

  // ---- controls

  function slider(parent, label, value, most, step, change) {
    const row = document.createElement("label"), name = document.createElement("span"), input = document.createElement("input");
    const output = document.createElement("output");
    row.className = "slider";
    name.textContent = label;
    Object.assign(input, { type: "range", min: 0, max: Math.max(most, value), step, value });
    input.setAttribute("aria-label", label);
    output.textContent = short(value);
    input.addEventListener("input", () => {
      const accepted = change(Number(input.value));
      if (accepted !== undefined) input.value = accepted;
      output.textContent = short(Number(input.value));
    });
    row.append(name, input, output);
    parent.append(row);
    return input;
  }

  const warmups = () => state.options.warmup && state.options.warmup.length === state.ranks ? state.options.warmup :
    range(state.ranks).map((rank) => 2 * (state.ranks - rank) - 1);

  // Sliders for what the schedule has; made anew when that changes.
  function showControls() {
    $("name").value = state.name;
    $("ranks").value = state.ranks;
    $("microbatches").value = state.microbatches;
    $("dispatch").value = state.dispatch;
    $("placement").value = state.placement;
    $("cap").value = state.cap;
    $("split").checked = state.split;
    $("channel").value = state.channel;
    const takes = library.OPTIONS[state.name] || [];
    for (const part of document.querySelectorAll("[data-option]")) part.hidden = !takes.includes(part.dataset.option) || state.grid !== null;
    $("num_stages").value = state.options.num_stages || 2 * state.ranks;
    $("waves").value = state.options.waves || 2;
    $("backward").value = state.options.backward || "whole";
    $("reset").hidden = state.grid === null;
    $("warmup").replaceChildren();
    if (takes.includes("warmup"))
      warmups().forEach((count, rank) => slider($("warmup"), `rank ${rank}`, count, 4 * state.ranks, 1, (value) => {
        const counts = [...warmups()], before = rank ? counts[rank - 1] : Infinity, after = counts[rank + 1] || 1;
        counts[rank] = Math.max(after, Math.min(before, value), 1); // they never rise from one rank to the next
        state.options.warmup = counts;
        state.grid = null;
        ask("build");
        return counts[rank];
      }));
    const ranks = shown ? shown.schedule.numRanks : state.ranks;
    const kinds = new Set(shown ? shown.kinds : Object.keys(TIMES));
    if (kinds.has("R")) kinds.add("F");
    $("times").replaceChildren();
    for (const [kind, name] of Object.entries(TIMES))
      if (kinds.has(kind)) slider($("times"), name, state.times[kind], MOST_MS, 0.5, (ms) => { state.times[kind] = ms; ask("run"); });
    if (ranks > 1) {
      const row = document.createElement("label"), pick = document.createElement("select");
      row.className = "row";
      row.append("Slower rank ", pick);
      pick.id = "slow";
      range(ranks).forEach((rank) => pick.add(new Option(`rank ${rank}`, rank)));
      pick.value = Math.min(state.slow[0], ranks - 1);
      pick.addEventListener("change", () => { state.slow[0] = Number(pick.value); ask("run"); });
      $("times").append(row);
      slider($("times"), "times", state.slow[1], 4, 0.05, (factor) => {
        state.slow = [Number(pick.value), Math.max(0.05, factor)];
        ask("run");
      });
    }
    $("links").replaceChildren();
    const pairs = shown ? linksOf(shown.schedule) : range(ranks - 1).map((rank) => `${rank}>${rank + 1}`);
    for (const pair of pairs) {
      const [a, b] = pair.split(">");
      slider($("links"), `${a} and ${b}`, state.links.get(pair) || 0, MOST_MS, 0.5, (ms) => { delay(a, b, ms); ask("run"); });
    }
    if (pairs.length > 1)
      slider($("links"), "all links", 0, MOST_MS, 0.5, (ms) => {
        for (const pair of pairs) delay(...pair.split(">"), ms);
        for (const input of [...$("links").querySelectorAll("input")].slice(0, -1)) {
          input.value = ms;
          input.nextElementSibling.textContent = short(ms);
        }
        ask("run");
      });
  }

  function delay(a, b, ms) {
    for (const link of [`${a}>${b}`, `${b}>${a}`]) {
      if (ms) state.links.set(link, ms);
      else state.links.delete(link);
    }
  }

  // The pairs of ranks between which messages go.
  function linksOf(s) {
    const found = new Set();
    for (const hosts of s.pipelines)
      for (let stage = 1; stage < hosts.length; stage++)
        if (hosts[stage] !== hosts[stage - 1]) found.add([hosts[stage - 1], hosts[stage]].sort((x, y) => x - y).join(">"));
    return [...found].sort((x, y) => x.localeCompare(y, "en", { numeric: true }));
  }

  // ---- what follows

  const costs = (numRanks) => ({ f: state.times.F, i: state.times.I, w: state.times.W, b: state.times.B,
    slow: range(numRanks).map((rank) => (rank === state.slow[0] ? state.slow[1] : 1)) });

  // Asks for an update at the next frame: "build" the schedule anew, read the "grid", or only "run" it.
  function ask(what) {
    const order = ["draw", "run", "grid", "build"];
    if (pending === null) requestAnimationFrame(update);
    if (pending === null || order.indexOf(what) > order.indexOf(pending)) pending = what;
    note();
  }

  function update() {
    const began = performance.now(), what = pending;
    pending = null;
    try {
      if (what === "build" || what === "grid") change(what);
      if (what !== "draw" && shown) shown.runs = run(state.links, seen);
      if (shown) show();
      if (what === "build" || what === "grid") rehearse(shown);
    } catch (error) {
      fail(error);
    }
    document.body.dataset.frame = (performance.now() - began).toFixed(1);
    document.body.dataset.updates = Number(document.body.dataset.updates || 0) + 1;
  }

  // Runs and draws a large schedule unseen while nothing else is asked for, in turn as it is and with a late link.
  // The browser compiles what has run often, and the first frames of a drag would wait for that.
  function rehearse(rehearsed, left = REHEARSALS) {
    if (!left || rehearsed.graph.ops.length < LARGE) return;
    rest(() => {
      if (shown !== rehearsed) return;
      try {
        const [link] = linksOf(shown.schedule), late = left % 2 && link ? [[link, left]] : state.links;
        view.draw(unseen.canvas, run(new Map(late), unseen.spaces), chosen, $("chart").clientWidth);
      } catch {
        return; // an update has said why, or the next one does
      }
      rehearse(rehearsed, left - 1);
    });
  }

  function change(what) {
    const before = shown && shapeOf(shown.schedule);
    let schedule;
    written = null;
    if (state.grid === null) {
      schedule = written = library.build(state.name, state.ranks, state.microbatches, optionsOf());
      $("grid").value = schedules.toText(schedule);
    } else {
      if (what === "build") $("grid").value = state.grid;
      schedule = written = schedules.parse(state.grid);
      schedules.check(schedule);
    }
    shown = { schedule, graph: runs.lower(schedule), kinds: new Set(schedule.order.flat().map((op) => op.kind)), runs: [], place: null };
    if (chosen !== null && !shown.graph.number.has(chosen)) chosen = null;
    pass();
    if (what === "build" || before !== shapeOf(schedule)) showControls();
    $("reset").hidden = state.grid === null;
  }

  // The options that the chosen schedule takes.
  function optionsOf() {
    const takes = library.OPTIONS[state.name] || [], found = {};
    for (const name of takes) if (state.options[name]) found[name] = state.options[name];
    if (found.warmup && found.warmup.length !== state.ranks) delete found.warmup;
    return found;
  }

  const shapeOf = (s) => [s.numRanks, [...new Set(s.order.flat().map((op) => op.kind))].sort().join(""), linksOf(s).join()].join(" ");

  // The runs to show: frozen, and as chosen. They lie in `spaces`, and so do the next ones.
  function run(links, spaces) {
    const options = { costs: costs(shown.schedule.numRanks), links, graph: shown.graph };
    const dispatches = state.dispatch === "frozen" ? ["frozen"] : ["frozen", state.dispatch];
    return dispatches.map((dispatch, at) => runs.simulate(shown.schedule, { ...options, dispatch, space: spaces[at] }));
  }

  function paint() {
    shown.place = view.draw($("chart"), shown.runs, chosen, $("chart").clientWidth || 1, drag && drag.isMoved ? drag : null);
  }

  function show() {
    paint();
    $("offer").hidden = offered === null || offered.address !== write();
    const frozen = shown.runs[0].makespan;
    $("numbers").replaceChildren(...shown.runs.map((run) => {
      const row = document.createElement("tr"), peaks = run.peaks.map(short);
      const cells = [run.dispatch, `${short(run.makespan)} ms`, (run.makespan / (frozen || 1)).toFixed(3), `${(100 * run.bubble).toFixed(1)}%`,
        peaks.length > 12 ? `${Math.max(...run.peaks)} at most` : peaks.join(" ")];
      cells.forEach((text, at) => {
        const cell = document.createElement(at ? "td" : "th");
        if (!at) cell.scope = "row";
        cell.textContent = text;
        row.append(cell);
      });
      return row;
    }));
    $("python").textContent = torch.python(`${shown.schedule.name}.csv`, state.channel);
    $("legend").replaceChildren(...view.legend(shown.kinds).map(([color, name]) => {
      const item = document.createElement("span"), patch = document.createElement("i");
      patch.style.background = color;
      item.append(patch, name);
      return item;
    }));
    $("chart").setAttribute("aria-label", shown.runs.map((run) => `${run.schedule.name}, ${run.dispatch}: ${short(run.makespan)} ms`).join("; "));
    tell();
  }

  function pass() {
    const { schedule } = shown, peaks = schedules.peaks(schedule);
    const message = `Proved: ${shown.graph.ops.length} ops, each runs once, in an order that every rank completes; at most ` +
      `${Math.max(...peaks)} activations in flight on a rank.`;
    $("marks").replaceChildren();
    $("proof").className = "good";
    if (told !== message) $("proof").textContent = told = message;
  }

  function fail(error) {
    if (!(error instanceof schedules.ScheduleError)) { console.error(error); }
    let message = error.message;
    if (shown && state.grid !== null) message += "\nThe timelines show the last grid that was right.";
    tell();
    told = message;
    $("proof").className = state.grid === null ? "bad" : "bad of-grid";
    $("proof").replaceChildren(...inParts(message));
    $("offer").hidden = true;
    if (shown && shown.place) paint();
    mark(placeOfError(error));
    $("reset").hidden = state.grid === null;
  }

  // An error's sentences, which may wrap, and the indented lines between them, whose arrow points at a cell of the row above.
  function inParts(message) {
    const parts = [];
    for (const line of message.split("\n")) {
      const name = line.startsWith("  ") ? "PRE" : "DIV", last = parts[parts.length - 1];
      if (last && last.tagName === name) last.textContent += `\n${line}`;
      else parts.push(Object.assign(document.createElement(name), { textContent: line }));
    }
    return parts;
  }

  // Where in the text an error is: [line, column, length], or null. An op that is missing is missed after its row's last.
  function placeOfError({ line, column, rank, step }) {
    if (line) return [line, column, Math.max(1, /^\S*/.exec(($("grid").value.split("\n")[line - 1] || "").slice(column - 1))[0].length)];
    const row = rank === null || rank === undefined || written === null || !written.spots ? [] : written.spots[rank] || [];
    return row[step] || row[row.length - 1] || null;
  }

  // Shows a place in the text, behind the letters.
  function mark(place) {
    if (place === null) return void $("marks").replaceChildren();
    const [begin, end] = between(place), text = $("grid").value, cell = document.createElement("mark");
    cell.textContent = text.slice(begin, end) || " ";
    $("marks").replaceChildren(text.slice(0, begin), cell, text.slice(end) + "\n");
    follow();
  }

  function follow() {
    $("marks").scrollTop = $("grid").scrollTop;
    $("marks").scrollLeft = $("grid").scrollLeft;
  }

  // The first and the last letter of a place in the text, counted from its start.
  function between([line, column, length]) {
    const before = $("grid").value.split("\n").slice(0, line - 1).reduce((total, each) => total + each.length + 1, 0) + column - 1;
    return [before, before + length];
  }

  // ---- one op

  function tell() {
    const [rank, step] = placeOf(chosen);
    $("earlier").disabled = !(step > 0);
    $("later").disabled = !(step >= 0 && step < written.order[rank].length - 1);
    const number = chosen !== null && shown ? shown.graph.number.get(chosen) : undefined;
    $("asked").textContent = number === undefined ? "Hover or tap an op to ask about it; drag it along its row to move it." : describe(number);
  }

  // Where an op stands in the grid: [rank, step], [-1, -1] where it does not.
  function placeOf(key) {
    if (key === null || written === null) return [-1, -1];
    const steps = written.order.map((row) => row.findIndex((op) => schedules.key(op) === key)), rank = steps.findIndex((step) => step >= 0);
    return [rank, rank < 0 ? -1 : steps[rank]];
  }

  function describe(number) {
    const op = shown.graph.ops[number], has = (k) => shown.graph.number.has(k);
    const needs = schedules.needs(shown.schedule, op, has).map(schedules.opText);
    const when = shown.runs.map((run) => `${run.dispatch} ${short(run.start[number])} to ${short(run.end[number])} ms`).join(", ");
    return `${palette.kinds[op.kind][0]} of microbatch ${op.m} in stage ${op.stage}, rank ${shown.graph.rank[number]}: ${when}` +
      `${needs.length ? `; needs ${needs.join(" and ")}` : ""}`;
  }

  function choose(key) {
    chosen = key;
    ask("draw");
  }

  // The chosen op's cell in the text, or the op at the text's caret.
  function select() {
    let parsed;
    try { parsed = schedules.parse($("grid").value); } catch { return; }
    parsed.order.forEach((row, rank) => row.forEach((op, step) => {
      if (schedules.key(op) !== chosen) return;
      $("grid").setSelectionRange(...between(parsed.spots[rank][step]));
    }));
  }

  function fromCaret() {
    let parsed;
    try { parsed = schedules.parse($("grid").value); } catch { return; }
    const before = $("grid").value.slice(0, $("grid").selectionStart).split("\n"), line = before.length, column = before[line - 1].length + 1;
    parsed.order.forEach((row, rank) => row.forEach((op, step) => {
      const [at, from, length] = parsed.spots[rank][step];
      if (at === line && from <= column && column <= from + length && schedules.key(op) !== chosen) choose(schedules.key(op));
    }));
  }

  // Moves the chosen op to another place in its row.
  function moveTo(to) {
    const [rank, step] = placeOf(chosen), order = written.order.map((row) => [...row]), row = order[rank];
    row.splice(to, 0, ...row.splice(step, 1));
    edit(schedules.toText({ ...written, order }));
    select();
  }

  const move = (by) => moveTo(placeOf(chosen)[1] + by);

  // What is typed within a moment is one edit.
  function edit(text, isTyped = false) {
    if (!isTyped || performance.now() - edited > ONE_EDIT_MS) past.push(state.grid);
    edited = isTyped ? performance.now() : 0;
    put(text);
  }

  function undo() {
    if (!past.length) return;
    edited = 0;
    put(past.pop());
  }

  // Shows this grid, or the one that is built where it is null.
  function put(text) {
    $("undo").disabled = !past.length;
    state.grid = text;
    if (text === null) return void ask("build");
    if ($("grid").value !== text) $("grid").value = text;
    ask("grid");
  }

  // ---- planning

  // A search for what is asked for now.
  function searchNow() {
    const p = state.ranks, cap = state.cap === "" ? null : Number(state.cap);
    const pipelines = { "one-to-one": () => schedules.oneToOne(p), "v": () => schedules.vShape(p), "circular": () => schedules.circular(p, 2 * p),
      "bidirectional": () => schedules.bidirectional(schedules.oneToOne(p)) }[state.placement]();
    return planner.search({ pipelines, numRanks: p, numMicrobatches: state.microbatches, links: state.links, cap, split: state.split, costs: costs(p) });
  }

  // Searches in slices between which the page answers, for so long or until the best is proved.
  function searchFor(search, ms, tellOf, end) {
    const began = performance.now(), { found } = search;
    const slice = () => {
      const until = performance.now() + PLAN_SLICE;
      while (!found.done && performance.now() < until) search.step();
      if (found.done || performance.now() - began >= ms) return void end(found);
      tellOf(found);
      planning = setTimeout(slice, 0);
    };
    clearTimeout(planning);
    slice();
  }

  const above = (found) => (100 * (found.makespan / found.lower - 1)).toFixed(1);

  function plan() {
    let search;
    try { search = searchNow(); } catch (error) { return void ($("planned").textContent = error.message); }
    $("plan").disabled = true;
    searchFor(search, PLAN_MS, (found) => {
      $("planned").textContent = `${short(found.makespan)} ms, ${above(found)}% above the bound so far, ${found.trials} starts`;
    }, (found) => {
      $("plan").disabled = false;
      $("planned").textContent = `${short(found.makespan)} ms, ` + (found.done ? "proved the shortest to 0.01%" :
        `at most ${above(found)}% above the shortest (no order is below ${short(found.lower)} ms)`);
      edit(schedules.toText(found.schedule));
    });
  }

  // Plans for what the page opens with, and says what that saves.
  function offer() {
    const address = write(), [[link, ms]] = state.links, [frozen] = shown.runs;
    searchFor(searchNow(), OFFER_MS, () => {}, (found) => {
      const share = Math.round(100 * (1 - found.makespan / frozen.makespan));
      if (address !== write() || share < 1) return;
      offered = { address, text: schedules.toText(found.schedule) };
      $("saves").textContent = `Messages between ranks ${link.replace(">", " and ")} are ${short(ms)} ms late. ${frozen.schedule.name} takes ` +
        `${short(frozen.makespan)} ms with that, a plan ${short(found.makespan)}: ${share}% less, with at most ` +
        `${short(Math.max(...runs.lower(found.schedule).frozen_peaks))} activations on a rank instead of ${short(Math.max(...frozen.peaks))}.`;
      $("offer").hidden = false;
    });
  }

  // ---- downloads

  function save(kind) {
    const { schedule } = shown;
    let text;
    try {
      text = { txt: () => schedules.toText(schedule) + "\n", json: () => schedules.toJson(schedule) + "\n", csv: () => torch.toCsv(schedule, { ...state, costs: costs(schedule.numRanks), graph: shown.graph }),
        svg: () => view.svg(shown.runs) }[kind]();
    } catch (error) {
      return void ($("saved").textContent = error.message);
    }
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind === "svg" ? "image/svg+xml" : "text/plain" }));
    link.download = `${schedule.name}.${kind}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    $("saved").textContent = `${link.download} is in your downloads.`;
  }

  // ---- begin

  for (const name of library.SCHEDULES) $("name").add(new Option(name, name));
  const rebuild = () => { past = []; put(null); };
  $("name").addEventListener("change", () => { state.name = $("name").value; rebuild(); });
  for (const [id, least, most] of [["ranks", 1, 64], ["microbatches", 1, 512]])
    $(id).addEventListener("input", () => {
      const value = Math.trunc(Number($(id).value));
      if (value >= least && value <= most) { state[id] = value; rebuild(); }
    });
  for (const id of ["num_stages", "waves"]) $(id).addEventListener("input", () => { state.options[id] = Math.trunc(Number($(id).value)); rebuild(); });
  $("backward").addEventListener("change", () => { state.options.backward = $("backward").value; rebuild(); });
  $("dispatch").addEventListener("change", () => { state.dispatch = $("dispatch").value; ask("run"); });
  $("placement").addEventListener("change", () => { state.placement = $("placement").value; note(); });
  $("cap").addEventListener("input", () => { state.cap = Number($("cap").value) >= 1 ? $("cap").value : ""; note(); });
  for (const channel of torch.CHANNELS) $("channel").add(new Option(channel || "none: added when loaded", channel));
  $("channel").addEventListener("change", () => { state.channel = $("channel").value; ask("draw"); });
  $("split").addEventListener("change", () => { state.split = $("split").checked; note(); });
  $("plan").addEventListener("click", plan);
  $("take").addEventListener("click", () => edit(offered.text));
  $("grid").addEventListener("input", () => edit($("grid").value, true));
  $("grid").addEventListener("scroll", follow);
  for (const event of ["keyup", "click"]) $("grid").addEventListener(event, fromCaret);
  $("earlier").addEventListener("click", () => move(-1));
  $("later").addEventListener("click", () => move(1));
  $("reset").addEventListener("click", rebuild);
  $("undo").addEventListener("click", undo);
  addEventListener("keydown", (event) => {
    const isUndo = (event.ctrlKey || event.metaKey) && !event.shiftKey && event.key === "z";
    if (!isUndo || (event.target.tagName === "INPUT" && event.target.type !== "range")) return;
    event.preventDefault();
    undo();
  });
  for (const button of document.querySelectorAll("[data-save]")) button.addEventListener("click", () => save(button.dataset.save));
  const under = (event) => {
    const box = $("chart").getBoundingClientRect();
    return shown && shown.place && view.at(shown.place, shown.runs, event.clientX - box.left, event.clientY - box.top);
  };
  // Ops of the frozen run are dragged: it runs the grid's order.
  const isMovable = (found) => found && found[0] === shown.runs[0] && written === shown.schedule;
  $("chart").addEventListener("pointerdown", (event) => {
    const found = under(event);
    choose(found ? schedules.key(shown.graph.ops[found[1]]) : null);
    if (!found) return;
    select();
    if (!isMovable(found)) return;
    $("chart").setPointerCapture(event.pointerId);
    drag = { op: found[1], from: event.clientX, left: 0, time: 0, step: 0, isMoved: false };
  });
  $("chart").addEventListener("pointermove", (event) => {
    if (drag !== null) return void carry(event.clientX);
    const found = under(event);
    $("chart").classList.toggle("movable", Boolean(isMovable(found)));
    if (found) $("asked").textContent = describe(found[1]);
    else tell();
  });
  // The dragged op's new place: after all ops of its rank whose middle lies left of the pointer.
  function carry(clientX) {
    if (!drag.isMoved && Math.abs(clientX - drag.from) < DRAGGED_PX) return;
    const [{ graph, start, end }] = shown.runs, rank = graph.rank[drag.op], { place } = shown;
    const row = range(graph.first[rank + 1] - graph.first[rank]).map((at) => graph.first[rank] + at).filter((op) => op !== drag.op);
    const time = place.timeAt(clientX - $("chart").getBoundingClientRect().left), before = row.filter((op) => (start[op] + end[op]) / 2 < time);
    drag.isMoved = true;
    drag.step = before.length;
    drag.time = before.length ? end[before[before.length - 1]] : start[row[0]] || 0;
    drag.left = place.x(start[drag.op]) + clientX - drag.from;
    $("chart").classList.add("moving");
    ask("draw");
  }
  $("chart").addEventListener("pointerup", () => {
    const dropped = drag;
    letGo();
    if (dropped !== null && dropped.isMoved && dropped.step !== placeOf(chosen)[1]) moveTo(dropped.step);
  });
  function letGo() {
    drag = null;
    $("chart").classList.remove("moving");
    ask("draw");
  }
  $("chart").addEventListener("pointercancel", letGo);
  $("chart").addEventListener("pointerleave", tell);
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("resize", () => shown && ask("draw"));
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  function colour(isDark) {
    document.documentElement.dataset.scheme = isDark ? "dark" : "light";
    if (shown) ask("draw");
  }
  prefersDark.addEventListener("change", () => colour(prefersDark.matches));
  addEventListener("message", ({ data }) => { if (data && (data.scheme === "dark" || data.scheme === "light")) colour(data.scheme === "dark"); });
  colour(prefersDark.matches);
  addEventListener("hashchange", () => { past = []; Object.assign(state, read(location.hash)); put(state.grid); showControls(); ask("build"); });
  showControls();
  ask("build");
  if (location.hash.length < 2) requestAnimationFrame(() => rest(offer));
})();
