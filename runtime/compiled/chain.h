/* Chains of most likely tokens of a draft model. */

#ifndef CHAIN_H
#define CHAIN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern const char greedy_chain_doc[];
PyObject *greedy_chain(PyObject *self, PyObject *const *args, Py_ssize_t n_args);

/* Bytes of the batch that this file's struct describes. */
Py_ssize_t batch_bytes(void);

#endif
