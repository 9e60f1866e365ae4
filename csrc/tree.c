/* The prefix tree of a step's rollouts (tree.h).
 *
 * Sorting is a merge sort that stores shared lengths, so that tokens which two paths are known to
 * share are not compared again (Ng and Kakehi, "Merging string sequences by longest common
 * prefixes", 2008): O(all tokens + n log n), however long the common prompt is. Segments in the
 * same memory, such as a group's prompt, are not read at all.
 */
#include "tree.h"

#include <stdlib.h>
#include <string.h>

/* --- sorting -------------------------------------------------------------------------------- */

/* A place in a path, moving forward only. */
typedef struct {
    const Segment *segment;
    int32_t offset; /* within the segment */
} Cursor;

static void
advance(Cursor *at, int32_t count)
{
    at->offset += count;
    while (at->offset >= at->segment->size) {
        at->offset -= at->segment->size;
        at->segment++;
    }
}

/* The number of leading elements that a and b share, at most n. */
static int32_t
first_difference(const int32_t *a, const int32_t *b, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (a[i] != b[i]) {
            return i;
        }
    }
    return n;
}

/* The length of the common prefix of a and b, of which `known` tokens are known already. */
static int32_t
shared_length(const Path *a, const Path *b, int32_t known)
{
    const int32_t end = a->length < b->length ? a->length : b->length;
    Cursor p = {a->segments, 0}, q = {b->segments, 0};
    for (int32_t step = known; known < end; known += step) {
        advance(&p, step);
        advance(&q, step);
        const int32_t p_left = p.segment->size - p.offset, q_left = q.segment->size - q.offset;
        step = p_left < q_left ? p_left : q_left;
        step = step < end - known ? step : end - known;
        const int32_t *x = p.segment->ids + p.offset, *y = q.segment->ids + q.offset;
        const int32_t same = x == y ? step : first_difference(x, y, step);
        if (same < step) {
            return known + same;
        }
    }
    return end;
}

static int32_t
token_at(const Path *path, int32_t position)
{
    Cursor at = {path->segments, 0};
    advance(&at, position);
    return at.segment->ids[at.offset];
}

/* Whether a sorts before b, which share `shared` tokens. Equal paths keep their order. */
static int
comes_first(const Path *a, const Path *b, int32_t shared)
{
    if (shared == a->length || shared == b->length) {
        return a->length <= b->length;
    }
    return token_at(a, shared) < token_at(b, shared);
}

/* Merges the sorted runs [a, a_end) and [b, b_end) into out. The `shared` of a run's first leaf is
 * 0; while merging, a->shared and b->shared are the lengths shared with the leaf last written.
 */
static void
merge(const Path *paths, Leaf *a, Leaf *a_end, Leaf *b, Leaf *b_end, Leaf *out)
{
    while (a < a_end && b < b_end) {
        int take_a = a->shared > b->shared;
        if (a->shared == b->shared) {
            const Path *x = &paths[a->path], *y = &paths[b->path];
            const int32_t shared = shared_length(x, y, a->shared);
            take_a = comes_first(x, y, shared);
            *out++ = take_a ? *a : *b;
            *(take_a ? &b->shared : &a->shared) = shared;
        } else {
            *out++ = take_a ? *a : *b;
        }
        a += take_a;
        b += !take_a;
    }
    memcpy(out, a, (size_t)(a_end - a) * sizeof *a);
    memcpy(out + (a_end - a), b, (size_t)(b_end - b) * sizeof *b);
}

/* Sorts leaves. other is scratch of the same size. */
static void
sort_leaves(const Path *paths, int32_t n, Leaf *leaves, Leaf *other)
{
    Leaf *from = leaves, *to = other;
    for (int64_t width = 1; width < n; width *= 2) {
        for (int64_t start = 0; start < n; start += 2 * width) {
            const int64_t middle = start + width < n ? start + width : n;
            const int64_t end = middle + width < n ? middle + width : n;
            merge(paths, from + start, from + middle, from + middle, from + end, to + start);
        }
        Leaf *swap = from;
        from = to;
        to = swap;
    }
    if (from != leaves) {
        memcpy(leaves, from, (size_t)n * sizeof *leaves);
    }
}

/* --- bins ----------------------------------------------------------------------------------- */

/* A bin being filled: a chain of leaves and the tokens of their union, root to leaf. */
typedef struct {
    int64_t num_tokens;
    int32_t head, tail; /* leaves, linked by next[] */
} Load;

/* The leaves of a unit that have been read, and the number of those that follow. */
typedef struct {
    Load load;
    int32_t to_come;
} Unit;

/* A branch point on the path of the last leaf: its depth, and the index of its first load. */
typedef struct {
    int32_t depth;
    int32_t first_load;
} Branch;

static int
larger_first(const void *a, const void *b)
{
    const Load *x = a, *y = b;
    if (x->num_tokens != y->num_tokens) {
        return x->num_tokens > y->num_tokens ? -1 : 1;
    }
    return (x->head > y->head) - (x->head < y->head);
}

