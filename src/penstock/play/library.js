// The schedules of `penstock.library` that are chains of stages, by the same names and to the same op.
const library = (() => {
  const { ScheduleError, bidirectional, circular, make, oneToOne, vShape, wave, key, check } = schedules;
  const op = (kind, stage, m) => ({ kind, stage, m });
  const zeros = (n) => new Array(n).fill(0);
  const refuse = (message) => { throw new ScheduleError(message, { rule: "options" }); };

  function wholeMultiple(name, what, count, of, unit) {
    if (count >= 1 && count % unit === 0) return;
    const lower = Math.max(unit, Math.floor(count / unit) * unit);
    refuse(`${name} needs ${what} in a multiple of the ${unit} ${of}, got ${count}; use ${lower < count ? `${lower} or ${lower + unit}` : lower}`);
  }
  function atLeast(name, what, count, lowest) {
    if (count < lowest) refuse(`${name} needs at least ${lowest} ${what}, got ${count}`);
  }

  function backwardOf(name, options) {
    const backward = options.backward || "whole";
    if (!["whole", "split"].includes(backward)) refuse(`${name}: backward is '${backward}'; give 'whole' or 'split'`);
    return backward;
  }

  // One stage per rank, from when each op would run, were all ops alike in length; those of one slot in the order in
  // which the kinds are given.
  function inSlots(name, p, n, slots) {
    const order = range(p).map((rank) =>
      slots.flatMap(([kind, slot], turn) => range(n).map((m) => [slot(rank, m) * slots.length + turn, op(kind, rank, m)]))
        .map((entry, at) => [...entry, at]).sort((a, b) => a[0] - b[0] || a[2] - b[2]).map((entry) => entry[1]));
    return make(name, oneToOne(p), order, zeros(n));
  }

  const gpipe = (p, n) => inSlots("gpipe", p, n, [["F", (r, m) => m], ["B", (r, m) => m + n]]);
  const oneFOneB = (p, n) => inSlots("1f1b", p, n, [["F", (r, m) => m - (p - r - 1)], ["B", (r, m) => m]]);
  const zbH1 = (p, n) => inSlots("zb-h1", p, n, [["F", (r, m) => m - (p - 1 - r)], ["I", (r, m) => m], ["W", (r, m) => m + r]]);

  function interleaved(p, n, options) {
    const stages = options.num_stages || 2 * p;
    wholeMultiple("interleaved-1f1b", "stages", stages, "ranks", p);
    // Groups as even as they go, the larger ones first. The first may have microbatches missing, which are left out below.
    const chunks = stages / p, missing = 2 * (n % p) > p && n > p ? p - (n % p) : 0, filled = n + missing;
    const groups = Math.max(1, Math.floor(filled / p)), size = Math.ceil(filled / groups), larger = filled - (size - 1) * groups;
    const turns = range(groups).flatMap((g) => range(chunks).flatMap((chunk) =>
      range(g < larger ? size : size - 1).map((m) => [chunk, g * size - Math.max(0, g - larger) + m - missing])));
    const split = backwardOf("interleaved-1f1b", options) === "split";
    const order = range(p).map((rank) => {
      const warmup = (split ? 1 : 2) * (p - 1 - rank) + (chunks - 1) * size;
      const lanes = split ? [["F", -warmup], ["I", 0], ["W", rank]] : [["F", -warmup], ["B", 0]];
      return lanes.flatMap(([kind, late], turn) => turns.map(([chunk, m], number) => (
        { slot: (number + late) * lanes.length + turn, op: op(kind, (kind === "F" ? chunk : chunks - 1 - chunk) * p + rank, m) }
      ))).sort((a, b) => a.slot - b.slot).map((each) => each.op).filter(({ m }) => m >= 0);
    });
    return make("interleaved-1f1b", circular(p, stages), order, zeros(n));
  }

  function loopedBfs(p, n, options) {
    const stages = options.num_stages || 2 * p;
    wholeMultiple("looped-bfs", "stages", stages, "ranks", p);
    const order = range(p).map((rank) => {
      const own = range(stages).filter((stage) => stage % p === rank);
      return [
        ...own.flatMap((stage) => range(n).map((m) => op("F", stage, m))),
        ...own.reverse().flatMap((stage) => range(n).map((m) => op("B", stage, m))),
      ];
    });
    return make("looped-bfs", circular(p, stages), order, zeros(n));
  }

  // Runs the decision core over unit costs from an order that holds just `warmup` activations per rank.
  function greedy(name, p, n, warmup, maxInFlight) {
    const counts = warmup.map((count) => Math.min(count, n));
    const order = range(p).map((rank) => {
      const row = range(counts[rank]).map((m) => op("F", rank, m));
      for (let m = 0; m < n; m++) {
        row.push(op("I", rank, m), op("W", rank, m));
        if (counts[rank] + m < n) row.push(op("F", rank, counts[rank] + m));
      }
      return row;
    });
    const seed = make(name, oneToOne(p), order, zeros(n), maxInFlight);
    const graph = runs.lower(seed), change = Float64Array.from(graph.ops, ({ kind }) => ({ F: 1, I: 0, W: -1 })[kind]);
    const caps = new Array(p).fill(maxInFlight === null ? 2 * n : maxInFlight);
    const ran = runs.simulate(seed, { graph, change, duration: new Float64Array(graph.ops.length).fill(1), dispatch: "dynamic", caps, warmup: counts });
    return runs.executed(ran);
  }

  const zbH2 = (p, n) => greedy("zb-h2", p, n, range(p).map((rank) => 2 * (p - rank) - 1), 2 * p - 1);

  function zb(p, n, options) {
    const given = options.warmup || range(p).map((rank) => 2 * (p - rank) - 1);
    if (given.length !== p) refuse(`zb: warmup has ${given.length} counts; give one per rank, ${p} in all`);
    if (Math.min(...given) < 1) refuse(`zb: a warm-up count is at least 1, got [${given.join(", ")}]`);
    for (let rank = 1; rank < p; rank++)
      if (given[rank] > given[rank - 1])
        refuse(`zb: warm-up counts never rise from one stage to the next, but rank ${rank} has ${given[rank]} after ${given[rank - 1]}`);
    const counts = given.map((count) => Math.min(count, n)), cap = options.max_in_flight || null;
    if (cap !== null && cap < Math.max(...counts))
      atLeast(`zb with warm-up counts [${counts.join(", ")}]`, "activations in flight (max_in_flight)", Math.trunc(cap), Math.max(...counts));
    return greedy("zb", p, n, counts, cap);
  }

  function zbV(p, n) {
    const last = 2 * p - 1;
    const order = range(p).map((rank) => {
      const row = [], count = {};
      const add = (kinds, chunk) => {
        for (const kind of kinds) {
          const m = count[kind + chunk] || 0;
          count[kind + chunk] = m + 1;
          if (m < n) row.push(op(kind, chunk === 0 ? rank : last - rank, m));
        }
      };
      const times = (number, act) => { for (let k = 0; k < number; k++) act(); };
      times(2 * (p - rank) - 1, () => add("F", 0));
      times(rank, () => { add("F", 1); add("F", 0); });
      times(p - rank, () => add("FIW", 1));
      while (count.F1 < Math.max(n, count.F0)) {
        if (count.F0 < n) add("F", 0);
        add("IW", 0);
        add("FIW", 1);
      }
      times(rank, () => { add("I", 0); add("I", 1); });
      times(p - rank, () => add("IW", 0));
      while ((count.W1 || 0) < n) add("W", 1);
      while ((count.W0 || 0) < n) add("W", 0);
      return row;
    });
    return make("zb-v", vShape(p), order, zeros(n));
  }

  // ---- patterns over a V: what one microbatch does, repeated every six slots and squeezed; see library/zero_bubble.py

  const PERIOD = 6, HELD = { F: 1, I: 0, W: -1 };
  const slotsOf = (row) => [...row.keys()].sort((a, b) => a - b);

  function withWeights(row) {
    const filled = new Map(row), late = [], places = slotsOf(row);
    let slot = places[0];
    const last = places[places.length - 1];
    while (slot <= last || late.length) {
      const here = row.get(slot);
      if (here === undefined) {
        if (late.length) { const first = late.shift(); filled.set(slot, op("W", first.stage, first.m)); }
      } else if (here.kind === "I") late.push(here);
      slot += 1;
    }
    return filled;
  }

  function levelsOf(row) {
    const found = [], last = Math.max(...row.keys());
    let held = 0;
    for (let slot = 0; slot <= last; slot++) found.push((held += row.has(slot) ? HELD[row.get(slot).kind] : 0));
    return found;
  }

  function neededBy(each, num) {
    const { kind, stage, m } = each, needed = m ? [op(kind, stage, m - 1)] : [];
    if (kind === "F" && stage) needed.push(op("F", stage - 1, m));
    else if (kind === "I") {
      needed.push(op("F", stage, m));
      if (stage + 1 < num) needed.push(op("I", stage + 1, m));
    } else if (kind === "W") needed.push(op("I", stage, m));
    return needed;
  }

  function squeeze(rows, cap, first) {
    const slotOf = new Map(rows.flatMap((row) => [...row].map(([slot, each]) => [key(each), slot])));
    const num = 2 * rows.length, bare = ![...rows[0].values()].some((each) => each.kind === "W");
    const moved = rows.map((row) => new Map(row)), level = rows.map(levelsOf);
    const places = rows.flatMap((row, rank) => [...row.keys()].filter((slot) => slot >= first).map((slot) => [slot, rank]));
    places.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    for (const [slot, rank] of places) {
      const each = rows[rank].get(slot), row = moved[rank], held = level[rank];
      const ready = 1 + Math.max(-1, ...neededBy(each, num).map((needed) => slotOf.get(key(needed))));
      row.delete(slot);
      for (let earlier = ready; earlier <= slot; earlier++) {
        if (row.has(earlier)) continue;
        row.set(earlier, each);
        if (earlier === slot) break;
        let fits;
        if (bare) fits = Math.max(...levelsOf(withWeights(row))) <= cap;
        else fits = each.kind !== "F" || Math.max(...held.slice(earlier, slot)) < cap;
        if (fits) {
          slotOf.set(key(each), earlier);
          for (let at = earlier; at < Math.min(slot, held.length); at++) held[at] += HELD[each.kind];
          break;
        }
        row.delete(earlier);
      }
    }
    return moved;
  }

  function fromPattern(name, pattern, n) {
    const p = pattern.length;
    let rows = pattern.map((slots, rank) => {
      const steps = [["F", rank], ["F", 2 * p - 1 - rank], ["I", 2 * p - 1 - rank], ["I", rank]], row = new Map();
      for (let m = 0; m < n; m++) slots.forEach((slot, at) => row.set(PERIOD * m + slot, op(...steps[at], m)));
      return withWeights(row);
    });
    const cap = Math.max(...rows.map((row) => Math.max(...levelsOf(row))));
    rows = squeeze(rows, cap, 0);
    const lastRead = Math.max(...[...rows[0]].filter(([, each]) => each.kind === "F" && each.stage === 0).map(([slot]) => slot));
    const bare = rows.map((row) => new Map([...row].filter(([, each]) => each.kind !== "W")));
    rows = squeeze(bare, cap, lastRead).map(withWeights);
    return make(name, vShape(p), rows.map((row) => slotsOf(row).map((slot) => row.get(slot))), zeros(n));
  }

  function vHalf(p, n) {
    const shift = p % 2 ? 0 : 3;
    return fromPattern("v-half", range(p).map((i) => [2 * i, 3 * p - i - 2, 3 * p + shift + 2 * i - 1, 6 * p + shift - i - 2]), n);
  }
  function vMin(p, n) {
    const shift = p % 3 ? 0 : 2;
    return fromPattern("v-min", range(p).map((i) => [i, 2 * p - i - 1, 2 * p + shift + i, 4 * p + shift - i - 1]), n);
  }

  // ---- one rule: backwards first, deepest stage first, p in flight; see library/two_ways.py

  // Runs the engine's list scheduler by these rules, in which every op takes a unit of time.
  function deepestFirst(name, pipelines, p, n, options) {
    const { BACKWARD, FORWARD, WEIGHT, NUM_CLASSES } = rule_tables;
    const classOf = { F: FORWARD, B: BACKWARD, I: BACKWARD, W: WEIGHT }, kinds = backwardOf(name, options) === "split" ? ["F", "I", "W"] : ["F", "B"];
    const num = pipelines[0].length, pipelineOf = range(n).map((m) => m % pipelines.length);
    const mine = pipelines.map((_, k) => range(n).filter((m) => pipelineOf[m] === k));
    const labels = [], number = new Map();
    pipelines.forEach((hosts, k) => hosts.forEach((rank, stage) => kinds.forEach((kind) => {
      number.set(`${k} ${kind} ${stage}`, labels.length);
      labels.push({ k, kind, stage, rank });
    })));
    const find = (k, kind, stage) => number.get(`${k} ${kind} ${stage}`);
    const sums = (counts) => counts.reduce((first, count) => [...first, first[first.length - 1] + count], [0]);
    const each = (value) => labels.map(() => value);
    const needs = labels.map(({ k, kind, stage }) => {
      const found = [];
      if (kind === "F" && stage > 0) found.push(find(k, "F", stage - 1));
      if (kind === "W") found.push(find(k, "I", stage));
      if (kind === "B" || kind === "I") {
        found.push(find(k, "F", stage));
        if (stage + 1 < num) found.push(find(k, kind, stage + 1));
      }
      return found;
    });
    const unlocks = labels.map((_, q) => range(labels.length).filter((other) => needs[other].includes(q)));
    const own = range(p).map((rank) => range(labels.length).filter((q) => labels[q].rank === rank));
    const classes = labels.map(({ kind }) => classOf[kind]), sizes = labels.map(({ k }) => mine[k].length);
    const slots = own.flatMap((row) => range(NUM_CLASSES).map((kind) => row.filter((q) => classes[q] === kind)
      .sort((a, b) => labels[b].stage - labels[a].stage || labels[a].k - labels[b].k)));
    const rowFirst = sums(own.map((row) => row.reduce((total, q) => total + sizes[q], 0))), numNeeds = needs.flat().length;
    const all = (count, value) => new Array(count).fill(value), last = kinds[kinds.length - 1];
    const tables = {
      network: { op_first: sums(sizes), row_first: rowFirst, duration: each(1) },
      more: {
        need_first: sums(needs.map((found) => found.length)), need_queue: needs.flat(), need_delay: all(numNeeds, 0),
        before: all(numNeeds, 1), after: all(numNeeds, 1), shift: all(numNeeds, 0), hosts: labels.map(({ rank }) => rank),
        unlock_first: sums(unlocks.map((found) => found.length)), unlocks: unlocks.flat(), host_first: range(labels.length + 1),
      },
      queues: {
        op_class: classes, memory: each(0), count: labels.map(({ kind }) => ({ F: 1, B: -1, W: -1, I: 0 })[kind]), reserve: each(0),
        reserve_count: each(0), release: labels.map(({ k, kind, stage }) => (kind === "F" ? find(k, last, stage) : -1)), late: each(0),
        cap: labels.map(({ kind, stage }) => (kind === "F" && stage === 0 ? Math.floor(p / pipelines.length) : Infinity)),
      },
      ranks: {
        own_first: sums(own.map((row) => row.length)), own: own.flat(), holder: range(p), beside: all(p, -1), strict: all(p, 0),
        mode: all(p, list_by_rules.BACKWARD_FIRST), unit_forward: all(p, 1), unit_backward: all(p, 1), cap_memory: all(p, Infinity),
        cap_count: all(p, Infinity), patience: all(p, 0), warmup: all(p, 0),
      },
      slots: {
        first: sums(slots.map((row) => row.length)), queues: slots.flat(), pick: all(slots.length, 0), interval: all(slots.length, 0),
        hold: all(slots.length, 0),
      },
    };
    const numOps = rowFirst[p], rows = all(numOps, 0);
    const state = {
      started: each(0), ready_at: each(0), refused: each(0), freed: each(0), free_at: all(p, 0), memory: all(p, 0), in_flight: all(p, 0),
      turn: all(p, BACKWARD), turn_left: all(p, 0), warmup_left: all(p, 0), position: all(slots.length, 0), stepped: all(slots.length, 0),
      start_time: all(numOps, 0), rows, filled: all(p, 0), tree: all(2 * min_tree.leaves_for(p), Infinity),
    };
    const started = list_by_rules.run(tables, state);
    if (started < numOps) throw new ScheduleError(`${name}: after ${started} of ${numOps} ops no rank can go on (rule: deadlock)`, { rule: "deadlock" });
    const order = range(p).map((rank) => {
      const seen = new Map();
      return rows.slice(rowFirst[rank], rowFirst[rank + 1]).map((q) => {
        const index = seen.get(q) || 0, { k, kind, stage } = labels[q];
        seen.set(q, index + 1);
        return op(kind, stage, mine[k][index]);
      });
    });
    return make(name, pipelines, order, pipelineOf);
  }

  function chimera(p, n, options) {
    wholeMultiple("chimera", "ranks", p, "pipelines", 2);
    return deepestFirst("chimera", bidirectional(oneToOne(p)), p, n, options);
  }
  function hanayo(p, n, options) {
    const waves = options.waves || 2;
    atLeast("hanayo", "waves", waves, 1);
    return deepestFirst("hanayo", wave(p, waves), p, n, options);
  }
  function bitpipe(p, n, options) {
    wholeMultiple("bitpipe", "ranks", p, "pipelines", 2);
    return deepestFirst("bitpipe", bidirectional(circular(p, 2 * p)), p, n, options);
  }
  function vchimera(p, n, options) {
    wholeMultiple("vchimera", "ranks", p, "pipelines", 2);
    return deepestFirst("vchimera", bidirectional(vShape(p)), p, n, options);
  }

  // ---- DualPipe: two streams of microbatches that meet; see library/two_ways.py

  function eightPhases(hosted, place, depth, n) {
    const row = [], late = [], count = {};
    const next = (kind, side) => { const at = count[kind + side] || 0; count[kind + side] = at + 1; return at; };
    const forward = (side) => { const [stage, nth] = hosted(side); row.push(op("F", stage, nth(next("F", side)))); };
    const backward = (side, split = false) => {
      const [stage, nth] = hosted(side), m = nth(next("B", side));
      row.push(op(split ? "I" : "B", stage, m));
      if (split) late.push(op("W", stage, m));
    };
    const times = (number, act) => { for (let k = 0; k < number; k++) act(k); };
    const below = depth - place - 1, above = place + 1;
    times(2 * below, () => forward("near"));
    times(above, () => { forward("near"); forward("far"); });
    times(below, () => { backward("far", true); row.push(late.shift()); forward("far"); });
    times(n - 2 * depth + above, () => { forward("near"); backward("far"); forward("far"); backward("near"); });
    times(below, () => { backward("far"); forward("far"); backward("near"); });
    times(2 * above, (k) => backward(k % 2 ? "near" : "far", k >= above));
    times(below, () => { row.push(late.shift()); backward("near", true); });
    return [...row, ...late];
  }

  // Keeps the ops of n microbatches, from number `missing` on, and numbers the microbatches from 0.
  const only = (rows, missing, n) => rows.map((row) =>
    row.map(({ kind, stage, m }) => op(kind, stage, m - missing)).filter(({ m }) => m >= 0 && m < n));

  function dualpipe(p, n) {
    wholeMultiple("dualpipe", "ranks", p, "pipelines", 2);
    const made = Math.max(n + (n % 2), 2 * p), missing = 2 * Math.floor((made - n) / 2);
    const order = range(p).map((rank) => eightPhases((side) => {
      const down = (side === "near") === (rank < p / 2);
      return down ? [rank, (k) => 2 * k] : [p - 1 - rank, (k) => 2 * k + 1];
    }, Math.min(rank, p - 1 - rank), p / 2, made / 2));
    return make("dualpipe", bidirectional(oneToOne(p)), only(order, missing, n), range(n).map((m) => m % 2));
  }

  function dualpipeV(p, n) {
    const made = Math.max(n, 2 * p);
    const order = range(p).map((rank) => eightPhases((side) => [side === "near" ? rank : 2 * p - 1 - rank, (k) => k], rank, p, made));
    return make("dualpipe-v", vShape(p), only(order, made - n, n), zeros(n));
  }

  const SCHEDULES = {
    "gpipe": gpipe, "1f1b": oneFOneB, "interleaved-1f1b": interleaved, "looped-bfs": loopedBfs, "zb-h1": zbH1, "zb-h2": zbH2,
    "zb": zb, "zb-v": zbV, "v-half": vHalf, "v-min": vMin, "chimera": chimera, "hanayo": hanayo, "bitpipe": bitpipe,
    "vchimera": vchimera, "dualpipe": dualpipe, "dualpipe-v": dualpipeV,
  };
  const OPTIONS = { "interleaved-1f1b": ["num_stages", "backward"], "looped-bfs": ["num_stages"], "zb": ["warmup", "max_in_flight"],
    "chimera": ["backward"], "hanayo": ["waves", "backward"], "bitpipe": ["backward"], "vchimera": ["backward"] };

  // Builds a schedule by its name and checks it. Raises ScheduleError as `ps.build` does.
  function build(name, numRanks, numMicrobatches, options = {}) {
    if (!SCHEDULES[name]) throw new ScheduleError(`no schedule named '${name}'; there are ${Object.keys(SCHEDULES).join(", ")}`, { rule: "name" });
    for (const [what, count] of [["ranks", numRanks], ["microbatches", numMicrobatches]])
      if (!(Number.isInteger(count) && count >= 1)) refuse(`${name} needs at least 1 of ${what}, got ${count}`);
    const made = SCHEDULES[name](numRanks, numMicrobatches, options);
    check(made);
    return made;
  }

  return { SCHEDULES: Object.keys(SCHEDULES), OPTIONS, build };
})();
