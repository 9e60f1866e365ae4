/* pack_tree(): the rollouts of a step become prefix trees under a token budget (tree.c).
 *
 * This file reads and checks the arrays and owns the memory; the work itself runs without the GIL.
 */
#include "tokens.h"

#include <math.h>
#include <string.h>

#include "methods.h"
#include "tree.h"

/* Everything a call holds; all of it zero or NULL until acquired. */
typedef struct {
    Py_buffer sizes, advantages, weights; /* per rollout */
    Py_buffer *views;                     /* of the segments: ids, logprobs, ids, ... */
    Segment *segments;
    Path *paths;
    Leaf *leaves;
    Bin *bins;
    int32_t *open;
    Py_ssize_t num_views, num_segments;
    int32_t num_rollouts, num_paths, max_tokens;
    int drop_zero, share;
} Job;

static void
release(Job *job)
{
    for (Py_ssize_t i = 0; i < job->num_views; i++) {
        PyBuffer_Release(&job->views[i]);
    }
    PyBuffer_Release(&job->sizes); /* a no-op where nothing is held */
    PyBuffer_Release(&job->advantages);
    PyBuffer_Release(&job->weights);
    void *const blocks[] = {job->views,  job->segments, job->paths,
                            job->leaves, job->bins,     job->open};
    for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) {
        PyMem_Free(blocks[i]);
    }
}

