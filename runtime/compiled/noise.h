/* What decides: the numbers of an answer's key, or any other source's methods. See runtime/laws/noise.py. */

#ifndef NOISE_H
#define NOISE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "draws.h"
#include "truncation.h"
#include "words.h"

typedef struct {
    unsigned long long key;
    long long stream;
    uint64_t word, n_tests, n_choices; /* of the position */
    PyObject *seek, *accept, *choose;  /* another source's, borrowed; null where numbers decide */
} Noise;

/* The decisions at so many positions from one on. */
typedef struct {
    Noise noise;
    long long start;
    Py_ssize_t count;
} Draws;

/* Read a tuple of key and stream, or of another source's seek, accept and choose; -1 is an error. */
int open_noise(PyObject *given, Noise *noise);

/* Read such a tuple that goes on with the first position and the number of positions. */
int open_draws(PyObject *given, Draws *draws);

/* Another source's decisions; an exception of its methods is an error, -1. */
int call_seek(const Noise *noise, int64_t position);
int call_accept(const Noise *noise, double probability);
int call_choose(
    const Noise *noise, const double *probs, const int64_t *ids, Py_ssize_t size, int64_t *token);

/* As `call_choose`, but for the place of the token; -2 is an error. */
Py_ssize_t call_for_place(
    const Noise *noise, const double *probs, const int64_t *ids, Py_ssize_t size);

/* Turn to the decisions of a position; -1 is an error. */
static inline int seek(Noise *noise, int64_t position)
{
    if (noise->seek != NULL)
        return call_seek(noise, position);
    noise->word = word_at(noise->key, noise->stream, position);
    noise->n_tests = noise->n_choices = 0;
    return 0;
}

/* Say 1 with this probability, else 0; -1 is an error. */
static inline int accepts(Noise *noise, double probability)
{
    if (noise->accept != NULL)
        return call_accept(noise, probability);
    if (probability >= 1.0)
        return 1;
    noise->n_tests++;
    return uniform_of(split_mix(noise->word, 2 * noise->n_tests + 1)) < probability;
}

/* Return the place of a draft's next draw from a law; -1: nothing has mass, -2: an error.

   Numbers pick a place of the cumulative law, whose sum may be any; others are given a law. Without
   ids, tokens are numbered by their places. */
static inline Py_ssize_t place_of_draw(
    Noise *noise, const double *probs, const int64_t *ids, Py_ssize_t size)
{
    if (noise->choose != NULL)
        return call_for_place(noise, probs, ids, size);
    uint64_t number = noise->n_choices + 1;
    double uniform = size > 1 ? uniform_of(split_mix(noise->word, 2 * number)) : 0.0;
    Py_ssize_t place = place_in(probs, size, uniform);
    /* A law of one token asks for no number, nor does one without mass. */
    if (size > 1 && place >= 0)
        noise->n_choices = number;
    return place;
}

/* Draw up to `count` different places, each from what the earlier ones left.

   Returns how many; -1 is an error. `left` is the law: what was drawn is taken out. For numbers the rest is not renormalised: they are
   scaled by the new total instead. */
static inline Py_ssize_t draw_distinct(
    Noise *noise, double *left, const int64_t *ids, Py_ssize_t size, Py_ssize_t count,
    Py_ssize_t *places)
{
    Py_ssize_t n = 0;
    while (n < count) {
        Py_ssize_t place = place_of_draw(noise, left, ids, size);
        if (place < 0)
            return place == -1 ? n : -1;
        left[place] = 0.0;
        places[n++] = place;
        if (noise->choose != NULL && !(scale_weights(left, size) > 0.0))
            break;
    }
    return n;
}

#endif
