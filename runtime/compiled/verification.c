/* Block verification of a leading chain of draws, and the token-wise rule for what lies below.

   As runtime/acceptance/exact.py and exact.py do it, in one call that also makes the target's laws of
   its rows: after an evaluation the interpreter's data is not in the processor's caches, and a dozen
   of Python's steps cost more than all that is counted here. Whatever is not short and plain (dense
   laws, broken rows, draws of no mass) is left to Python: nothing has changed by then. */

#include "verification.h"

#include <string.h>

#include "arrays.h"
#include "law_room.h"
#include "noise.h"
#include "rows.h"
#include "short_laws.h"
#include "sums.h"

#define SHORT 128     /* tokens of a law, as in runtime/laws/law.py */
#define DEEPEST 64    /* nodes of a path */
#define ROOT (-1)

/* What a step comes to. */
enum { FAILED = -1, UNUSUAL = 0, DONE = 1 };

typedef struct {
    int64_t ids[SHORT];
    double probs[SHORT];
    Py_ssize_t size;
} Law;

typedef struct {
    RowSource rows;
    PyObject *tokens, *draws; /* by node, by parent */
    PyObject *array;                   /* where laws are made: its length is top-k's */
    Cuts cuts;
    Noise noise;
    int64_t position;
    Py_ssize_t path[DEEPEST], n_path;
} Walk;

/* The draws at a node: a tuple of (node, law), or siblings without replacement: (first, tokens, law).
   A law may be unmade. */
typedef struct {
    PyObject *drawn, *tokens, *law;
    Py_ssize_t count, first;
} Drawn;

/* A draft law that was opened: of a law of Python's, or a point mass. */
typedef struct {
    Py_buffer views[2];
    int64_t token;
    double certain;
    const int64_t *ids;
    const double *probs;
    Py_ssize_t size;
    int is_open;
} Draft;

/* Draw the token of a position from probabilities of a law's tokens. */
static int choose(const Noise *noise, const double *probs, const Law *law, int64_t *token)
{
    if (noise->choose != NULL)
        return call_choose(noise, probs, law->ids, law->size, token) ? FAILED : DONE;
    *token = law->size == 1
        ? law->ids[0] : first_of_race(probs, law->ids, law->size, split_mix(noise->word, 2));
    return DONE;
}

/* -- laws and draws ------------------------------------------------------------------------------ */

static double probability_in(
    const int64_t *ids, const double *probs, Py_ssize_t size, int64_t token)
{
    Py_ssize_t place = place_among(ids, size, token);
    return place < 0 ? 0.0 : probs[place];
}

/* Make the target's law after a node. */
static int law_after(Walk *walk, Py_ssize_t node, Law *law)
{
    Row row;
    Py_buffer view;
    int result = open_row(&walk->rows, node + 1, &row);
    if (result <= 0)
        return result < 0 ? FAILED : UNUSUAL; /* numbers of another kind are for Python */
    result = UNUSUAL;
    if (open_array(walk->array, &view, 'd', 1)) {
        result = FAILED;
    } else {
        Py_ssize_t k = length_of(&view);
        if (k >= 1 && k <= SHORT && k < row.size) {
            law->size = law_of_row(
                row.entries, row.size, &walk->cuts, k, law->ids, view.buf, walk->array);
            result = law->size < 0 ? FAILED : law->size > 0 ? DONE : UNUSUAL;
            if (result == DONE)
                memcpy(law->probs, view.buf, (size_t)law->size * sizeof(double));
        }
        PyBuffer_Release(&view);
    }
    close_row(&row);
    return result;
}

static void close_drawn(Drawn *drawn)
{
    Py_CLEAR(drawn->drawn);
}

/* Look up the draws at a node. */
static int open_drawn(Walk *walk, Py_ssize_t node, Drawn *drawn)
{
    PyObject *name = PyLong_FromSsize_t(node);
    drawn->drawn = name == NULL ? NULL : PyObject_CallOneArg(walk->draws, name);
    drawn->tokens = NULL;
    drawn->count = 0;
    Py_XDECREF(name);
    if (drawn->drawn == NULL)
        return FAILED;
    if (drawn->drawn == Py_None)
        return DONE;
    if (!PyTuple_Check(drawn->drawn)) {
        close_drawn(drawn);
        return UNUSUAL;
    }
    drawn->count = PyTuple_GET_SIZE(drawn->drawn);
    if (drawn->count == 3 && PyLong_Check(PyTuple_GET_ITEM(drawn->drawn, 0))) {
        drawn->first = PyLong_AsSsize_t(PyTuple_GET_ITEM(drawn->drawn, 0));
        drawn->tokens = PyTuple_GET_ITEM(drawn->drawn, 1);
        drawn->law = PyTuple_GET_ITEM(drawn->drawn, 2);
        drawn->count = PySequence_Size(drawn->tokens);
        if (drawn->first < 0 || drawn->count < 0) {
            int failed = PyErr_Occurred() != NULL;
            close_drawn(drawn);
            return failed ? FAILED : UNUSUAL;
        }
    }
    return DONE;
}

