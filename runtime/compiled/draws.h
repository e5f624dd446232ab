/* Draws from short laws, by numbers of SplitMix64 sequences. */

#ifndef DRAWS_H
#define DRAWS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define MOST_DRAWN 128 /* tokens of a law from which several are drawn at once */

/* The output of SplitMix64 (Steele, Lea and Flood 2014) after `counter` steps from `key`. */
static inline uint64_t split_mix(uint64_t key, uint64_t counter)
{
    uint64_t word = key + counter * 0x9E3779B97F4A7C15u;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

static inline double uniform_of(uint64_t word)
{
    return (double)(word >> 11) * 0x1p-53;
}

/* Return the place at `uniform` of the cumulative law; -1 if nothing has mass. */
static inline Py_ssize_t place_in(const double *probs, Py_ssize_t size, double uniform)
{
    double total = 0.0, reached = 0.0;
    Py_ssize_t last = -1;
    for (Py_ssize_t i = 0; i < size; i++) {
        total += probs[i];
        if (probs[i] != 0.0)
            last = i;
    }
    double wanted = uniform * total;
    for (Py_ssize_t i = 0; i < size; i++) {
        reached += probs[i];
        if (reached > wanted)
            return i;
    }
    /* The product was rounded up to the sum itself: the last token with mass is meant. */
    return last;
}

#endif
