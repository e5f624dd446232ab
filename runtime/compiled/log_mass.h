/* Sums of exponentials of a row. */

#ifndef LOG_MASS_H
#define LOG_MASS_H

#include <stddef.h>

/* Return the highest entry of a row; what it is with a NaN among them is not said. */
float highest_entry(const float *row, ptrdiff_t size);

/* With x = row[i] - highest: the sum of exp(x), and that of x exp(x). */
typedef struct {
    float highest;
    double mass, weighted;
} LogMass;

LogMass log_mass_of(const float *row, ptrdiff_t size, float highest);

/* The same within 0.01 %. */
LogMass rough_mass_of(const float *row, ptrdiff_t size);

#endif
