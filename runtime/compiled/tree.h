/* Trees that a draft model draws without replacement. */

#ifndef TREE_H
#define TREE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern const char drawn_tree_doc[];
PyObject *drawn_tree(PyObject *self, PyObject *const *args, Py_ssize_t n_args);

#endif