/* The length that two leaves share: the minimum over the neighbours between them. */
static int32_t
shared_between(const Leaf *leaves, int32_t before, int32_t after)
{
    int32_t shared = leaves[after].shared;
    for (int32_t i = before + 1; i < after; i++) {
        shared = leaves[i].shared < shared ? leaves[i].shared : shared;
    }
    return shared;
}

/* Adds leaf i to its unit. */
static void
read_leaf(const Path *paths, const Leaf *leaves, int32_t i, Unit *unit, int32_t *next)
{
    const int32_t length = paths[leaves[i].path].length;
    Load *load = &unit->load;
    if (load->num_tokens == 0) {
        *load = (Load){length, i, i};
    } else {
        load->num_tokens += length - shared_between(leaves, load->tail, i);
        next[load->tail] = i;
        load->tail = i;
    }
    next[i] = -1;
    unit->to_come--;
}

/* First fit decreasing of the loads under a branch point. Any two share at least `depth` tokens, so
 * no bin has more tokens than are counted. Units of one path share exactly `depth`, except two bins
 * that were cut from a deeper branch: those did not fit together there and do not fit here. Returns
 * the number of loads that remain.
 */
static int32_t
first_fit(Load *loads, int32_t n, int32_t depth, int32_t max_tokens, int32_t *next)
{
    qsort(loads, (size_t)n, sizeof *loads, larger_first);
    int32_t used = 0;
    for (int32_t i = 0; i < n; i++) {
        const Load load = loads[i];
        int32_t bin = 0;
        while (bin < used && loads[bin].num_tokens + load.num_tokens - depth > max_tokens) {
            bin++;
        }
        if (bin == used) {
            loads[used++] = load;
        } else {
            loads[bin].num_tokens += load.num_tokens - depth;
            next[loads[bin].tail] = load.head;
            loads[bin].tail = load.tail;
        }
    }
    return used;
}

/* Assigns a bin to each of the sorted leaves, deepest branch points first: a subtree that fits
 * stays together, and one that does not is cut at its branch points. A unit becomes a load under
 * the branch points of its last leaf. Returns the number of bins, or TREE_EXCESS. loads and next
 * have room for n, branches for n + 1. units, indexed by first path, have all paths in to_come.
 */
static int32_t
assign_bins(const Path *paths, Leaf *leaves, int32_t n, int32_t max_tokens, Unit *units,
            Load *loads, Branch *branches, int32_t *next, Excess *excess)
{
    int32_t num_loads = 0, top = 0, was_last = 0; /* of its unit: the leaf before is a load */
    branches[0] = (Branch){.depth = 0, .first_load = 0};
    for (int32_t i = 0; i <= n; i++) {
        const int32_t shared = i < n ? leaves[i].shared : 0;
        int32_t first_load = num_loads - was_last; /* the leaf before is its branch's first child */
        for (; branches[top].depth > shared; top--) {
            first_load = branches[top].first_load;
            num_loads = first_load + first_fit(loads + first_load, num_loads - first_load,
                                               branches[top].depth, max_tokens, next);
        }
        if (branches[top].depth < shared) {
            branches[++top] = (Branch){.depth = shared, .first_load = first_load};
        }
        if (i == n) {
            break;
        }
        Unit *unit = &units[paths[leaves[i].path].unit];
        read_leaf(paths, leaves, i, unit, next);
        was_last = unit->to_come == 0;
        if (was_last && unit->load.num_tokens > max_tokens) {
            *excess = (Excess){paths[leaves[i].path].unit, unit->load.num_tokens};
            return TREE_EXCESS;
        }
        if (was_last) {
            loads[num_loads++] = unit->load;
        }
    }
    num_loads = first_fit(loads, num_loads, 0, max_tokens, next);
    for (int32_t bin = 0; bin < num_loads; bin++) {
        for (int32_t i = loads[bin].head; i >= 0; i = next[i]) {
            leaves[i].bin = bin;
        }
    }
    return num_loads;
}

/* Orders the leaves by bin, sorted within each, and sums their sizes. last is scratch for one
 * number per bin.
 */
static void
group_by_bin(const Path *paths, Leaf *leaves, int32_t n, Leaf *sorted, int32_t *last, Bin *bins,
             int32_t num_bins)
{
    memset(bins, 0, (size_t)num_bins * sizeof *bins);
    memcpy(sorted, leaves, (size_t)n * sizeof *sorted);
    for (int32_t i = 0; i < n; i++) {
        bins[sorted[i].bin].num_leaves++;
    }
    for (int32_t bin = 0, first = 0; bin < num_bins; bin++) {
        bins[bin].first = first;
        first += bins[bin].num_leaves;
        bins[bin].num_leaves = 0;
    }
    for (int32_t i = 0; i < n; i++) {
        Bin *bin = &bins[sorted[i].bin];
        const Path *path = &paths[sorted[i].path];
        Leaf *leaf = &leaves[bin->first + bin->num_leaves];
        *leaf = sorted[i];
        leaf->shared = bin->num_leaves > 0 ? shared_between(sorted, last[sorted[i].bin], i) : 0;
        last[sorted[i].bin] = i;
        bin->num_leaves++;
        bin->num_tokens += path->length - leaf->shared;
        bin->num_terms += path->num_terms;
    }
}

