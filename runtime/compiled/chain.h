/* Chains of a draft model: of its most likely tokens, and of draws from its laws. */

#ifndef CHAIN_H
#define CHAIN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern const char greedy_chain_doc[], drawn_chain_doc[];
PyObject *greedy_chain(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *drawn_chain(PyObject *self, PyObject *const *args, Py_ssize_t n_args);

/* Bytes of the batch that this file's struct describes. */
Py_ssize_t batch_bytes(void);

#endif
