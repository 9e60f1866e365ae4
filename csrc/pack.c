/* TreePlan: the rollouts of a step as prefix trees under a token budget (tree.c), laid out one tree
 * at a time, so that not all batches of a step are in memory at once.
 *
 * This file checks the arrays and owns the memory. tree.c does the work, without the GIL.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "methods.h"
#include "tree.h"

/* The arrays of a plan: the step's token ids and the log-probabilities of the sampled ones, then
 * one element per segment, then one per row. A rollout has one or more rows.
 */
enum { IDS, LOGP, START, SIZE, LOGP_START, ADVANTAGE, LENGTH, SAMPLE, WEIGHT, NUM_ARRAYS };

static const char formats[] = "ifiiifiif";
static char *names[] = {
    "token_ids",           "logprobs",       "starts",         "sizes",   "logprob_starts",
    "advantages",          "num_segments",   "samples",        "weights", "max_tokens",
    "drop_zero_advantage", "share_prefixes", "whole_rollouts", NULL};

/* A plan. All members are zero or NULL until acquired. */
typedef struct {
    PyObject_HEAD Py_buffer arrays[NUM_ARRAYS];
    Segment *segments;
    Path *paths;
    Leaf *leaves;
    Bin *bins;
    Py_ssize_t num_segments;
    int32_t num_rows, num_paths, num_bins, max_tokens;
    int drop_zero, share, whole;
} Plan;

/* Fills view with obj's 1-d contiguous memory of format 'i' (int32) or 'f' (float32), at most
 * INT32_MAX elements. Returns 0, or -1 with an exception, and view not held.
 */
static int
get_buffer(PyObject *obj, char format, Py_buffer *view, const char *name)
{
    if (PyObject_GetBuffer(obj, view, PyBUF_FORMAT | PyBUF_STRIDES) < 0) {
        return -1;
    }
    /* both types have four bytes; another ABI may use other format characters */
    if (view->ndim == 1 && view->itemsize == 4 && view->format[0] == format &&
        view->format[1] == '\0' && view->shape[0] <= INT32_MAX &&
        (view->shape[0] <= 1 || view->strides[0] == view->itemsize)) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s: expected a contiguous 1-d %s array, got a %d-d one of '%s'",
                 name, format == 'i' ? "int32" : "float32", view->ndim, view->format);
    PyBuffer_Release(view);
    return -1;
}

static void
release(Plan *plan)
{
    for (int i = 0; i < NUM_ARRAYS; i++) {
        PyBuffer_Release(&plan->arrays[i]); /* a no-op where nothing is held */
    }
    void *const blocks[] = {plan->segments, plan->paths, plan->leaves, plan->bins};
    for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) {
        PyMem_Free(blocks[i]);
    }
}

static int32_t
int_at(const Plan *plan, int array, Py_ssize_t i)
{
    return ((const int32_t *)plan->arrays[array].buf)[i];
}

static float
float_at(const Plan *plan, int array, Py_ssize_t i)
{
    return ((const float *)plan->arrays[array].buf)[i];
}

/* Acquires the arrays and compares their lengths. Returns 0 with num_rows and num_segments set, or
 * -1.
 */
static int
get_arrays(Plan *plan, PyObject *const *args)
{
    for (int i = 0; i < NUM_ARRAYS; i++) {
        if (get_buffer(args[i], formats[i], &plan->arrays[i], names[i]) < 0) {
            return -1;
        }
    }
    plan->num_rows = (int32_t)plan->arrays[LENGTH].shape[0];
    for (int32_t r = 0; r < plan->num_rows; r++) {
        if (int_at(plan, LENGTH, r) < 0) {
            PyErr_SetString(PyExc_ValueError, "num_segments: expected no negative number");
            return -1;
        }
        plan->num_segments += int_at(plan, LENGTH, r);
    }
    for (int i = START; i < NUM_ARRAYS; i++) {
        const Py_ssize_t expected = i < LENGTH ? plan->num_segments : plan->num_rows;
        if (plan->arrays[i].shape[0] != expected) {
            PyErr_Format(PyExc_ValueError, "%s: expected %zd, one per %s, got %zd", names[i],
                         expected, i < LENGTH ? "segment" : "row", plan->arrays[i].shape[0]);
            return -1;
        }
    }
    for (int32_t r = 0; r < plan->num_rows; r++) {
        if (!isfinite(float_at(plan, WEIGHT, r))) {
            PyErr_Format(PyExc_ValueError, "rollout %d: weight is not finite",
                         (int)int_at(plan, SAMPLE, r));
            return -1;
        }
    }
    return 0;
}

