// Plans an order for a placement, costs and late links, under a cap on activations in flight: list scheduling from many
// random starts and forward-backward improvement, both the engine's own, and Jackson's bound below which no order is.
// `ps.plan` knows more ways and more bounds; what is found here is proved by the same `check`.
const planner = (() => {
  const { ScheduleError, make } = schedules;
  const NONE = -1;
  const INTS = ["rank", "pipeline", "size", "message_from", "message_to", "local_from", "local_to"];
  const FLOATS = ["duration", "memory", "delay", "delay_to"];
  const CLASS = { F: 1, I: 0, B: 0, W: 2 };

  // The problem: its network as the engine has it, and what each queue stands for.
  function pose({ pipelines, numRanks, numMicrobatches, costs, links, cap, split }) {
    const kinds = split ? ["F", "I", "W"] : ["F", "B"], back = kinds[1], num = pipelines[0].length;
    const pipelineOf = range(numMicrobatches).map((m) => m % pipelines.length);
    const sizes = pipelines.map((_, k) => pipelineOf.filter((each) => each === k).length);
    const labels = pipelines.flatMap((hosts, k) => hosts.flatMap((rank, stage) => kinds.map((kind) => ({ rank, k, stage, kind }))));
    labels.sort((a, b) => a.rank - b.rank || a.k - b.k || a.stage - b.stage || kinds.indexOf(a.kind) - kinds.indexOf(b.kind));
    const number = new Map(labels.map(({ k, stage, kind }, q) => [`${k} ${stage} ${kind}`, q]));
    const find = (k, stage, kind) => number.get(`${k} ${stage} ${kind}`);
    const p = {};
    for (const name of INTS) p[name] = new Int32Array(labels.length).fill(NONE);
    for (const name of FLOATS) p[name] = new Float64Array(labels.length);
    const per = num / numRanks, of = { F: costs.f, I: costs.i, W: costs.w, B: costs.b };
    const join = (q, before, name) => {
      p[`${name}_from`][q] = before;
      p[`${name}_to`][before] = q;
      if (name === "message" && p.rank[q] !== p.rank[before])
        p.delay[q] = p.delay_to[before] = (links && links.get(`${p.rank[before]}>${p.rank[q]}`)) || 0;
    };
    labels.forEach(({ rank, k }, q) => {
      p.rank[q] = rank;
      p.pipeline[q] = k;
      p.size[q] = sizes[k];
    });
    labels.forEach(({ rank, k, stage, kind }, q) => {
      p.duration[q] = (of[kind] / per) * (costs.slow ? costs.slow[rank] || 1 : 1);
      p.memory[q] = { F: 1, I: 0, W: -1, B: -1 }[kind];
      if (kind === "F" && stage > 0) join(q, find(k, stage - 1, "F"), "message");
      if (kind === back) {
        join(q, find(k, stage, "F"), "local");
        if (stage + 1 < num) join(q, find(k, stage + 1, back), "message");
      }
      if (kind === "W") join(q, find(k, stage, "I"), "local");
    });
    p.rank_first = Int32Array.from(range(numRanks + 1).map((rank) => labels.filter((each) => each.rank < rank).length));
    p.op_first = new Int32Array(labels.length + 1);
    p.size.forEach((size, q) => (p.op_first[q + 1] = p.op_first[q] + size));
    p.row_first = Int32Array.from(p.rank_first, (q) => p.op_first[q]);
    p.cap = new Float64Array(numRanks).fill(cap === null ? Infinity : cap);
    p.release = new Float64Array(numRanks);
    p.tail = new Float64Array(numRanks);
    range(numRanks).forEach((rank) => {
      const own = labels.filter((each) => each.rank === rank);
      if (!own.length) throw new ScheduleError(`rank ${rank} hosts no stage; number the ranks without gaps from 0`, { rule: "placement" });
    });
    return { p, labels, pipelines, pipelineOf, numRanks, cap, kinds };
  }

  const turned = (p) => ({ ...p, memory: p.memory.map((held) => -held), message_from: p.message_to, delay: p.delay_to,
    local_from: p.local_to, message_to: p.message_from, delay_to: p.delay, local_to: p.local_from, release: p.tail, tail: p.release });

  // No order is shorter: Jackson's preemptive schedule of each rank, with how early its ops can start at best and how
  // much must follow them. Under a cap, a rank of one stage waits for its older microbatches.
  function bound({ p, labels, cap, kinds }) {
    const num = labels.length, waits = new Array(num).fill(NONE), last = kinds[kinds.length - 1];
    if (cap !== null)
      for (let rank = 0; rank < p.cap.length; rank++) {
        const own = range(num).filter((q) => p.rank[q] === rank), forwards = own.filter((q) => labels[q].kind === "F");
        if (forwards.length === 1) waits[forwards[0]] = own.find((q) => labels[q].kind === last);
      }
    const stages = (q) => labels[q].stage, rise = range(num).filter((q) => labels[q].kind === "F").sort((a, b) => stages(a) - stages(b));
    const fall = range(num).filter((q) => labels[q].kind === kinds[1]).sort((a, b) => stages(b) - stages(a));
    const order = [...rise, ...fall, ...(kinds.length > 2 ? range(num).filter((q) => labels[q].kind === "W") : [])];
    const none = new Array(num).fill(NONE), lag = new Array(num).fill(cap === null ? 0 : Math.floor(cap * (1 + tolerance.EPSILON)));
    const back = none.slice();
    waits.forEach((after, q) => { if (after !== NONE) back[after] = q; });
    const head = new Float64Array(p.op_first[num]), tail = new Float64Array(p.op_first[num]), floor = new Float64Array(num);
    longest_paths.heads(p, order, [waits, none], [lag, lag], floor, false, [], head);
    longest_paths.heads(turned(p), order.slice().reverse(), [back, none], [lag, lag], floor, false, [], tail);
    const width = Math.max(...range(p.cap.length).map((rank) => p.rank_first[rank + 1] - p.rank_first[rank]));
    return longest_paths.jackson_all(p, head, tail, new Int32Array(width), new Float64Array(width));
  }

  function spaceOf(p) {
    const numOps = p.op_first[p.op_first.length - 1], ranks = p.cap.length, queues = p.rank.length;
    const ints = (count) => new Int32Array(count), floats = (count) => new Float64Array(count);
    return { values: floats(numOps), wait: floats(ranks), start: floats(numOps), row: ints(numOps), head: ints(queues), placed: ints(ranks),
      several: ints(ranks), ready: floats(queues), free: floats(ranks), held: floats(ranks), limit: floats(ranks),
      tree: floats(2 * min_tree.leaves_for(ranks)) };
  }

  function scheduleOf(problem, row, name) {
    const { p, labels, pipelines, pipelineOf, numRanks, cap } = problem;
    const mine = pipelines.map((_, k) => range(pipelineOf.length).filter((m) => pipelineOf[m] === k)), seen = new Int32Array(labels.length);
    const order = range(numRanks).map((rank) => [...row.subarray(p.row_first[rank], p.row_first[rank + 1])].map((q) => {
      const { k, stage, kind } = labels[q];
      return { kind, stage, m: mine[k][seen[q]++] };
    }));
    return make(name, pipelines, order, pipelineOf, cap);
  }

  // A search that goes on for as long as `step` is called, a few milliseconds each time.
  // given: { pipelines, numRanks, numMicrobatches, costs, links, cap, split, seed }
  function search(given) {
    const problem = pose(given), { p, labels } = problem, space = spaceOf(p), back = turned(p);
    const least = Math.max(...labels.map(({ rank, k }) =>
      labels.filter((each) => each.rank === rank && each.k === k && each.kind === "F").length));
    if (given.cap !== null && given.cap < least)
      throw new ScheduleError(`one microbatch on its way needs ${least} activations on some rank, and at most ${given.cap} may be in ` +
        "flight; raise the cap", { rule: "memory" });
    const classes = labels.map(({ kind }) => CLASS[kind]), rows = [classes, classes.map((each) => (each === 0 ? 0 : 3 - each))];
    const row = new Int32Array(space.row.length), lower = bound(problem), scale = Math.max(...p.duration) * 4, stop = new Int32Array(1);
    const found = { lower, makespan: Infinity, trials: 0, done: false, schedule: null };
    seedRandom(given.seed || 0);
    const most = Math.max(...p.size) + 1;
    labels.forEach((_, q) => {
      for (let j = 0; j < p.size[q]; j++) space.values[p.op_first[q] + j] = classes[q] * most + j;
    });
    let best = list_by_values.list_ops(p, space, false, false);
    if (best < 0) best = list_by_values.list_ops(p, space, false, true);
    if (best < 0) throw new ScheduleError("no order was found in which the ranks keep to the cap; raise it", { rule: "memory" });
    row.set(space.row);
    const note = () => {
      if (best < found.makespan * (1 - 1e-12)) { found.makespan = best; found.schedule = scheduleOf(problem, row, "planned"); }
      found.done = found.makespan <= lower * (1 + 1e-4);
    };
    note();
    return {
      found,
      step() {
        if (found.done) return;
        best = forward_backward.trials(p, back, rows, scale, best, row, space, { num_moves: 1, target: lower * (1 + 1e-4), stop });
        found.trials += 1;
        note();
      },
    };
  }

  return { search };
})();
