/* block_mask(): what FlexAttention's create_block_mask() computes from T * T mask values, read off
 * the tree's intervals instead.
 *
 * With token q seeing token k iff k <= q < tout[k], a block of keys is seen by the blocks of
 * queries from its own up to the largest tout in it, and seen whole by those between its own and
 * the smallest tout in it. Two numbers per block of keys are the mask; what remains is to write it
 * down.
 */
#include "tokens.h"

#include "methods.h"

/* Which blocks of queries see block k of keys: all of it those in [from, whole_end), part of it k
 * itself (unless from == k) and those in [whole_end, end).
 */
typedef struct {
    int32_t from, whole_end, end;
} Reach;

/* Finds each block's reach. Returns 0 if some tout is impossible; reach is then without meaning. */
TOKENS_WIDE static int
find_reach(const int32_t *tout, int32_t num_tokens, int32_t size, Reach *reach)
{
    int bad = 0;
    for (int32_t k = 0, start = 0; start < num_tokens; k++) {
        const int32_t end = size < num_tokens - start ? start + size : num_tokens;
        int32_t least = num_tokens, most = 0;
        for (int32_t t = start; t < end; t++) {
            bad |= tout[t] <= t;
            least = tout[t] < least ? tout[t] : least;
            most = tout[t] > most ? tout[t] : most;
        }
        bad |= most > num_tokens;
        reach[k].from = size == 1 ? k : k + 1; /* a token sees itself but nothing after it */
        reach[k].whole_end = least / size > k + 1 ? least / size : k + 1;
        reach[k].end = most / size + (most % size != 0);
        start = end;
    }
    return !bad;
}

static PyObject *
refuse(const int32_t *tout, int32_t num_tokens)
{
    int32_t t = 0;
    while (tout[t] > t && tout[t] <= num_tokens) {
        t++;
    }
    return PyErr_Format(PyExc_ValueError, "tout[%d] is %d, expected %d < tout <= %d", (int)t,
                        (int)tout[t], (int)t, (int)num_tokens);
}

enum { CHUNK = 8 };

/* One of the four results: n counts, then n rows of n blocks, the chosen ones and behind them the
 * others, both in order; then CHUNK elements that hold nothing.
 */
typedef struct {
    int32_t *counts, *rows;
} Table;

static size_t
table_size(int32_t n)
{
    return (size_t)n * ((size_t)n + 1) + CHUNK;
}

static Table
table_at(int32_t *memory, int32_t n, int32_t number)
{
    int32_t *counts = memory + (size_t)number * table_size(n);
    return (Table){.counts = counts, .rows = counts + n};
}

/* Blocks [first, end). */
typedef struct {
    int32_t first, end;
} Range;

/* Blocks of keys with the same reach: seen whole up to query block whole_end, in part up to end. */
typedef struct {
    Range blocks;
    int32_t whole_end, end;
} Run;

/* Chosen blocks, in order and not touching, as far as they were added one by one. */
typedef struct {
    Range *ranges;
    int32_t count;
} Choice;

static inline void
choose(Choice *choice, Range blocks)
{
    if (choice->count > 0 && choice->ranges[choice->count - 1].end == blocks.first) {
        choice->ranges[choice->count - 1].end = blocks.end;
    } else {
        choice->ranges[choice->count++] = blocks;
    }
}

/* Writes [first, end) to out, in chunks that compile to a few instructions: less than CHUNK
 * elements behind the end are overwritten too, and are written after this. Returns where the next
 * goes.
 */
static inline int32_t *
write_range(int32_t first, int32_t end, int32_t *out)
{
    typedef int32_t Lanes __attribute__((vector_size(4 * sizeof(int32_t))));
    Lanes values = {first, first + 1, first + 2, first + 3}, next = values + 4;
    for (int32_t i = 0; i < end - first; i += CHUNK) {
        memcpy(out + i, &values, sizeof values);
        memcpy(out + i + 4, &next, sizeof next);
        values += CHUNK;
        next += CHUNK;
    }
    return out + (end - first);
}

/* Appends a row whose chosen blocks are given. */
static inline void
append_row(Table *table, int32_t n, const Range *chosen, int32_t count)
{
    int32_t *out = table->rows, next = 0;
    for (int32_t i = 0; i < count; i++) {
        out = write_range(chosen[i].first, chosen[i].end, out);
    }
    *table->counts++ = (int32_t)(out - table->rows);
    for (int32_t i = 0; i < count; i++) {
        out = write_range(next, chosen[i].first, out);
        next = chosen[i].end;
    }
    write_range(next, n, out);
    table->rows += n;
}

/* What the work needs besides its result, for n blocks. */
typedef struct {
    Reach *reach;
    Run *seen;
    Range *ranges; /* 2 n */
} Scratch;