static void *
allocate(Py_ssize_t count, size_t size)
{
    void *block = PyMem_Calloc((size_t)(count > 0 ? count : 1), size);
    if (block == NULL) {
        PyErr_NoMemory();
    }
    return block;
}

/* Whether `size` elements from `start` on lie within an array. */
static int
lies_within(const Plan *plan, int array, int32_t start, int32_t size)
{
    return start >= 0 && size >= 0 && start <= plan->arrays[array].shape[0] - size;
}

/* Reads segment i, the s-th of rollout r. Returns 0, or -1. An empty segment has size 0. */
static int
get_segment(const Plan *plan, Py_ssize_t i, int32_t r, int32_t s, Segment *segment)
{
    const int32_t start = int_at(plan, START, i), logp_start = int_at(plan, LOGP_START, i);
    *segment = (Segment){
        .size = int_at(plan, SIZE, i),
        .advantage = float_at(plan, ADVANTAGE, i),
    };
    if (!lies_within(plan, IDS, start, segment->size) ||
        (logp_start != -1 && !lies_within(plan, LOGP, logp_start, segment->size))) {
        PyErr_Format(PyExc_ValueError,
                     "rollout %d: segment %d: %d tokens from %d on, sampled from %d on, of %zd and "
                     "%zd",
                     (int)r, (int)s, (int)segment->size, (int)start, (int)logp_start,
                     plan->arrays[IDS].shape[0], plan->arrays[LOGP].shape[0]);
        return -1;
    }
    segment->ids = (const int32_t *)plan->arrays[IDS].buf + start;
    if (logp_start == -1) {
        return 0;
    }
    segment->logp = (const float *)plan->arrays[LOGP].buf + logp_start;
    if (!isfinite(segment->advantage)) {
        PyErr_Format(PyExc_ValueError, "rollout %d: segment %d: advantage is not finite", (int)r,
                     (int)s);
        return -1;
    }
    return 0;
}

/* The state of reading the rows. */
typedef struct {
    Py_ssize_t index; /* of the next segment, in the arrays */
    Segment *next;    /* where to store it */
    int32_t turn;     /* sampled segments so far in rows of the same rollout */
    int32_t unit;     /* first path of the current unit */
    int matters;      /* whether the unit changes the loss */
} Reader;

/* Drops the current unit if it does not change the loss, and starts another. */
static void
next_unit(Plan *plan, Reader *reader)
{
    plan->num_paths = reader->matters ? plan->num_paths : reader->unit;
    reader->unit = plan->num_paths;
    reader->matters = !plan->drop_zero;
}

/* Reads row r. It becomes a path of the current unit if it has loss terms. */
static int
get_path(Plan *plan, Reader *reader, int32_t r)
{
    const int32_t size = int_at(plan, LENGTH, r), sample = int_at(plan, SAMPLE, r);
    Path path = {.segments = reader->next,
                 .sample = sample,
                 .weight = float_at(plan, WEIGHT, r),
                 .unit = reader->unit};
    int64_t length = 0;
    for (int32_t s = 0; s < size; s++) {
        Segment *segment = reader->next;
        if (get_segment(plan, reader->index++, sample, s, segment) < 0) {
            return -1;
        }
        length += segment->size;
        reader->next += segment->size > 0;
        if (length > INT32_MAX) {
            PyErr_Format(PyExc_ValueError, "rollout %d: over 2**31 - 1 tokens", (int)sample);
            return -1;
        }
        segment->turn = reader->turn;
        reader->turn += segment->logp != NULL;
        if (segment->logp == NULL || segment->size == 0) {
            continue;
        }
        if (length == segment->size) {
            PyErr_Format(PyExc_ValueError,
                         "rollout %d: segment %d: sampled from the first token on, which no token "
                         "before it predicts",
                         (int)sample, (int)s);
            return -1;
        }
        reader->matters |= segment->advantage != 0.0f;
        path.num_terms += segment->size;
        path.length = (int32_t)length - 1;
    }
    if (path.num_terms > 0) {
        plan->paths[plan->num_paths++] = path;
    }
    return 0;
}

