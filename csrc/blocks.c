/* block_mask(): what FlexAttention's create_block_mask() computes from T * T mask values, read off
 * the tree's intervals instead: T for the extremes of each block, then (T / block_size)^2.
 *
 * With token q seeing token k iff k <= q < tout[k], and blocks of queries [q0, q1) and keys before
 * them, some pair is visible iff the largest tout of the keys is above q0, and all pairs are iff
 * the smallest is at least q1.
 */
#include "tokens.h"

#include "methods.h"

typedef enum { EMPTY, PARTIAL, FULL } Kind;

typedef struct {
    int32_t size;  /* tokens per block; the last one may be incomplete */
    int32_t count; /* blocks */
    int32_t num_tokens;
    int32_t *least, *most; /* tout within each block */
} Blocks;

static Kind
kind_of(const Blocks *blocks, int32_t q, int32_t k)
{
    const int64_t q_start = (int64_t)q * blocks->size, q_end = q_start + blocks->size;
    if (k > q) {
        return EMPTY;
    }
    if (k == q) { /* a token sees itself and nothing after it */
        return blocks->size == 1 ? FULL : PARTIAL;
    }
    if (blocks->most[k] <= q_start) {
        return EMPTY;
    }
    /* the padding of an incomplete block counts as not visible, as in create_block_mask() */
    return blocks->least[k] >= q_end && q_end <= blocks->num_tokens ? FULL : PARTIAL;
}

/* Writes, for each row, how many of its blocks are of the wanted kind, then their indices in order
 * and after them all others in order. Rows are queries, or keys if transposed. Returns the end.
 */
static int32_t *
write_rows(const Blocks *blocks, int transposed, Kind wanted, int32_t *counts)
{
    const int32_t n = blocks->count;
    int32_t *row = counts + n;
    for (int32_t i = 0; i < n; i++, row += n) {
        int32_t found = 0, others = n;
        for (int32_t j = n - 1; j >= 0; j--) { /* backwards: the others fill the row from its end */
            const Kind kind = transposed ? kind_of(blocks, j, i) : kind_of(blocks, i, j);
            if (kind != wanted) {
                row[--others] = j;
            }
        }
        for (int32_t j = 0; found < others; j++) {
            const Kind kind = transposed ? kind_of(blocks, j, i) : kind_of(blocks, i, j);
            if (kind == wanted) {
                row[found++] = j;
            }
        }
        counts[i] = found;
    }
    return row;
}

/* Fills least and most. Returns the index of the first token whose tout is impossible, or -1. */
static int32_t
find_extremes(const int32_t *tout, Blocks *blocks)
{
    for (int32_t t = 0; t < blocks->num_tokens; t++) {
        if (tout[t] <= t || tout[t] > blocks->num_tokens) {
            return t;
        }
        const int32_t block = t / blocks->size;
        if (t % blocks->size == 0) {
            blocks->least[block] = blocks->most[block] = tout[t];
        } else if (tout[t] < blocks->least[block]) {
            blocks->least[block] = tout[t];
        } else if (tout[t] > blocks->most[block]) {
            blocks->most[block] = tout[t];
        }
    }
    return -1;
}

static PyObject *
build(const int32_t *tout, Blocks *blocks)
{
    const int32_t bad = find_extremes(tout, blocks);
    if (bad >= 0) {
        return PyErr_Format(PyExc_ValueError, "tout[%d] is %d, expected %d < tout <= %d", (int)bad,
                            (int)tout[bad], (int)bad, (int)blocks->num_tokens);
    }
    const Py_ssize_t n = blocks->count;
    PyObject *result = PyByteArray_FromStringAndSize(NULL, 4 * 4 * n * (n + 1));
    if (result == NULL) {
        return NULL;
    }
    int32_t *out = (int32_t *)PyByteArray_AsString(result);
    Py_BEGIN_ALLOW_THREADS
        out = write_rows(blocks, 0, PARTIAL, out);
        out = write_rows(blocks, 0, FULL, out);
        out = write_rows(blocks, 1, PARTIAL, out);
        write_rows(blocks, 1, FULL, out);
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
    "Returns the bytes of four int32 arrays, each n counts and then n rows of n indices, where n "
    "is\n"
    "T / block_size rounded up: partial and full blocks by query, then partial and full by key.\n"
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
    Blocks blocks = {.size = (int32_t)size, .num_tokens = (int32_t)tout.shape[0]};
    blocks.count = blocks.num_tokens / blocks.size + (blocks.num_tokens % blocks.size != 0);
    int32_t *memory = PyMem_Calloc(2 * (size_t)blocks.count + 1, sizeof *memory);
    PyObject *result = NULL;
    if (memory == NULL) {
        PyErr_NoMemory();
    } else {
        blocks.least = memory;
        blocks.most = memory + blocks.count;
        result = build(tout.buf, &blocks);
    }
    PyMem_Free(memory);
    PyBuffer_Release(&tout);
    return result;
}

PyMethodDef agentgrpo_blocks_methods[] = {
    {"block_mask", (PyCFunction)(void (*)(void))block_mask, METH_FASTCALL, block_mask_doc},
    {NULL, NULL, 0, NULL},
};