/* Read a draw: its node, and the law that it was drawn from, None for a point mass; both borrowed. */
static int read_draw(const Walk *walk, const Drawn *drawn, Py_ssize_t i, Py_ssize_t *node, PyObject **law)
{
    if (drawn->tokens != NULL) {
        *node = drawn->first + i;
        *law = drawn->law;
    } else {
        PyObject *draw = PyTuple_GET_ITEM(drawn->drawn, i);
        if (!PyTuple_Check(draw) || PyTuple_GET_SIZE(draw) != 2)
            return UNUSUAL;
        *node = PyLong_AsSsize_t(PyTuple_GET_ITEM(draw, 0));
        *law = PyTuple_GET_ITEM(draw, 1);
    }
    if (*node >= 0 && *node < PyTuple_GET_SIZE(walk->tokens))
        return DONE;
    return PyErr_Occurred() ? FAILED : UNUSUAL;
}

static int token_of(const Walk *walk, Py_ssize_t node, int64_t *token)
{
    *token = PyLong_AsLongLong(PyTuple_GET_ITEM(walk->tokens, node));
    return *token == -1 && PyErr_Occurred() ? FAILED : DONE;
}

static void close_draft(Draft *draft)
{
    if (draft->is_open)
        close_arrays(draft->views, 2);
    draft->is_open = 0;
}

/* Open a draft law that lies among others (`name_law`). */
static int open_unmade(PyObject *law, Draft *draft)
{
    PyObject *laws = PyTuple_GET_ITEM(law, 0);
    Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(law, 1));
    Py_ssize_t k = PyLong_AsSsize_t(PyTuple_GET_ITEM(law, 2));
    draft->size = PyLong_AsSsize_t(PyTuple_GET_ITEM(law, 3));
    if (PyErr_Occurred())
        return FAILED;
    if (!PyBytes_Check(laws) || place < 0 || draft->size < 1 || draft->size > k || k > SHORT
        || place >= PyBytes_GET_SIZE(laws) / (k * (Py_ssize_t)LAW_ENTRY))
        return UNUSUAL;
    draft->ids = (const int64_t *)(PyBytes_AS_STRING(laws) + place * k * (Py_ssize_t)LAW_ENTRY);
    draft->probs = (const double *)(draft->ids + k);
    return DONE;
}

/* Open a draft law; None is the point mass on a token. */
static int open_draft(PyObject *law, int64_t token, Draft *draft)
{
    draft->is_open = 0;
    if (PyTuple_CheckExact(law) && PyTuple_GET_SIZE(law) == 4)
        return open_unmade(law, draft);
    if (law == Py_None) {
        draft->token = token;
        draft->certain = 1.0;
        draft->ids = &draft->token;
        draft->probs = &draft->certain;
        draft->size = 1;
        return DONE;
    }
    PyObject *arrays[] = {PyObject_GetAttrString(law, "probs"), NULL};
    if (arrays[0] != NULL)
        arrays[1] = PyObject_GetAttrString(law, "ids");
    int result = arrays[1] == NULL ? FAILED : UNUSUAL;
    if (result == UNUSUAL && arrays[1] != Py_None) {
        if (open_arrays(arrays, draft->views, "dq")) {
            PyErr_Clear();
        } else {
            draft->probs = draft->views[0].buf;
            draft->ids = draft->views[1].buf;
            draft->size = length_of(&draft->views[0]);
            draft->is_open = 1;
            result = draft->size == length_of(&draft->views[1]) ? DONE : UNUSUAL;
            if (result != DONE)
                close_draft(draft);
        }
    }
    /* The views hold what they need. */
    Py_XDECREF(arrays[0]);
    Py_XDECREF(arrays[1]);
    return result;
}

/* -- token by token ------------------------------------------------------------------------------ */