static int
get_paths(Plan *plan)
{
    plan->segments = allocate(plan->num_segments, sizeof *plan->segments);
    plan->paths = allocate(plan->num_rows, sizeof *plan->paths);
    plan->leaves = allocate(plan->num_rows, sizeof *plan->leaves);
    plan->bins = allocate(plan->num_rows, sizeof *plan->bins);
    if (PyErr_Occurred() != NULL) {
        return -1;
    }
    const int32_t *const samples = plan->arrays[SAMPLE].buf;
    Reader reader = {.next = plan->segments};
    for (int32_t r = 0; r < plan->num_rows; r++) {
        const int is_first = r == 0 || samples[r] != samples[r - 1];
        reader.turn = is_first ? 0 : reader.turn;
        if (is_first || !plan->whole) {
            next_unit(plan, &reader);
        }
        if (get_path(plan, &reader, r) < 0) {
            return -1;
        }
    }
    next_unit(plan, &reader);
    return 0;
}

static void
raise_excess(const Plan *plan, const Excess *excess)
{
    int32_t rows = 0;
    for (int32_t i = excess->unit; i < plan->num_paths && plan->paths[i].unit == excess->unit;
         i++) {
        rows++;
    }
    PyErr_Format(PyExc_ValueError,
                 "rollout %d: %lld tokens to lay out%s, more than max_tokens=%d; shorten rollouts "
                 "or raise the budget",
                 (int)plan->paths[excess->unit].sample, (long long)excess->num_tokens,
                 rows > 1 ? " in one batch, as its rows' terms are read together" : "",
                 (int)plan->max_tokens);
}

/* sizes(): number of tokens T and of loss terms N of each tree, as (T, N). */
static PyObject *
plan_sizes(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    const Plan *plan = (const Plan *)self;
    PyObject *sizes = PyList_New(plan->num_bins);
    for (int32_t i = 0; sizes != NULL && i < plan->num_bins; i++) {
        const Bin *bin = &plan->bins[i];
        PyObject *size = Py_BuildValue("LL", (long long)bin->num_tokens, (long long)bin->num_terms);
        if (size == NULL) {
            Py_CLEAR(sizes);
            break;
        }
        PyList_SetItem(sizes, i, size);
    }
    return sizes;
}

/* lay_out(tree): the runs of tokens and of loss terms of a tree, each a bytearray of int32 columns
 * in any order: start, source, position, tout; and start, source, source of logprobs, row, sample,
 * turn, the bits of the float32 advantage and weight. Releases the GIL. */
/* Makes a bytearray for the counted runs, and points the table to it. */
static PyObject *
allot(Table *table, int columns)
{
    const int64_t count = table->count;
    PyObject *bytes = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(count * columns * 4));
    if (bytes != NULL) {
        *table = (Table){.columns = (int32_t *)(void *)PyByteArray_AsString(bytes), .room = count};
    }
    return bytes;
}

