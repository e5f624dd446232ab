/* The law that truncation leaves of a row. */

#ifndef TRUNCATION_H
#define TRUNCATION_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* What is cut: the share of top-p, the logarithm of min-p, and the temperature. */
typedef struct {
    double share, lowest, temperature;
} Cuts;

/* Divide by the sum, unless that is not positive; return the sum. */
double scale_weights(double *weights, Py_ssize_t size);

/* Write the law of a row's k highest, k at most MOST_RANKED and no more than the row has.

   Returns how many tokens it has; 0 if the highest is not finite or there is a NaN. */
Py_ssize_t law_of_row(
    const float *row, Py_ssize_t size, const Cuts *cuts, Py_ssize_t k, int64_t *ids, double *probs);

#endif
