// Schedules: ops, the text grid, and the proof that an order can run. Python's `penstock.schedule` is the reference,
// to the words of its errors; what it knows besides (stage graphs, updates, messages as ops, declared orders of
// microbatches) is refused here by name.
//
//   { name, numRanks, pipelines: [[rank of each stage], ...], pipelineOf: [pipeline of each microbatch],
//     order: [[op, ...] of each rank], maxInFlight: number or null }        op: { kind, stage, m }
const schedules = (() => {
  const { is_within } = tolerance;
  const KINDS = ["F", "B", "I", "W", "R"];
  const ELSEWHERE = ["U", "SEND_F", "RECV_F", "SEND_B", "RECV_B"];
  const OP = /^([0-9]{1,9})?([A-Z]|[A-Z][A-Z0-9_]+[A-Z]|[A-Z][A-Z0-9_]*[0-9])(?:(?<=[A-Z])|(?<=[0-9])\.)([0-9]{1,9})$/;
  const HEAD = new RegExp(
    "^schedule (\\S+): ([0-9]{1,7}) ranks?, ([0-9]{1,7}) stages?, ([0-9]{1,7}) microbatch(?:es)?" +
    "(?:, at most ([0-9]+(?:\\.[0-9]+)?(?:e[+-]?[0-9]+)?) in flight)?$");
  const PIPELINE =
    /^pipeline ([0-9]{1,7}): stages on ranks ([0-9]{1,7}(?: [0-9]{1,7})*)(?:, microbatches ([0-9]{1,7}(?: [0-9]{1,7})*))?$/;
  const ROW = /^rank ([0-9]{1,7}) *\|(.*)$/;
  const CELLS = /^(?:[0-9]*[A-Z][A-Z0-9_]*[0-9]\b.*|\.[. ]*(?:[0-9]*[A-Z][A-Z0-9_]*[0-9]\b.*)?)$/; // of a row that names no rank
  const LINE_END = /\r\n|\r|\n/, UNNAMED = -1, SHOWN_EACH_SIDE = 60;
  const OTHER_LINES = [
    [/^stage [0-9]{1,7}: shared by ranks /, "stages that several ranks share"],
    [/^edges /, "graphs of stages"],
    [/^microbatches of stages /, "graphs of stages"],
    [/^kind /, "registered ops"],
    [/^needs /, "registered ops"],
    [/^updates every /, "updates as ops"],
    [/^order of /, "declared orders of microbatches"],
  ];

  class ScheduleError extends Error {
    // `rule`, and where: `rank` and `step` in the order, or `line` and `column` (from 1) in the text.
    constructor(message, where) {
      super(message);
      this.name = "ScheduleError";
      Object.assign(this, { rule: null, rank: null, step: null, op: null, line: null, column: null }, where);
    }
  }

  // ---- words

  const keyOf = (kind, stage, m) => `${stage}${kind}${m}`;
  const key = (op) => keyOf(op.kind, op.stage, op.m);
  const shortName = (op) => `${op.kind}${/[0-9]$/.test(op.kind) ? "." : ""}${op.m}`;
  const opText = (op) => `${op.stage}${shortName(op)}`;
  const nameOf = (op) => `${shortName(op)} of stage ${op.stage}`;
  const plural = (count, noun, nouns) => `${count} ${count === 1 ? noun : nouns || noun + "s"}`;
  const list = (values) => `[${values.join(", ")}]`;
  const general = (value) => String(Number(value.toPrecision(6)));
  const quoted = (text) => {
    const mark = text.includes("'") && !text.includes('"') ? '"' : "'";
    return mark + text.replaceAll("\\", "\\\\").replaceAll("\t", "\\t").replaceAll(mark, "\\" + mark) + mark;
  };
  const only = (count, noun, nouns) =>
    count === 1 ? `there is only 1 ${noun}, ${noun} 0` : `there are only ${plural(count, noun, nouns)}, 0 to ${count - 1}`;

  // ---- what a schedule says

  const numStages = (s) => s.pipelines[0].length;
  const numMicrobatches = (s) => s.pipelineOf.length;
  const rankOf = (s, stage, m) => s.pipelines[s.pipelineOf[m]][stage];
  const stagesOf = (s, rank) => {
    const found = new Set();
    for (const hosts of s.pipelines) hosts.forEach((host, stage) => { if (host === rank) found.add(stage); });
    return [...found].sort((a, b) => a - b);
  };
  const oneToOne = (p) => [range(p)];
  const circular = (p, num) => [range(num).map((stage) => stage % p)];
  const vShape = (p) => [[...range(p), ...range(p).reverse()]];
  const wave = (p, waves) => [range(waves).flatMap(() => vShape(p)[0])];
  const bidirectional = (pipelines) => {
    const last = Math.max(...pipelines.flat());
    return [...pipelines, ...pipelines.map((hosts) => hosts.map((rank) => last - rank))];
  };
  const make = (name, pipelines, order, pipelineOf, maxInFlight = null) =>
    ({ name, numRanks: order.length, pipelines, pipelineOf, order, maxInFlight });

  // What an op needs, in a fixed order. `has(key)` says which ops are there: the backward of the next stage is its B
  // or its I, whichever is there.
  function needs(s, op, has) {
    const { kind, stage, m } = op, last = numStages(s) - 1;
    if (stage > last) return [];
    if (kind === "F") return stage > 0 ? [{ kind: "F", stage: stage - 1, m }] : [];
    if (kind === "W") return [{ kind: "I", stage, m }];
    if (kind === "R") return [{ kind: "F", stage, m }];
    if (kind !== "B" && kind !== "I") return [];
    const found = [{ kind: has(keyOf("R", stage, m)) ? "R" : "F", stage, m }];
    if (stage < last) found.push({ kind: has(keyOf("B", stage + 1, m)) ? "B" : "I", stage: stage + 1, m });
    return found;
  }

  // Whose forward runs again before its backward, and so holds nothing.
  function again(row) { return new Set(row.filter((op) => op.kind === "R").map((op) => keyOf("F", op.stage, op.m))); }
  function heldBy(op, forwardsAgain) {
    if (op.kind === "F") return forwardsAgain.has(key(op)) ? 0 : 1;
    return op.kind === "R" ? 1 : op.kind === "B" || op.kind === "W" ? -1 : 0;
  }
  function levels(row) {
    const forwards = again(row);
    let held = 0;
    return row.map((op) => (held += heldBy(op, forwards)));
  }
  const peaks = (s) => s.order.map((row) => Math.max(0, ...levels(row)));

  // ---- the text grid

  // The column of each op when all take one unit of time; those that can't be timed follow one another.
  function unitColumns(s) {
    const present = new Set(s.order.flat().map(key)), waiting = new Map(), finished = new Map();
    const columns = s.order.map(() => []), ready = range(s.numRanks);
    while (ready.length) {
      const rank = ready.pop(), row = s.order[rank], placed = columns[rank];
      while (placed.length < row.length) {
        const op = row[placed.length];
        const needed = needs(s, op, (k) => present.has(k)).map(key);
        const missing = needed.find((k) => !finished.has(k));
        if (missing !== undefined) {
          if (!waiting.has(missing)) waiting.set(missing, []);
          waiting.get(missing).push(rank);
          break;
        }
        const start = Math.max(placed.length ? placed[placed.length - 1] + 1 : 0, ...needed.map((k) => finished.get(k)));
        placed.push(start);
        finished.set(key(op), start + 1);
        ready.push(...(waiting.get(key(op)) || []));
        waiting.delete(key(op));
      }
    }
    s.order.forEach((row, rank) => {
      const placed = columns[rank];
      while (placed.length < row.length) placed.push(placed.length ? placed[placed.length - 1] + 1 : 0);
    });
    return columns;
  }

  function cellTexts(s, rank) {
    const stages = stagesOf(s, rank);
    return s.order[rank].map((op) => (stages.length === 1 && stages[0] === op.stage ? shortName(op) : opText(op)));
  }

  function rowsText(s) {
    const columns = unitColumns(s), cells = s.order.map((_, rank) => cellTexts(s, rank));
    const width = Math.max(1, ...cells.map((row) => Math.max(0, ...row.map((cell) => cell.length))));
    const label = `rank ${s.numRanks - 1}`.length;
    return cells.map((texts, rank) => {
      const places = columns[rank], line = new Array(places.length ? places[places.length - 1] + 1 : 0).fill(".");
      texts.forEach((text, at) => (line[places[at]] = text));
      return `${`rank ${rank}`.padEnd(label)} | ${line.map((cell) => cell.padEnd(width)).join(" ")}`.trimEnd();
    });
  }

  function toText(s) {
    let head = `schedule ${s.name}: ${plural(s.numRanks, "rank")}, ${plural(numStages(s), "stage")}, ` +
      plural(numMicrobatches(s), "microbatch", "microbatches");
    if (s.maxInFlight !== null) head += `, at most ${s.maxInFlight} in flight`;
    const lines = [head];
    s.pipelines.forEach((hosts, k) => {
      const mine = s.pipelineOf.map((pipeline, m) => (pipeline === k ? m : -1)).filter((m) => m >= 0);
      const several = s.pipelines.length > 1 && mine.length ? `, microbatches ${mine.join(" ")}` : "";
      lines.push(`pipeline ${k}: stages on ranks ${hosts.join(" ")}${several}`);
    });
    return [...lines, ...rowsText(s)].join("\n");
  }

  function fail(line, column, message) {
    throw new ScheduleError(`line ${line}, column ${column}: ${message}`, { rule: "text", line, column });
  }

  function parseOp(text, defaultStage) {
    const match = OP.exec(text);
    if (match === null) {
      const near = text.slice(0, 40).replace(/^[,;]+|[,;]+$/g, "").toUpperCase().replaceAll("O", "0");
      const meant = near === text ? null : OP.exec(near);
      const hint = meant !== null && "FBIW".includes(meant[2]) ? `did you mean ${near}?` : "like F0 or 2F0";
      return `${quoted(text.slice(0, 40))} is not an op: write [stage]KIND<microbatch>, ${hint}`;
    }
    if (match[1] === undefined && defaultStage === null)
      return `${quoted(text)} names no stage, and its rank hosts several: write 2${text} for stage 2`;
    return { kind: match[2], stage: match[1] === undefined ? defaultStage : Number(match[1]), m: Number(match[3]) };
  }

  // The line around a place, with an arrow under it.
  function spotInText(line, at) {
    const begin = Math.max(0, at - SHOWN_EACH_SIDE), end = at + SHOWN_EACH_SIDE;
    const lead = (begin ? "... " : "") + line.slice(begin, at), rest = line.slice(at, end);
    const shown = (lead + rest).replaceAll("\t", " ") + (line.length > end ? " ..." : "");
    return `  ${shown}\n  ${" ".repeat(lead.length)}${"^".repeat(Math.max(1, /^\S*/.exec(rest)[0].length))}`;
  }

  function parse(text) {
    try { return read(text); } catch (error) {
      if (error.line && text.trim()) error.message += `\n${spotInText(text.split(LINE_END)[error.line - 1], error.column - 1)}`;
      throw error;
    }
  }

  function read(text) {
    let head = null, isFirst = true, top = 1;
    const pipelines = new Map(), mine = new Map(), rows = new Map(), unnamed = [];
    text.split(LINE_END).forEach((raw, at) => {
      const number = at + 1, line = raw.trim();
      if (!line || line.startsWith("#")) return;
      if (isFirst) {
        isFirst = false;
        top = number;
        head = HEAD.exec(line);
        if (head !== null) return;
        if (!PIPELINE.test(line) && !ROW.test(line) && !CELLS.test(line) && !line.startsWith("updates every "))
          fail(number, 1, "expected 'schedule NAME: R ranks, S stages, N microbatches' (after it, where there is a limit, " +
            `', at most K in flight'), or a row like 'rank 0 | F0 B0', got ${quoted(line.slice(0, 80))}`);
      }
      let match;
      if ((match = PIPELINE.exec(line))) {
        const index = Number(match[1]);
        if (pipelines.has(index)) fail(number, 1, `pipeline ${index} is given twice`);
        pipelines.set(index, match[2].split(" ").map(Number));
        mine.set(index, match[3] ? match[3].split(" ").map(Number) : []);
      } else if ((match = ROW.exec(line))) {
        const rank = Number(match[1]);
        if (rows.has(rank)) fail(number, 1, `rank ${rank} is given twice`);
        rows.set(rank, { line: number, cells: match[2], offset: raw.indexOf("|") + 2 });
      } else if (CELLS.test(line)) unnamed.push({ line: number, cells: line, offset: raw.indexOf(line) + 1 });
      else {
        const other = OTHER_LINES.find(([pattern]) => pattern.test(line));
        if (other) fail(number, 1, `the playground has no ${other[1]}; 'penstock show FILE' draws this schedule`);
        fail(number, 1, "expected 'pipeline K: ...' or 'rank R | ...' (or a line of updates, of a stage graph or of an " +
          `order), got ${quoted(line.slice(0, 60))}`);
      }
    });
    if (rows.size && unnamed.length)
      fail(unnamed[0].line, 1, "some rows name their rank and this one does not; begin it like 'rank 0 | F0 B0'");
    unnamed.forEach((row, rank) => rows.set(rank, row));
    const numbers = [...rows.keys()].sort((a, b) => a - b);
    let name, count, stages, microbatches;
    if (head === null) {
      if (!rows.size) fail(top, 1, "the text holds no 'schedule NAME: ...' line and no row");
      const cells = numbers.flatMap((rank) => cellsOf(rows.get(rank), UNNAMED).map((cell) => ({ rank, ...cell })));
      if (!pipelines.size) { pipelines.set(0, hostsOf(cells, rows.size)); mine.set(0, []); }
      [name, count, stages] = ["grid", rows.size, pipelines.values().next().value.length];
      microbatches = countMicrobatches(cells);
    } else [name, count, stages, microbatches] = [head[1], Number(head[2]), Number(head[3]), Number(head[4])];
    if (numbers.length !== count || numbers.some((rank, at) => rank !== at))
      fail((rows.get(numbers.find((rank) => rank >= count)) || { line: top }).line, 1, `${head ? "the header says" : "there are rows of"} ${count} ranks, the rows are for ranks ${list(numbers)}`);
    const indices = [...pipelines.keys()].sort((a, b) => a - b);
    if (!indices.length)
      fail(top, 1, "no line says where stages lie; add one below, like 'pipeline 0: stages on ranks " +
        `${range(Math.min(stages, 16)).map((stage) => stage % Math.max(1, count)).join(" ")}'`);
    if (indices.some((k, at) => k !== at))
      fail(top, 1, `pipelines must be numbered from 0, got ${list(indices)}`);
    for (const [k, ranks] of pipelines) {
      if (ranks.length !== stages) fail(top, 1, `the header says ${stages} stages, pipeline ${k} places ${ranks.length}`);
      const most = Math.max(...ranks);
      if (most >= count) fail(top, 1, `pipeline ${k} names rank ${most}, but there are ${count} ranks`);
    }
    const pipelineOf = new Array(microbatches).fill(0);
    if (pipelines.size > 1 || mine.get(0).length) {
      const listed = [...mine.values()].flat().sort((a, b) => a - b);
      if (listed.length !== microbatches || listed.some((m, at) => m !== at))
        fail(top, 1, `each of the ${microbatches} microbatches must be in one pipeline's list, as in 'pipeline 0: stages ` +
          `on ranks 0 1, microbatches 0 2', got ${list(listed)}`);
      for (const [k, found] of mine) for (const m of found) pipelineOf[m] = k;
    }
    const made = make(name, indices.map((k) => pipelines.get(k)), range(count).map(() => []), pipelineOf,
      head && head[5] ? Number(head[5]) : null);
    // Where each op stands in the text, for what points at it: [line, column, length] by rank and step.
    made.spots = made.order.map(() => []);
    for (let rank = 0; rank < count; rank++) {
      const own = stagesOf(made, rank);
      for (const { op, line, column, length } of cellsOf(rows.get(rank), own.length === 1 ? own[0] : null)) {
        if (ELSEWHERE.includes(op.kind)) fail(line, column, `the playground has no ${op.kind} ops`);
        made.order[rank].push(op);
        made.spots[rank].push([line, column, length]);
      }
    }
    if (!/^[A-Za-z0-9][A-Za-z0-9._+-]*$/.test(name))
      throw new ScheduleError(`schedule name ${quoted(name)}: use letters, digits and ._+- only`, { rule: "name" });
    if (made.maxInFlight === 0 || made.maxInFlight === Infinity)
      throw new ScheduleError(`max_in_flight is ${made.maxInFlight ? "inf" : "0.0"}: give a number of activations above 0, or None`,
        { rule: "memory" });
    return made;
  }

  // The ops of a row, and their places in the text.
  function cellsOf({ line, cells, offset }, defaultStage) {
    return [...cells.matchAll(/\S+/g)].filter(([cell]) => cell !== ".").map(({ 0: cell, index }) => {
      const column = offset + index;
      if (cell.includes("+"))
        fail(line, column, `the playground has no pairs like ${quoted(cell.slice(0, 40))}; 'penstock show FILE' draws this schedule`);
      const op = parseOp(cell, defaultStage);
      if (typeof op === "string") fail(line, column, op);
      return { op, line, column, length: cell.length };
    });
  }

  const tally = (values) => {
    const found = new Map();
    for (const value of values) found.set(value, (found.get(value) || 0) + 1);
    return found;
  };

  // The rank of each stage, read off rows without a header: stage r on rank r, or where most of its cells stand.
  function hostsOf(cells, numRanks) {
    const named = cells.filter(({ op }) => op.stage !== UNNAMED), allNamed = 2 * named.length > cells.length;
    const cellsOn = tally(named.map(({ op, rank }) => `${op.stage} ${rank}`));
    const on = (stage, rank) => cellsOn.get(`${stage} ${rank}`) || 0;
    const hosts = new Map(allNamed ? [] : range(numRanks).map((rank) => [rank, rank]));
    const num = allNamed ? numCounted(named.map(({ op }) => op.stage)) : 0;
    for (const { op: { stage }, rank } of named)
      if (stage < num && on(stage, rank) > on(stage, hosts.get(stage))) hosts.set(stage, rank);
    for (const { op: { stage }, rank, line, column } of named) {
      const host = hosts.get(stage);
      if (host === undefined)
        fail(line, column, only(Math.max(1, hosts.size), "stage") + (allNamed ? "" : "; where one cell names its stage, as 2F0 does, all do"));
      if (allNamed && host !== rank && 2 * on(stage, rank) >= on(stage, host))
        fail(line, column, `stage ${stage} stands on ranks ${host} and ${rank}: rows alone do not say ` +
          "which pipelines there are; head them with 'schedule NAME: R ranks, S stages, N microbatches' " +
          "and a line like 'pipeline 0: stages on ranks 0 1, microbatches 0 2' for each");
    }
    const stages = [...hosts.keys()].sort((a, b) => a - b);
    if (stages.some((stage, at) => stage !== at))
      fail(cells[0].line, 1, `the cells name stages ${list(stages)}: stages are numbered from 0, with ops in each`);
    return stages.map((stage) => hosts.get(stage));
  }

  function countMicrobatches(cells) {
    const plain = cells.filter(({ op }) => KINDS.includes(op.kind)), num = numCounted(plain.map(({ op }) => op.m));
    for (const { op, line, column } of plain) if (op.m >= num) fail(line, column, only(num, "microbatch", "microbatches"));
    return num;
  }

  // How many of the numbers from 0 on are meant: those that half as many cells name as the number that most do.
  function numCounted(numbers) {
    const times = tally(numbers), most = Math.max(0, ...times.values());
    let num = 0;
    while (times.has(num) && 2 * times.get(num) >= most) num++;
    const beyond = [...times].filter(([number, count]) => 2 * count > most && number <= numbers.length).map(([number]) => number + 1);
    return Math.max(num, Math.min(1, most), ...beyond);
  }

  // ---- the proof

  const EACH_SIDE = 6;

  // The row around one op, with an arrow under it.
  function spotOf(s, rank, step) {
    const cells = cellTexts(s, rank);
    const first = Math.max(0, step - EACH_SIDE), last = Math.min(cells.length, step + EACH_SIDE + 1);
    const lead = `  rank ${rank} | ${first ? "... " : ""}` + cells.slice(first, step).map((c) => c + " ").join("");
    const cell = step < cells.length ? cells[step] : "(end)";
    const row = lead + [cell, ...cells.slice(step + 1, last)].join(" ") + (last < cells.length ? " ..." : "");
    return `${row}\n${" ".repeat(lead.length)}${"^".repeat(cell.length)}`;
  }

  function errorAt(s, rule, rank, step, op, message) {
    return new ScheduleError(
      `rank ${rank}, step ${step}, ${nameOf(op)}: ${message} (rule: ${rule})\n${spotOf(s, rank, step)}`,
      { rule, rank, step, op });
  }

  // Raises ScheduleError unless the schedule can run: from what is local to what is global, as Python's `check`.
  function check(s) {
    checkRanges(s);
    checkCoverage(s);
    checkLocalOrder(s);
    checkMicrobatchOrder(s);
    const run = runUntimed(s);
    if (run.blocked.size) throw deadlock(s, run);
    if (s.maxInFlight !== null) checkMemory(s);
  }

  function checkRanges(s) {
    const stages = numStages(s), microbatches = numMicrobatches(s);
    if (microbatches < 1)
      throw new ScheduleError("the schedule has no microbatch; it needs at least 1 (rule: range)", { rule: "range" });
    s.order.forEach((row, rank) => row.forEach((op, step) => {
      if (!KINDS.includes(op.kind)) {
        const glued = /^([FBIWR][0-9]+)([0-9]*[FBIWR])$/.exec(op.kind);
        throw errorAt(s, "kind", rank, step, op,
          `kind ${quoted(op.kind)} is not one of F, B, I, W, and is not registered for stage ${op.stage}` +
          (glued ? `; put a space between ${glued[1]} and ${glued[2]}${op.m}` : ""));
      }
      if (!(op.stage >= 0 && op.stage < stages))
        throw errorAt(s, "range", rank, step, op, only(stages, "stage"));
      if (!(op.m >= 0 && op.m < microbatches))
        throw errorAt(s, "range", rank, step, op, only(microbatches, "microbatch", "microbatches"));
      const host = rankOf(s, op.stage, op.m);
      if (rank !== host)
        throw errorAt(s, "placement", rank, step, op, `stage ${op.stage} is placed on rank ${host}, so the op belongs there`);
    }));
  }

  function checkCoverage(s) {
    const spot = new Map();
    s.order.forEach((row, rank) => row.forEach((op, step) => {
      if (spot.has(key(op)))
        throw errorAt(s, "coverage", rank, step, op,
          `the op occurs twice, first at step ${spot.get(key(op))[1]}; each op runs once`);
      spot.set(key(op), [rank, step]);
    }));
    for (let stage = 0; stage < numStages(s); stage++) {
      for (let m = 0; m < numMicrobatches(s); m++) {
        const [f, b, i, w] = ["F", "B", "I", "W"].map((kind) => ({ kind, stage, m }));
        const at = (op) => spot.get(key(op));
        for (const half of [i, w])
          if (at(b) && at(half))
            throw errorAt(s, "coverage", ...at(half), half,
              `the full backward is there too, at step ${at(b)[1]}; use either B or I with W`);
        if (!at(f)) throw missing(s, f, at(b) || at(i) || at(w));
        if (at(b)) continue;
        if (!at(i) && !at(w))
          throw missing(s, b, at(f), `${nameOf(b)} is missing, with no ${shortName(i)} and ${shortName(w)} in its place`);
        if (!at(i) || !at(w)) throw missing(s, at(i) ? w : i, at(at(i) ? i : w));
      }
    }
  }

  function missing(s, op, near, what) {
    const [rank, step] = near || [rankOf(s, op.stage, op.m), null];
    what = what || `${nameOf(op)} is missing${near ? "" : ", and so is its backward"}`;
    if (!s.order.some((row) => row.some((other) => other.m === op.m)))
      what += `, as no row has an op of microbatch ${op.m} (the schedule has ${numMicrobatches(s)})`;
    let text = `rank ${rank}${near ? `, beside step ${step}` : ""}: ${what}; each stage runs F and its backward once for ` +
      "every microbatch (rule: coverage)";
    if (near) text += "\n" + spotOf(s, ...near);
    return new ScheduleError(text, { rule: "coverage", rank, step, op });
  }

  function checkLocalOrder(s) {
    s.order.forEach((row, rank) => {
      const place = new Map(row.map((op, step) => [key(op), step]));
      row.forEach((op, step) => {
        for (const needed of needs(s, op, (k) => place.has(k))) {
          const at = place.get(key(needed));
          if (at > step)
            throw errorAt(s, "order", rank, step, op, `it needs ${nameOf(needed)}, which comes later, at step ${at}`);
        }
      });
    });
  }

  const CHAINS = { F: ["F"], B: ["I", "W"], I: ["I"], W: ["W"], R: ["R"] };

  function checkMicrobatchOrder(s) {
    s.order.forEach((row, rank) => {
      const reached = new Map();
      row.forEach((op, step) => {
        const pipeline = s.pipelineOf[op.m];
        for (const chain of CHAINS[op.kind]) {
          const name = `${chain} ${op.stage} ${pipeline}`;
          if (op.m < (reached.get(name) || 0)) throw outOfOrder(s, rank, step, op, chain);
          reached.set(name, op.m + 1);
        }
      });
    });
  }

  function outOfOrder(s, rank, step, op, chain) {
    const kind = op.kind === "F" ? "F" : "B", pipeline = s.pipelineOf[op.m], row = s.order[rank];
    const before = row.slice(0, step).reverse().find((each) => each.stage === op.stage &&
      CHAINS[each.kind].includes(chain) && s.pipelineOf[each.m] === pipeline && each.m > op.m);
    const own = s.pipelineOf.map((k, m) => (k === pipeline ? m : -1)).filter((m) => m >= 0);
    const shown = own.slice(0, 8).join(" ") + (own.length > 8 ? ` ... (${own.length} of them)` : "");
    const where = s.pipelines.length > 1 ? ` in pipeline ${pipeline}` : "";
    return errorAt(s, "microbatches", rank, step, op,
      `${nameOf(before)} comes before it, at step ${row.indexOf(before)}, but the order of ${kind} of stage ${op.stage}${where}` +
      `${kind === "B" ? ", which I, W and R keep too," : ""} is ${shown}. Sums depend on it: keep the order, or declare another ` +
      `with ps.schedule.declare_order(schedule, ${kind === "F" ? "forward" : "backward"}=[...]), for a file with ` +
      "ps.load(..., declare_order=True) or penstock show --declare-order --out");
  }

  // Runs the order until no rank can go on, over channels that never fill up.
  function runUntimed(s) {
    const rankOfOp = new Map();
    s.order.forEach((row, rank) => row.forEach((op) => rankOfOp.set(key(op), rank)));
    const has = (k) => rankOfOp.has(k), steps = new Array(s.numRanks).fill(0);
    const done = new Set(), waiting = new Map(), blocked = new Map(), ready = range(s.numRanks);
    while (ready.length) {
      const rank = ready.pop(), row = s.order[rank];
      blocked.delete(rank);
      while (steps[rank] < row.length) {
        const op = row[steps[rank]], absent = needs(s, op, has).find((needed) => !done.has(key(needed)));
        if (absent !== undefined) {
          const k = key(absent);
          if (!waiting.has(k)) waiting.set(k, []);
          waiting.get(k).push(rank);
          blocked.set(rank, [absent, has(k) ? rankOfOp.get(k) : rank]);
          break;
        }
        const k = key(op);
        done.add(k);
        steps[rank] += 1;
        if (waiting.has(k)) { ready.push(...waiting.get(k)); waiting.delete(k); }
      }
    }
    return { steps, blocked };
  }

  // Follows who waits for whom from the first blocked rank to the circle, and tells the circle.
  function deadlock(s, run) {
    const path = [];
    let rank = Math.min(...run.blocked.keys());
    while (run.blocked.has(rank) && !path.includes(rank)) {
      path.push(rank);
      rank = run.blocked.get(rank)[1];
    }
    const cycle = path.includes(rank) ? path.slice(path.indexOf(rank)) : path;
    const stepOf = (row, op) => {
      const at = row.findIndex((each) => key(each) === key(op));
      return at < 0 ? "(nowhere)" : at;
    };
    const first = cycle[0], step = run.steps[first], own = s.order[first][step];
    const lines = cycle.map((waiting) => {
      const [op, peer] = run.blocked.get(waiting);
      return `  rank ${waiting} at step ${run.steps[waiting]} waits for ${nameOf(op)} from rank ${peer}, ` +
        `which runs it at step ${stepOf(s.order[peer], op)}`;
    });
    const spots = cycle.map((waiting) => spotOf(s, waiting, run.steps[waiting]));
    return new ScheduleError(
      [`rank ${first}, step ${step}, ${nameOf(own)}: the ranks wait for one another (rule: deadlock)`, ...lines, ...spots].join("\n"),
      { rule: "deadlock", rank: first, step, op: own });
  }

  function checkMemory(s) {
    s.order.forEach((row, rank) => levels(row).forEach((held, step) => {
      if (!is_within(held, s.maxInFlight))
        throw errorAt(s, "memory", rank, step, row[step],
          `the rank would hold ${general(held)} stage activations, the limit is ${general(s.maxInFlight)}; let a backward run ` +
            "before it, or raise the limit");
    }));
  }

  // ---- other forms

  function toJson(s) {
    return JSON.stringify({
      format: "penstock-schedule", version: 1, name: s.name, placement: s.pipelines, microbatch_pipeline: s.pipelineOf,
      memory_limit: s.maxInFlight, order: s.order.map((row) => row.map(opText)),
    });
  }

  return { KINDS, ScheduleError, again, bidirectional, check, circular, key, make, needs, numStages, oneToOne, opText,
    parse, peaks, stagesOf, toJson, toText, unitColumns, vShape, wave };
})();