static PyObject *
plan_lay_out(PyObject *self, PyObject *arg)
{
    const Plan *plan = (const Plan *)self;
    const Py_ssize_t tree = PyLong_AsSsize_t(arg);
    if (tree == -1 && PyErr_Occurred() != NULL) {
        return NULL;
    }
    if (tree < 0 || tree >= plan->num_bins) {
        return PyErr_Format(PyExc_IndexError, "tree %zd of %d", tree, (int)plan->num_bins);
    }
    const Bin *bin = &plan->bins[tree];
    Run *scratch = allocate(bin->num_leaves, sizeof *scratch);
    if (scratch == NULL) {
        return NULL;
    }
    Layout out = {.ids = plan->arrays[IDS].buf, .logp = plan->arrays[LOGP].buf};
    Py_BEGIN_ALLOW_THREADS /* without columns it only counts the runs */
        tree_lay_out(plan->paths, plan->leaves, bin, scratch, &out);
    Py_END_ALLOW_THREADS
    PyObject *tokens = allot(&out.tokens, TOKEN_COLUMNS), *terms = allot(&out.terms, TERM_COLUMNS);
    PyObject *both = NULL;
    if (tokens != NULL && terms != NULL) {
        Py_BEGIN_ALLOW_THREADS
            tree_lay_out(plan->paths, plan->leaves, bin, scratch, &out);
        Py_END_ALLOW_THREADS
        both = PyTuple_Pack(2, tokens, terms);
    }
    Py_XDECREF(tokens);
    Py_XDECREF(terms);
    PyMem_Free(scratch);
    return both;
}

/* --- the type ------------------------------------------------------------------------------- */

static void
plan_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    release((Plan *)object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static int
make(Plan *plan, PyObject *const *args)
{
    if (get_arrays(plan, args) < 0 || get_paths(plan) < 0) {
        return -1;
    }
    int32_t num_bins;
    Excess excess;
    Py_BEGIN_ALLOW_THREADS
        num_bins = tree_plan(plan->paths, plan->num_paths, plan->max_tokens, plan->share,
                             plan->leaves, plan->bins, &excess);
    Py_END_ALLOW_THREADS
    if (num_bins == TREE_EXCESS) {
        raise_excess(plan, &excess);
        return -1;
    }
    if (num_bins == TREE_NO_MEMORY) {
        PyErr_NoMemory();
        return -1;
    }
    plan->num_bins = num_bins;
    return 0;
}

/* TreePlan(token_ids, logprobs, starts, sizes, logprob_starts, advantages, num_segments, samples,
 * weights, max_tokens, drop_zero_advantage, share_prefixes, whole_rollouts): plan the prefix trees
 * of a step's rows, with at most max_tokens tokens each. Without share_prefixes every row is a
 * tree of its own. With whole_rollouts all rows of a rollout are in one tree.
 *
 * token_ids (int32) and logprobs (float32) have the values of the step, in any order. starts,
 * sizes, logprob_starts (int32; -1: not sampled by the policy) and advantages (float32) have one
 * element per segment, row by row. num_segments (int32), samples (int32: the rollout of the row;
 * rows of a rollout are adjacent) and weights (float32) have one element per row. The plan keeps
 * references to the arrays, no copies. Raises TypeError or ValueError with the rollout and the
 * field. Releases the GIL. */
static PyObject *
plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *x[NUM_ARRAYS];
    long max_tokens;
    int drop_zero, share, whole;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOOOOlppp:TreePlan", names, &x[0], &x[1],
                                     &x[2], &x[3], &x[4], &x[5], &x[6], &x[7], &x[8], &max_tokens,
                                     &drop_zero, &share, &whole)) {
        return NULL;
    }
    if (max_tokens < 1 || max_tokens > INT32_MAX) {
        return PyErr_Format(PyExc_ValueError, "max_tokens must be in [1, 2**31), got %ld",
                            max_tokens);
    }
    PyObject *self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) {
        return NULL;
    }
    Plan *plan = (Plan *)self;
    plan->max_tokens = (int32_t)max_tokens;
    plan->drop_zero = drop_zero;
    plan->share = share;
    plan->whole = whole;
    if (make(plan, x) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

static PyMethodDef plan_methods[] = {
    {"sizes", plan_sizes, METH_NOARGS, NULL},
    {"lay_out", plan_lay_out, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_new, (void *)plan_new},
    {Py_tp_dealloc, (void *)plan_dealloc},
    {Py_tp_methods, plan_methods},
    {0, NULL},
};

PyType_Spec agentgrpo_plan_spec = {
    .name = "agentgrpo._C.TreePlan",
    .basicsize = sizeof(Plan),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = plan_slots,
};
