// Draws the timelines in #data on the canvas and answers the pointer and the keys.
// The part of the address after # may say what to show, so that a view can be sent on:
//   #time=100,200  #show=arrows,held,critical  #op=0:2F3 (timeline 0, stage 2, F, microbatch 3)
"use strict";
(() => {
  const { kinds, timelines } = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("chart");
  const tip = document.getElementById("tip");
  const front = canvas.getContext("2d");
  const base = document.createElement("canvas"); // everything but what the pointer changes
  const back = base.getContext("2d");
  let g = back; // where the painters paint
  const LABEL = 70, RIGHT = 54, AXIS = 26, HEAD = 30, FACTS = 16, GAP = 3, ACROSS = 14, FONT = '-apple-system, "Segoe UI", Roboto, Arial, sans-serif';
  const length = Math.max(...timelines.map((t) => t.makespan)) || 1;
  const unit = timelines.some((t) => t.unit) ? " ms" : "";
  const view = { from: 0, to: length, scroll: 0 };
  const show = { arrows: timelines.some((t) => t.channels), held: false, critical: false };
  let width = 0, height = 0, color = {}, places = [], total = 0;
  let hover = null, held = null; // each { t: timeline index, i: op index }

  timelines.forEach((t) => {
    t.rank = new Int32Array(t.start.length);
    t.byMicrobatch = new Map();
    t.byName = new Map();
    for (let r = 0; r < t.numRanks; r++) t.rank.fill(r, t.first[r], t.first[r + 1]);
    t.start.forEach((_, i) => {
      const m = chainOf(t, i);
      if (!t.byMicrobatch.has(m)) t.byMicrobatch.set(m, []);
      t.byMicrobatch.get(m).push(i);
      t.byName.set(name(t, i), i);
    });
    t.byMicrobatch.forEach((list) => list.sort((a, b) => t.start[a] - t.start[b]));
    t.mostHeld = Math.max(1, ...t.held.map((steps) => steps.reduce((most, s) => Math.max(most, s[1]), 0)));
  });

  // What an op is followed with: its microbatch, or where it is an update all copies of it.
  function chainOf(t, i) { return t.updates && t.updates[i] ? "U" + t.updates[i][0] : t.microbatch[i]; }

  // What stands on a bar: the microbatch, or the update, marked where a copy takes it over.
  function numberOf(t, i) {
    if (!t.updates || !t.updates[i]) return String(t.microbatch[i]);
    return t.updates[i][0] + (t.updates[i][1] ? "'" : "");
  }

  function name(t, i) { return t.stage[i] + kinds[t.kind[i]].kind + t.microbatch[i]; }

  function short(v) {
    const size = Math.abs(v), digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 2 : 3;
    return String(Number(v.toFixed(digits)));
  }

  // The ops an op needs: the forward chain down the stages, the backward chain up, W after I.
  function needs(t, i) {
    const kind = kinds[t.kind[i]].kind, s = t.stage[i], m = t.microbatch[i];
    const find = (stage, k) => t.byName.get(stage + k + m);
    let found = [];
    if (kind === "F") found = [find(s - 1, "F")];
    else if (kind === "W") found = [find(s, "I")];
    else if (kind === "B" || kind === "I") found = [find(s, "F"), find(s + 1, "B") ?? find(s + 1, "I")];
    return found.filter((x) => x !== undefined);
  }

  // From the last op backwards: what each one waited for, else what its rank did before it.
  function criticalPath(t) {
    if (t.path) return t.path;
    t.path = [];
    let at = -1;
    t.end.forEach((end, i) => { if (at < 0 || end > t.end[at]) at = i; });
    const seen = new Set();
    while (at >= 0 && !seen.has(at)) {
      seen.add(at);
      t.path.push(at);
      const before = at > t.first[t.rank[at]] ? at - 1 : -1;
      const free = before >= 0 ? t.end[before] + t.blocked[before] : 0;
      let next = before;
      if (t.waitedFor[at] >= 0) next = t.waitedFor[at];
      else if (!t.waitedForAsync[at] && t.start[at] - free > 1e-3) {
        const late = needs(t, at).sort((a, b) => t.end[b] - t.end[a])[0];
        if (late !== undefined && (before < 0 || t.end[late] > free)) next = late;
      }
      at = next;
    }
    return t.path;
  }

  // ---- places on the canvas

  const x = (time) => LABEL + ((time - view.from) / (view.to - view.from)) * (width - LABEL - RIGHT);
  const timeAt = (px) => view.from + ((px - LABEL) / (width - LABEL - RIGHT)) * (view.to - view.from);

  // What is said of a timeline, as lines below its title; none where it fits beside it.
  function factLines(t) {
    g.font = `600 14px ${FONT}`;
    const title = g.measureText(t.title).width;
    g.font = `12px ${FONT}`;
    if (18 + title + 12 + g.measureText(t.facts).width <= width - 8) return [];
    const lines = [];
    for (const fact of t.facts.split(" · ")) {
      const more = lines.length ? `${lines.at(-1)} · ${fact}` : fact;
      if (lines.length && 18 + g.measureText(more).width <= width - 8) lines[lines.length - 1] = more;
      else lines.push(fact);
    }
    return lines;
  }

  function lay() {
    const rows = timelines.reduce((sum, t) => sum + t.numRanks, 0);
    const room = height - AXIS - timelines.length * (HEAD + 8);
    const [least, most] = show.held ? [30, 56] : show.arrows ? [24, 46] : [16, 36];
    const pitch = Math.max(least, Math.min(most, Math.floor(room / rows)));
    let y = AXIS;
    places = timelines.map((t) => {
      t.lines = factLines(t);
      const place = { head: y, top: y + HEAD + FACTS * t.lines.length, pitch, bar: show.held ? Math.round(pitch * 0.58) : pitch - (show.arrows ? ACROSS : GAP) };
      y = place.top + t.numRanks * pitch + 8;
      return place;
    });
    total = y;
    view.scroll = Math.max(0, Math.min(view.scroll, total - height));
  }

  const rowY = (p, rank) => p.top + rank * p.pitch - view.scroll;

  function resize() {
    const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
    width = Math.max(box.width, LABEL + RIGHT + 40);
    height = box.height;
    for (const each of [canvas, base]) {
      each.width = Math.round(width * ratio);
      each.height = Math.round(height * ratio);
    }
    front.setTransform(ratio, 0, 0, ratio, 0, 0);
    back.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(document.documentElement);
    for (const key of ["page", "text", "soft", "line", "lane", "mark", "memory", "blocked", "veil"])
      color[key] = style.getPropertyValue("--" + key).trim();
    lay();
    draw();
  }

  // First op of a rank that ends after `time`: ops of a rank do not overlap, so ends ascend too.
  function firstAfter(t, rank, time) {
    let low = t.first[rank], high = t.first[rank + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (t.end[middle] + t.blocked[middle] > time) high = middle; else low = middle + 1;
    }
    return low;
  }

  // ---- drawing

  let asked = false, stale = true;

  // Paints at the next frame: all of it, or only what lies over the base.
  function draw(all = true) {
    stale ||= all;
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; paint(); });
  }

  function paint() {
    if (stale) {
      g = back;
      g.fillStyle = color.page;
      g.fillRect(0, 0, width, height);
      const marks = ticks();
      timelines.forEach((t, k) => paintTimeline(t, places[k], marks));
      paintAxis(marks);
      if (total > height) {
        const size = (height - AXIS) * (height - AXIS) / (total - AXIS);
        g.fillStyle = color.line;
        g.fillRect(width - 6, AXIS + ((height - AXIS - size) * view.scroll) / (total - height), 4, size);
      }
      stale = false;
    }
    g = front;
    g.drawImage(base, 0, 0, width, height);
    g.save();
    g.beginPath();
    g.rect(LABEL, AXIS, width - LABEL - RIGHT, height - AXIS);
    g.clip();
    timelines.forEach((t, k) => paintOver(t, k, places[k]));
    g.restore();
  }

  // What is asked for lies over its timeline: the critical path, a microbatch's chain, messages.
  function paintOver(t, k, p) {
    if (rowY(p, t.numRanks) < AXIS || rowY(p, 0) > height) return;
    const focus = held ? (held.t === k ? held : null) : hover && hover.t === k ? hover : null;
    if (focus || show.critical) {
      g.fillStyle = color.veil;
      g.fillRect(LABEL, rowY(p, 0), width, t.numRanks * p.pitch);
      if (show.critical) paintPath(t, p, criticalPath(t));
      if (focus) paintChain(t, p, focus.i);
    }
    if (show.arrows || focus) paintMessages(t, p, focus ? chainOf(t, focus.i) : null);
  }

  function ticks() {
    const raw = ((view.to - view.from) * 90) / (width - LABEL - RIGHT), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw * 0.999999);
    const found = [];
    for (let n = Math.ceil(view.from / step); n * step <= view.to + 1e-9; n++) found.push(n * step);
    return { found, decimals: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
  }

  function paintAxis({ found, decimals }) {
    g.fillStyle = color.page;
    g.fillRect(0, 0, width, AXIS);
    g.font = `12px ${FONT}`;
    g.fillStyle = color.soft;
    g.textBaseline = "middle";
    g.textAlign = "right";
    g.fillText(unit ? "time, ms" : "time", LABEL - 10, AXIS / 2);
    g.textAlign = "center";
    for (const time of found) if (x(time) > LABEL + 14 || time === 0) g.fillText(time.toFixed(decimals), x(time), AXIS / 2);
    g.strokeStyle = color.line;
    g.lineWidth = 1;
    g.beginPath();
    g.moveTo(0, AXIS - 0.5);
    g.lineTo(width, AXIS - 0.5);
    g.stroke();
  }

  function paintTimeline(t, p, marks) {
    const head = p.head - view.scroll, bottom = rowY(p, t.numRanks);
    if (bottom < AXIS || head > height) return;
    g.textBaseline = "middle";
    g.textAlign = "left";
    g.font = `600 14px ${FONT}`;
    g.fillStyle = color.text;
    g.fillText(t.title, 18, head + HEAD / 2 + 2);
    const after = 18 + g.measureText(t.title).width + 12;
    g.font = `12px ${FONT}`;
    g.fillStyle = color.soft;
    if (!t.lines.length) g.fillText(t.facts, after, head + HEAD / 2 + 2);
    t.lines.forEach((line, k) => g.fillText(line, 18, head + HEAD + FACTS * k + 4));

    g.save();
    g.beginPath();
    g.rect(LABEL, Math.max(AXIS, head), width - LABEL - RIGHT, height);
    g.clip();
    g.strokeStyle = color.line;
    g.beginPath();
    for (const time of marks.found) { const at = Math.round(x(time)) + 0.5; g.moveTo(at, p.top - view.scroll - 2); g.lineTo(at, bottom); }
    g.stroke();
    for (let r = 0; r < t.numRanks; r++) paintRow(t, r, p);
    g.restore();

    g.font = `12px ${FONT}`;
    for (let r = 0; r < t.numRanks; r++) {
      const y = rowY(p, r) + p.bar / 2;
      if (y < AXIS || y > height + 10) continue;
      g.fillStyle = color.text;
      g.textAlign = "right";
      g.fillText("rank " + r, LABEL - 10, y);
      g.fillStyle = color.soft;
      g.textAlign = "left";
      g.fillText((100 * t.busy[r]).toFixed(0) + "%", width - RIGHT + 10, y);
      if (show.held) {
        const most = t.held[r].reduce((m, s) => Math.max(m, s[1]), 0);
        g.fillStyle = color.memory;
        g.fillText("max " + most, width - RIGHT + 6, y + p.pitch * 0.5);
      }
    }
  }

  function paintRow(t, rank, p) {
    const y = rowY(p, rank);
    if (y + p.pitch < AXIS || y > height) return;
    const right = Math.min(x(t.makespan), width - RIGHT), left = Math.max(x(0), LABEL);
    if (right > left) { g.fillStyle = color.lane; g.fillRect(left, y, right - left, p.bar); }
    let drawnTo = -1;
    for (let i = firstAfter(t, rank, view.from); i < t.first[rank + 1] && t.start[i] <= view.to; i++) {
      const x1 = x(t.end[i]);
      // Ops narrower than half a pixel share it: the first one there stands for them.
      if (x1 - drawnTo < 0.5 && drawnTo >= 0) continue;
      paintOp(t, i, p, y);
      drawnTo = x1;
    }
    for (const one of t.streams) if (one.rank === rank) paintBeside(one, p, y);
    if (show.held) paintHeld(t, rank, p, y);
  }

  // An asynchronous op: a thin bar below the row of its rank.
  function paintBeside(one, p, y) {
    const x0 = Math.max(x(one.start), LABEL), x1 = Math.min(x(one.end), width - RIGHT);
    if (x1 <= x0) return;
    g.fillStyle = one.color;
    g.fillRect(x0, y + p.bar, Math.max(x1 - x0, 0.6), GAP);
  }

  function paintOp(t, i, p, y) {
    const x0 = x(t.start[i]), x1 = x(t.end[i]), wide = x1 - x0;
    const [fill, text] = t.colors[t.kind[i]][t.chunk[i]];
    // Narrow ops touch, and reach below the next one, which is painted over them: gaps would make stripes.
    const next = g === back && i + 1 < t.first[t.rank[i] + 1] && t.start[i + 1] <= t.end[i] ? Math.min(1, x(t.end[i + 1]) - x1) : 0;
    const edge = wide > 5 ? 1 : -next;
    g.fillStyle = fill;
    g.fillRect(x0, y, Math.max(wide - edge, 0.6), p.bar);
    if (t.blocked[i] > 0) {
      g.strokeStyle = color.blocked;
      g.lineWidth = 2;
      g.setLineDash([2, 2]);
      g.beginPath();
      g.moveTo(x1, y + p.bar / 2);
      g.lineTo(x(t.end[i] + t.blocked[i]), y + p.bar / 2);
      g.stroke();
      g.setLineDash([]);
      g.lineWidth = 1;
    }
    if (p.bar < 11 || wide < 9) return;
    const number = numberOf(t, i), full = name(t, i);
    const label = wide > full.length * 7.5 + 16 ? full : wide > number.length * 6.6 + 2 ? number : "";
    if (!label) return;
    g.font = `11px ${FONT}`;
    g.textAlign = "center";
    g.textBaseline = "middle";
    g.fillStyle = text;
    // The number stays in sight while its bar is cut by the window's edge.
    const from = Math.max(x0, LABEL), to = Math.min(x1, width - RIGHT);
    g.fillText(label, to - from > 12 ? (from + to) / 2 : (x0 + x1) / 2, y + p.bar / 2 + 0.5);
  }

  function paintHeld(t, rank, p, y) {
    const top = y + p.bar + 3, size = p.pitch - p.bar - GAP - 3, steps = t.held[rank];
    const at = (count) => top + size - (size * count) / t.mostHeld;
    g.beginPath();
    g.moveTo(x(0), at(0));
    let count = 0;
    for (const [time, next] of steps) { g.lineTo(x(time), at(count)); g.lineTo(x(time), at(next)); count = next; }
    g.lineTo(x(t.makespan), at(count));
    g.lineTo(x(t.makespan), at(0));
    g.globalAlpha = 0.22;
    g.fillStyle = color.memory;
    g.fill();
    g.globalAlpha = 1;
    g.strokeStyle = color.memory;
    g.lineWidth = 1;
    g.stroke();
  }

  function paintChain(t, p, i) {
    const chain = t.byMicrobatch.get(chainOf(t, i));
    for (const j of chain) paintOp(t, j, p, rowY(p, t.rank[j]));
    outline(t, p, i, 2);
    if (t.waitedFor[i] >= 0) { paintOp(t, t.waitedFor[i], p, rowY(p, t.rank[t.waitedFor[i]])); outline(t, p, t.waitedFor[i], 1); }
  }

  function outline(t, p, i, wide) {
    g.strokeStyle = color.mark;
    g.lineWidth = wide;
    const x0 = x(t.start[i]), y = rowY(p, t.rank[i]);
    g.strokeRect(x0 - 0.5, y - 0.5, Math.max(x(t.end[i]) - x0, 2), p.bar + 1);
    g.lineWidth = 1;
  }

  function paintPath(t, p, path) {
    for (const i of path) if (x(t.end[i]) >= LABEL && x(t.start[i]) <= width) paintOp(t, i, p, rowY(p, t.rank[i]));
    g.strokeStyle = color.mark;
    g.lineWidth = 1.5;
    for (let n = 0; n + 1 < path.length; n++) {
      const to = path[n], from = path[n + 1];
      if (t.rank[from] !== t.rank[to]) link(t, p, from, to, t.end[from], t.start[to]);
    }
    g.lineWidth = 1;
  }

  // Where a link between the rows of two ops begins and ends: between the rows if messages are shown there.
  function edges(t, p, from, to) {
    const down = t.rank[to] > t.rank[from], y0 = rowY(p, t.rank[from]), y1 = rowY(p, t.rank[to]) + (down ? 0 : p.bar);
    return show.arrows ? [y0 + (down ? p.bar + 1.5 : -1.5), y1 + (down ? -1.5 : 1.5)] : [y0 + p.bar / 2, y1];
  }

  // A line from one op's row at one time to another's at another, with a head at its end.
  function link(t, p, from, to, sent, arrived) {
    const x0 = x(sent), x1 = x(arrived), [y0, y1] = edges(t, p, from, to);
    if (Math.max(x0, x1) < LABEL || Math.min(x0, x1) > width) return;
    g.beginPath();
    g.moveTo(x0, y0);
    g.lineTo(x1, y1);
    const angle = Math.atan2(y1 - y0, x1 - x0);
    g.moveTo(x1 - 6 * Math.cos(angle - 0.45), y1 - 6 * Math.sin(angle - 0.45));
    g.lineTo(x1, y1);
    g.lineTo(x1 - 6 * Math.cos(angle + 0.45), y1 - 6 * Math.sin(angle + 0.45));
    g.stroke();
  }

  // Messages: thin along the sender's row until they leave, across, and faint along the receiver's row until they
  // are taken. A dot stands where the receive was posted.
  function paintMessages(t, p, chain) {
    const { source, target, sent, left, arrived, taken, posted } = t.messages;
    const spread = (width * length) / (view.to - view.from);
    const along = (from, to, y, wide) => {
      if (to <= from) return;
      g.lineWidth = wide;
      g.beginPath();
      g.moveTo(x(from), y);
      g.lineTo(x(to), y);
      g.stroke();
    };
    if (!t.recorded) g.setLineDash([4, 3]);
    let last = -1;
    for (let n = 0; n < source.length; n++) {
      if (taken[n] < view.from || sent[n] > view.to) continue;
      if (chain !== null && chainOf(t, source[n]) !== chain) continue;
      // Far out, arrows closer than half a pixel to the one before say nothing more.
      if (spread / source.length < 0.5 && Math.abs(x(sent[n]) - last) < 0.5) continue;
      last = x(sent[n]);
      const [y0, y1] = edges(t, p, source[n], target[n]);
      g.strokeStyle = g.fillStyle = t.colors[t.kind[source[n]]][0][0];
      along(sent[n], left[n], y0, 1);
      g.globalAlpha = 0.4;
      along(arrived[n], taken[n], y1, 3);
      g.globalAlpha = 1;
      g.lineWidth = 1.5;
      link(t, p, source[n], target[n], left[n], arrived[n]);
      if (t.channels) g.fillRect(x(posted[n]) - 1.5, y1 - 1.5, 3, 3);
    }
    g.lineWidth = 1;
    g.setLineDash([]);
  }

  // ---- asking

  function opAt(px, py) {
    if (px < LABEL || px > width - RIGHT || py < AXIS) return null;
    for (let k = 0; k < timelines.length; k++) {
      const t = timelines[k], p = places[k], rank = Math.floor((py + view.scroll - p.top) / p.pitch);
      if (rank < 0 || rank >= t.numRanks || py + view.scroll < p.top) continue;
      const time = timeAt(px), slack = timeAt(px + 1.5) - time;
      let i = firstAfter(t, rank, time - slack);
      if (i < t.first[rank + 1] && t.end[i] + slack < time && i + 1 < t.first[rank + 1]) i++;
      if (i < t.first[rank + 1] && t.start[i] <= time + slack && t.end[i] >= time - slack) return { t: k, i };
      return null;
    }
    return null;
  }

  function describe({ t: k, i }) {
    const t = timelines[k], u = t.unit ? " " + t.unit : "";
    const rows = [
      ["rank", String(t.rank[i])],
      ["stage", t.stage[i] + " of " + t.numStages],
      t.updates && t.updates[i]
        ? ["update", t.updates[i][0] + (t.pipelines ? ", pipeline " + t.updates[i][1] + (t.updates[i][1] ? "" : ", its owner") : "")]
        : ["microbatch", t.microbatch[i] + (t.pipelines ? ", pipeline " + t.pipelines[t.microbatch[i]] : "")],
      ["time", short(t.start[i]) + " to " + short(t.end[i]) + u],
      ["duration", short(t.end[i] - t.start[i]) + u],
    ];
    if (t.waitedFor[i] >= 0) {
      const w = t.waitedFor[i];
      rows.push(["waited for", name(t, w) + " of rank " + t.rank[w] + ", " + short(t.waited[i]) + u]);
    } else if (t.waitedForAsync[i]) rows.push(["waited for", t.waitedForAsync[i] + ", asynchronous, " + short(t.waited[i]) + u]);
    else if (t.waited[i] > 0) rows.push(["idle before", short(t.waited[i]) + u]);
    if (t.blocked[i] > 0) rows.push(["then blocked", short(t.blocked[i]) + u + ": link full"]);
    const { source, target, sent, left, arrived, taken, posted } = t.messages;
    for (let n = 0; t.recorded && n < source.length; n++) {
      if (source[n] !== i && target[n] !== i) continue;
      const ends = t.channels ? `, received from ${short(posted[n])} on; left ${short(left[n])}` : "";
      rows.push([target[n] === i ? "from " + name(t, source[n]) : "to " + name(t, target[n]),
        `sent ${short(sent[n])}${ends}, arrived ${short(arrived[n])}, taken ${short(taken[n])}${u}`]);
    }
    timelines.forEach((other, n) => {
      const j = n === k ? undefined : other.byName.get(name(t, i));
      if (j === undefined || other.unit !== t.unit || other.numStages !== t.numStages) return;
      const later = other.start[j] - t.start[i], longer = other.end[j] - other.start[j] - (t.end[i] - t.start[i]);
      const signed = (v) => (Math.abs(v) < 1e-3 ? "same" : (v < 0 ? "−" : "+") + short(Math.abs(v)) + u);
      const which = timelines.length > 2 ? " (" + (n + 1) + ")" : "";
      rows.push([other.source + which, "start " + signed(later) + ", duration " + signed(longer)]);
    });
    const what = kinds[t.kind[i]];
    return { head: name(t, i) + (what.name !== what.kind ? "  " + what.name : ""), rows };
  }

  function tell(op, px, py) {
    if (!op) { tip.hidden = true; return; }
    const { head, rows } = describe(op);
    tip.replaceChildren();
    const title = tip.appendChild(document.createElement("b")), list = document.createElement("dl");
    title.textContent = head;
    for (const [key, value] of rows) {
      list.appendChild(document.createElement("dt")).textContent = key;
      list.appendChild(document.createElement("dd")).textContent = value;
    }
    tip.appendChild(list);
    tip.hidden = false;
    const box = tip.getBoundingClientRect(), chart = canvas.getBoundingClientRect();
    const left = chart.left + px + 16, top = chart.top + py + 18;
    tip.style.left = Math.max(4, left + box.width > innerWidth - 8 ? left - box.width - 32 : left) + "px";
    tip.style.top = Math.max(4, top + box.height > innerHeight - 8 ? top - box.height - 36 : top) + "px";
  }

  // ---- moving

  function look(from, to) {
    const least = length * 1e-6, most = length * 1.05;
    const size = Math.min(Math.max(to - from, least), most);
    const middle = (from + to) / 2;
    view.from = Math.min(Math.max(middle - size / 2, -0.03 * length), Math.max(1.03 * length - size, -0.03 * length));
    view.to = view.from + size;
    draw();
  }

  function zoom(factor, at = (view.from + view.to) / 2) {
    look(at - (at - view.from) * factor, at + (view.to - at) * factor);
  }

  function pan(share) {
    const by = (view.to - view.from) * share;
    look(view.from + by, view.to + by);
  }

  function scrollBy(pixels) { view.scroll += pixels; lay(); draw(); }

  function fit() { view.scroll = 0; view.from = 0; view.to = length; lay(); draw(); }

  function toggle(what) {
    show[what] = !show[what];
    document.getElementById(what).setAttribute("aria-pressed", String(show[what]));
    lay();
    draw();
  }

  canvas.addEventListener("wheel", (e) => {
    e.preventDefault();
    const unitSize = e.deltaMode === 1 ? 16 : e.deltaMode === 2 ? height : 1;
    if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY))
      pan((((e.shiftKey ? e.deltaY : e.deltaX) || e.deltaX) * unitSize) / (width - LABEL - RIGHT));
    else if (e.altKey) scrollBy(e.deltaY * unitSize);
    else zoom(Math.exp(Math.max(-300, Math.min(300, e.deltaY * unitSize)) * 0.0018), timeAt(e.offsetX));
  }, { passive: false });

  let drag = null;
  canvas.addEventListener("pointerdown", (e) => {
    drag = { x: e.offsetX, y: e.offsetY, moved: false };
    if (e.isTrusted) canvas.setPointerCapture(e.pointerId);
  });
  canvas.addEventListener("pointermove", (e) => {
    if (drag) {
      if (Math.abs(e.offsetX - drag.x) + Math.abs(e.offsetY - drag.y) > 3) drag.moved = true;
      if (drag.moved) {
        canvas.classList.add("dragging");
        tell(null);
        pan((drag.x - e.offsetX) / (width - LABEL - RIGHT));
        if (total > height) scrollBy(drag.y - e.offsetY);
        drag.x = e.offsetX;
        drag.y = e.offsetY;
      }
      return;
    }
    const found = opAt(e.offsetX, e.offsetY);
    const changed = !hover !== !found || (hover && found && (hover.i !== found.i || hover.t !== found.t));
    hover = found;
    tell(found, e.offsetX, e.offsetY);
    if (changed) draw(false);
  });
  canvas.addEventListener("pointerup", (e) => {
    if (drag && !drag.moved) {
      const found = opAt(e.offsetX, e.offsetY);
      held = found && held && held.t === found.t && held.i === found.i ? null : found;
    }
    drag = null;
    canvas.classList.remove("dragging");
    draw(false);
  });
  canvas.addEventListener("pointercancel", () => { drag = null; canvas.classList.remove("dragging"); });
  canvas.addEventListener("pointerleave", () => { hover = null; tell(null); draw(false); });
  canvas.addEventListener("dblclick", fit);

  window.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const keys = {
      "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), "0": fit, Home: fit,
      ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), ArrowUp: () => scrollBy(-40), ArrowDown: () => scrollBy(40),
      PageUp: () => scrollBy(-height * 0.8), PageDown: () => scrollBy(height * 0.8),
      m: () => toggle("arrows"), h: () => toggle("held"), c: () => toggle("critical"),
      Escape: () => { held = null; hover = null; tell(null); draw(false); },
    };
    if (keys[e.key]) { keys[e.key](); e.preventDefault(); }
  });

  for (const what of ["arrows", "held", "critical"]) document.getElementById(what).addEventListener("click", () => toggle(what));
  document.getElementById("in").addEventListener("click", () => zoom(0.7));
  document.getElementById("out").addEventListener("click", () => zoom(1 / 0.7));
  document.getElementById("fit").addEventListener("click", fit);
  window.addEventListener("resize", resize);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", resize);

  function readAddress() {
    const asks = new URLSearchParams(location.hash.slice(1));
    for (const what of (asks.get("show") || "").split(",")) if (what in show && !show[what]) toggle(what);
    const [from, to] = (asks.get("time") || "").split(",").map(Number);
    if (to > from) look(from, to);
    const [k, opName] = (asks.get("op") || "").split(":");
    if (opName && timelines[k] && timelines[k].byName.has(opName)) {
      held = { t: Number(k), i: timelines[k].byName.get(opName) };
      const t = timelines[k];
      if (t.end[held.i] < view.from || t.start[held.i] > view.to) {
        const half = (view.to - view.from) / 2, middle = (t.start[held.i] + t.end[held.i]) / 2;
        look(middle - half, middle + half);
      }
      tell(held, x((t.start[held.i] + t.end[held.i]) / 2), rowY(places[k], t.rank[held.i]));
    }
  }

  document.getElementById("arrows").setAttribute("aria-pressed", String(show.arrows));
  resize();
  readAddress();
})();
