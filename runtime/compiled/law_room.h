/* Room for laws that a draft makes, one after the other: ids and probabilities, side by side. */

#ifndef LAW_ROOM_H
#define LAW_ROOM_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "arrays.h"
#include "draws.h"
#include "truncation.h"

#define LAW_ENTRY (sizeof(int64_t) + sizeof(double))

/* Of laws of up to k tokens, law number i lies at i * k * LAW_ENTRY of `laws`, bytes: first k ids, of
   which as many count as the law has tokens, then as many probabilities. */
typedef struct {
    PyObject *laws, *scratch; /* held, and borrowed: one law's probabilities, k of them */
    Py_buffer view;
    Py_ssize_t k, count, most;
} LawRoom;

/* Make room for laws of rows of so many entries; -1 is an error. */
static int open_law_room(PyObject *scratch, Py_ssize_t most, Py_ssize_t n_known, LawRoom *room)
{
    if (open_array(scratch, &room->view, 'd', 1))
        return -1;
    room->scratch = scratch;
    room->k = length_of(&room->view);
    room->count = 0;
    room->most = most;
    if (room->k < 1 || room->k > MOST_DRAWN || room->k > n_known)
        PyErr_Format(PyExc_ValueError, "the %zd highest of %zd entries", room->k, n_known);
    else {
        room->laws = PyBytes_FromStringAndSize(NULL, most * room->k * (Py_ssize_t)LAW_ENTRY);
        if (room->laws != NULL)
            return 0;
    }
    PyBuffer_Release(&room->view);
    return -1;
}

static void close_law_room(LawRoom *room)
{
    PyBuffer_Release(&room->view);
    Py_CLEAR(room->laws);
}

/* Make the law of a row's first entries behind those before; return its size, as `law_of_row` does.

   Where there are `names`, ascending, they stand for the entries' places. */
static Py_ssize_t make_law(
    LawRoom *room, const float *row, const int32_t *names, Py_ssize_t n_known, const Cuts *cuts,
    const int64_t **ids, const double **probs)
{
    if (room->count == room->most) {
        PyErr_SetString(PyExc_ValueError, "room for fewer laws than are made");
        return -1;
    }
    char *begin = PyBytes_AS_STRING(room->laws) + room->count * room->k * (Py_ssize_t)LAW_ENTRY;
    int64_t *named = (int64_t *)begin;
    double *made = room->view.buf, *kept = (double *)(named + room->k);
    Py_ssize_t size = law_of_row(row, n_known, cuts, room->k, named, made);
    for (Py_ssize_t i = 0; names != NULL && i < size; i++)
        named[i] = names[named[i]];
    if (size > 0) {
        memcpy(kept, made, (size_t)size * sizeof *made);
        room->count++;
    }
    *ids = named;
    *probs = kept;
    return size;
}

/* Return the law that was made last for Python: (laws, its number, k, its size). */
static PyObject *name_law(const LawRoom *room, Py_ssize_t size)
{
    return Py_BuildValue("Onnn", room->laws, room->count - 1, room->k, size);
}

#endif
