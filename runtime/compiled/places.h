/* Where the rows of a head's graph stand, and what they see. */

#ifndef PLACES_H
#define PLACES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern const char chain_places_doc[], places_doc[];
PyObject *chain_places(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *places(PyObject *self, PyObject *const *args, Py_ssize_t n_args);

#endif
