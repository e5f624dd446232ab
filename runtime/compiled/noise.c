/* Decisions of a source that is not an answer's own: its methods are called, one decision each. */

#include "noise.h"

#include <string.h>

#include "law_room.h"
#include "short_laws.h"

int open_noise(PyObject *given, Noise *noise)
{
    *noise = (Noise){0};
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "noise is a tuple of key and stream, or of three functions");
        return -1;
    }
    if (PyTuple_GET_SIZE(given) != 2)
        return PyArg_ParseTuple(given, "OOO", &noise->seek, &noise->accept, &noise->choose) ? 0 : -1;
    noise->key = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(given, 0));
    noise->stream = PyLong_AsLongLong(PyTuple_GET_ITEM(given, 1));
    return PyErr_Occurred() ? -1 : 0;
}

int open_draws(PyObject *given, Draws *draws)
{
    Noise *noise = &draws->noise;
    *noise = (Noise){0};
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "draws are a tuple of noise, a position and a count");
        return -1;
    }
    int is_parsed = PyTuple_GET_SIZE(given) == 5
        ? PyArg_ParseTuple(
              given, "OOOLn", &noise->seek, &noise->accept, &noise->choose, &draws->start,
              &draws->count)
        : PyArg_ParseTuple(
              given, "KLLn", &noise->key, &noise->stream, &draws->start, &draws->count);
    return is_parsed ? 0 : -1;
}

/* Call a function with an object, which is released; NULL is an error. */
static PyObject *call_with(PyObject *function, PyObject *given)
{
    PyObject *result = given == NULL ? NULL : PyObject_CallOneArg(function, given);
    Py_XDECREF(given);
    return result;
}

int call_seek(const Noise *noise, int64_t position)
{
    PyObject *done = call_with(noise->seek, PyLong_FromLongLong(position));
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int call_accept(const Noise *noise, double probability)
{
    PyObject *said = call_with(noise->accept, PyFloat_FromDouble(probability));
    int is_accepted = said == NULL ? -1 : PyObject_IsTrue(said);
    Py_XDECREF(said);
    return is_accepted;
}

/* Return a law for Python as `name_law` does: it lies alone. */
static PyObject *name_alone(const double *probs, const int64_t *ids, Py_ssize_t size)
{
    PyObject *law = PyBytes_FromStringAndSize(NULL, size * (Py_ssize_t)LAW_ENTRY);
    if (law == NULL)
        return NULL;
    int64_t *named = (int64_t *)PyBytes_AS_STRING(law);
    for (Py_ssize_t i = 0; i < size; i++)
        named[i] = ids == NULL ? i : ids[i];
    memcpy(named + size, probs, (size_t)size * sizeof *probs);
    return Py_BuildValue("Nnnn", law, (Py_ssize_t)0, size, size);
}

int call_choose(
    const Noise *noise, const double *probs, const int64_t *ids, Py_ssize_t size, int64_t *token)
{
    PyObject *chosen = call_with(noise->choose, name_alone(probs, ids, size));
    *token = chosen == NULL ? -1 : PyLong_AsLongLong(chosen);
    Py_XDECREF(chosen);
    return PyErr_Occurred() ? -1 : 0;
}

Py_ssize_t call_for_place(
    const Noise *noise, const double *probs, const int64_t *ids, Py_ssize_t size)
{
    int64_t token;
    if (call_choose(noise, probs, ids, size, &token))
        return -2;
    Py_ssize_t place = token;
    if (ids != NULL)
        place = place_among(ids, size, token);
    if (place >= 0 && place < size && probs[place] > 0.0)
        return place;
    PyErr_Format(PyExc_ValueError, "a source chose token %lld, which the law does not have", token);
    return -2;
}
