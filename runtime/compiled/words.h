/* The numbers that decide the token at a position: see runtime/noise.py. */

#ifndef WORDS_H
#define WORDS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

extern const char digest_doc[];
PyObject *digest(PyObject *self, PyObject *const *args, Py_ssize_t n_args);

/* BLAKE2b's digest of 8 bytes of up to 16 words of 64 bits, as hashlib makes it of "<Q...". */
uint64_t digest_of(const uint64_t *words, int count);

/* What a position's draws are made of, by an answer's key and a stream. */
static inline uint64_t word_at(uint64_t key, int64_t stream, int64_t position)
{
    const uint64_t words[] = {key, (uint64_t)stream, (uint64_t)position};
    return digest_of(words, 3);
}

/* The draws of an answer at so many positions from one on. */
typedef struct {
    unsigned long long key;
    long long stream, start;
    Py_ssize_t count;
} Draws;

/* Read a tuple of these; -1 is an error. */
static inline int open_draws(PyObject *given, Draws *draws)
{
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "draws are a tuple of key, stream, position and count");
        return -1;
    }
    return PyArg_ParseTuple(given, "KLLn", &draws->key, &draws->stream, &draws->start, &draws->count)
        ? 0 : -1;
}

static inline uint64_t word_of(const Draws *draws, Py_ssize_t i)
{
    return word_at(draws->key, draws->stream, draws->start + i);
}

#endif
