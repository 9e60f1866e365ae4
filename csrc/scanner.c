/* TagScanner: finds stop and tool tags in a stream of tokens.
 *
 * An Aho-Corasick automaton over bytes with every transition worked out, so a byte costs one load
 * however many tags there are. The scanner is immutable and what it remembers of a stream is one
 * integer that the caller keeps: a forked rollout forks its scan by copying it. Bytes rather than
 * characters, because tokens may end inside a character.
 */
#include "tokens.h"

#include "methods.h"

enum { NUM_BYTES = 256, MAX_STATES = 1 << 20 };

typedef struct {
    int32_t tag;    /* the tag that ends here, or -1 */
    int32_t suffix; /* the state of the longest shorter tag that ends here too, or 0 */
    int32_t next[NUM_BYTES];
} State;

typedef struct {
    PyObject_HEAD State *states;
    int32_t num_states;
    Py_ssize_t num_tokens; /* of the vocabulary; its bytes lie one behind the other in `bytes` */
    Py_ssize_t *starts;    /* num_tokens + 1 */
    unsigned char *bytes;
} Scanner;

/* --- building ------------------------------------------------------------------------------- */

/* Returns item i of a list of non-empty bytes. Borrowed; the caller runs no other Python code. */
static const unsigned char *
get_bytes(PyObject *list, Py_ssize_t i, const char *name, Py_ssize_t *size)
{
    PyObject *item = PyList_GetItem(list, i);
    char *bytes;
    if (item == NULL || !PyBytes_Check(item)) {
        if (item != NULL) {
            PyErr_Format(PyExc_TypeError, "%s[%zd]: expected bytes, got %R", name, i,
                         (PyObject *)Py_TYPE(item));
        }
        return NULL;
    }
    return PyBytes_AsStringAndSize(item, &bytes, size) < 0 ? NULL : (unsigned char *)bytes;
}

/* Adds tag number i to the trie of the tags before it; absent transitions are 0. */
static int
add_tag(Scanner *self, PyObject *tags, Py_ssize_t i)
{
    Py_ssize_t size;
    const unsigned char *tag = get_bytes(tags, i, "tags", &size);
    if (tag == NULL) {
        return -1;
    }
    int32_t at = 0;
    for (Py_ssize_t j = 0; j < size; j++) {
        int32_t *next = &self->states[at].next[tag[j]];
        if (*next == 0) {
            *next = self->num_states;
            self->states[self->num_states++].tag = -1;
        }
        at = *next;
    }
    if (size == 0 || self->states[at].tag >= 0) {
        PyErr_Format(PyExc_ValueError, "tags[%zd] is %s", i, size == 0 ? "empty" : "a repetition");
        return -1;
    }
    self->states[at].tag = (int32_t)i;
    return 0;
}

/* Completes the transitions, nearest states first. queue and fail have room for all states; fail[s]
 * is the state of the longest proper suffix of s that begins a tag.
 */
static void
complete(State *states, int32_t *queue, int32_t *fail)
{
    int32_t end = 0;
    for (int byte = 0; byte < NUM_BYTES; byte++) {
        if (states[0].next[byte] != 0) {
            queue[end++] = states[0].next[byte];
        }
    }
    for (int32_t i = 0; i < end; i++) {
        State *state = &states[queue[i]];
        const State *shorter = &states[fail[queue[i]]];
        state->suffix = shorter->tag >= 0 ? fail[queue[i]] : shorter->suffix;
        for (int byte = 0; byte < NUM_BYTES; byte++) {
            if (state->next[byte] == 0) {
                state->next[byte] = shorter->next[byte];
            } else {
                fail[state->next[byte]] = shorter->next[byte];
                queue[end++] = state->next[byte];
            }
        }
    }
}

static int
set_tags(Scanner *self, PyObject *tags)
{
    Py_ssize_t total = 1;
    for (Py_ssize_t i = 0; i < PyList_Size(tags); i++) {
        Py_ssize_t size;
        if (get_bytes(tags, i, "tags", &size) == NULL) {
            return -1;
        }
        total += size;
        if (total > MAX_STATES) {
            PyErr_Format(PyExc_ValueError, "tags: over %d bytes in all", (int)MAX_STATES - 1);
            return -1;
        }
    }
    self->states = PyMem_Calloc((size_t)total, sizeof *self->states);
    if (self->states == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->states[0].tag = -1;
    self->num_states = 1;
    for (Py_ssize_t i = 0; i < PyList_Size(tags); i++) {
        if (add_tag(self, tags, i) < 0) {
            return -1;
        }
    }
    int32_t *scratch = PyMem_Calloc(2 * (size_t)total, sizeof *scratch);
    if (scratch == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    complete(self->states, scratch, scratch + total);
    PyMem_Free(scratch);
    return 0;
}

static int
set_vocabulary(Scanner *self, PyObject *vocabulary)
{
    const Py_ssize_t n = PyList_Size(vocabulary);
    self->starts = PyMem_Calloc((size_t)n + 1, sizeof *self->starts);
    if (self->starts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_ssize_t size;
        if (get_bytes(vocabulary, i, "vocabulary", &size) == NULL) {
            return -1;
        }
        self->starts[i + 1] = self->starts[i] + size;
    }
    self->bytes = PyMem_Malloc((size_t)self->starts[n] + 1);
    if (self->bytes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_ssize_t size;
        const unsigned char *bytes = get_bytes(vocabulary, i, "vocabulary", &size);
        if (bytes == NULL) {
            return -1;
        }
        memcpy(self->bytes + self->starts[i], bytes, (size_t)size);
    }
    self->num_tokens = n;
    return 0;
}

static void
scanner_dealloc(PyObject *object)
{
    Scanner *self = (Scanner *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyMem_Free(self->states);
    PyMem_Free(self->starts);
    PyMem_Free(self->bytes);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *
scanner_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tags", "vocabulary", NULL};
    PyObject *tags, *vocabulary;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!:TagScanner", names, &PyList_Type, &tags,
                                     &PyList_Type, &vocabulary)) {
        return NULL;
    }
    PyObject *self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) {
        return NULL;
    }
    if (set_tags((Scanner *)self, tags) < 0 || set_vocabulary((Scanner *)self, vocabulary) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}

/* --- scanning ------------------------------------------------------------------------------- */

/* Reads the optional state argument. Returns it, or -1 with an exception set. */
static int32_t
get_state(const Scanner *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs < 1 || nargs > 2) {
        PyErr_Format(PyExc_TypeError, "scan_ids() takes 1 or 2 arguments, got %zd", nargs);
        return -1;
    }
    const long state = nargs == 2 ? PyLong_AsLong(args[1]) : 0;
    if (state < 0 || state >= self->num_states) {
        if (PyErr_Occurred() == NULL) {
            PyErr_Format(PyExc_ValueError, "state is %ld, not one that this scanner returned",
                         state);
        }
        return -1;
    }
    return (int32_t)state;
}