/* Returns 0 with num_rollouts and the per-rollout buffers set, or -1. */
static int
get_rollouts(Job *job, PyObject *const *args)
{
    if (!PyList_Check(args[0]) || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "token_ids and logprobs must be lists of arrays");
        return -1;
    }
    if (tokens_get_buffer(args[2], 'i', 0, &job->sizes, "num_segments") < 0 ||
        tokens_get_buffer(args[3], 'f', 0, &job->advantages, "advantages") < 0 ||
        tokens_get_buffer(args[4], 'f', 0, &job->weights, "weights") < 0) {
        return -1;
    }
    job->num_rollouts = (int32_t)job->sizes.shape[0];
    if (job->advantages.shape[0] != job->num_rollouts ||
        job->weights.shape[0] != job->num_rollouts) {
        PyErr_Format(PyExc_ValueError, "%d rollouts, but %zd advantages and %zd weights",
                     (int)job->num_rollouts, job->advantages.shape[0], job->weights.shape[0]);
        return -1;
    }
    int64_t total = 0;
    for (int32_t r = 0; r < job->num_rollouts; r++) {
        const int32_t size = ((const int32_t *)job->sizes.buf)[r];
        const float advantage = ((const float *)job->advantages.buf)[r];
        const float weight = ((const float *)job->weights.buf)[r];
        if (size < 0) {
            PyErr_Format(PyExc_ValueError, "rollout %d: num_segments is %d", (int)r, (int)size);
            return -1;
        }
        if (!isfinite(advantage) || !isfinite(weight)) {
            PyErr_Format(PyExc_ValueError, "rollout %d: %s is not finite", (int)r,
                         isfinite(advantage) ? "weight" : "advantage");
            return -1;
        }
        total += size;
    }
    job->num_segments = PyList_Size(args[0]);
    if (total != job->num_segments || total != PyList_Size(args[1])) {
        PyErr_Format(PyExc_ValueError,
                     "num_segments sums to %lld, but there are %zd token_ids and %zd logprobs",
                     (long long)total, job->num_segments, PyList_Size(args[1]));
        return -1;
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

/* Takes the buffer of list[i], which may be a list that a buffer's owner changes meanwhile. */
static int
get_item_buffer(Job *job, PyObject *list, Py_ssize_t i, char format, const char *field, int32_t r,
                int32_t s)
{
    PyObject *item = PyList_GetItem(list, i); /* borrowed; IndexError if the list has shrunk */
    if (item == NULL) {
        return -1;
    }
    Py_INCREF(item);
    Py_buffer *view = &job->views[job->num_views];
    const int failed = tokens_get_buffer(item, format, 0, view, "rollout %d: segment %d: %s",
                                         (int)r, (int)s, field);
    Py_DECREF(item); /* the view holds it */
    job->num_views += failed == 0;
    return failed;
}

/* Reads segment i, the s-th of rollout r. Returns 0, or -1. An empty one has size 0. */
static int
get_segment(Job *job, PyObject *const *args, Py_ssize_t i, int32_t r, int32_t s, Segment *segment)
{
    if (get_item_buffer(job, args[0], i, 'i', "token_ids", r, s) < 0) {
        return -1;
    }
    const Py_buffer *ids = &job->views[job->num_views - 1];
    *segment = (Segment){.ids = ids->buf, .size = (int32_t)ids->shape[0]};
    PyObject *logprobs = PyList_GetItem(args[1], i);
    if (logprobs == NULL || logprobs == Py_None) {
        return logprobs == NULL ? -1 : 0;
    }
    if (get_item_buffer(job, args[1], i, 'f', "logprobs", r, s) < 0) {
        return -1;
    }
    const Py_buffer *logp = &job->views[job->num_views - 1];
    segment->logp = logp->buf;
    if (logp->shape[0] != segment->size) {
        PyErr_Format(PyExc_ValueError, "rollout %d: segment %d: %zd logprobs for %d token_ids",
                     (int)r, (int)s, logp->shape[0], (int)segment->size);
        return -1;
    }
    return 0;
}

static int
check_values(const Segment *segment, int32_t r, int32_t s)
{
    const Py_ssize_t size = segment->size, id = tokens_first_negative(segment->ids, size);
    const Py_ssize_t logp =
        segment->logp == NULL ? size : tokens_first_not_finite(segment->logp, size);
    if (id == size && logp == size) {
        return 0;
    }
    if (id < size) {
        PyErr_Format(PyExc_ValueError, "rollout %d: segment %d: token_ids[%zd] is %d, not an id",
                     (int)r, (int)s, id, (int)segment->ids[id]);
    } else {
        PyErr_Format(PyExc_ValueError, "rollout %d: segment %d: logprobs[%zd] is not finite",
                     (int)r, (int)s, logp);
    }
    return -1;
}

/* Reads rollout r, whose segments begin at `first`, and makes it a path if it has loss terms. */
static int
get_path(Job *job, PyObject *const *args, Py_ssize_t first, int32_t r, Segment **segments)
{
    const int32_t size = ((const int32_t *)job->sizes.buf)[r];
    Path path = {.segments = *segments, .sample = r};
    path.advantage = ((const float *)job->advantages.buf)[r];
    path.weight = ((const float *)job->weights.buf)[r];
    int64_t length = 0;
    for (int32_t s = 0; s < size; s++) {
        Segment *segment = *segments;
        if (get_segment(job, args, first + s, r, s, segment) < 0 ||
            check_values(segment, r, s) < 0) {
            return -1;
        }
        length += segment->size;
        *segments += segment->size > 0;
        if (length > INT32_MAX) {
            PyErr_Format(PyExc_ValueError, "rollout %d: over 2**31 - 1 tokens", (int)r);
            return -1;
        }
        if (segment->logp == NULL || segment->size == 0) {
            continue;
        }
        if (length == segment->size) {
            PyErr_Format(PyExc_ValueError,
                         "rollout %d: segment %d: sampled from the first token on, which no token "
                         "before it predicts",
                         (int)r, (int)s);
            return -1;
        }
        path.num_terms += segment->size;
        path.length = (int32_t)length - 1;
    }
    if (path.num_terms == 0 || (job->drop_zero && path.advantage == 0.0f)) {
        return 0;
    }
    if (path.length > job->max_tokens) {
        PyErr_Format(PyExc_ValueError,
                     "rollout %d: %d tokens to lay out, more than max_tokens=%d; shorten rollouts "
                     "or raise the budget",
                     (int)r, (int)path.length, (int)job->max_tokens);
        return -1;
    }
    job->paths[job->num_paths++] = path;
    return 0;
}

static int
get_paths(Job *job, PyObject *const *args)
{
    job->views = allocate(2 * job->num_segments, sizeof *job->views);
    job->segments = allocate(job->num_segments, sizeof *job->segments);
    job->paths = allocate(job->num_rollouts, sizeof *job->paths);
    job->leaves = allocate(job->num_rollouts, sizeof *job->leaves);
    job->bins = allocate(job->num_rollouts, sizeof *job->bins);
    if (PyErr_Occurred() != NULL) {
        return -1;
    }
    Segment *segments = job->segments;
    Py_ssize_t first = 0;
    int32_t longest = 0;
    for (int32_t r = 0; r < job->num_rollouts; r++) {
        if (get_path(job, args, first, r, &segments) < 0) {
            return -1;
        }
        first += ((const int32_t *)job->sizes.buf)[r];
    }
    for (int32_t i = 0; i < job->num_paths; i++) {
        longest = job->paths[i].length > longest ? job->paths[i].length : longest;
    }
    job->open = allocate(longest, sizeof *job->open);
    return job->open == NULL ? -1 : 0;
}

/* Returns the slices of memory, which holds 3 * num_tokens + 6 * num_terms numbers. */
static Layout
layout_in(int32_t *memory, const Bin *bin)
{
    int32_t *const terms = memory + 3 * bin->num_tokens;
    float *const floats = (float *)(terms + 3 * bin->num_terms);
    return (Layout){
        .input_ids = memory,
        .positions = memory + bin->num_tokens,
        .tout = memory + 2 * bin->num_tokens,
        .row = terms,
        .target = terms + bin->num_terms,
        .sample = terms + 2 * bin->num_terms,
        .old_logp = floats,
        .advantage = floats + bin->num_terms,
        .weight = floats + 2 * bin->num_terms,
    };
}

static int64_t
numbers_in(const Bin *bin)
{
    return 3 * bin->num_tokens + 6 * bin->num_terms;
}

/* Writes all bins, one behind the other, into an array made by allocate(size). Returns the array
 * and the bins' (T, N).
 */
static PyObject *
lay_out(const Job *job, int32_t num_bins, PyObject *allocate_array)
{
    int64_t total = 0;
    PyObject *sizes = PyList_New(num_bins);
    for (int32_t i = 0; sizes != NULL && i < num_bins; i++) {
        const Bin *bin = &job->bins[i];
        PyObject *size = Py_BuildValue("LL", (long long)bin->num_tokens, (long long)bin->num_terms);
        if (size == NULL) {
            Py_CLEAR(sizes);
            break;
        }
        PyList_SetItem(sizes, i, size);
        total += numbers_in(bin);
    }
    PyObject *array =
        sizes == NULL ? NULL : PyObject_CallFunction(allocate_array, "L", (long long)total);
    Py_buffer view;
    if (array == NULL || tokens_get_buffer(array, 'i', 1, &view, "allocate(%lld)", total) < 0) {
        Py_XDECREF(array);
        Py_XDECREF(sizes);
        return NULL;
    }
    const int fits = view.shape[0] == total;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
            int32_t *memory = view.buf;
            for (int32_t i = 0; i < num_bins; i++) {
                const Layout layout = layout_in(memory, &job->bins[i]);
                tree_lay_out(job->paths, job->leaves, &job->bins[i], job->open, &layout);
                memory += numbers_in(&job->bins[i]);
            }
        Py_END_ALLOW_THREADS
    } else {
        PyErr_Format(PyExc_ValueError, "allocate(%lld) returned %zd elements", (long long)total,
                     view.shape[0]);
    }
    PyBuffer_Release(&view);
    PyObject *result = fits ? PyTuple_Pack(2, array, sizes) : NULL;
    Py_DECREF(array);
    Py_DECREF(sizes);
    return result;
}

