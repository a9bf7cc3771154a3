// Schedules in torch's CSV, with their messages placed for what will carry them. Python's `simulation.channels`, which
// explains the placement, and `formats.torch_csv` are the reference.
const torch = (() => {
  const { opText, ScheduleError, unitColumns } = schedules;
  const TOLERANCE = 1e-9, MOST_POSTED = 8, SHARED = ["nccl", "nccl-pair"];
  const CHANNELS = ["nccl", "nccl-pair", "nccl-edge", "gloo", ""]; // the last: torch places the messages

  // The messages between ranks, by the ops that make and need them, with their two ends as ops.
  function messagesOf(graph) {
    return graph.ops.flatMap((op, made) => graph.successors[made].filter((used) => graph.rank[used] !== graph.rank[made]).map((used) => {
      const end = (side, stage) => ({ kind: `${side}_${op.kind === "F" ? "F" : "B"}`, stage, m: op.m });
      return { made, used, source: graph.rank[made], target: graph.rank[used], send: end("SEND", op.stage), receive: end("RECV", graph.ops[used].stage) };
    }));
  }

  // Runs the order; messages that share a stream of the channel take it one at a time, those with the least `turn` first.
  function arbitrate({ graph, duration, messages, late }, channel, turn) {
    const num = graph.ops.length, ranks = graph.first.length - 1, missing = Int32Array.from(graph.missing);
    const start = new Float64Array(num), left = new Float64Array(messages.length), arrived = new Float64Array(messages.length);
    const done = new Array(ranks).fill(0), running = new Array(ranks).fill(false), busy = new Set(), served = [], events = [];
    const carried = new Map(messages.map(({ made }, number) => [made, number]));
    const pair = ({ source, target }) => (channel === "nccl-pair" ? ` ${Math.min(source, target)} ${Math.max(source, target)}` : "");
    const streams = messages.map((each) => (channel ? [each.source, each.target].map((rank) => rank + pair(each)) : []));
    let waiting = [], now = 0, makespan = 0;
    const begin = (rank) => {
      const op = graph.first[rank] + done[rank];
      if (running[rank] || op >= graph.first[rank + 1] || missing[op]) return;
      running[rank] = true;
      start[op] = now;
      heapPush(events, [now + duration[op], op]);
    };
    const leave = (number) => {
      const { source, target } = messages[number];
      left[number] = now;
      for (const stream of streams[number]) busy.add(stream);
      served.push([number, done[source], done[target]]);
      arrived[number] = now + Math.round((now + late(source, target) - now) * 1e9) / 1e9;
      heapPush(events, [arrived[number], num + number]);
    };
    range(ranks).forEach(begin);
    while (events.length) {
      now = events[0][0];
      while (events.length && events[0][0] <= now + TOLERANCE) {
        const [, event] = heapPop(events);
        if (event >= num) {
          for (const stream of streams[event - num]) busy.delete(stream);
          const { used, target } = messages[event - num];
          missing[used] -= 1;
          begin(target);
          continue;
        }
        const rank = graph.rank[event];
        makespan = now;
        running[rank] = false;
        done[rank] += 1;
        for (const after of graph.successors[event]) if (graph.rank[after] === rank) missing[after] -= 1;
        if (carried.has(event)) waiting.push(carried.get(event));
        begin(rank);
      }
      waiting = sortedBy(waiting, turn).filter((number) => streams[number].some((stream) => busy.has(stream)) || leave(number));
    }
    return { makespan, start, left, arrived, served };
  }

  // Rules for which of several messages goes first.
  function rulesOf({ graph, duration, messages }, free) {
    const tail = new Float64Array(graph.ops.length), travels = new Map(messages.map(({ made }, n) => [made, free.arrived[n] - free.left[n]]));
    for (const op of range(tail.length).sort((a, b) => free.start[b] - free.start[a] || b - a)) {
      const after = graph.successors[op].map((each) => tail[each] + (graph.rank[each] === graph.rank[op] ? 0 : travels.get(op)));
      if (op + 1 < graph.first[graph.rank[op] + 1]) after.push(tail[op + 1]);
      tail[op] = duration[op] + Math.max(0, ...after);
    }
    const due = messages.map(({ used }) => free.start[used]), last = 1 + free.start.reduce((most, each) => Math.max(most, each), 0);
    const gradient = messages.map(({ send }) => (send.kind === "SEND_B" ? last : 0));
    return [(n) => free.left[n], (n) => due[n], (n) => due[n] - gradient[n], (n) => due[n] + gradient[n], (n) => -tail[messages[n].used],
      (n) => due[n] - free.arrived[n]];
  }

  // Rows in which each message is sent at once, and each receive is posted as early as a bound allows: where a link takes
  // time, in the order in which they are due. On gloo the messages of a link are then sent in the order of their use.
  function placeEarly({ graph, messages }, free, channel) {
    const sends = graph.ops.map(() => []), dues = range(graph.first.length - 1).map(() => []), links = new Map();
    const needed = new Array(graph.ops.length).fill(0), there = new Array(graph.ops.length).fill(0);
    const isLate = range(messages.length).some((n) => free.arrived[n] !== free.left[n]);
    for (const n of range(messages.length).sort((a, b) => free.left[a] - free.left[b] || messages[a].made - messages[b].made)) {
      const { used, source, target } = messages[n], link = `${source}>${target}`;
      needed[used] += 1;
      links.set(link, [...(links.get(link) || []), n]);
    }
    for (let numbers of links.values()) {
      if (channel === "gloo" && isLate) numbers = sortedBy(numbers, (n) => messages[n].used);
      let made = -1, due = Infinity;
      for (const n of numbers) {
        made = Math.max(made, messages[n].made);
        sends[made].push(messages[n].send);
      }
      const found = [...numbers].reverse().map((n) => {
        due = Math.min(due, free.start[messages[n].used] - 2 * (free.arrived[n] - free.left[n]));
        return isLate ? [due, 0, messages[n]] : [free.left[n], messages[n].made, messages[n]];
      });
      dues[messages[numbers[0]].target].push(...found.reverse());
    }
    const receives = dues.map((each) => [...each].sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, , message]) => message));
    return receives.map((queue, rank) => {
      const row = [];
      let posted = 0, outstanding = 0;
      for (let op = graph.first[rank]; op < graph.first[rank + 1]; op++) {
        while (posted < queue.length && (outstanding < MOST_POSTED || there[op] < needed[op])) {
          row.push(queue[posted].receive);
          there[queue[posted].used] += 1;
          posted += 1;
          outstanding += 1;
        }
        row.push(graph.ops[op]);
        outstanding -= needed[op];
        row.push(...sends[op]);
      }
      return row;
    });
  }

  // Rows with each message where its two ranks were when it left.
  function write({ graph, messages }, { served }) {
    const spots = range(graph.first.length - 1).map((rank) => range(graph.first[rank + 1] - graph.first[rank] + 1).map(() => []));
    for (const [number, sent, received] of served) {
      spots[messages[number].source][sent].push(messages[number].send);
      spots[messages[number].target][received].push(messages[number].receive);
    }
    return spots.map((row, rank) => row.flatMap((ends, place) => (place + 1 < row.length ? [...ends, graph.ops[graph.first[rank] + place]] : ends)));
  }

  // The rows of a schedule with its messages, placed for times and links as `runs.simulate` takes them.
  function place(s, { costs, links, channel, graph = runs.lower(s) }) {
    const run = { graph, duration: runs.durationsOf(s, graph, costs), messages: messagesOf(graph), late: (a, b) => links.get(`${a}>${b}`) || 0 };
    const free = arbitrate(run, null, () => 0);
    if (!SHARED.includes(channel)) return placeEarly(run, free, channel);
    const tried = rulesOf(run, free).map((rule) => arbitrate(run, channel, rule));
    return write(run, tried.reduce((best, each) => (each.makespan < best.makespan ? each : best)));
  }

  function refuse(s) {
    const lacks = (feature, spot = "") => { throw new ScheduleError(`${spot}torch's pipelining lacks ${feature}`, { rule: "torch" }); };
    if (s.pipelines.length > 1) lacks(`several pipelines (${s.pipelines.length} here): one chain of stages, each on one rank, is all it runs`);
    s.order.forEach((row, rank) => {
      if (!row.length) lacks(`ranks with nothing to do (rank ${rank} has no op): each hosts at least one stage`);
      const step = row.findIndex((op) => op.kind === "R");
      if (step >= 0)
        lacks("recomputation as an op of the schedule (R); checkpoint inside the stage's module instead, and leave R out",
          `rank ${rank}, step ${step}, ${opText(row[step])}: `);
    });
  }

  // torch's CSV: the actions of each rank, or without a channel its ops in the columns that they have in unit time.
  function toCsv(s, options) {
    refuse(s);
    const columns = options.channel ? null : unitColumns(s);
    return (options.channel ? place(s, options) : s.order).map((row, rank) => {
      if (columns) {
        const line = new Array(columns[rank][row.length - 1] + 1).fill("");
        row.forEach((op, at) => (line[columns[rank][at]] = opText(op)));
        return line.join(",") + "\n";
      }
      const last = new Map(row.map((op, step) => [op.stage, step]));
      const cells = row.map((op, step) => opText(op) + (last.get(op.stage) === step ? `,${op.stage}REDUCE_GRAD,${op.stage}RESHARD` : ""));
      return [...[...last.keys()].map((stage) => `${stage}UNSHARD`), ...cells].join(",") + "\n";
    }).join("");
  }

  // How a program of torch's takes the file.
  function python(file, channel) {
    return ["from penstock.integrations.torch import PlannedSchedule",
      `schedule = PlannedSchedule(stages, "${file}", loss_fn=loss_fn${channel ? `, channels="${channel}"` : ""})`,
      "schedule.step(x, target=y, losses=losses)  # x on the first rank, target and losses on the last"].join("\n");
  }

  return { CHANNELS, python, toCsv };
})();
