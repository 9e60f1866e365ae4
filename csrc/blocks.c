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

/* Returns the index of the first token whose tout is impossible, or -1. */
static int32_t
find_impossible(const int32_t *tout, int32_t num_tokens)
{
    int bad = 0; /* a pass without branches first, which the compiler vectorises */
    for (int32_t t = 0; t < num_tokens; t++) {
        bad |= (tout[t] <= t) | (tout[t] > num_tokens);
    }
    int32_t t = bad ? 0 : num_tokens;
    while (t < num_tokens && tout[t] > t && tout[t] <= num_tokens) {
        t++;
    }
    return t < num_tokens ? t : -1;
}

static void
find_reach(const int32_t *tout, int32_t num_tokens, int32_t size, Reach *reach)
{
    for (int32_t k = 0, start = 0; start < num_tokens; k++) {
        const int32_t end = size < num_tokens - start ? start + size : num_tokens;
        int32_t least = num_tokens, most = 0;
        for (int32_t t = start; t < end; t++) {
            least = tout[t] < least ? tout[t] : least;
            most = tout[t] > most ? tout[t] : most;
        }
        reach[k].from = size == 1 ? k : k + 1; /* a token sees itself but nothing after it */
        reach[k].whole_end = least / size > k + 1 ? least / size : k + 1;
        reach[k].end = most / size + (most % size != 0);
        start = end;
    }
}

enum { CHUNK = 4 };

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

/* Chosen blocks, in order and not touching, as far as they were added one by one. */
typedef struct {
    Range *ranges;
    int32_t count;
} Choice;

static void
choose(Choice *choice, int32_t block)
{
    if (choice->count > 0 && choice->ranges[choice->count - 1].end == block) {
        choice->ranges[choice->count - 1].end++;
    } else {
        choice->ranges[choice->count++] = (Range){block, block + 1};
    }
}

/* Writes [first, end) to out, in chunks that compile to a few instructions: less than CHUNK
 * elements behind the end are overwritten too, and are written after this. Returns where the next
 * goes.
 */
static int32_t *
write_range(int32_t first, int32_t end, int32_t *out)
{
    typedef int32_t Lanes __attribute__((vector_size(CHUNK * sizeof(int32_t))));
    Lanes values = {first, first + 1, first + 2, first + 3};
    for (int32_t i = 0; i < end - first; i += CHUNK) {
        memcpy(out + i, &values, sizeof values);
        values += CHUNK;
    }
    return out + (end - first);
}

/* Appends a row whose chosen blocks are given. */
static void
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

/* The partial and the whole blocks of each query block. seen is scratch for n, part and whole for n
 * ranges each; seen are the blocks that the last query block saw: only those may be seen by the
 * next.
 */
static void
write_by_query(const Reach *reach, int32_t n, int32_t *seen, Range *part, Range *whole,
               Table partial_table, Table whole_table)
{
    int32_t num_seen = 0;
    for (int32_t q = 0; q < n; q++) {
        int32_t still = 0;
        Choice partial = {part, 0}, full = {whole, 0};
        seen[num_seen++] = q;
        for (int32_t i = 0; i < num_seen; i++) {
            const int32_t k = seen[i];
            if (q < reach[k].end) {
                seen[still++] = k;
                choose(q >= reach[k].from && q < reach[k].whole_end ? &full : &partial, k);
            }
        }
        num_seen = still;
        append_row(&partial_table, n, partial.ranges, partial.count);
        append_row(&whole_table, n, full.ranges, full.count);
    }
}

/* The partial and the whole blocks of each key block. */
static void
write_by_key(const Reach *reach, int32_t n, Table partial_table, Table whole_table)
{
    for (int32_t k = 0; k < n; k++) {
        const Range partial[] = {{k, reach[k].from}, {reach[k].whole_end, reach[k].end}};
        const Range whole = {reach[k].from, reach[k].whole_end};
        append_row(&partial_table, n, partial, 2);
        append_row(&whole_table, n, &whole, 1);
    }
}

static PyObject *
build(const int32_t *tout, int32_t num_tokens, int32_t size, Reach *reach, Range *scratch)
{
    const int32_t bad = find_impossible(tout, num_tokens);
    if (bad >= 0) {
        return PyErr_Format(PyExc_ValueError, "tout[%d] is %d, expected %d < tout <= %d", (int)bad,
                            (int)tout[bad], (int)bad, (int)num_tokens);
    }
    const int32_t n = num_tokens / size + (num_tokens % size != 0);
    PyObject *result = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(4 * 4 * table_size(n)));
    if (result == NULL) {
        return NULL;
    }
    int32_t *const out = (int32_t *)PyByteArray_AsString(result);
    Py_BEGIN_ALLOW_THREADS
        find_reach(tout, num_tokens, size, reach);
        write_by_query(reach, n, (int32_t *)(scratch + 2 * (size_t)n), scratch, scratch + n,
                       table_at(out, n, 0), table_at(out, n, 1));
        write_by_key(reach, n, table_at(out, n, 2), table_at(out, n, 3));
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
    "Returns the bytes of four int32 arrays, each n counts, n rows of n indices, and 4 elements\n"
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
    Reach *reach = PyMem_Calloc(num_blocks, sizeof *reach);
    Range *scratch = PyMem_Calloc(3 * num_blocks, sizeof *scratch);
    PyObject *result = NULL;
    if (reach == NULL || scratch == NULL) {
        PyErr_NoMemory();
    } else {
        result = build(tout.buf, (int32_t)tout.shape[0], (int32_t)size, reach, scratch);
    }
    PyMem_Free(scratch);
    PyMem_Free(reach);
    PyBuffer_Release(&tout);
    return result;
}

PyMethodDef agentgrpo_blocks_methods[] = {
    {"block_mask", (PyCFunction)(void (*)(void))block_mask, METH_FASTCALL, block_mask_doc},
    {NULL, NULL, 0, NULL},
};
