/* Moves of sequences among the cells of llama.cpp's memory, all of a round's in one call.

   A tree of a dozen leaves makes two dozen calls of a microsecond; Python takes longer around each. */

#include "moves.h"

#include "arrays.h"

#define MOST_MOVES 256 /* llama.cpp has no more sequences */

typedef struct {
    int32_t sequence, shared, strays;
} Move;

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
    for (Py_ssize_t i = 0; i < count && i < MOST_MOVES; i++) {
        PyObject *move = PyTuple_GET_ITEM(given, i);
        if (!PyTuple_Check(move) || PyTuple_GET_SIZE(move) != 3) {
            count = -1;
            break;
        }
        moves[i].sequence = (int32_t)PyLong_AsLong(PyTuple_GET_ITEM(move, 0));
        moves[i].shared = (int32_t)PyLong_AsLong(PyTuple_GET_ITEM(move, 1));
        moves[i].strays = PyObject_IsTrue(PyTuple_GET_ITEM(move, 2));
    }
    if (count >= 0 && count <= MOST_MOVES && !PyErr_Occurred())
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
    Move moves[MOST_MOVES];
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
