/* Stands at the head of the C that `to_c` writes: arrays, random numbers, a heap, and how arguments come from Python.

Of Python only its stable ABI is used, and declared here, so that building needs a C compiler and no Python headers,
and one library serves every version from 3.11 on. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int64_t *at; int64_t len; } Ints;
typedef struct { volatile int64_t *at; int64_t len; } Stop;
typedef struct { double *at; int64_t len; } Floats;
typedef struct { bool *at; int64_t len; } Flags;
typedef struct { int64_t *at; int64_t len, columns; } IntRows;
typedef struct { double *at; int64_t len, columns; } FloatRows;

/* As Python has them: of equals the first. */
static inline double max_float(double a, double b) { return b > a ? b : a; }
static inline double min_float(double a, double b) { return b < a ? b : a; }
static inline int64_t max_int(int64_t a, int64_t b) { return b > a ? b : a; }
static inline int64_t min_int(int64_t a, int64_t b) { return b < a ? b : a; }
static inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
static inline int64_t floor_mod(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }
static inline int64_t max_ints(Ints of) {
  int64_t most = of.at[0];
  for (int64_t k = 1; k < of.len; k++) most = max_int(most, of.at[k]);
  return most;
}
static int by_size(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}
static inline void sort_floats(Floats of) { qsort(of.at, of.len, sizeof(double), by_size); }

/* Arrays made inside a function, which go with it. */
static void give_back(void *array) { free(*(void **)array); }
#define OWN __attribute__((cleanup(give_back)))

/* heapq over pairs of (float, int). */
typedef struct { double time; int64_t code; } Entry;
typedef struct { Entry *at; int64_t len, room; } Heap;
static inline bool is_before(Entry a, Entry b) { return a.time < b.time || (a.time == b.time && a.code < b.code); }
static void heap_push(Heap *heap, double time, int64_t code) {
  if (heap->len == heap->room) {
    heap->room = 2 * heap->room + 64;
    heap->at = realloc(heap->at, heap->room * sizeof(Entry));
  }
  Entry entry = {time, code};
  int64_t at = heap->len++;
  for (int64_t above; at > 0 && is_before(entry, heap->at[above = (at - 1) / 2]); at = above)
    heap->at[at] = heap->at[above];
  heap->at[at] = entry;
}
static Entry heap_pop(Heap *heap) {
  Entry least = heap->at[0], entry = heap->at[--heap->len];
  int64_t at = 0;
  for (int64_t below; (below = 2 * at + 1) < heap->len; at = below) {
    if (below + 1 < heap->len && is_before(heap->at[below + 1], heap->at[below])) below++;
    if (!is_before(heap->at[below], entry)) break;
    heap->at[at] = heap->at[below];
  }
  heap->at[at] = entry;
  return least;
}

/* numpy.random's functions of old: MT19937 (Matsumoto and Nishimura 1998), here one for each thread. */
static _Thread_local uint32_t twister[624];
static _Thread_local int drawn = 0;
static void seed(int64_t number) {
  twister[0] = (uint32_t)number;
  for (uint32_t k = 1; k < 624; k++) twister[k] = 1812433253u * (twister[k - 1] ^ (twister[k - 1] >> 30)) + k;
  drawn = 624;
}
static uint32_t draw(void) {
  if (drawn == 0) seed(5489);
  if (drawn == 624) {
    for (int k = 0; k < 624; k++) {
      uint32_t y = (twister[k] & 0x80000000u) | (twister[(k + 1) % 624] & 0x7fffffffu);
      twister[k] = twister[(k + 397) % 624] ^ (y >> 1) ^ (y & 1 ? 0x9908b0dfu : 0);
    }
    drawn = 0;
  }
  uint32_t y = twister[drawn++];
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}
static double random_float(void) {
  uint32_t high = draw() >> 5, low = draw() >> 6;
  return (high * 67108864.0 + low) / 9007199254740992.0;
}
static inline double uniform(double low, double high) { return low + (high - low) * random_float(); }
static int64_t randint(int64_t low, int64_t high) {
  uint32_t most = (uint32_t)(high - low - 1), mask = most, found;
  if (most == 0) return low;
  for (int bits = 1; bits < 32; bits *= 2) mask |= mask >> bits;
  while ((found = draw() & mask) > most) continue;
  return low + found;
}

typedef struct PyObject PyObject;
typedef struct {
  void *buf; PyObject *obj; intptr_t len, itemsize; int readonly, ndim; char *format;
  intptr_t *shape, *strides, *suboffsets; void *internal;
} Py_buffer;
extern PyObject _Py_NoneStruct, *PyExc_TypeError;
extern PyObject *PyTuple_GetItem(PyObject *, intptr_t), *Py_BuildValue(const char *, ...), *PyErr_Occurred(void);
extern PyObject *PyBool_FromLong(long);
extern int PyObject_GetBuffer(PyObject *, Py_buffer *, int), PyObject_IsTrue(PyObject *);
extern void PyBuffer_Release(Py_buffer *), *PyEval_SaveThread(void), PyEval_RestoreThread(void *);
extern void PyErr_SetString(PyObject *, const char *);
extern long long PyLong_AsLongLong(PyObject *);
extern double PyFloat_AsDouble(PyObject *);
#define EXPORTED __attribute__((visibility("default")))

/* The arrays of a call, held until it ends. */
typedef struct { int count; Py_buffer held[160]; } Call;
typedef struct { void *at; int64_t len, columns; } View;
static View take(Call *call, PyObject *given, const char *formats, intptr_t size, int dimensions, const char *why) {
  View view = {0};
  if (PyErr_Occurred() || given == NULL || given == &_Py_NoneStruct) return view;
  Py_buffer *held = &call->held[call->count];
  if (PyObject_GetBuffer(given, held, 0x38 | 0x04)) return view; /* C-contiguous, with its format */
  call->count++;
  if (!strchr(formats, held->format[0]) || held->itemsize != size || held->ndim != dimensions) {
    PyErr_SetString(PyExc_TypeError, why);
    return view;
  }
  view.at = held->buf, view.len = held->shape[0], view.columns = dimensions > 1 ? held->shape[1] : 1;
  return view;
}
static void release(Call *call) {
  while (call->count > 0) PyBuffer_Release(&call->held[--call->count]);
}
static int64_t take_int(PyObject *given) { return given == NULL || PyErr_Occurred() ? 0 : PyLong_AsLongLong(given); }
static double take_float(PyObject *given) { return given == NULL || PyErr_Occurred() ? 0 : PyFloat_AsDouble(given); }
static bool take_bool(PyObject *given) { return given != NULL && !PyErr_Occurred() && PyObject_IsTrue(given) == 1; }
