/* The rows of an evaluation: a function that gives each, or a matrix of all of them, in any order. */

#ifndef ROWS_H
#define ROWS_H

#include "arrays.h"

typedef struct {
    PyObject *given;
    Py_buffer all;    /* of a matrix; without one, `given` is called */
    PyObject *places; /* a tuple, borrowed: row i of an evaluation is row places[i]; null: row i */
    int is_matrix;
} RowSource;

typedef struct {
    const float *entries;
    Py_ssize_t size;
    Py_buffer view;
    PyObject *owner; /* null for a row of a matrix */
} Row;

/* Open what gives rows; a matrix may come with places, as a tuple. -1 is an error. */
static int open_rows(PyObject *given, RowSource *rows)
{
    rows->places = NULL;
    if (PyTuple_Check(given) && PyTuple_GET_SIZE(given) == 2
        && PyTuple_Check(PyTuple_GET_ITEM(given, 1))) {
        rows->places = PyTuple_GET_ITEM(given, 1);
        given = PyTuple_GET_ITEM(given, 0);
    }
    rows->given = given;
    rows->is_matrix = !PyCallable_Check(given);
    if (!rows->is_matrix)
        return 0;
    if (PyObject_GetBuffer(given, &rows->all, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT))
        return -1;
    const char *format = rows->all.format ? rows->all.format : "B";
    if (rows->all.ndim == 2 && rows->all.itemsize == sizeof(float)
        && format[*format == '@' || *format == '=' || *format == NATIVE_ORDER] == 'f')
        return 0;
    PyBuffer_Release(&rows->all);
    PyErr_SetString(PyExc_TypeError, "rows are a function, or a matrix of numbers of 32 bits");
    return -1;
}

static void close_rows(RowSource *rows)
{
    if (rows->is_matrix)
        PyBuffer_Release(&rows->all);
}

/* Open a row: 1, 0 where its numbers are of another kind, -1 for an error. */
static int open_row(const RowSource *rows, Py_ssize_t number, Row *row)
{
    row->owner = NULL;
    if (rows->places != NULL) {
        if (number < 0 || number >= PyTuple_GET_SIZE(rows->places)) {
            PyErr_Format(PyExc_IndexError, "row %zd of %zd", number, PyTuple_GET_SIZE(rows->places));
            return -1;
        }
        number = PyLong_AsSsize_t(PyTuple_GET_ITEM(rows->places, number));
        if (number == -1 && PyErr_Occurred())
            return -1;
    }
    if (rows->is_matrix) {
        if (number < 0 || number >= rows->all.shape[0]) {
            PyErr_Format(PyExc_IndexError, "row %zd of %zd", number, rows->all.shape[0]);
            return -1;
        }
        row->size = rows->all.shape[1];
        row->entries = (const float *)rows->all.buf + number * row->size;
        return 1;
    }
    PyObject *name = PyLong_FromSsize_t(number);
    PyObject *owner = name == NULL ? NULL : PyObject_CallOneArg(rows->given, name);
    Py_XDECREF(name);
    if (owner == NULL)
        return -1;
    if (open_array(owner, &row->view, 'f', 0)) {
        PyErr_Clear();
        Py_DECREF(owner);
        return 0;
    }
    row->owner = owner;
    row->entries = row->view.buf;
    row->size = length_of(&row->view);
    return 1;
}

static void close_row(Row *row)
{
    if (row->owner != NULL) {
        PyBuffer_Release(&row->view);
        Py_CLEAR(row->owner);
    }
}

#endif