/* Make the residual of what remains, after a draw from a law was rejected. */
static void reject(Law *remaining, const Draft *draft)
{
    double left[SHORT];
    write_left_over(
        remaining->probs, remaining->ids, remaining->size, draft->probs, draft->ids, draft->size, 1.0,
        left);
    if (scale_weights(left, remaining->size) > 0.0)
        memcpy(remaining->probs, left, (size_t)remaining->size * sizeof *left);
}

/* Test one draw: 1 + DONE if it is accepted; else the remaining law is what its rejection leaves. */
static int test_draw(Walk *walk, PyObject *law, const Draft *draft, int64_t token, Law *remaining)
{
    double target = probability_in(remaining->ids, remaining->probs, remaining->size, token);
    double drafted = probability_in(draft->ids, draft->probs, draft->size, token);
    if (!(drafted > 0.0))
        return UNUSUAL;
    int is_kept = target > 0.0 ? accepts(&walk->noise, target / drafted) : 0;
    if (is_kept)
        return is_kept < 0 ? FAILED : 1 + DONE;
    if (law == Py_None)
        take_out(remaining->probs, remaining->ids, remaining->size, token);
    else
        reject(remaining, draft);
    return DONE;
}

/* Decide between siblings, each drawn from what the earlier ones left of a law. */
static int test_siblings(Walk *walk, const Drawn *drawn, Law *remaining, Py_ssize_t *child)
{
    Draft draft;
    double left[SHORT];
    int result = open_draft(drawn->law, 0, &draft);
    if (result != DONE)
        return result;
    if (draft.size > SHORT)
        result = UNUSUAL;
    else
        memcpy(left, draft.probs, (size_t)draft.size * sizeof *left);
    draft.probs = left;
    for (Py_ssize_t i = 0; result == DONE && i < drawn->count; i++) {
        Py_ssize_t node;
        PyObject *law;
        int64_t token;
        result = read_draw(walk, drawn, i, &node, &law);
        if (result == DONE)
            result = token_of(walk, node, &token);
        if (result != DONE)
            break;
        result = test_draw(walk, law, &draft, token, remaining);
        if (result == 1 + DONE)
            *child = node;
        else
            take_out(left, draft.ids, draft.size, token);
    }
    close_draft(&draft);
    return result == 1 + DONE ? DONE : result;
}

/* Decide between draws, each with a law of its own, and point masses before the last of these. */
static int test_draws(Walk *walk, const Drawn *drawn, Py_ssize_t n_tested, Law *remaining, Py_ssize_t *child)
{
    for (Py_ssize_t i = 0; i < n_tested; i++) {
        Py_ssize_t node;
        PyObject *law;
        int64_t token;
        Draft draft;
        int result = read_draw(walk, drawn, i, &node, &law);
        if (result == DONE)
            result = token_of(walk, node, &token);
        if (result == DONE)
            result = open_draft(law, token, &draft);
        if (result != DONE)
            return result;
        result = test_draw(walk, law, &draft, token, remaining);
        close_draft(&draft);
        if (result == 1 + DONE)
            *child = node;
        if (result != DONE)
            return result == 1 + DONE ? DONE : result;
    }
    return DONE;
}

/* Settle the point masses from number `start` on: one draw, and the child that it names, if any. */
static int settle(Walk *walk, const Drawn *drawn, Py_ssize_t start, const Law *remaining, Py_ssize_t *child, int64_t *token)
{
    int result = choose(&walk->noise, remaining->probs, remaining, token);
    for (Py_ssize_t i = start; result == DONE && i < drawn->count; i++) {
        Py_ssize_t node;
        PyObject *law;
        int64_t drafted;
        result = read_draw(walk, drawn, i, &node, &law);
        if (result == DONE)
            result = token_of(walk, node, &drafted);
        if (result != DONE)
            return result;
        if (drafted == *token) {
            *child = node;
            break;
        }
    }
    return result;
}

/* Count the draws that are tested in turn: all up to the last that has a law. */
static int count_tested(const Walk *walk, const Drawn *drawn, Py_ssize_t *count)
{
    *count = drawn->count;
    for (; *count > 0; --*count) {
        Py_ssize_t node;
        PyObject *law;
        int result = read_draw(walk, drawn, *count - 1, &node, &law);
        if (result != DONE)
            return result;
        if (law != Py_None)
            break;
    }
    return DONE;
}

