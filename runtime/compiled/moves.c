/* Moves of sequences among the cells of llama.cpp's memory, all of a round's in one call: onto the
   accepted path of a target's tree (`follow`) and of a draft model's (`keep_path`).

   A tree of a dozen leaves makes two dozen calls of a microsecond; Python takes longer around each. */

#include "moves.h"

#include <string.h>

#define ALL_SEQUENCES (-1)

typedef struct {
    int32_t sequence, shared, strays;
} Move;

static int check_count(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments where %zd are needed", given, wanted);
    return -1;
}

int open_cells(PyObject *addresses, Cells *cells)
{
    void *found[3];
    if (!PyTuple_Check(addresses) || PyTuple_GET_SIZE(addresses) != 3) {
        PyErr_SetString(PyExc_TypeError, "the addresses of a memory are a tuple of 3");
        return -1;
    }
    for (int i = 0; i < 3; i++)
        found[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, i));
    if (PyErr_Occurred())
        return -1;
    cells->drop = (_Bool (*)(void *, int32_t, int32_t, int32_t))(uintptr_t)found[0];
    cells->share = (void (*)(void *, int32_t, int32_t, int32_t, int32_t))(uintptr_t)found[1];
    cells->memory = found[2];
    return 0;
}

/* Read (sequence, shared, strays) of each; -1 is an error. */
static Py_ssize_t read_moves(PyObject *given, Move *moves)
{
    Py_ssize_t count = PyTuple_Check(given) ? PyTuple_GET_SIZE(given) : -1;
    for (Py_ssize_t i = 0; i < count && i < MOST_SEQUENCES; i++) {
        PyObject *move = PyTuple_GET_ITEM(given, i);
        if (!PyTuple_Check(move) || PyTuple_GET_SIZE(move) != 3) {
            count = -1;
            break;
        }
        moves[i].sequence = (int32_t)PyLong_AsLong(PyTuple_GET_ITEM(move, 0));
        moves[i].shared = (int32_t)PyLong_AsLong(PyTuple_GET_ITEM(move, 1));
        moves[i].strays = PyObject_IsTrue(PyTuple_GET_ITEM(move, 2));
    }
    if (count >= 0 && count <= MOST_SEQUENCES && !PyErr_Occurred())
        return count;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "moves are a tuple of at most 256 tuples of 3");
    return -1;
}

const char follow_doc[] =
"follow(addresses, source, first, end, moves): let sequences take over what they lack of another.\n\n"
"Each of `moves` is (sequence, shared, strays): positions from first + shared to `end` are shared with\n"
"`source`, after what the sequence strays to there was dropped. Addresses are those of llama.cpp's\n"
"llama_memory_seq_rm, llama_memory_seq_cp and of a memory. Returns False where it cannot drop a part.";

PyObject *follow(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Move moves[MOST_SEQUENCES];
    Cells cells;
    if (check_count(n_args, 5) || open_cells(args[0], &cells))
        return NULL;
    int32_t source = (int32_t)PyLong_AsLong(args[1]), first = (int32_t)PyLong_AsLong(args[2]);
    int32_t end = (int32_t)PyLong_AsLong(args[3]);
    Py_ssize_t count = PyErr_Occurred() ? -1 : read_moves(args[4], moves);
    if (count < 0)
        return NULL;
    int done = 1;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; done && i < count; i++) {
        int32_t start = first + moves[i].shared;
        /* First, or the path would be attended to beside another branch's cells. */
        if (moves[i].strays)
            done = cells.drop(cells.memory, moves[i].sequence, start, end);
        if (done)
            cells.share(cells.memory, source, moves[i].sequence, start, end);
    }
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(done);
}

/* -- what is kept -------------------------------------------------------------------------------- */

/* Nodes that were evaluated, in their order. */
typedef struct {
    Py_ssize_t count, parents[MOST_NODES], depths[MOST_NODES];
    int64_t tokens[MOST_NODES];
    int32_t sequences[MOST_NODES];
    char is_kept[MOST_NODES];
} Nodes;

static int read_nodes(PyObject *const lists[3], Nodes *nodes)
{
    nodes->count = PyList_GET_SIZE(lists[0]);
    if (nodes->count > MOST_NODES || nodes->count != PyList_GET_SIZE(lists[1])
        || nodes->count != PyList_GET_SIZE(lists[2])) {
        PyErr_SetString(PyExc_ValueError, "nodes have a parent, a token and a sequence each, and are few");
        return -1;
    }
    for (Py_ssize_t i = 0; i < nodes->count; i++) {
        Py_ssize_t parent = PyLong_AsSsize_t(PyList_GET_ITEM(lists[0], i));
        nodes->tokens[i] = PyLong_AsLongLong(PyList_GET_ITEM(lists[1], i));
        long sequence = PyLong_AsLong(PyList_GET_ITEM(lists[2], i));
        if (PyErr_Occurred())
            return -1;
        if (parent < ROOT || parent >= i || sequence < 0 || sequence >= MOST_SEQUENCES) {
            PyErr_SetString(PyExc_ValueError, "a node below a later one, or in a sequence beside the others");
            return -1;
        }
        nodes->parents[i] = parent;
        nodes->sequences[i] = (int32_t)sequence;
        nodes->depths[i] = parent == ROOT ? 1 : nodes->depths[parent] + 1;
        nodes->is_kept[i] = 0;
    }
    return 0;
}