int32_t
tree_plan(const Path *paths, int32_t n, int32_t max_tokens, int share, Leaf *leaves, Bin *bins,
          Excess *excess)
{
    if (n == 0) {
        return 0;
    }
    const size_t size = (size_t)n;
    int32_t num_bins = TREE_NO_MEMORY;
    Leaf *scratch = malloc(size * sizeof *scratch);
    Unit *units = calloc(size, sizeof *units);
    Load *loads = malloc(size * sizeof *loads);
    Branch *branches = malloc((size + 1) * sizeof *branches);
    int32_t *next = malloc(size * sizeof *next);
    if (scratch != NULL && units != NULL && loads != NULL && branches != NULL && next != NULL) {
        for (int32_t i = 0; i < n; i++) {
            leaves[i] = (Leaf){.path = i};
            units[paths[i].unit].to_come++;
        }
        if (share) {
            sort_leaves(paths, n, leaves, scratch);
        }
        num_bins = assign_bins(paths, leaves, n, max_tokens, units, loads, branches, next, excess);
        if (num_bins >= 0) {
            group_by_bin(paths, leaves, n, scratch, next, bins, num_bins);
        }
    }
    free(next);
    free(branches);
    free(loads);
    free(units);
    free(scratch);
    return num_bins;
}

/* --- layout --------------------------------------------------------------------------------- */

static inline void
append(Table *table, const int32_t *values, int count)
{
    for (int i = 0; table->columns != NULL && i < count; i++) {
        table->columns[i * table->room + table->count] = values[i];
    }
    table->count++;
}

/* The runs of the current path, root first, and its length. A path has one run per branch point. */
typedef struct {
    Run *runs;
    int32_t count, length;
} Open;

/* Appends the tokens of a run at depths [from, end), whose subtrees end at packed index tout. */
static void
append_tokens(const Path *path, const Run *run, int32_t from, int32_t end, int32_t tout,
              Layout *out)
{
    Cursor at = {path->segments, 0};
    for (int32_t depth = from, step = from; depth < end; depth += step) {
        advance(&at, step);
        step = at.segment->size - at.offset;
        step = step < end - depth ? step : end - depth;
        const int32_t source = (int32_t)(at.segment->ids - out->ids) + at.offset;
        const int32_t values[TOKEN_COLUMNS] = {run->index + (depth - run->depth), source, depth,
                                               tout};
        append(&out->tokens, values, TOKEN_COLUMNS);
    }
}

/* Closes the open runs from depth `shared` on: their subtrees end at packed index t. */
static void
close_from(const Path *paths, Open *open, int32_t shared, int32_t t, Layout *out)
{
    while (open->length > shared) {
        const Run *last = &open->runs[open->count - 1];
        const int32_t from = last->depth > shared ? last->depth : shared;
        append_tokens(&paths[last->path], last, from, open->length, t, out);
        open->length = from;
        open->count -= from == last->depth;
    }
}

/* Appends the loss terms of a sampled segment from index `term` on. A token is predicted at the
 * position before it; the first such position is `depth`.
 */
static void
append_terms(const Path *path, const Segment *segment, int32_t depth, int32_t term,
             const Open *open, Layout *out)
{
    int32_t values[TERM_COLUMNS] = {[4] = path->sample, [5] = segment->turn};
    memcpy(&values[6], &segment->advantage, sizeof *values);
    memcpy(&values[7], &path->weight, sizeof *values);
    int32_t end = depth + segment->size;
    for (int32_t i = open->count - 1; end > depth; i--) {
        const Run *run = &open->runs[i];
        if (run->depth < end) {
            const int32_t from = run->depth > depth ? run->depth : depth;
            values[0] = term + (from - depth);
            values[1] = (int32_t)(segment->ids - out->ids) + (from - depth);
            values[2] = (int32_t)(segment->logp - out->logp) + (from - depth);
            values[3] = run->index + (from - run->depth);
            append(&out->terms, values, TERM_COLUMNS);
            end = from;
        }
    }
}

void
tree_lay_out(const Path *paths, const Leaf *leaves, const Bin *bin, Run *scratch, Layout *out)
{
    Open open = {.runs = scratch};
    int32_t t = 0, term = 0;
    for (int32_t i = 0; i < bin->num_leaves; i++) {
        const Leaf *leaf = &leaves[bin->first + i];
        const Path *path = &paths[leaf->path];
        close_from(paths, &open, leaf->shared, t, out);
        if (path->length > leaf->shared) {
            open.runs[open.count++] = (Run){leaf->path, leaf->shared, t};
            open.length = path->length;
            t += path->length - leaf->shared;
        }
        const int32_t terms_end = term + path->num_terms;
        int32_t depth = -1;
        for (const Segment *segment = path->segments; term < terms_end; segment++) {
            if (segment->logp != NULL) {
                append_terms(path, segment, depth, term, &open, out);
                term += segment->size;
            }
            depth += segment->size;
        }
    }
    close_from(paths, &open, 0, t, out);
}