/* Walk down from a node to a token that is no child. */
static int walk_down(Walk *walk, Py_ssize_t node, int64_t *token, int *rejected)
{
    for (;;) {
        Law remaining;
        Drawn drawn;
        Py_ssize_t n_tested, child = -1;
        int result = seek(&walk->noise, walk->position + walk->n_path)
            ? FAILED : open_drawn(walk, node, &drawn);
        if (result != DONE)
            return result;
        result = count_tested(walk, &drawn, &n_tested);
        if (result == DONE)
            result = law_after(walk, node, &remaining);
        if (result == DONE)
            result = drawn.tokens != NULL ? test_siblings(walk, &drawn, &remaining, &child)
                                          : test_draws(walk, &drawn, n_tested, &remaining, &child);
        if (result == DONE && child < 0)
            result = settle(walk, &drawn, n_tested, &remaining, &child, token);
        *rejected = drawn.count > 0;
        close_drawn(&drawn);
        if (result != DONE || child < 0)
            return result;
        if (walk->n_path == DEEPEST)
            return UNUSUAL;
        walk->path[walk->n_path++] = child;
        node = child;
    }
}

/* -- chains as blocks ---------------------------------------------------------------------------- */

/* After i tokens of the chain: p_i, P_{i+1}, and what Q_{i+1} and the token drawn from it are. */
typedef struct {
    double share;
    Law law;
    PyObject *draft;
    int64_t token;
} Level;

typedef struct {
    Py_ssize_t nodes[DEEPEST], length;
    PyObject *laws[DEEPEST]; /* held */
    int is_drawn;            /* any has a law */
} Chain;

static void close_chain(Chain *chain)
{
    while (chain->length > 0)
        Py_DECREF(chain->laws[--chain->length]);
}

/* Follow the draws from the root down to the first node that has none or several. */
static int read_chain(Walk *walk, Chain *chain)
{
    Py_ssize_t node = ROOT;
    chain->length = 0;
    chain->is_drawn = 0;
    for (;;) {
        Drawn drawn;
        PyObject *law;
        int result = open_drawn(walk, node, &drawn);
        if (result != DONE)
            return result;
        if (drawn.count != 1) {
            close_drawn(&drawn);
            return DONE;
        }
        result = chain->length == DEEPEST ? UNUSUAL : read_draw(walk, &drawn, 0, &node, &law);
        if (result == DONE) {
            chain->is_drawn |= law != Py_None;
            chain->nodes[chain->length] = node;
            chain->laws[chain->length++] = Py_NewRef(law);
        }
        close_drawn(&drawn);
        if (result != DONE)
            return result;
    }
}

/* Make the levels above the chain's draws, and p_L; once the share is 0, fewer. */
static int make_levels(Walk *walk, const Chain *chain, Level *levels, Py_ssize_t *count, double *share)
{
    *share = 1.0;
    *count = 0;
    for (Py_ssize_t i = 0; i < chain->length && *share > 0.0; i++) {
        Level *level = &levels[i];
        Draft draft;
        level->share = *share;
        level->draft = chain->laws[i];
        int result = token_of(walk, chain->nodes[i], &level->token);
        if (result == DONE)
            result = open_draft(level->draft, level->token, &draft);
        if (result != DONE)
            return result;
        double drafted = probability_in(draft.ids, draft.probs, draft.size, level->token);
        close_draft(&draft);
        result = drafted > 0.0 ? law_after(walk, i ? chain->nodes[i - 1] : ROOT, &level->law) : UNUSUAL;
        if (result != DONE)
            return result;
        const Law *law = &level->law;
        double claimed = *share * probability_in(law->ids, law->probs, law->size, level->token) / drafted;
        *share = claimed < 1.0 ? claimed : 1.0;
        ++*count;
    }
    return DONE;
}

/* Weigh what the next token cannot claim of a level: write its weights, return their sum. */
static int weigh(const Level *level, double *left, double *total)
{
    Draft draft;
    const Law *law = &level->law;
    int result = open_draft(level->draft, level->token, &draft);
    if (result != DONE)
        return result;
    write_left_over(
        law->probs, law->ids, law->size, draft.probs, draft.ids, draft.size, level->share, left);
    *total = sum_of(left, law->size);
    close_draft(&draft);
    return DONE;
}

