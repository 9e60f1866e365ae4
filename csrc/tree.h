/* The prefix tree of a step's rollouts: sorted, cut into bins, laid out. No Python here.
 *
 * The tree is never built. Paths sorted by their tokens, each with the length that it shares with
 * the previous path, are the depth-first order of the tree: laying out a path means appending its
 * tokens from `shared` on. There are no nodes, no child lists to search and nothing to free.
 */
#ifndef AGENTGRPO_TREE_H
#define AGENTGRPO_TREE_H

#include <stdint.h>

typedef struct {
    const int32_t *ids;
    const float *logp; /* NULL: not sampled */
    int32_t size;      /* > 0 */
    int32_t turn;      /* number of sampled segments before it */
    float advantage;
} Segment;

typedef struct {
    const Segment *segments; /* the first is not sampled: no token would predict its first one */
    int32_t length;          /* tokens to lay out: all before the last sampled one */
    int32_t num_terms;       /* sampled tokens */
    int32_t sample;          /* index of the rollout within the step */
    int32_t unit;            /* the first of the paths that must be in the same bin as this one */
    float weight;
} Path;

typedef struct {
    int32_t path;
    int32_t
        shared; /* tokens shared with the leaf before: in the step when sorted, then in its bin */
    int32_t bin;
} Leaf;

typedef struct {
    int64_t num_tokens;
    int64_t num_terms;
    int32_t first; /* index of the bin's first leaf */
    int32_t num_leaves;
} Bin;

/* Runs of one kind, a column each, in any order. */
typedef struct {
    int32_t *columns; /* [columns][room]; NULL: only count the runs */
    int64_t room, count;
} Table;

enum { TOKEN_COLUMNS = 4, TERM_COLUMNS = 8 };

/* A bin as runs: of tokens with consecutive ids in memory and the same end of subtree, and of loss
 * terms with consecutive rows. The columns are those of kernels/delta_pack.py.
 */
typedef struct {
    Table tokens, terms;
    const int32_t *ids; /* of the step: the origin of a run's source */
    const float *logp;
} Layout;

/* Consecutive tokens of a path: depths from `depth` to that of the next run, at packed indices from
 * `index` on.
 */
typedef struct {
    int32_t path, depth, index;
} Run;

/* A unit that does not fit into a bin: its first path, and the tokens of all its paths. */
typedef struct {
    int32_t unit;
    int64_t num_tokens;
} Excess;

enum { TREE_NO_MEMORY = -1, TREE_EXCESS = -2 };

/* Sorts n paths into leaves, cuts them into bins of at most max_tokens tokens and orders the leaves
 * by bin. Without share, every path is a separate tree. leaves and bins have room for n. Returns
 * the number of bins, TREE_NO_MEMORY, or TREE_EXCESS with the first unit that does not fit.
 */
int32_t tree_plan(const Path *paths, int32_t n, int32_t max_tokens, int share, Leaf *leaves,
                  Bin *bins, Excess *excess);

/* Writes the runs of a bin, or counts them. scratch has room for one run per leaf. */
void tree_lay_out(const Path *paths, const Leaf *leaves, const Bin *bin, Run *scratch, Layout *out);

#endif
