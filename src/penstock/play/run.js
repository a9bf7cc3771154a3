// Runs a schedule through time: lowers it to the arrays of the engine, and lets the engine's own event loop decide.
//
// costs: { f, i, w, b: ms of a rank's whole share of the model, slow: [factor of each rank] }
// links: Map of "a>b" to ms that messages of that link are late
const runs = (() => {
  const { again, key, KINDS, needs, numStages, ScheduleError } = schedules;
  const PRIORITY = { B: 0, I: 0, F: 1, W: 2, R: 2 };
  const CODES = { frozen: decider.FROZEN, hinted: decider.HINTED, dynamic: decider.CLASS_FIRST };
  const FREED_BY_INPUT = 0.5;
  const POLICIES = ["hinted", "hinted:0.5", "hinted:1", "dynamic", "frozen"];

  function starts(groups, count) {
    const first = new Int32Array(count + 1);
    for (const group of groups) first[group + 1] += 1;
    for (let at = 0; at < count; at++) first[at + 1] += first[at];
    return first;
  }

  // The schedule as arrays: ops numbered row by row, edges from what makes to what needs, queues to choose from, and
  // what its ops hold. None of it depends on times or links, so that dragging those only fills arrays of numbers.
  function lower(s) {
    const ops = s.order.flat(), num = ops.length, number = new Map(ops.map((op, at) => [key(op), at]));
    const rank = new Int32Array(num), first = new Int32Array(s.numRanks + 1);
    s.order.forEach((row, r) => {
      first[r + 1] = first[r] + row.length;
      rank.fill(r, first[r], first[r + 1]);
    });
    const successors = ops.map(() => []), missing = new Int32Array(num), has = (k) => number.has(k);
    const edge = (before, after) => { successors[before].push(after); missing[after] += 1; };
    ops.forEach((op, at) => {
      for (const needed of needs(s, op, has)) {
        if (!has(key(needed)))
          throw new ScheduleError(`${schedules.opText(needed)} is missing, and ${schedules.opText(op)} needs it`, { rule: "coverage" });
        edge(number.get(key(needed)), at);
      }
    });
    // B and W add to the same gradients from different queues: they keep the order of the row.
    for (const row of s.order) {
      const adding = new Map();
      row.forEach((op) => {
        if (op.kind !== "B" && op.kind !== "W") return;
        const before = adding.get(op.stage);
        if (before && before.kind !== op.kind) edge(number.get(key(before)), number.get(key(op)));
        adding.set(op.stage, op);
      });
    }
    const priority = Int32Array.from(ops, (op) => PRIORITY[op.kind]);
    const stages = numStages(s), place = ops.map((op, at) => ((rank[at] * 3 + priority[at]) * stages + op.stage) * 2 + (op.kind === "R" ? 1 : 0));
    const queueOps = Int32Array.from(range(num).sort((a, b) => place[a] - place[b] || a - b));
    const queueOf = new Int32Array(num), begins = [];
    queueOps.forEach((op, at) => {
      if (at === 0 || place[op] !== place[queueOps[at - 1]]) begins.push(at);
      queueOf[op] = begins.length - 1;
    });
    const memory_change = memoryChanges(s, ops, rank);
    return {
      ops, number, rank, first, missing, priority, successors, memory_change, frozen_peaks: peaksOf(first, memory_change),
      kind: Uint8Array.from(ops, (op) => KINDS.indexOf(op.kind)),
      edge_first: Int32Array.from([0, ...successors.map(((total) => (each) => (total += each.length))(0))]),
      edge_to: Int32Array.from(successors.flat()),
      queue_ops: queueOps, queue_of: queueOf, queue_first: Int32Array.from([...begins, num]),
      queue_rank_first: starts(begins.map((at) => rank[queueOps[at]]), s.numRanks),
      gang: new Int32Array(num).fill(-1), gang_first: new Int32Array(1), gang_ops: new Int32Array(0),
    };
  }

  function durationsOf(s, graph, costs) {
    const per = perStage(s), of = { F: costs.f, R: costs.f, I: costs.i, W: costs.w, B: costs.b }, found = new Float64Array(graph.ops.length);
    for (let rank = 0; rank < s.numRanks; rank++) {
      const table = KINDS.map((kind) => (of[kind] / per) * (costs.slow ? costs.slow[rank] || 1 : 1));
      for (let op = graph.first[rank]; op < graph.first[rank + 1]; op++) found[op] = table[graph.kind[op]];
    }
    return found;
  }

  // How many stages a rank's share of the model is cut into: costs are said per share, so that schedules compare.
  const perStage = (s) => numStages(s) / s.numRanks;

  function memoryChanges(s, ops, rank) {
    const forwards = s.order.map(again);
    return Float64Array.from(ops, (op, at) => {
      if (op.kind === "F") return forwards[rank[at]].has(key(op)) ? 0 : 1;
      if (op.kind === "R") return 1;
      if (op.kind === "I") return -FREED_BY_INPUT;
      return op.kind === "W" ? FREED_BY_INPUT - 1 : -1;
    });
  }

  function peaksOf(first, change) {
    return range(first.length - 1).map((r) => {
      let held = 0, most = 0;
      for (let op = first[r]; op < first[r + 1]; op++) most = Math.max(most, (held += change[op]));
      return most;
    });
  }

  // What one run reads and writes: the state of ranks, that of the event loop, and the links. Arrays that the caller's
  // `space` has of the right size are used again: a browser that is given new ones for every frame stops now and then to
  // collect the old.
  function stateOf(s, graph, options) {
    const num = graph.ops.length, rows = s.numRanks, space = options.space || {};
    const blank = (Kind, name, size) => {
      if (space[name] && space[name].length === size) return space[name].fill(0);
      return (space[name] = new Kind(size));
    };
    const ints = (name, size) => blank(Int32Array, name, size), floats = (name, size) => blank(Float64Array, name, size);
    const copied = (name, from) => {
      const found = ints(name, from.length);
      found.set(from);
      return found;
    };
    const delay = floats("delay", rows * rows);
    for (const [link, ms] of options.links || []) {
      const [a, b] = link.split(">").map(Number);
      if (a < rows && b < rows) delay[a * rows + b] = ms;
    }
    const ranks = {
      missing: copied("missing", graph.missing), done: ints("done", num), held: floats("held", rows),
      head: copied("head", graph.queue_first.subarray(0, -1)), next_frozen: copied("next_frozen", graph.first.subarray(0, -1)),
      warmup_left: Int32Array.from(options.warmup || new Array(rows).fill(0)), under_way: null,
    };
    const loop = {
      due: null, left: floats("left", rows), start_time: floats("start_time", num), end_time: floats("end_time", num),
      free_time: floats("free_time", num), arrival_time: floats("arrival_time", graph.edge_to.length), peak: floats("peak", rows),
      turn: ints("turn", num), state: ints("state", rows), last_on: ints("last_on", rows), unsent: ints("unsent", rows),
      wake: floats("wake", rows), ends: floats("ends", 2 * min_tree.leaves_for(rows)).fill(Infinity), gathered: ints("gathered", 0),
      in_transit: ints("in_transit", 0), reached: ints("reached", 2),
    };
    return { ranks, loop, links: { delay, bounded: false, lines: false } };
  }

  // Runs a schedule. options: { costs, links, dispatch: "frozen" | "hinted" | "hinted:SHARE" | "dynamic" | "auto",
  // caps, warmup, change, duration, space }. What is returned lies in `space`, if given, until that is given again.
  function simulate(s, options) {
    const graph = options.graph || lower(s);
    const duration = options.duration || durationsOf(s, graph, options.costs);
    const given = { ...options, graph, duration, space: null };
    if (options.dispatch === "auto") {
      const tried = POLICIES.map((dispatch) => simulate(s, { ...given, dispatch }));
      const frozen = tried[POLICIES.length - 1].makespan;
      const sure = tried.filter((each) => each.makespan <= frozen * (1 + tolerance.EPSILON));
      const least = Math.min(...sure.map((each) => each.makespan)) * (1 + tolerance.EPSILON);
      return sure.find((each) => each.makespan <= least);
    }
    const [name, share] = options.dispatch.split(":"), wait = share ? Number(share) : 0;
    const { ranks, loop, links } = stateOf(s, graph, options);
    if (wait) loop.due = simulate(s, { ...given, dispatch: "frozen" }).start;
    const memory_change = options.change || graph.memory_change;
    const peaks = options.change ? peaksOf(graph.first, options.change) : graph.frozen_peaks;
    const cap = Float64Array.from(options.caps || (name === "frozen" ? peaks.map(() => Infinity) : peaks));
    Object.assign(ranks, { memory_change, cap });
    loop.duration = duration;
    const ended = event_loop.run(CODES[name], wait, Infinity, graph, ranks, loop, links);
    if (ended < graph.ops.length) {
      const stuck = ranks.done.indexOf(0);
      throw new ScheduleError(
        `the run stops after ${ended} of ${graph.ops.length} ops: rank ${graph.rank[stuck]} never runs ` +
        `${schedules.opText(graph.ops[stuck])} (rule: deadlock); the proof shows why`, { rule: "deadlock" });
    }
    const busy = new Array(s.numRanks).fill(0);
    let first = Infinity, last = -Infinity;
    for (let op = 0; op < duration.length; op++) {
      busy[graph.rank[op]] += duration[op];
      first = Math.min(first, loop.start_time[op]);
      last = Math.max(last, loop.end_time[op]);
    }
    const makespan = graph.ops.length ? last - first : 0;
    return {
      schedule: s, graph, turn: loop.turn, dispatch: options.dispatch, makespan, busy,
      bubble: makespan ? 1 - sum(busy) / (s.numRanks * makespan) : 0,
      start: loop.start_time, end: loop.end_time, peaks: [...loop.peak],
    };
  }

  // The schedule with each rank's ops in the order in which they ran.
  function executed(run) {
    const { graph, turn, schedule } = run;
    const order = schedule.order.map((row, r) => {
      const places = range(row.length).sort((a, b) => turn[graph.first[r] + a] - turn[graph.first[r] + b]);
      return places.map((place) => row[place]);
    });
    return { ...schedule, order };
  }

  return { durationsOf, executed, lower, simulate };
})();
