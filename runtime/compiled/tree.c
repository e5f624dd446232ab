/* Trees drawn without replacement (Sequoia, Chen et al. 2024, algorithm 2).

   As runtime/trees/growth.py and runtime/drafters/draft_model/state.py do it: evaluate a depth,
   make the law of each row, draw the children of its node, and so on. Every evaluation drives the
   interpreter's data out of the processor's caches, and Python's steps after it cost several times
   what they cost elsewhere. */

#include "tree.h"

#include <stdint.h>
#include <string.h>

#include "arrays.h"
#include "draws.h"
#include "law_room.h"
#include "moves.h"
#include "noise.h"
#include "steps.h"
#include "truncation.h"

/* A node that is evaluated: its place in the shape, its number in the tree and among those that are
   evaluated, and the sequence of its path. */
typedef struct {
    PyObject *children; /* its children's places, borrowed */
    Py_ssize_t node, parent, number;
    int64_t token;
    int32_t sequence;
    int has_heir; /* a child has taken over its sequence */
} Evaluated;

typedef struct {
    Steps steps;
    Cells cells;
    Cuts cuts;
    PyObject *shape, *synced;               /* children by place, sequences' lengths */
    PyObject *tokens, *parents, *draws;     /* of the tree */
    PyObject *above, *drawn, *ids_of_paths; /* of what is evaluated: parents, tokens, sequences */
    LawRoom room;
    Py_ssize_t n_known, n_vocab, n_evaluated;
    int32_t end; /* the position of the first depth */
    char is_taken[MOST_SEQUENCES];
    double seconds;
} Growth;

static int append_number(PyObject *list, int64_t value)
{
    PyObject *number = PyLong_FromLongLong(value);
    int failed = number == NULL || PyList_Append(list, number);
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

/* -- sequences ----------------------------------------------------------------------------------- */

/* Find the sequence of the next child of a node, which holds all before position `end`. */
static int find_sequence(Growth *growth, Evaluated *parent, int32_t end, int32_t *sequence)
{
    *sequence = parent->sequence;
    /* The first child goes on in its parent's sequence, which costs no walk over the cells. */
    if (!parent->has_heir) {
        parent->has_heir = 1;
        return 0;
    }
    Py_ssize_t count = PyList_GET_SIZE(growth->synced), free = 0;
    while (free < count && growth->is_taken[free])
        free++;
    if (free == count) {
        PyErr_Format(PyExc_ValueError, "a draft tree with more paths than %zd sequences", count);
        return -1;
    }
    /* It holds the text up to there; the rest is shared at once. */
    long held = PyLong_AsLong(PyList_GET_ITEM(growth->synced, free));
    if (held == -1 && PyErr_Occurred())
        return -1;
    growth->is_taken[free] = 1;
    growth->cells.share(growth->cells.memory, parent->sequence, (int32_t)free, (int32_t)held, end);
    *sequence = (int32_t)free;
    return 0;
}

/* Evaluate a depth below another: 1, 0 where llama.cpp could not (`code`), -1 is an error. */
static int evaluate_depth(
    Growth *growth, Evaluated *above, Evaluated *level, Py_ssize_t count, int depth, int32_t *code)
{
    Batch *batch = growth->steps.batch;
    int32_t position = growth->end + depth - 1;
    batch->n_tokens = (int32_t)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        Evaluated *node = &level[i];
        if (find_sequence(growth, &above[node->parent], position, &node->sequence)
            || append_number(growth->above, above[node->parent].number)
            || append_number(growth->drawn, node->token)
            || append_number(growth->ids_of_paths, node->sequence))
            return -1;
        node->number = growth->n_evaluated++;
        batch->token[i] = (int32_t)node->token;
        batch->pos[i] = position;
        *batch->seq_id[i] = node->sequence;
    }
    *code = evaluate(&growth->steps, &growth->seconds);
    return *code == 0;
}

/* -- draws --------------------------------------------------------------------------------------- */

/* Note children of a node that were drawn from the law that was made last, of so many tokens. */
static int note_children(Growth *growth, Py_ssize_t node, const int64_t *tokens, Py_ssize_t n, Py_ssize_t size)
{
    Py_ssize_t first = PyList_GET_SIZE(growth->tokens);
    PyObject *named = PyTuple_New(n), *parent = PyLong_FromSsize_t(node);
    int failed = named == NULL || parent == NULL;
    for (Py_ssize_t i = 0; !failed && i < n; i++) {
        PyObject *token = PyLong_FromLongLong(tokens[i]);
        failed = token == NULL || PyList_Append(growth->tokens, token)
            || PyList_Append(growth->parents, parent);
        if (token != NULL)
            PyTuple_SET_ITEM(named, i, token);
    }
    PyObject *law = failed ? NULL : name_law(&growth->room, size);
    PyObject *siblings = law == NULL ? NULL : Py_BuildValue("nON", first, named, law);
    failed = siblings == NULL || PyDict_SetItem(growth->draws, parent, siblings);
    Py_XDECREF(siblings);
    Py_XDECREF(named);
    Py_XDECREF(parent);
    return failed ? -1 : 0;
}

