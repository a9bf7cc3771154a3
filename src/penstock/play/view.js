// Draws timelines on a canvas, and as an SVG file.
const view = (() => {
  const { KINDS: ORDER, stagesOf } = schedules;
  const LABEL = 62, RIGHT = 14, AXIS = 22, HEAD = 22, FONT = '-apple-system, "Segoe UI", Roboto, Arial, sans-serif';
  const channels = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));

  // The colour of an op of the rank's `chunk`-th of so many stages: later ones are lighter.
  function shade(kind, chunk, num) {
    const share = (palette.lightest * chunk) / Math.max(num - 1, 1);
    return channels(palette.kinds[kind][1]).map((c) => Math.round(c + (255 - c) * share));
  }
  const hex = (rgb) => "#" + rgb.map((c) => c.toString(16).padStart(2, "0")).join("");
  function ink(rgb) {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 10 / 255 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 1.05 / (0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05) >= 4 ? palette.light : palette.dark;
  }

  function chunks(s) {
    const own = range(s.numRanks).map((rank) => stagesOf(s, rank));
    return { of: (rank, stage) => own[rank].indexOf(stage), num: Math.max(...own.map((each) => each.length)) };
  }

  // Round numbers for about so many ticks.
  function ticks(length, count) {
    const rough = length / Math.max(count, 1), size = 10 ** Math.floor(Math.log10(rough || 1));
    const step = [1, 2, 5, 10].map((k) => k * size).find((each) => each >= rough) || 1;
    return range(Math.floor(length / step + 1e-9) + 1).map((k) => Number((k * step).toPrecision(10)));
  }
  const short = (ms) => String(Number(ms.toPrecision(4)));

  // Where everything stands for a canvas of this width.
  function layOut(runs, width) {
    const length = Math.max(...runs.map((run) => run.makespan)) || 1, ranks = runs[0].schedule.numRanks;
    const pitch = Math.max(9, Math.min(26, Math.floor(460 / (ranks * runs.length)))), room = Math.max(40, width - LABEL - RIGHT);
    const tops = runs.map((_, at) => AXIS + HEAD + at * (HEAD + ranks * pitch + 6));
    return { length, ranks, pitch, tops, width, bar: pitch - (pitch > 11 ? 3 : 2), height: tops[tops.length - 1] + ranks * pitch + 8,
      x: (time) => LABEL + (time / length) * room, timeAt: (px) => ((px - LABEL) / room) * length };
  }

  // How a schedule's ops look, whenever they run: for each op its place in the tables of colours and inks.
  const seen = new WeakMap();
  function looks({ schedule, graph }) {
    if (seen.has(graph)) return seen.get(graph);
    const { of, num } = chunks(schedule), places = new Map(), colors = [];
    const index = Uint16Array.from(graph.ops, (op, at) => {
      const chunk = of(graph.rank[at], op.stage), name = op.kind + chunk;
      if (!places.has(name)) places.set(name, colors.push(shade(op.kind, chunk, num)) - 1);
      return places.get(name);
    });
    const found = { index, colors: Float32Array.from(colors.flat()), inks: colors.map(ink) };
    seen.set(graph, found);
    return found;
  }

  let pixels = null;
  // Memory for so many pixels, the same as long as their number is.
  function pixelsOf(width, height) {
    if (!pixels || pixels.rows.width !== width || pixels.rows.height !== height)
      pixels = { sums: new Float32Array(4 * width), rows: new ImageData(width, height) };
    return pixels;
  }

  // A row of pixels for each rank, by how much of each pixel an op covers: no seams and no moire, however thin ops are.
  function rowsOfPixels(run, place, ratio, lane) {
    const count = Math.ceil(place.width * ratio), { graph, start, end } = run, { index, colors } = looks(run);
    const { sums, rows } = pixelsOf(count, place.ranks), { data } = rows;
    const from = place.x(0) * ratio, scale = (place.x(1) - place.x(0)) * ratio, blank = Math.ceil((LABEL - 2) * ratio);
    for (let rank = 0; rank < place.ranks; rank++) {
      sums.fill(0);
      for (let op = graph.first[rank]; op < graph.first[rank + 1]; op++) {
        const left = from + start[op] * scale, wide = (end[op] - start[op]) * scale, color = 3 * index[op];
        const right = Math.min(count, left + wide - (wide > 5 * ratio ? 1 : wide > 3 * ratio ? 0.5 : 0));
        for (let at = Math.floor(left); at < right; at++) {
          const covered = Math.min(right, at + 1) - Math.max(left, at);
          sums[4 * at] += colors[color] * covered;
          sums[4 * at + 1] += colors[color + 1] * covered;
          sums[4 * at + 2] += colors[color + 2] * covered;
          sums[4 * at + 3] += covered;
        }
      }
      for (let at = blank, to = 4 * (rank * count + blank); at < count; at++, to += 4) {
        const bare = Math.max(0, 1 - sums[4 * at + 3]);
        data[to] = sums[4 * at] + lane[0] * bare;
        data[to + 1] = sums[4 * at + 1] + lane[1] * bare;
        data[to + 2] = sums[4 * at + 2] + lane[2] * bare;
        data[to + 3] = 255;
      }
    }
    return rows;
  }

  const strip = typeof document === "undefined" ? null : document.createElement("canvas");

  // A canvas of this size. To set a size, even the same, takes the browser new memory.
  function sized(canvas, width, height) {
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== height) canvas.height = height;
  }

  // Draws the runs one below the other on one time axis; returns where they are, for the pointer. `moving` is an op of
  // the first run that is dragged: { op, left: where it is held (px), time: where its new place begins }.
  function draw(canvas, runs, chosen, width = canvas.clientWidth || 1, moving = null) {
    const ratio = window.devicePixelRatio || 1, place = layOut(runs, width);
    sized(canvas, Math.round(width * ratio), Math.round(place.height * ratio));
    canvas.style.height = `${place.height}px`;
    const g = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim(), lane = channels(long(color("lane")));
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.fillStyle = color("page");
    g.fillRect(0, 0, width, place.height);
    g.textBaseline = "middle";
    g.font = `11px ${FONT}`;
    for (const time of ticks(place.length, width / 90)) {
      g.fillStyle = color("line");
      g.fillRect(place.x(time), AXIS - 4, 1, place.height);
      g.fillStyle = color("soft");
      g.textAlign = place.x(time) > width - 24 ? "right" : "center";
      g.fillText(short(time), place.x(time), 9);
    }
    g.textAlign = "left";
    g.fillText("ms", 6, 9);
    runs.forEach((run, at) => {
      const top = place.tops[at], pixels = rowsOfPixels(run, place, ratio, lane), { index, inks } = looks(run);
      sized(strip, pixels.width, pixels.height);
      strip.getContext("2d").putImageData(pixels, 0, 0);
      g.imageSmoothingEnabled = false;
      g.fillStyle = color("text");
      g.font = `600 12.5px ${FONT}`;
      g.fillText(`${run.dispatch}: ${short(run.makespan)} ms`, LABEL, top - HEAD / 2);
      for (let rank = 0; rank < place.ranks; rank++) {
        const y = top + rank * place.pitch;
        g.font = `11px ${FONT}`;
        g.fillStyle = color("soft");
        if (place.pitch >= 12 || rank % 2 === 0) g.fillText(`rank ${rank}`, 6, y + place.bar / 2);
        g.drawImage(strip, 0, rank, pixels.width, 1, 0, y, pixels.width / ratio, place.bar);
        if (place.bar < 9) continue;
        g.textAlign = "center";
        for (let op = run.graph.first[rank]; op < run.graph.first[rank + 1]; op++) {
          const left = place.x(run.start[op]), wide = place.x(run.end[op]) - left, text = String(run.graph.ops[op].m);
          if (wide < 7 * text.length + 2) continue;
          g.fillStyle = inks[index[op]];
          g.fillText(text, left + wide / 2 - 0.5, y + place.bar / 2 + 0.5);
        }
        g.textAlign = "left";
      }
      const op = chosen && run.graph.number.get(chosen);
      if (op !== undefined && op !== null && op !== false) {
        g.strokeStyle = color("mark");
        g.lineWidth = 2;
        const left = place.x(run.start[op]);
        g.strokeRect(left, top + run.graph.rank[op] * place.pitch - 1, Math.max(2, place.x(run.end[op]) - left), place.bar + 2);
      }
    });
    if (moving) {
      const [{ graph, start, end }] = runs, { op, left, time } = moving, y = place.tops[0] + graph.rank[op] * place.pitch;
      const { index, colors } = looks(runs[0]), wide = Math.max(4, place.x(end[op]) - place.x(start[op]));
      g.globalAlpha = 0.75;
      g.fillStyle = hex([0, 1, 2].map((part) => colors[3 * index[op] + part]));
      g.fillRect(left, y - 4, wide, place.bar + 8);
      g.globalAlpha = 1;
      g.fillStyle = color("mark");
      g.fillRect(place.x(time) - 1.5, y - 6, 3, place.bar + 12);
    }
    return place;
  }
  const long = (color) => (color.length === 4 ? "#" + [...color.slice(1)].map((c) => c + c).join("") : color);

  // The op under a point of the canvas: [run, op number], or null.
  function at(place, runs, px, py) {
    const which = place.tops.findIndex((top) => py >= top && py < top + place.ranks * place.pitch);
    if (which < 0) return null;
    const rank = Math.floor((py - place.tops[which]) / place.pitch), time = place.timeAt(px), run = runs[which];
    for (let op = run.graph.first[rank]; op < run.graph.first[rank + 1]; op++)
      if (run.start[op] <= time && time < run.end[op]) return [run, op];
    return null;
  }

  function svg(runs) {
    const width = 1100, place = layOut(runs, width), parts = [];
    const text = (x, y, words, more = "") => parts.push(`<text x="${x}" y="${y}" ${more}>${words}</text>`);
    for (const time of ticks(place.length, 12)) {
      parts.push(`<rect x="${place.x(time).toFixed(2)}" y="${AXIS - 4}" width="1" height="${place.height - AXIS}" fill="#d5dce4"/>`);
      text(place.x(time).toFixed(2), 14, short(time), 'text-anchor="middle" fill="#5d6875"');
    }
    runs.forEach((run, which) => {
      const { of, num } = chunks(run.schedule), top = place.tops[which];
      text(LABEL, top - 7, `${run.schedule.name}, ${run.dispatch}: ${short(run.makespan)} ms`, 'font-weight="600" font-size="12.5"');
      for (let rank = 0; rank < place.ranks; rank++) {
        const y = top + rank * place.pitch;
        text(6, y + place.bar / 2 + 4, `rank ${rank}`, 'fill="#5d6875"');
        parts.push(`<rect x="${LABEL}" y="${y}" width="${width - LABEL - RIGHT}" height="${place.bar}" fill="#eef1f5"/>`);
        for (let op = run.graph.first[rank]; op < run.graph.first[rank + 1]; op++) {
          const each = run.graph.ops[op], rgb = shade(each.kind, of(rank, each.stage), num), left = place.x(run.start[op]);
          const wide = place.x(run.end[op]) - left, gap = wide > 5 ? 1 : 0;
          parts.push(`<rect x="${left.toFixed(2)}" y="${y}" width="${(wide - gap).toFixed(2)}" height="${place.bar}" fill="${hex(rgb)}">` +
            `<title>${schedules.opText(each)}: ${short(run.start[op])} to ${short(run.end[op])} ms</title></rect>`);
          if (wide >= 7 * String(each.m).length + 2 && place.bar >= 9)
            text((left + wide / 2).toFixed(2), y + place.bar / 2 + 4, each.m, `text-anchor="middle" fill="${ink(rgb)}"`);
        }
      }
    });
    return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${place.height}" width="${width}" height="${place.height}" ` +
      `font-family='${FONT.replace(/"/g, "&quot;")}' font-size="11"><rect width="100%" height="100%" fill="#fff"/>${parts.join("\n")}</svg>\n`;
  }

  function legend(kinds) {
    return ORDER.filter((kind) => kinds.has(kind)).map((kind) => [hex(shade(kind, 0, 1)), `${kind} ${palette.kinds[kind][0]}`]);
  }

  return { at, draw, legend, short, svg };
})();