PyDoc_STRVAR(
    pack_tree_doc,
    "pack_tree($module, token_ids, logprobs, num_segments, advantages, weights, max_tokens,\n"
    "          drop_zero_advantage, share_prefixes, allocate, /)\n"
    "--\n"
    "\n"
    "Lay the rollouts of a step out as prefix trees of at most max_tokens tokens, or side by side\n"
    "if not share_prefixes.\n"
    "\n"
    "token_ids and logprobs list the segments of all rollouts in turn: 1-d int32 arrays, and\n"
    "float32 arrays of the same length or None where the policy did not sample. num_segments\n"
    "(int32), advantages and weights (float32) have one element per rollout.\n"
    "Returns the int32 array that allocate(size) made, filled, and each tree's (T, N). The trees\n"
    "lie in it one behind the other, each as input_ids, positions, tout (T each), row, target,\n"
    "sample, and the bits of the float32 old_logp, advantage, weight (N each).\n"
    "Raises TypeError or ValueError naming the rollout and the field. Releases the GIL.");

static PyObject *
pack_tree(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 9) {
        return PyErr_Format(PyExc_TypeError, "pack_tree() takes 9 arguments, got %zd", nargs);
    }
    const long max_tokens = PyLong_AsLong(args[5]);
    if (max_tokens == -1 && PyErr_Occurred() != NULL) {
        return NULL;
    }
    if (max_tokens < 1 || max_tokens > INT32_MAX) {
        return PyErr_Format(PyExc_ValueError, "max_tokens must be in [1, 2**31), got %ld",
                            max_tokens);
    }
    Job job = {
        .max_tokens = (int32_t)max_tokens,
        .drop_zero = PyObject_IsTrue(args[6]),
        .share = PyObject_IsTrue(args[7]),
    };
    PyObject *result = NULL;
    if (job.drop_zero >= 0 && job.share >= 0 && get_rollouts(&job, args) == 0 &&
        get_paths(&job, args) == 0) {
        int32_t num_bins;
        Py_BEGIN_ALLOW_THREADS
            num_bins = tree_plan(job.paths, job.num_paths, job.max_tokens, job.share, job.leaves,
                                 job.bins);
        Py_END_ALLOW_THREADS
        result = num_bins < 0 ? PyErr_NoMemory() : lay_out(&job, num_bins, args[8]);
    }
    release(&job);
    return result;
}

PyMethodDef agentgrpo_pack_methods[] = {
    {"pack_tree", (PyCFunction)(void (*)(void))pack_tree, METH_FASTCALL, pack_tree_doc},
    {NULL, NULL, 0, NULL},
};