/* Appends block k to the runs seen, of which the last may be continued by it. */
static inline int32_t
see(Run *seen, int32_t num_seen, int32_t k, const Reach *reach)
{
    Run *last = num_seen > 0 ? &seen[num_seen - 1] : NULL;
    if (last != NULL && last->blocks.end == k && last->whole_end == reach->whole_end &&
        last->end == reach->end) {
        last->blocks.end++;
        return num_seen;
    }
    seen[num_seen] = (Run){{k, k + 1}, reach->whole_end, reach->end};
    return num_seen + 1;
}

/* The partial and the whole blocks of each query block: of those before it that the last one saw,
 * and itself.
 */
TOKENS_WIDE static void
write_by_query(int32_t n, const Scratch *scratch, Table partial_table, Table whole_table)
{
    Run *const seen = scratch->seen;
    int32_t num_seen = 0;
    for (int32_t q = 0; q < n; q++) {
        int32_t still = 0;
        Choice partial = {scratch->ranges, 0}, whole = {scratch->ranges + n, 0};
        for (int32_t i = 0; i < num_seen; i++) {
            const Run run = seen[i];
            if (q < run.end) {
                seen[still++] = run;
                choose(q < run.whole_end ? &whole : &partial, run.blocks);
            }
        }
        choose(scratch->reach[q].from == q ? &whole : &partial, (Range){q, q + 1});
        append_row(&partial_table, n, partial.ranges, partial.count);
        append_row(&whole_table, n, whole.ranges, whole.count);
        num_seen = see(seen, still, q, &scratch->reach[q]);
    }
}

/* The partial and the whole blocks of each key block. */
TOKENS_WIDE static void
write_by_key(int32_t n, const Reach *reach, Table partial_table, Table whole_table)
{
    for (int32_t k = 0; k < n; k++) {
        const Range partial[] = {{k, reach[k].from}, {reach[k].whole_end, reach[k].end}};
        const Range whole = {reach[k].from, reach[k].whole_end};
        append_row(&partial_table, n, partial, 2);
        append_row(&whole_table, n, &whole, 1);
    }
}

static PyObject *
build(const int32_t *tout, int32_t num_tokens, int32_t size, const Scratch *scratch)
{
    int possible;
    Py_BEGIN_ALLOW_THREADS
        possible = find_reach(tout, num_tokens, size, scratch->reach);
    Py_END_ALLOW_THREADS
    if (!possible) {
        return refuse(tout, num_tokens);
    }
    const int32_t n = num_tokens / size + (num_tokens % size != 0);
    PyObject *result = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(4 * 4 * table_size(n)));
    if (result == NULL) {
        return NULL;
    }
    int32_t *const out = (int32_t *)PyByteArray_AsString(result);
    Py_BEGIN_ALLOW_THREADS
        write_by_query(n, scratch, table_at(out, n, 0), table_at(out, n, 1));
        write_by_key(n, scratch->reach, table_at(out, n, 2), table_at(out, n, 3));
    Py_END_ALLOW_THREADS
    return result;
}

PyDoc_STRVAR(
    block_mask_doc,
    "block_mask($module, tout, block_size, /)\n"
    "--\n"
    "\n"
    "FlexAttention's block indices of the mask k <= q < tout[k], for 1-d int32 tout of T tokens.\n"
    "\n"
    "Returns the bytes of four int32 arrays, each n counts, n rows of n indices, and 8 elements\n"
    "without meaning, where n is T / block_size rounded up: partial and full blocks by query, "
    "then\n"
    "partial and full by key.\n"
    "Raises ValueError if block_size is not positive or a tout is not in (t, T].");

static PyObject *
block_mask(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        return PyErr_Format(PyExc_TypeError, "block_mask() takes 2 arguments, got %zd", nargs);
    }
    const long size = PyLong_AsLong(args[1]);
    if (size == -1 && PyErr_Occurred() != NULL) {
        return NULL;
    }
    if (size < 1 || size > INT32_MAX) {
        return PyErr_Format(PyExc_ValueError, "block_size must be in [1, 2**31), got %ld", size);
    }
    Py_buffer tout;
    if (tokens_get_buffer(args[0], 'i', 0, &tout, "tout") < 0) {
        return NULL;
    }
    const size_t num_blocks = (size_t)(tout.shape[0] / size + 1);
    const Scratch scratch = {
        .reach = PyMem_Calloc(num_blocks, sizeof(Reach)),
        .seen = PyMem_Calloc(num_blocks, sizeof(Run)),
        .ranges = PyMem_Calloc(2 * num_blocks, sizeof(Range)),
    };
    PyObject *result = NULL;
    if (scratch.reach == NULL || scratch.seen == NULL || scratch.ranges == NULL) {
        PyErr_NoMemory();
    } else {
        result = build(tout.buf, (int32_t)tout.shape[0], (int32_t)size, &scratch);
    }
    PyMem_Free(scratch.ranges);
    PyMem_Free(scratch.seen);
    PyMem_Free(scratch.reach);
    PyBuffer_Release(&tout);
    return result;
}

PyMethodDef agentgrpo_blocks_methods[] = {
    {"block_mask", (PyCFunction)(void (*)(void))block_mask, METH_FASTCALL, block_mask_doc},
    {NULL, NULL, 0, NULL},
};