/* Find how many tokens are kept of a chain that is not kept whole, and draw the one after them. */
static int keep_part(Walk *walk, const Chain *chain, const Level *levels, Py_ssize_t count, int64_t *token)
{
    double left[SHORT], total = 0.0;
    Py_ssize_t kept = count - 1;
    for (;; kept--) {
        const Level *level = &levels[kept];
        int result = weigh(level, left, &total);
        if (result != DONE)
            return result;
        double rest = total + (1.0 - level->share);
        int is_kept = kept == 0 ? 1 : accepts(&walk->noise, rest > 0.0 ? total / rest : 1.0);
        if (is_kept < 0)
            return FAILED;
        if (is_kept)
            break;
    }
    const Law *law = &levels[kept].law;
    for (Py_ssize_t i = 0; total > 0.0 && i < law->size; i++)
        left[i] /= total;
    memcpy(walk->path, chain->nodes, (size_t)kept * sizeof *walk->path);
    walk->n_path = kept;
    return seek(&walk->noise, walk->position + kept)
        ? FAILED : choose(&walk->noise, total > 0.0 ? left : law->probs, law, token);
}

static int verify_block(Walk *walk, int64_t *token, int *rejected)
{
    Chain chain;
    Level *levels = NULL;
    Py_ssize_t count, node = ROOT;
    double share;
    int is_whole = 1, result = read_chain(walk, &chain);
    if (result == DONE && chain.is_drawn) {
        levels = PyMem_Malloc((size_t)chain.length * sizeof *levels);
        if (levels == NULL) {
            PyErr_NoMemory();
            result = FAILED;
        } else {
            result = make_levels(walk, &chain, levels, &count, &share);
        }
        /* All tests are keyed with the round's first position. */
        if (result == DONE && seek(&walk->noise, walk->position))
            result = FAILED;
        if (result == DONE) {
            is_whole = share > 0.0 ? accepts(&walk->noise, share) : 0;
            if (is_whole < 0) {
                result = FAILED;
            } else if (is_whole) {
                memcpy(walk->path, chain.nodes, (size_t)chain.length * sizeof *walk->path);
                walk->n_path = chain.length;
                node = chain.nodes[chain.length - 1];
            } else {
                *rejected = 1;
                result = keep_part(walk, &chain, levels, count, token);
            }
        }
        PyMem_Free(levels);
    }
    close_chain(&chain);
    return result == DONE && is_whole ? walk_down(walk, node, token, rejected) : result;
}

/* -- for Python ---------------------------------------------------------------------------------- */

const char verify_doc[] =
"verify(logits, tokens, draws, array, cuts, noise, position, as_blocks): what an exact rule keeps.\n\n"
"Row 0 of `logits`, a function or a matrix, is the root's, row i + 1 that of node i; laws are made of\n"
"them in `array`, whose length, 128 at most, is top-k's, by `cuts`: exp, share, lowest and temperature, as in `truncate`.\n"
"`draws(node)` are a node's draws, or None: a tuple of (node, law), or (first, tokens, law) of siblings\n"
"without replacement. Numbers are those of `SeededNoise` of `noise`, key and stream, from a position on;\n"
"a source of another kind is three functions, its seek, its accept, and its choose, whose laws are unmade.\n"
"`as_blocks`: the leading chain is verified as a block. Returns the path, the token after it, and\n"
"whether there were draws to refuse; None if it needs what only Python does.";

PyObject *verify(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    if (check_count(n_args, 8))
        return NULL;
    Walk walk = {.tokens = args[1], .draws = args[2], .array = args[3], .n_path = 0};
    Cuts *cuts = &walk.cuts;
    if (!PyTuple_Check(args[1]) || !PyTuple_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "tokens and cuts are tuples");
        return NULL;
    }
    if (!PyArg_ParseTuple(args[4], "Oddd", &cuts->exp, &cuts->share, &cuts->lowest, &cuts->temperature)
        || open_noise(args[5], &walk.noise))
        return NULL;
    walk.position = PyLong_AsLongLong(args[6]);
    int as_blocks = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[7]), rejected = 0;
    if (as_blocks < 0 || open_rows(args[0], &walk.rows))
        return NULL;
    int64_t token = 0;
    int result = as_blocks ? verify_block(&walk, &token, &rejected)
                           : walk_down(&walk, ROOT, &token, &rejected);
    close_rows(&walk.rows);
    if (result == FAILED)
        return NULL;
    if (result == UNUSUAL)
        Py_RETURN_NONE;
    PyObject *path = PyTuple_New(walk.n_path);
    for (Py_ssize_t i = 0; path != NULL && i < walk.n_path; i++) {
        PyObject *node = PyLong_FromSsize_t(walk.path[i]);
        if (node == NULL)
            Py_CLEAR(path);
        else
            PyTuple_SET_ITEM(path, i, node);
    }
    return path == NULL ? NULL : Py_BuildValue("NLO", path, token, rejected ? Py_True : Py_False);
}