/* Draw the children of a node, whose row is given (names as in `make_law`); write what is evaluated next.

   Returns how many these are; -1 is an error, -2 a broken row. */
static Py_ssize_t draw_children(
    Growth *growth, const Evaluated *node, Py_ssize_t index, const float *row, const int32_t *names,
    Noise *noise, Evaluated *next, Py_ssize_t room)
{
    Py_ssize_t wanted = PyTuple_GET_SIZE(node->children), grown = 0, places[MOST_DRAWN];
    int64_t tokens[MOST_DRAWN];
    double left[MOST_DRAWN];
    const int64_t *ids;
    const double *probs;
    Py_ssize_t size = make_law(
        &growth->room, row, names, growth->n_known, &growth->cuts, &ids, &probs);
    if (size <= 0)
        return size < 0 ? -1 : -2;
    memcpy(left, probs, (size_t)size * sizeof *probs);
    Py_ssize_t n = draw_distinct(noise, left, ids, size, wanted < size ? wanted : size, places);
    if (n < 0)
        return -1;
    for (Py_ssize_t i = 0; i < n; i++)
        tokens[i] = ids[places[i]];
    Py_ssize_t first = PyList_GET_SIZE(growth->tokens);
    if (note_children(growth, node->node, tokens, n, size))
        return -1;
    /* Fewer children than places where the law is exhausted: the first ones take the first subtrees. */
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *below = PyDict_GetItemWithError(growth->shape, PyTuple_GET_ITEM(node->children, i));
        if (below == NULL && PyErr_Occurred())
            return -1;
        if (below == NULL)
            continue; /* a leaf of the shape needs no law */
        if (!PyTuple_Check(below) || grown == room) {
            PyErr_SetString(PyExc_ValueError, "children of a shape are tuples, of few nodes");
            return -1;
        }
        next[grown++] = (Evaluated){
            .children = below, .node = first + i, .parent = index, .token = tokens[i]};
    }
    return grown;
}

/* Grow all depths; returns the number of a row that is broken, -1 if none is, -2 for an error. */
static Py_ssize_t grow(Growth *growth, Evaluated *levels[2], Draws *draws, int32_t *code)
{
    Evaluated *level = levels[0], *next = levels[1];
    Py_ssize_t n_level = 1;
    for (Py_ssize_t depth = 0; depth < draws->count; depth++) {
        if (depth > 0) {
            int done = evaluate_depth(growth, next, level, n_level, (int)depth, code);
            if (done <= 0)
                return done < 0 ? -2 : -1;
        }
        /* Ctrl-C, as between two evaluations in Python. */
        if (PyErr_CheckSignals() || seek(&draws->noise, draws->start + depth))
            return -2;
        const float *rows = growth->steps.logits(growth->steps.context);
        Py_ssize_t n_next = 0;
        for (Py_ssize_t i = 0; i < n_level; i++) {
            Py_ssize_t grown = draw_children(
                growth, &level[i], i, rows + i * growth->n_vocab, NULL, &draws->noise, next + n_next,
                MOST_NODES - n_next);
            if (grown < 0)
                return grown == -2 ? i : -2;
            n_next += grown;
        }
        if (n_next == 0)
            break;
        Evaluated *above = level;
        level = next;
        next = above;
        n_level = n_next;
    }
    return -1;
}

/* -- for Python ---------------------------------------------------------------------------------- */

static int open_growth(Growth *growth, PyObject *const *args)
{
    PyObject *nodes[3];
    if (open_steps(args[0], &growth->steps) || open_cells(args[1], &growth->cells))
        return -1;
    if (!PyDict_Check(growth->shape)) {
        PyErr_SetString(PyExc_TypeError, "a shape is a dictionary of children by place");
        return -1;
    }
    if (!PyTuple_Check(args[6]) || !PyTuple_Check(args[8])) {
        PyErr_SetString(PyExc_TypeError, "cuts and nodes are tuples");
        return -1;
    }
    if (!PyArg_ParseTuple(
            args[6], "ddd", &growth->cuts.share, &growth->cuts.lowest,
            &growth->cuts.temperature)
        || !PyArg_ParseTuple(
            args[8], "O!O!O!", &PyList_Type, &nodes[0], &PyList_Type, &nodes[1], &PyList_Type, &nodes[2]))
        return -1;
    growth->above = nodes[0];
    growth->drawn = nodes[1];
    growth->ids_of_paths = nodes[2];
    return open_law_room(args[5], PyDict_GET_SIZE(growth->shape), growth->n_known, &growth->room);
}