/* Mark the nodes that spell the beginning of a text; returns how many, and the last, -1: an error. */
static Py_ssize_t mark_path(Nodes *nodes, PyObject *text, Py_ssize_t *last)
{
    Py_ssize_t length = 0;
    *last = ROOT;
    for (; length < PyList_GET_SIZE(text); length++) {
        int64_t token = PyLong_AsLongLong(PyList_GET_ITEM(text, length));
        Py_ssize_t node = *last + 1;
        if (token == -1 && PyErr_Occurred())
            return -1;
        /* The first of equal children: either spells the path. */
        while (node < nodes->count && (nodes->parents[node] != *last || nodes->tokens[node] != token))
            node++;
        if (node == nodes->count)
            break;
        nodes->is_kept[node] = 1;
        *last = node;
    }
    return length;
}

/* Drop what sequences hold beside the path, whose cells are the text's own; returns 0 if it cannot. */
static int drop_strays(
    const Nodes *nodes, const Cells *cells, Py_ssize_t length, int32_t base, int32_t *held)
{
    for (Py_ssize_t tip = nodes->count - 1; tip >= 0; tip--) {
        int32_t sequence = nodes->sequences[tip];
        if (held[sequence] >= 0)
            continue; /* the deepest node of each comes first */
        Py_ssize_t node = tip, depth = nodes->depths[tip];
        while (node != ROOT && !nodes->is_kept[node])
            node = nodes->parents[node];
        Py_ssize_t shared = node == ROOT ? 0 : nodes->depths[node];
        held[sequence] = base + (int32_t)shared;
        if ((depth < length ? depth : length) > shared
            && !cells->drop(cells->memory, sequence, held[sequence], base + (int32_t)length))
            return 0;
    }
    return 1;
}

const char keep_path_doc[] =
"keep_path(memory, nodes, text, base, main, synced): keep the nodes that spell a text's beginning.\n\n"
"`nodes` are lists of parents, tokens and sequences of what was evaluated below position `base`, in\n"
"that order. Whatever is not kept of them is dropped from the memory, and how much of the text each\n"
"sequence holds is written to `synced`. Returns how many nodes are kept, and the sequence that holds\n"
"them all: that of the last, `main` without any; None where llama.cpp cannot drop a part.";

PyObject *keep_path(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Cells cells;
    PyObject *lists[3];
    if (check_count(n_args, 6) || open_cells(args[0], &cells))
        return NULL;
    int32_t base = (int32_t)PyLong_AsLong(args[3]), main = (int32_t)PyLong_AsLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if (!PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "nodes are a tuple");
        return NULL;
    }
    if (!PyArg_ParseTuple(
            args[1], "O!O!O!", &PyList_Type, &lists[0], &PyList_Type, &lists[1], &PyList_Type, &lists[2]))
        return NULL;
    if (!PyList_Check(args[2]) || !PyList_Check(args[5])) {
        PyErr_SetString(PyExc_TypeError, "a text and what sequences hold are lists");
        return NULL;
    }
    Nodes nodes;
    Py_ssize_t last, length, deepest = 0;
    if (read_nodes(lists, &nodes) || (length = mark_path(&nodes, args[2], &last)) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < nodes.count; i++)
        deepest = nodes.depths[i] > deepest ? nodes.depths[i] : deepest;
    int32_t held[MOST_SEQUENCES], end = base + (int32_t)length;
    memset(held, -1, sizeof held);
    /* One walk over the cells drops everything deeper, for all sequences. */
    if ((deepest > length && !cells.drop(cells.memory, ALL_SEQUENCES, end, -1))
        || !drop_strays(&nodes, &cells, length, base, held))
        Py_RETURN_NONE;
    if (last != ROOT) {
        main = nodes.sequences[last];
        held[main] = end;
    }
    for (Py_ssize_t i = 0; i < MOST_SEQUENCES; i++) {
        PyObject *size = held[i] < 0 ? NULL : PyLong_FromLong(held[i]);
        if (held[i] >= 0 && (size == NULL || PyList_SetItem(args[5], i, size)))
            return NULL;
    }
    return Py_BuildValue("ni", length, (int)main);
}
