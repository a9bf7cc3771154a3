// What the translated functions call, ahead of them.
const floorMod = (a, b) => a - b * Math.floor(a / b);
const roundEven = (x) => {
  const low = Math.floor(x), rest = x - low;
  return rest < 0.5 ? low : rest > 0.5 ? low + 1 : low % 2 === 0 ? low : low + 1;
};
const isBefore = (a, b) => a[0] < b[0] || (a[0] === b[0] && a[1] < b[1]);
const heapPush = (heap, entry) => {
  let at = heap.push(entry) - 1;
  while (at > 0) {
    const above = (at - 1) >> 1;
    if (!isBefore(entry, heap[above])) break;
    heap[at] = heap[above];
    at = above;
  }
  heap[at] = entry;
};
const heapPop = (heap) => {
  const least = heap[0], entry = heap.pop();
  if (heap.length === 0) return least;
  let at = 0;
  for (;;) {
    let below = 2 * at + 1;
    if (below >= heap.length) break;
    if (below + 1 < heap.length && isBefore(heap[below + 1], heap[below])) below += 1;
    if (!isBefore(heap[below], entry)) break;
    heap[at] = heap[below];
    at = below;
  }
  heap[at] = entry;
  return least;
};
const range = (...given) => {
  const [first, last] = given.length === 1 ? [0, given[0]] : given;
  return Array.from({ length: Math.max(0, last - first) }, (_, place) => first + place);
};
const sortedBy = (values, key) => [...values].sort((a, b) => key(a) - key(b));
let randomState = 1;
const seedRandom = (seed) => { randomState = (seed * 2654435761 + 88675123) >>> 0 || 1; };
const random = () => { // Marsaglia's xorshift of 32 bits, which a seed repeats in every browser
  randomState ^= randomState << 13;
  randomState ^= randomState >>> 17;
  randomState ^= randomState << 5;
  return (randomState >>> 0) / 4294967296;
};
const uniform = (low, high) => low + (high - low) * random();
const randint = (count) => Math.floor(random() * count);
const fillWith = (array, value) => (typeof value === "number" ? array.fill(value) : array.set(value));
const columnsOf = (rows) => (rows.length === 0 ? 0 : rows[0].length);
const sum = (values) => [...values].reduce((a, b) => a + b, 0);