/* Set up the root, in the sequence that holds the text. */
static int open_root(Growth *growth, Evaluated *root, PyObject *sequences)
{
    int main;
    PyObject *name = PyLong_FromLong(ROOT), *children = NULL;
    if (name != NULL)
        children = PyDict_GetItemWithError(growth->shape, name);
    Py_XDECREF(name);
    if (PyErr_Occurred() || !PyArg_ParseTuple(sequences, "iO!", &main, &PyList_Type, &growth->synced))
        return -1;
    Py_ssize_t count = PyList_GET_SIZE(growth->synced);
    if (children == NULL || !PyTuple_Check(children) || main < 0 || main >= count || count > MOST_SEQUENCES) {
        PyErr_SetString(PyExc_ValueError, "a shape without a root, or a sequence beside the others");
        return -1;
    }
    growth->is_taken[main] = 1;
    *root = (Evaluated){.children = children, .node = ROOT, .number = ROOT, .sequence = main};
    return 0;
}

/* Evaluate the end of the text, for the row of its last token; -1 is an error. */
static int evaluate_text(Growth *growth, PyObject *tokens, int32_t sequence, int32_t *code)
{
    Batch *batch = growth->steps.batch;
    Py_ssize_t count = PyTuple_GET_SIZE(tokens);
    if (count == 0)
        return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        batch->token[i] = (int32_t)PyLong_AsLong(PyTuple_GET_ITEM(tokens, i));
        batch->pos[i] = growth->end++;
        *batch->seq_id[i] = sequence;
        batch->logits[i] = i == count - 1;
    }
    batch->n_tokens = (int32_t)count;
    if (PyErr_Occurred())
        return -1;
    *code = evaluate(&growth->steps, &growth->seconds);
    for (Py_ssize_t i = 0; i < count; i++)
        batch->logits[i] = 1; /* all others of a tree have rows */
    return 0;
}

const char drawn_tree_doc[] =
"drawn_tree(addresses, memory, place, shape, noise, scratch, cuts, sequences, nodes): draw a tree.\n\n"
"Evaluates the end of a text, draws children without replacement from the law after it, evaluates\n"
"those that have children in `shape` (places of children by place, from -1 on), and so on. `place` is\n"
"the text's end, a tuple (without tokens the row is there), the position of the first token that is\n"
"evaluated, and how many of how many entries of a row count. The batch has room for all this.\n"
"`noise` are the key and the stream of the draws (or the three functions of `verify`), the position of\n"
"the first depth and how many there are. `scratch` has room for one law's probabilities, as many as top-k is; `cuts` as in `truncate`:\n"
"exp, share, lowest, temperature. `sequences` are the one that holds the text, and how much of it each\n"
"holds; parents, tokens and sequences of what is evaluated are appended to `nodes`. Returns\n"
"llama.cpp's last code, the seconds in its evaluation, and of the tree the tokens, the parents, by\n"
"parent the number of its first child, the children's tokens and their law (bytes, its number in\n"
"them, top-k, its size: see law_room.h), and last the number of a row of the last evaluation that is\n"
"no law, or -1.";

PyObject *drawn_tree(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    static const Growth nothing;
    Growth growth = nothing;
    PyObject *text;
    Draws draws;
    if (check_count(n_args, 9))
        return NULL;
    growth.shape = args[3];
    if (!PyTuple_Check(args[2]) || !PyTuple_Check(args[7]) || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "a memory, a place and sequences are tuples");
        return NULL;
    }
    if (!PyArg_ParseTuple(
            args[2], "O!inn", &PyTuple_Type, &text, &growth.end, &growth.n_known, &growth.n_vocab)
        || open_draws(args[4], &draws) || open_growth(&growth, args))
        return NULL;
    Evaluated *nodes = PyMem_Malloc(2 * MOST_NODES * sizeof *nodes);
    Evaluated *levels[] = {nodes, nodes + MOST_NODES};
    growth.tokens = PyList_New(0);
    growth.parents = PyList_New(0);
    growth.draws = PyDict_New();
    PyObject *result = NULL;
    int32_t code = 0;
    if (nodes == NULL)
        PyErr_NoMemory();
    else if (growth.draws != NULL && growth.parents != NULL && growth.tokens != NULL
        && open_root(&growth, nodes, args[7]) == 0
        && evaluate_text(&growth, text, nodes->sequence, &code) == 0) {
        Py_ssize_t broken = -1;
        if (code == 0)
            broken = grow(&growth, levels, &draws, &code);
        if (broken != -2)
            result = Py_BuildValue(
                "id(NNOn)", (int)code, growth.seconds, PyList_AsTuple(growth.tokens),
                PyList_AsTuple(growth.parents), growth.draws, broken);
    }
    Py_XDECREF(growth.tokens);
    Py_XDECREF(growth.parents);
    Py_XDECREF(growth.draws);
    PyMem_Free(nodes);
    close_law_room(&growth.room);
    return result;
}