/* Appends (tag, token, end) for every tag that ends at state, the longest first. */
static int
report(const Scanner *self, int32_t state, Py_ssize_t token, Py_ssize_t end, PyObject *matches)
{
    const State *at = &self->states[state];
    for (at = at->tag >= 0 ? at : &self->states[at->suffix]; at->tag >= 0;
         at = &self->states[at->suffix]) {
        PyObject *match = Py_BuildValue("inn", (int)at->tag, token, end);
        if (match == NULL || PyList_Append(matches, match) < 0) {
            Py_XDECREF(match);
            return -1;
        }
        Py_DECREF(match);
    }
    return 0;
}

/* Advances over the bytes. Returns the state after them, or -1 with an exception set. */
static int32_t
advance(const Scanner *self, int32_t state, const unsigned char *bytes, Py_ssize_t size,
        Py_ssize_t token, PyObject *matches)
{
    for (Py_ssize_t i = 0; i < size; i++) {
        state = self->states[state].next[bytes[i]];
        const State *at = &self->states[state];
        if ((at->tag >= 0 || at->suffix != 0) && report(self, state, token, i + 1, matches) < 0) {
            return -1;
        }
    }
    return state;
}

static PyObject *
result_of(int32_t state, PyObject *matches)
{
    PyObject *result = state < 0 ? NULL : Py_BuildValue("iO", (int)state, matches);
    Py_XDECREF(matches);
    return result;
}

PyDoc_STRVAR(scan_ids_doc,
             "scan_ids($self, ids, state=0, /)\n"
             "--\n"
             "\n"
             "Continue a scan over the next tokens of a stream, a 1-d int32 array.\n"
             "\n"
             "Returns the state to go on from and (tag, token, end) for every tag that ended: its\n"
             "index, the index within ids of the token it ended in, and the offset within that\n"
             "token's bytes just behind it. Raises ValueError for an id that is not in the\n"
             "vocabulary.");

static PyObject *
scan_ids(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    const Scanner *self = (const Scanner *)object;
    int32_t state = get_state(self, args, nargs);
    Py_buffer view;
    if (state < 0 || tokens_get_buffer(args[0], 'i', &view, "ids") < 0) {
        return NULL;
    }
    const int32_t *ids = view.buf;
    PyObject *matches = PyList_New(0);
    state = matches == NULL ? -1 : state;
    for (Py_ssize_t i = 0; state >= 0 && i < view.shape[0]; i++) {
        if (ids[i] < 0 || ids[i] >= self->num_tokens) {
            PyErr_Format(PyExc_ValueError, "ids[%zd] is %d, not in the vocabulary of %zd", i,
                         (int)ids[i], self->num_tokens);
            state = -1;
            break;
        }
        const Py_ssize_t start = self->starts[ids[i]];
        state =
            advance(self, state, self->bytes + start, self->starts[ids[i] + 1] - start, i, matches);
    }
    PyBuffer_Release(&view);
    return result_of(state, matches);
}

/* --- the type ------------------------------------------------------------------------------- */

PyDoc_STRVAR(scanner_doc,
             "TagScanner(tags, vocabulary)\n"
             "--\n"
             "\n"
             "Finds any of a list of byte strings in a stream of tokens, wherever it is split.\n"
             "\n"
             "vocabulary[id] is the bytes of token id. Both are copied. Raises\n"
             "TypeError for anything but lists of bytes, ValueError for an empty or repeated tag.");

static PyMethodDef scanner_methods[] = {
    {"scan_ids", (PyCFunction)(void (*)(void))scan_ids, METH_FASTCALL, scan_ids_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot scanner_slots[] = {
    {Py_tp_new, (void *)scanner_new},
    {Py_tp_dealloc, (void *)scanner_dealloc},
    {Py_tp_methods, scanner_methods},
    {Py_tp_doc, (void *)scanner_doc},
    {0, NULL},
};

PyType_Spec agentgrpo_scanner_spec = {
    .name = "agentgrpo._C.TagScanner",
    .basicsize = sizeof(Scanner),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = scanner_slots,
};
