/* Loops over a row of logits; _rows.pyx hands them to Python. */

#ifndef ROW_H
#define ROW_H

#include <stddef.h>
#include <stdint.h>

/* GCC compiles such a loop once for each width of vectors, and picks when it is loaded. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_WIDTH
#endif

#define MOST_RANKED 256

typedef struct {
    ptrdiff_t count, most;
    float values[MOST_RANKED]; /* descending; of equals the lower id first */
    int64_t ids[MOST_RANKED];
    int has_nan;
} Ranking;

/* Rank the `most` highest entries of a row that has no fewer. */
void rank_row(Ranking *ranking, const float *row, ptrdiff_t size);

/* Return the place of the highest entry, the first of equals; -1 if it is not finite, or for a NaN. */
ptrdiff_t place_of_highest(const float *row, ptrdiff_t size);

/* With x = row[i] - highest: the sum of exp(x), and that of x exp(x). */
typedef struct {
    float highest;
    double mass, weighted;
} LogMass;

LogMass log_mass_of(const float *row, ptrdiff_t size);

#endif
