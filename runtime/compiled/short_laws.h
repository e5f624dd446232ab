/* Laws of a few tokens, whose ids ascend: what draws, rejections and residuals do to them. */

#ifndef SHORT_LAWS_H
#define SHORT_LAWS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>

#include "draws.h"
#include "truncation.h"

/* Return the place of a token among ascending ids, -1 if it is not there. */
static inline Py_ssize_t place_among(const int64_t *ids, Py_ssize_t size, int64_t token)
{
    Py_ssize_t low = 0, high = size;
    while (low < high) {
        Py_ssize_t middle = low + (high - low) / 2;
        if (ids[middle] < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low < size && ids[low] == token ? low : -1;
}

/* Return the token that arrives first, by the SplitMix64 sequence of a key; without ids, its place. */
static inline int64_t first_of_race(
    const double *probs, const int64_t *ids, Py_ssize_t size, uint64_t key)
{
    int64_t best = ids == NULL ? 0 : ids[0];
    double best_time = INFINITY;
    for (Py_ssize_t i = 0; i < size; i++) {
        /* A token without mass never arrives. */
        if (!(probs[i] > 0.0))
            continue;
        int64_t token = ids == NULL ? i : ids[i];
        double time = -log1p(-uniform_of(split_mix(key, (uint64_t)token + 1))) / probs[i];
        if (time < best_time) {
            best_time = time;
            best = token;
        }
    }
    return best;
}

/* Write max(0, share P - Q) on the support of P. */
static inline void write_left_over(
    const double *probs, const int64_t *ids, Py_ssize_t size, const double *draft_probs,
    const int64_t *draft_ids, Py_ssize_t n_drafted, double share, double *out)
{
    Py_ssize_t place = 0;
    for (Py_ssize_t i = 0; i < size; i++) {
        while (place < n_drafted && draft_ids[place] < ids[i])
            place++;
        double draft = place < n_drafted && draft_ids[place] == ids[i] ? draft_probs[place] : 0.0;
        double left = share * probs[i] - draft;
        out[i] = left > 0.0 ? left : 0.0;
    }
}

/* Take a token out of a law, unless the law is sure of it. */
static inline void take_out(double *probs, const int64_t *ids, Py_ssize_t size, int64_t token)
{
    Py_ssize_t place = place_among(ids, size, token);
    if (place < 0)
        return;
    double was = probs[place];
    probs[place] = 0.0;
    if (!(scale_weights(probs, size) > 0.0))
        probs[place] = was;
}

#endif
