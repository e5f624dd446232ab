/* Moves of sequences among the cells of llama.cpp's memory. */

#ifndef MOVES_H
#define MOVES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define MOST_SEQUENCES 256 /* llama.cpp has no more */
#define MOST_NODES 1024    /* of a tree, as in runtime/trees/topology.py */
#define ROOT (-1)

/* llama.cpp's memory, and its functions that drop and share positions of a sequence (-1: of all). */
typedef struct {
    _Bool (*drop)(void *, int32_t, int32_t, int32_t);
    void (*share)(void *, int32_t, int32_t, int32_t, int32_t);
    void *memory;
} Cells;

/* Read the addresses of llama_memory_seq_rm, of llama_memory_seq_cp and of a memory; -1: an error. */
int open_cells(PyObject *addresses, Cells *cells);

extern const char follow_doc[], keep_path_doc[];
PyObject *follow(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *keep_path(PyObject *self, PyObject *const *args, Py_ssize_t n_args);

#endif
